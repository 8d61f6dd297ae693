"""What identifies a model's weights, and what shows that a loaded model was changed: hashes, and
sums of bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.hub_access import hub_commit
from mechattn.model.gguf_files import REAL_PREFIX, SUFFIX, packaged_file
from mechattn.model.hooked import (
    HookedModel,
    ModelFacts,
    facts_of,
    modules_of,
    original_of,
    unoffloaded,
)
from mechattn.model.native_twin import WRAPPED

State = Mapping[str, dict[str, Any]]  # by what can be changed, and the name of the part

_HASHED_SUFFIXES = (".safetensors", ".bin", ".json", ".model")
# A larger file is hashed by this many pieces of this size, evenly spaced; a larger parameter by
# this many numbers.
_PIECE_BYTES = 2**18
_MOST_PIECES = 64
_HASHED_NUMBERS = 2**20
_COMPARED_NUMBERS = 64  # of a parameter: if they are the same, its last hash is used again

# These register hooks of their own when a model first runs, none of which changes a value.
_LIBRARIES = ("transformers.", "transformer_lens.", "accelerate.", "mechattn.")
_WORD_BYTES = 8  # of an int64, in which weights are summed
_LOAD_AGAIN = (
    "Load the model again as it is now; load_model(model, verify=False) measures it anyway, and "
    "every result then records verified: false"
)
# By what was changed, with the name of the part, and its value now and before.
_CHANGES = {
    "class": (
        "{name} is {now} where {before} was. Adapters are merged (merge_and_unload) before "
        "load_model. " + _LOAD_AGAIN
    ),
    "dtype": (
        "{name} is {now} and was {before}. Give the dtype to load_model(…, dtype=…), which leaves"
        " the rotary frequencies in float32"
    ),
    "attention": "{name} is {now!r} and was {before!r}, for which hooks may not fire. "
    + _LOAD_AGAIN,
    "weights": "the weights of {name} were edited. " + _LOAD_AGAIN,
}


def weights_hash(model: Any) -> str:
    """A hash of names, shapes, dtypes and values of all parameters and buffers that are saved with
    a model."""
    facts = facts_of(model) or ModelFacts()
    source = facts.native
    if source is None:
        source = model
    stored = sorted(source.state_dict().items())
    tensors = {name: values for name, values in stored if isinstance(values, Tensor)}

    versions = []  # by which the last hash is known to hold still
    for values in tensors.values():
        # A tensor made in inference mode does not count how often it was written to.
        version = 0 if values.is_inference() else values._version
        versions.append((values.data_ptr(), version, _sample(values, _COMPARED_NUMBERS)))

    if facts.weights_hash is not None and facts.hashed_versions == versions:
        return facts.weights_hash

    digest = hashlib.sha256()
    for name, values in tensors.items():
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(_sample(unoffloaded(source, name, values), _HASHED_NUMBERS))

    facts.weights_hash = digest.hexdigest()[:16]
    facts.hashed_versions = versions
    return facts.weights_hash


def stored_hash(name: str) -> str | None:
    """A hash of a GGUF file, or of a directory's weights, configs and vocabularies, without loading
    it; of a model on the hub, its commit there, or else the one downloaded. None for a toy."""
    try:
        place = Path(name)
        if name.startswith(REAL_PREFIX):
            place = Path(packaged_file(name))
        if place.is_dir():
            files = [
                path
                for path in place.iterdir()
                if path.suffix in _HASHED_SUFFIXES and path.is_file()
            ]
        elif place.suffix == SUFFIX:
            files = [place]
        else:
            return hub_commit(name)

        digest = hashlib.sha256()
        for path in sorted(files):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode("utf-8", "surrogateescape"))
            step = max(_PIECE_BYTES, math.ceil(size / _MOST_PIECES))
            with open(path, "rb") as stored:
                for start in range(0, size, step):
                    stored.seek(start)
                    digest.update(stored.read(_PIECE_BYTES))
        return digest.hexdigest()[:16]
    except OSError:
        return None


def _sample(values: Float[Tensor, ...], most: int) -> bytes:
    """The bytes of at most this many numbers of a tensor, evenly spaced."""
    if values.is_meta:  # offloaded: not read again each time
        return b"meta"
    flat = values.detach().reshape(-1)
    if not len(flat):
        return b""
    step = math.ceil(len(flat) / most)
    return flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def state_of(model: HookedModel) -> State:
    """What a user can change on a loaded model; of its weights, sums of their bits.

    Reading all weights takes as long as a few tokens in a forward pass.
    """
    modules = modules_of(model)
    parameters: dict[int, tuple[str, Tensor]] = {}  # each once, by the first of its names
    hooks = {}

    for name, module in modules.items():
        for own_name, values in module._parameters.items():
            if values is not None:
                parameters.setdefault(id(values), (f"{name}.{own_name}", values))
        functions = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [function for function in functions if not _is_of_a_library(function)]
        # TransformerLens wraps the functions that are added to its hook points.
        foreign += getattr(module, "fwd_hooks", [])
        if foreign:
            hooks[name] = frozenset(map(id, foreign))

    weights = dict(parameters.values())
    config = getattr(original_of(model), "config", None)
    return {
        "class": {name: type(module).__qualname__ for name, module in modules.items()},
        "dtype": {name: values.dtype for name, values in weights.items()},
        "attention": {"its attention": getattr(config, "_attn_implementation", "")},
        "weights": {name: _sum_of_bits(values) for name, values in weights.items()},
        "device": {name: values.device for name, values in weights.items()},
        "hooks": hooks,
    }


def refuse_changes(model: HookedModel, before: State, now: State) -> None:
    """Refuse a model whose parts, dtype, attention or weights are not those that were verified.

    Raises:
        ModelError: Says what was changed, and what to do.
    """
    for kind, sentence in _CHANGES.items():
        for name in {**before[kind], **now[kind]}:
            value_before = before[kind].get(name)
            value_now = now[kind].get(name)
            if value_before != value_now:
                plain_name = WRAPPED.sub("", name)
                change = sentence.format(name=plain_name, before=value_before, now=value_now)
                raise ModelError(
                    f"{model.cfg.model_name} was changed after it was verified: {change}"
                )


def _sum_of_bits(values: Tensor) -> int:
    """A sum over a tensor's memory as whole numbers, which may overflow, always alike; 0 if it is
    offloaded."""
    if values.is_meta:
        return 0
    octets = values.detach().reshape(-1).view(torch.uint8)
    is_whole = octets.numel() % _WORD_BYTES == 0 and octets.storage_offset() % _WORD_BYTES == 0
    if is_whole:
        octets = octets.view(torch.int64)
    return int(octets.sum())


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook was registered by a library, which changes no value."""
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
