"""The interface of an intervention, which acts on some rows of a batch while a model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.model.hooked import attribute_set, holding, original_of
from mechattn.prompts.token_sequences import TokenSequence

TokenIndices = Int[Tensor, "row pos"]


@dataclass(frozen=True, eq=False)
class Target:
    """The tokens of a forward pass that an intervention acts on."""

    rows: Int[Tensor, " row"]  # of the batch
    prompts: tuple[str, ...]  # the id of each row's prompt
    # The index of each token in the baseline sequence, which generated tokens continue; negative
    # for inserted tokens and padding.
    positions: TokenIndices
    # The index of each token's segment in SEGMENTS; negative for padding and generated tokens; None
    # if the segments are not known.
    segments: TokenIndices | None = None


CurrentTarget = Callable[[], Target]  # of the forward pass that is running
Acting = AbstractContextManager[None]


def tensors_digest(nested: Any) -> str:
    """A short hash of the tensors in nested mappings and sequences.

    It identifies an intervention's tensors in the description that a result records.
    """
    sha256 = hashlib.sha256()
    for tensor in _tensors_in(nested):
        sha256.update(repr(tuple(tensor.shape)).encode())
        sha256.update(tensor.detach().cpu().double().numpy().tobytes())
    return sha256.hexdigest()[:12]


def as_tuple(one_or_several: Any) -> tuple[Any, ...]:
    """One or several layers, or names of segments, as a tuple."""
    if isinstance(one_or_several, str) or not isinstance(one_or_several, Iterable):
        return (one_or_several,)
    return tuple(one_or_several)


def store_tuples(intervention: Any, *names: str) -> None:
    """Replace lists and other iterables in these fields of a frozen dataclass by tuples.

    Interventions with the same options are then equal, have the same hash, and can be read more
    than once. A text and a single number stay as they are.
    """
    for name in names:
        option = getattr(intervention, name)
        if isinstance(option, Iterable) and not isinstance(option, str):
            object.__setattr__(intervention, name, tuple(option))  # the dataclass is frozen


def is_head(pair: Any) -> bool:
    """Whether this is a (layer, head) pair of whole numbers."""
    match pair:
        case (Integral(), Integral()):
            return True
    return False


@runtime_checkable
class Intervention(Protocol):
    """Acts on a model inside a ``with`` block and restores it afterwards."""

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse a model or prompts that it cannot act on.

        It is called before the first forward pass.
        """

    def acting(self, model: Any, target: CurrentTarget) -> Acting:
        """Act on the tokens that ``target()`` returns during each forward pass."""


def any_reads_first(interventions: Iterable[Any]) -> bool:
    """Whether any intervention has ``reads_first = True``.

    Such an intervention needs two passes over a batch. It changes nothing in the first, whose
    activations it reads.
    """
    return any(getattr(intervention, "reads_first", False) for intervention in interventions)


@runtime_checkable
class ChecksSequences(Protocol):
    """An intervention that may refuse a sequence."""

    def check_sequence(self, prompt: str, sequence: TokenSequence) -> None:
        """Refuse a sequence that it cannot act on.

        It is called before the first forward pass.
        """


@contextmanager
def on(intervention: Intervention, model: Any, prompts: Sequence[str] = ()) -> Iterator[None]:
    """Apply an intervention to everything that a model reads inside a ``with`` block.

    Generation with a cache is included.

    Args:
        intervention: The intervention.
        model: A hooked model or a model of transformers.
        prompts: The id of the prompt in each row of the batch, on which random draws depend. By
            default all rows share one id.

    Raises:
        ModelError: The intervention cannot act on this model.
        OptionError: It cannot act on these prompts, or their number differs from the number of rows
            that the model reads.
    """
    with holding(model):
        intervention.check(model, tuple(prompts))
        current_positions: Tensor | None = None
        inner_model = original_of(model) or model
        forward = inner_model.forward

        # This replaces forward, since a hook would not fire for callers that call forward directly.
        # ``wraps`` keeps the signature: transformers' generate passes positions only to a forward
        # that takes them.
        @wraps(forward)
        def forward_with_positions(*arguments: Any, **options: Any) -> Any:
            nonlocal current_positions
            parameters = signature(forward).parameters
            inputs = dict(zip(parameters, arguments, strict=False)) | options
            current_positions = _positions(inner_model, inputs)
            return forward(*arguments, **options)

        def target() -> Target:
            assert current_positions is not None, "hooks fire during a forward pass"
            rows = len(current_positions)
            if prompts and len(prompts) != rows:
                raise OptionError(
                    f"{len(prompts)} prompt ids were given for a batch of {rows}: give one for each"
                    " row"
                )
            ids = tuple(prompts) or ("",) * rows
            row_numbers = torch.arange(rows, device=current_positions.device)
            return Target(row_numbers, ids, current_positions)

        recording_positions = attribute_set(inner_model, "forward", forward_with_positions)
        with recording_positions, intervention.acting(model, target):
            yield


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings and sequences, in order."""
    if isinstance(nested, Tensor):
        yield nested
        return
    members = nested.values() if isinstance(nested, Mapping) else nested
    for member in members:
        yield from _tensors_in(member)


def _positions(model: Any, inputs: Mapping[str, Any]) -> TokenIndices:
    """The positions of the tokens of a forward pass, counted on from the tokens in its cache.

    Padding has position −1. The position ids that transformers gives to padding cannot be used:
    they are 0 or 1 on the left, and that of the last token on the right.

    Args:
        model: The model of transformers, or the ``HookedTransformer``, whose ``forward`` is called.
        inputs: The arguments of ``forward`` by their names.
    """
    # Ids, embeddings or text. The first argument, if the forward has another name for them.
    model_input = next(iter(inputs.values()))
    for name in ("input_ids", "input", "inputs_embeds"):
        if inputs.get(name) is not None:
            model_input = inputs[name]
            break
    if not isinstance(model_input, Tensor):  # a HookedTransformer also takes text
        options = {name: inputs[name] for name in ("prepend_bos", "padding_side") if name in inputs}
        model_input = model.to_tokens(model_input, **options)
    if model_input.ndim == 1:  # the ids of a single row
        model_input = model_input[None]
    rows, length = model_input.shape[:2]

    hooked_cache = inputs.get("past_kv_cache")  # the cache of a HookedTransformer
    mask: Any = inputs.get("attention_mask")
    has_mask = isinstance(mask, Tensor) and mask.ndim == 2
    if has_mask and hooked_cache is not None:  # then the mask covers only the new tokens
        mask = torch.cat([hooked_cache.previous_attention_mask.to(mask), mask], -1)

    positions = inputs.get("position_ids")
    if positions is None and has_mask:
        positions = mask.long().cumsum(-1)[:, -length:] - 1
    if positions is None:
        cached_length = 0
        cache = inputs.get("past_key_values")
        if cache is not None:
            cached_length = int(cache.get_seq_length())
        if hooked_cache is not None:
            cached_length = int(hooked_cache[0].past_keys.shape[1])
        positions = cached_length + torch.arange(length, device=model_input.device)

    positions = positions.expand(rows, -1)
    if has_mask:
        is_padding = mask[:, -length:] == 0
        positions = positions.masked_fill(is_padding, -1)
    return positions
