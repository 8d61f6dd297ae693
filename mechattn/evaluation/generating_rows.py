"""The rows of a batch that generates: padded prompts, and a cache whose rows can be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mechattn.prompts.token_sequences import PADDING, TokenSequence


class PaddedPrompts:
    """Sequences padded on the left, as a model reads them.

    Args:
        sequences: The sequences.
        device: Where the model's inputs are.
    """

    def __init__(self, sequences: Sequence[TokenSequence], device: torch.device) -> None:
        self.longest = max(len(sequence) for sequence in sequences)
        self.real: Bool[Tensor, "row pos"] = self._padded(
            [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences], False, device
        )
        self.tokens: Int[Tensor, "row pos"] = self._padded(
            [sequence.tokens for sequence in sequences], 0, device
        )
        self.position_ids: Int[Tensor, "row pos"] = self._padded(
            [sequence.position_ids for sequence in sequences], 0, device
        )
        self.segments: Int[Tensor, "row pos"] = self._padded(
            [sequence.segment for sequence in sequences], PADDING, device
        )
        # The index in the baseline sequence; negative for inserted tokens and padding.
        self.origin: Int[Tensor, "row pos"] = self._padded(
            [_origin(sequence) for sequence in sequences], -1 - self.longest, device
        )

        # Edges that are cut: these queries don't see these keys.
        self.blind_queries: Bool[Tensor, "row pos"] = torch.zeros_like(self.real)
        self.unseen_keys: Bool[Tensor, "row pos"] = torch.zeros_like(self.real)
        self.hidden_from_answers: Bool[Tensor, "row pos"] = torch.zeros_like(self.real)
        for row, sequence in enumerate(sequences):
            if sequence.edge_mask is None:
                continue
            start = self.longest - len(sequence)
            self.blind_queries[row, start:] = sequence.edge_mask.queries
            self.unseen_keys[row, start:] = sequence.edge_mask.keys
            if sequence.edge_mask.later:
                self.hidden_from_answers[row, start:] = sequence.edge_mask.keys
        self.has_cut_edges = any(sequence.edge_mask is not None for sequence in sequences)
        # Position ids with gaps need a mask: without one, transformers takes them for several
        # sequences that are packed into one row.
        self.needs_mask = not self.real.all() or any(
            sequence.keeps_positions for sequence in sequences
        )

    def _padded(
        self, parts: Sequence[Shaped[Tensor, " _"]], value: int, device: torch.device
    ) -> Shaped[Tensor, "row pos"]:
        rows = []
        for values in parts:
            padding = values.new_full((self.longest - len(values),), value)
            rows.append(torch.cat([padding, values]))
        return torch.stack(rows).to(device)

    @property
    def mask(self) -> Tensor | None:
        """Which keys are tokens, None if all are; with cut edges, which query sees which key."""
        if not self.has_cut_edges:
            return self.real.long() if self.needs_mask else None
        positions = torch.arange(self.longest, device=self.real.device)
        is_self = positions[:, None] == positions
        seen = (positions[:, None] >= positions) & self.real[:, None]
        seen &= ~(self.blind_queries[:, :, None] & self.unseen_keys[:, None])
        return (seen | is_self)[:, None]

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of the model."""
        return {
            "input_ids": self.tokens,
            "attention_mask": self.mask,
            "position_ids": self.position_ids,
        }


def _origin(sequence: TokenSequence) -> Int[Tensor, " pos"]:
    """The index of each token in the baseline sequence; another negative number for each
    inserted."""
    return torch.where(sequence.inserted, -1 - torch.arange(len(sequence)), sequence.origin)


@dataclass
class GeneratingRow:
    """An answer that is being generated."""

    number: int  # of its request
    sequence: TokenSequence  # the prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_ended: bool = False
    is_handed_over: bool = False
    last_origin: int = field(init=False)  # of the prompt; generated tokens count on from it
    last_position_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_origin = int(_origin(self.sequence).max())
        self.last_position_id = int(self.sequence.position_ids[-1])

    @property
    def length(self) -> int:
        """How many tokens of it are in the cache: all but the last one."""
        return len(self.sequence) + len(self.tokens) - 1


class GeneratingRows:
    """The rows of a batch, whose keys and values are in one cache, padded on the left.

    Args:
        model: The model without hooks.
        device: Where its inputs are.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.rows: list[GeneratingRow] = []
        self.cache: Any = None
        self.real: Bool[Tensor, "row pos"] = torch.zeros((0, 0), dtype=torch.bool, device=device)
        self.hidden: Bool[Tensor, "row pos"] = self.real  # keys that no generated token sees
        self.hides_keys = False
        self.needs_mask = False

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def open_count(self) -> int:
        """The number of rows whose answers have not ended."""
        return sum(not row.is_ended for row in self.rows)

    @property
    def can_change(self) -> bool:
        """Whether rows can be exchanged: all layers cache keys and values, and nothing else."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        kinds = (DynamicLayer, DynamicSlidingWindowLayer)
        return all(type(layer) in kinds for layer in self.cache.layers)

    @property
    def origin(self) -> Int[Tensor, "row 1"]:
        """The index of each row's last token, counted on from those of the baseline sequence."""
        indices = [row.last_origin + len(row.tokens) for row in self.rows]
        return torch.tensor(indices, device=self.device)[:, None]

    def new_cache(self) -> Any:
        """An empty cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def add(self, rows: Sequence[GeneratingRow], prompts: PaddedPrompts, cache: Any) -> None:
        """Add rows whose prompts have been read."""
        if not self.rows:
            self.rows = list(rows)
            self.cache = cache
            self.real = prompts.real
            self.hidden = prompts.hidden_from_answers
            self.hides_keys = bool(self.hidden.any())
            self.needs_mask = prompts.needs_mask
            return
        length = max(self.real.shape[1], prompts.longest)
        for layer, new_layer in zip(self.cache.layers, cache.layers, strict=True):
            if layer.is_initialized:
                kept_length = _set_length(layer, length)
                layer.keys = _joined(layer.keys, new_layer.keys, kept_length, 2)
                layer.values = _joined(layer.values, new_layer.values, kept_length, 2)
        self.real = _joined(self.real, prompts.real, length)
        self.hidden = _joined(self.hidden, prompts.hidden_from_answers, length)
        self.hides_keys = bool(self.hidden.any())
        self.rows += rows
        self.needs_mask = True

    def drop_ended(self) -> None:
        """Take out the rows whose answers have ended, and the padding that no other row needs."""
        open_places = [place for place, row in enumerate(self.rows) if not row.is_ended]
        if not open_places:
            self.rows = []
            return
        if len(open_places) == len(self.rows) or not self.can_change:
            return
        self.rows = [self.rows[place] for place in open_places]
        length = max(row.length for row in self.rows)
        for layer in self.cache.layers:
            if layer.is_initialized:
                kept_length = _set_length(layer, length)
                layer.keys = _fitted(layer.keys, kept_length, 2)[open_places]
                layer.values = _fitted(layer.values, kept_length, 2)[open_places]
        self.real = _fitted(self.real[open_places], length)
        self.hidden = _fitted(self.hidden[open_places], length)

    def read_last_tokens(self, options: dict[str, Any]) -> Float[Tensor, "row token"]:
        """Read the token that each row has written last; the logits of the next.

        A row that has ended and could not be taken out reads its last token again.
        """
        last_tokens = [row.tokens[-1] for row in self.rows]
        position_ids = [row.last_position_id + len(row.tokens) for row in self.rows]
        self.real = torch.nn.functional.pad(self.real, (0, 1), value=True)
        self.hidden = torch.nn.functional.pad(self.hidden, (0, 1), value=False)
        mask = None
        if self.hides_keys:
            mask = (self.real & ~self.hidden)[:, None, None]
        elif self.needs_mask:
            mask = self.real.long()
        output = self.model(
            input_ids=torch.tensor(last_tokens, device=self.device)[:, None],
            attention_mask=mask,
            position_ids=torch.tensor(position_ids, device=self.device)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        logits: Float[Tensor, "row token"] = output.logits[:, -1].float()
        return logits


def _set_length(layer: Any, length: int) -> int:
    """Note how many tokens a layer's cache has from now on; how many of them it holds."""
    if not layer.is_sliding:
        return length
    layer.cumulative_length = length
    return min(length, layer.sliding_window - 1)


def _fitted(values: Shaped[Tensor, ...], length: int, axis: int = 1) -> Shaped[Tensor, ...]:
    """The last positions on an axis, or zeros before them where there are fewer."""
    lacking = length - values.shape[axis]
    if lacking <= 0:
        return values.narrow(axis, -lacking, length)
    padding = list(values.shape)
    padding[axis] = lacking
    return torch.cat([values.new_zeros(padding), values], axis)


def _joined(
    rows: Shaped[Tensor, ...], new_rows: Shaped[Tensor, ...], length: int, axis: int = 1
) -> Shaped[Tensor, ...]:
    """Rows and new rows, all of this length on an axis."""
    return torch.cat([_fitted(rows, length, axis), _fitted(new_rows, length, axis)])
