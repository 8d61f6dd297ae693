"""The interface of an intervention, which acts on some rows of a batch while a model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.model.hooked import attribute_set, holding
from mechattn.prompts.token_sequences import Sequence as Tokens


@dataclass(frozen=True)
class Target:
    """The tokens of a forward pass that an intervention acts on."""

    rows: Int[Tensor, " row"]  # of the batch
    prompts: tuple[str, ...]  # the id of each row's prompt
    # The index of each token in the baseline sequence; −1 and less for inserted tokens and padding
    positions: Int[Tensor, "row pos"]
    # The index of each token's segment in SEGMENTS; −1 and less for padding and generated tokens; None if unknown
    segments: Int[Tensor, "row pos"] | None = None


def digest(tensors: Iterable[Tensor]) -> str:
    """A short hash of some tensors, for the recorded description of an intervention."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(
            repr(tuple(tensor.shape)).encode() + tensor.detach().cpu().double().numpy().tobytes()
        )
    return made.hexdigest()[:12]


@runtime_checkable
class Intervention(Protocol):
    """Acts on a model inside a ``with`` block, and then restores it."""

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse a model, or prompts, that it cannot act on; called before the first forward pass."""

    def acting(self, model: Any, target: Callable[[], Target]) -> AbstractContextManager[None]:
        """Act on the tokens that ``target()`` returns at each forward pass."""


def read_first(interventions: Iterable[Any]) -> bool:
    """Whether one has ``reads_first = True``: it leaves the first of two passes over a batch as it is, to learn."""
    return any(getattr(each, "reads_first", False) for each in interventions)


@runtime_checkable
class ChecksSequences(Protocol):
    """An intervention that may refuse a sequence."""

    def check_sequence(self, prompt: str, sequence: Tokens) -> None:
        """Refuse a sequence that it cannot act on; called before the first forward pass."""


@contextmanager
def on(intervention: Intervention, model: Any, prompts: Sequence[str] = ()) -> Iterator[None]:
    """Apply an intervention to everything a model reads inside a ``with`` block, including cached generation.

    Args:
        intervention: The intervention.
        model: A hooked model or a model of transformers.
        prompts: The id of the prompt in each row of the batch, on which random draws depend; one for all by default.

    Raises:
        ModelError: The intervention cannot act on this model.
    """
    with holding(model):
        intervention.check(model, tuple(prompts))
        positions: list[Tensor] = []
        inner = getattr(model, "original_model", None) or model
        forward = inner.forward

        def noting(
            *given: Any, **named: Any
        ) -> Any:  # replaces forward itself, because some callers call it directly
            positions[:] = [_positions(inner, given, named)]
            return forward(*given, **named)

        def target() -> Target:
            now = positions[0]
            if prompts and len(prompts) != len(now):
                raise OptionError(
                    f"{len(prompts)} prompt ids were given, but the model reads {len(now)} rows: give one for each row"
                )
            return Target(
                torch.arange(len(now), device=now.device), tuple(prompts) or ("",) * len(now), now
            )

        with attribute_set(inner, "forward", noting), intervention.acting(model, target):
            yield


def _positions(model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Int[Tensor, "row pos"]:
    """The positions of the tokens of a forward pass, counted after its cache and without padding on the left."""
    by_name = [
        named[name]
        for name in ("input_ids", "input", "inputs_embeds")
        if named.get(name) is not None
    ]
    tokens = (by_name or given)[0]
    if not isinstance(tokens, Tensor):  # a HookedTransformer also takes text
        tokens = model.to_tokens(tokens)
    if named.get("position_ids") is not None:
        return named["position_ids"].expand(len(tokens), -1)
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.long().cumsum(-1)[:, -tokens.shape[1] :] - 1
    past = 0
    for cache in (
        named[name] for name in ("past_key_values", "past_kv_cache") if named.get(name) is not None
    ):
        past = int(
            cache.get_seq_length()
            if hasattr(cache, "get_seq_length")
            else cache[0].past_keys.shape[1]
        )
    return (past + torch.arange(tokens.shape[1], device=tokens.device)).expand(len(tokens), -1)
