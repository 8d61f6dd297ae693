"""Identifies weights: the loaded revision, and a hash of the parameters or of their files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.model.model_facts import ModelFacts, facts_of

_STORED = (".safetensors", ".bin", ".json", ".model")
_STRETCH, _STRETCHES = 2**18, 64
_FEW = 64  # numbers of a parameter that are compared before its last hash is reused
_WHOLE = 2**20  # a parameter with more numbers is hashed by this many, evenly spaced


def weights_hash(model: Any) -> str:
    """A hash of names, shapes, dtypes and values of all parameters and buffers that are saved with a model."""
    facts = facts_of(model) or ModelFacts()
    stored = (model if facts.native is None else facts.native).state_dict()
    tensors = {name: stored[name] for name in sorted(stored) if isinstance(stored[name], Tensor)}
    now = [(t.data_ptr(), _writes(t), _sample(t, _FEW)) for t in tensors.values()]
    if facts.hashed is None or facts.hashed[0] != now:
        made = hashlib.sha256()
        for name, values in tensors.items():
            made.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
            made.update(_sample(values, _WHOLE))
        facts.hashed = (now, made.hexdigest()[:16])
    return facts.hashed[1]


def stored_hash(name: str) -> str | None:
    """A hash of the weights, configs and vocabularies of a checkpoint directory, without loading it."""
    try:
        return _of_files(Path(name)) if Path(name).is_dir() else None
    except OSError:
        return None


def revision(model: Any) -> str | None:
    """The hub commit that the weights come from; None for a directory, a toy or a model object."""
    facts = facts_of(model) or ModelFacts()
    found = getattr(getattr(facts.native, "config", None), "_commit_hash", None)
    return None if found is None else str(found)


def _of_files(place: Path) -> str:
    made = hashlib.sha256()
    for path in sorted(path for path in place.iterdir() if path.suffix in _STORED and path.is_file()):
        size = path.stat().st_size
        made.update(f"{path.name} {size} ".encode("utf-8", "surrogateescape"))
        step = max(_STRETCH, -(-size // _STRETCHES))
        with open(path, "rb") as stored:
            for start in range(0, size, step):
                stored.seek(start)
                made.update(stored.read(_STRETCH))
    return made.hexdigest()[:16]


def _writes(values: Tensor) -> int:
    """The number of writes to a tensor; 0 for a tensor made in inference mode, which does not count them."""
    return 0 if values.is_inference() else values._version


def _sample(values: Float[Tensor, ...], most: int) -> bytes:
    if values.is_meta:  # offloaded to disk: known only by its name and shape
        return b"meta"
    flat = values.detach().reshape(-1)
    if len(flat) > most:
        flat = flat[:: -(-len(flat) // most)]
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if len(flat) else b""
