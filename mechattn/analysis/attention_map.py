"""The attention map of a short prompt: the one analysis that keeps the whole pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums
from mechattn.errors import OptionError
from mechattn.prompts.sequences import Batch, Sequence


@dataclass(frozen=True)
class AttentionMap(AnalysisBase):
    """Keep the attention probabilities of every query and key of prompts with up to ``max_tokens`` tokens.

    ``attention_map[q, k] = A[q, k]``; NaN beyond the end of a sequence.
    """

    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or not 2 <= self.max_tokens <= 1024:
            raise OptionError(
                f"max_tokens={self.max_tokens}: give a number from 2 to 1,024, the sizes at which a map is readable"
            )

    name = "attention_map"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The map."""
        return {"attention": Quantity(("head", "query", "target"), "probability", "attention from query to target")}

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence longer than ``max_tokens`` is refused: its map would be unreadable and would fill the page."""
        if len(sequence) <= self.max_tokens:
            return None
        return (
            f"has {len(sequence)} tokens, and a map shows at most {self.max_tokens}: shorten the prompt, or raise "
            f"max_tokens (page size grows with its square)"
        )

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty [query, key] maps."""
        shape = (len(batch.rows), heads, self.max_tokens, self.max_tokens)
        return {"attention": torch.zeros(shape, device=batch.tokens.device)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Copy this block of rows to its place in the map."""
        sums["attention"][:, :, rows.queries, rows.keys] = rows.pattern

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """The maps, NaN where there is no token."""
        lengths = batch.lengths.to(sums["attention"].device)
        inside = torch.arange(self.max_tokens, device=lengths.device) < lengths[:, None]
        both = inside[:, None, :, None] & inside[:, None, None, :]
        return {"attention": sums["attention"].masked_fill(~both, torch.nan)}
