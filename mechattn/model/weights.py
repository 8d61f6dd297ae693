"""Hashes that identify a model's weights, and the state that shows whether a loaded model was
changed."""

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

# What a user can change: by kind ("weights", "hooks" …) and by the name of the module or parameter.
State = Mapping[str, dict[str, Any]]

_HASHED_SUFFIXES = (".safetensors", ".bin", ".json", ".model")
# Of a file that is larger than all pieces together, evenly spaced pieces are hashed; of a larger
# parameter, evenly spaced numbers.
_PIECE_BYTES = 2**18
_MOST_PIECES = 64
_HASHED_NUMBERS = 2**20
# The last hash is used again if this many evenly spaced numbers of each tensor are the same.
_COMPARED_NUMBERS = 64

# Libraries that register hooks of their own when a model first runs. None of them changes a value.
_LIBRARIES = ("transformers.", "transformer_lens.", "accelerate.", "mechattn.")
_WORD_BYTES = 8  # of an int64, in which weights are summed
_LOAD_AGAIN = (
    "Load the model again as it is now; load_model(model, verify=False) measures it anyway, and "
    "every result then records verified: false"
)
# By the kind of change. ``name`` is the changed part, ``verified`` and ``current`` are its values.
_CHANGES = {
    "class": (
        "{name} is {current} where {verified} was. Adapters are merged (merge_and_unload) before "
        "load_model. " + _LOAD_AGAIN
    ),
    "dtype": (
        "{name} is {current} and was {verified}. Give the dtype to load_model(…, dtype=…), which"
        " leaves the rotary frequencies in float32"
    ),
    "attention": (
        "{name} is {current!r} and was {verified!r}, so hooks may not fire. " + _LOAD_AGAIN
    ),
    "weights": "the weights of {name} were edited. " + _LOAD_AGAIN,
}


def weights_hash(model: Any) -> str:
    """A hash of a model's parameters and saved buffers: names, shapes, dtypes and values.

    Of a tensor with more than 2**20 numbers, evenly spaced ones are hashed. The hash is kept, and
    computed again if a tensor was written to.
    """
    facts = facts_of(model) or ModelFacts()
    # The twin's parameters have the names of the checkpoint.
    hashed_model = facts.native
    if hashed_model is None:
        hashed_model = model
    tensors = {
        name: values
        for name, values in sorted(hashed_model.state_dict().items())
        if isinstance(values, Tensor)
    }

    versions = []  # the last hash is used again if these have not changed
    for values in tensors.values():
        # A tensor that was made in inference mode has no count of how often it was written to.
        version = 0 if values.is_inference() else values._version
        versions.append((values.data_ptr(), version, _sample(values, _COMPARED_NUMBERS)))

    if facts.weights_hash is not None and facts.hashed_versions == versions:
        return facts.weights_hash

    digest = hashlib.sha256()
    for name, values in tensors.items():
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(_sample(unoffloaded(hashed_model, name, values), _HASHED_NUMBERS))

    facts.weights_hash = digest.hexdigest()[:16]
    facts.hashed_versions = versions
    return facts.weights_hash


def stored_hash(name: str) -> str | None:
    """What identifies a stored model, without loading it.

    For a GGUF file, or the weights, configs and vocabularies of a directory, it is a hash. Of a
    file larger than 16 MiB, evenly spaced pieces are hashed. For a model on the hub it is the
    commit (``hub_commit``). It is None for a toy, and if the files cannot be read.
    """
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
            byte_count = path.stat().st_size
            # A name that is not UTF-8 contains surrogates.
            digest.update(f"{path.name} {byte_count} ".encode("utf-8", "surrogateescape"))
            step = max(_PIECE_BYTES, math.ceil(byte_count / _MOST_PIECES))
            with open(path, "rb") as file:
                for start in range(0, byte_count, step):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
        return digest.hexdigest()[:16]
    except OSError:
        return None


def state_of(model: HookedModel) -> State:
    """The classes, dtypes, devices, weights and hooks of a model, which a user can change.

    The weights are represented by sums of their bits. Reading all of them takes as long as a few
    tokens in a forward pass.
    """
    modules = modules_of(model)
    # A shared parameter occurs once, under the first of its names.
    parameters: dict[int, tuple[str, Tensor]] = {}
    hooks = {}

    for name, module in modules.items():
        for own_name, values in module._parameters.items():
            if values is not None:
                parameters.setdefault(id(values), (f"{name}.{own_name}", values))
        functions = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        user_functions = [function for function in functions if not _is_of_a_library(function)]
        # Functions that a user adds to a hook point have a wrapper of TransformerLens.
        user_functions += getattr(module, "fwd_hooks", [])
        if user_functions:
            hooks[name] = frozenset(map(id, user_functions))

    weights = dict(parameters.values())  # the name and values of each parameter
    config = getattr(original_of(model), "config", None)
    return {
        "class": {name: type(module).__qualname__ for name, module in modules.items()},
        "dtype": {name: values.dtype for name, values in weights.items()},
        # A model has a single kind of attention, which the message of a change calls so.
        "attention": {"its attention": getattr(config, "_attn_implementation", "")},
        "weights": {name: _sum_of_bits(values) for name, values in weights.items()},
        "device": {name: values.device for name, values in weights.items()},
        "hooks": hooks,
    }


def refuse_changes(model: HookedModel, verified_state: State, current_state: State) -> None:
    """Refuse a model whose modules, dtype, attention or weights are not those that were verified.

    Raises:
        ModelError: One of them was changed. The message says what to do.
    """
    for kind, sentence in _CHANGES.items():
        for name in {**verified_state[kind], **current_state[kind]}:
            verified_value = verified_state[kind].get(name)
            current_value = current_state[kind].get(name)
            if verified_value != current_value:
                change = sentence.format(
                    name=WRAPPED.sub("", name), verified=verified_value, current=current_value
                )
                raise ModelError(
                    f"{model.cfg.model_name} was changed after it was verified: {change}"
                )


def _sample(values: Float[Tensor, ...], most: int) -> bytes:
    """The bytes of at most ``most`` numbers of a tensor, evenly spaced; "meta" if it is offloaded,
    because reading it each time would be slow."""
    if values.is_meta:
        return b"meta"
    flat = values.detach().reshape(-1)
    step = max(1, math.ceil(len(flat) / most))
    return flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook belongs to one of the libraries whose hooks change no value."""
    function = getattr(hook, "func", hook)  # the function inside a partial
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)


def _sum_of_bits(values: Tensor) -> int:
    """The sum of a tensor's memory read as integers; 0 if it is offloaded.

    It may overflow, which gives the same number each time.
    """
    if values.is_meta:
        return 0
    octets = values.detach().reshape(-1).view(torch.uint8)
    # Only aligned memory can be read in words.
    if octets.numel() % _WORD_BYTES or octets.storage_offset() % _WORD_BYTES:
        return int(octets.sum())
    words = octets.view(torch.int64)
    return int(words.sum())
