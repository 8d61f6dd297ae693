"""A model's weights as a whole: hashes that identify them, and random ones in their place."""

from __future__ import annotations

import copy
import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError, check_choice, check_counts
from mechattn.hub_access import hub_commit
from mechattn.model.checkpoint import as_trusted, is_of_own_code
from mechattn.model.gguf_files import REAL, SUFFIX, packaged_file
from mechattn.model.hooked import (
    ModelFacts,
    alone,
    device_of,
    facts_of,
    model_creation_lock,
    unoffloaded,
)
from mechattn.model.load import hooked_object, load_model
from mechattn.model.verified_models import known_facts, verified

Kind = Literal["initialised", "shuffled"]


@alone
def random_weights(model: Any, kind: Kind = "initialised", seed: int = 0, **options: Any) -> Any:
    """Return a model of the same architecture and tokenizer with random weights, loaded and
    verified like any other.

    The given model is not changed, so two models are in memory at the same time.

    Args:
        model: Anything that ``load_model`` accepts.
        kind: "initialised": the architecture's own initialisation, as at the start of training;
            "shuffled": the entries of each parameter are permuted, so every matrix keeps the
            distribution of its numbers.
        seed: The seed of the draw.
        **options: Passed to ``load_model``.

    Returns:
        A ``TransformerBridge``; its name and the provenance of its results state that the weights
        are random.

    Raises:
        OptionError: There is no such kind, or the seed is not a whole number.
        ModelError: The weights cannot be redrawn: the model is quantised, or has no transformers
            model behind it.

    Source:
        Random networks as the null of interpretability: arXiv:2512.18792.
    """
    check_draw(kind, seed)
    hooked = load_model(model, **options)
    facts = known_facts(hooked)
    if facts.native is None:
        raise ModelError(
            f"the weights of {hooked.cfg.model_name} cannot be redrawn: {facts.why_not_native}."
            " Give an unquantised model by its name, its directory, or as a transformers model"
        )

    with model_creation_lock:
        native = _drawn(facts.native, kind, seed)

        with as_trusted(is_of_own_code(native)):
            drawn = hooked_object(native, hooked.tokenizer)

    drawn = verified(drawn, verify=True)
    drawn.cfg.model_name = f"{hooked.cfg.model_name}, random weights ({kind}, seed {seed})"
    drawn.cfg.default_prepend_bos = hooked.cfg.default_prepend_bos
    facts_of_drawn = known_facts(drawn)
    facts_of_drawn.weights = "random"
    facts_of_drawn.random_weights = {"kind": kind, "seed": seed}
    return drawn


def check_draw(kind: str, seed: int) -> None:
    """Refuse an invalid kind or seed, before a model is loaded."""
    check_choice(Kind, kind=kind)
    check_counts(0, 2**63 - 1, seed=seed)  # torch takes no other


def _drawn(native: Any, kind: Kind, seed: int) -> Any:
    """A new model of the same class and configuration; the given one is unchanged."""
    config = copy.deepcopy(native.config)
    config._attn_implementation_internal = None  # the class chooses its attention again
    with torch.random.fork_rng():  # the random state of the process and of every GPU is restored
        torch.manual_seed(seed)
        drawn = type(native)(config)

    drawn.generation_config = getattr(native, "generation_config", None)
    drawn = drawn.to(device=device_of(native), dtype=next(native.parameters()).dtype)
    if kind == "initialised":
        return drawn

    generator = torch.Generator().manual_seed(seed)
    drawn.load_state_dict(native.state_dict())
    with torch.no_grad():
        for _, values in sorted(drawn.named_parameters()):  # a tied parameter occurs once
            order = torch.randperm(values.numel(), generator=generator)
            shuffled = values.flatten()[order.to(values.device)]
            values.copy_(shuffled.view_as(values))

    return drawn


_HASHED_SUFFIXES = (".safetensors", ".bin", ".json", ".model")
# A larger file is hashed by this many pieces of this size, evenly spaced; a larger parameter by
# this many numbers.
_PIECE_BYTES = 2**18
_MOST_PIECES = 64
_HASHED_NUMBERS = 2**20
_COMPARED_NUMBERS = 64  # of a parameter: if they are the same, its last hash is used again


def weights_hash(model: Any) -> str:
    """A hash of names, shapes, dtypes and values of all parameters and buffers that are saved with
    a model."""
    facts = facts_of(model) or ModelFacts()
    source = facts.native
    if source is None:
        source = model
    stored = source.state_dict()
    tensors = {name: stored[name] for name in sorted(stored) if isinstance(stored[name], Tensor)}

    state = []  # by which the last hash is known to hold still
    for values in tensors.values():
        # A tensor made in inference mode does not count how often it was written to.
        version = 0 if values.is_inference() else values._version
        state.append((values.data_ptr(), version, _sample(values, _COMPARED_NUMBERS)))

    if facts.weights_hash is not None and facts.hashed_state == state:
        return facts.weights_hash

    digest = hashlib.sha256()
    for name, values in tensors.items():
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(_sample(unoffloaded(source, name, values), _HASHED_NUMBERS))

    facts.weights_hash = digest.hexdigest()[:16]
    facts.hashed_state = state
    return facts.weights_hash


def stored_hash(name: str) -> str | None:
    """A hash of a GGUF file, or of a directory's weights, configs and vocabularies, without loading
    it; of a model on the hub, its commit there, or else the one downloaded. None for a toy."""
    try:
        place = Path(name)
        if name.startswith(REAL):
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
