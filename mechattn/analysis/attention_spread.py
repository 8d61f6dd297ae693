"""How far back each head attends, and over how many keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    AnalysisBase,
    AttentionRows,
    Coords,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    means_of,
    seen_keys,
    zeros,
)
from mechattn.errors import OptionError, check_counts
from mechattn.functional import focus as fn
from mechattn.functional.attention import constant
from mechattn.prompts.token_sequences import Batch


@dataclass(frozen=True)
class AttentionSpread(AnalysisBase):
    """Measure each head's attention by distance, and count the keys with almost as much attention
    as the strongest.

    ``band_mass[t] = mean over q of Σ_{t ≤ q − k < 2t} A[q, k]``, over the queries of a segment that
    see the whole band; constant in t where attention is scale-invariant (arXiv:2505.17083).
    ``near_best[share] = mean over q of #{k : A[q, k] ≥ share · max A[q]}``: keys whose score is at
    most ``−log share`` below the best one's (gap counts, arXiv:2605.12697, read in its abstract).
    Bands count positions: inserted tokens move earlier tokens further away.

    Args:
        bands: The number of bands, labelled by their first distance: 0 (the token itself), 1, 2, 4,
            8, ….
        shares: Fractions of the strongest key's attention.
    """

    name = "attention_spread"
    bands: int = 12
    shares: tuple[float, ...] = (0.5, 0.1, 0.01)

    def __post_init__(self) -> None:
        check_counts(bands=self.bands)
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise OptionError(f"shares={self.shares!r}: give numbers between 0 and 1")

    @property
    def coords(self) -> Coords:
        """The first distance of each band, and the shares."""
        return {
            "band": list(fn.band_edges(self.bands)[:-1]),
            "share": [float(share) for share in self.shares],
        }

    @property
    def quantities(self) -> Quantities:
        """Attention by band, and numbers of keys by share."""
        mass = "attention at the distances band to 2 · band − 1, of queries that see all of them"
        keys = "keys with at least this share of the strongest key's attention"
        return means_of(
            {
                "band_mass": Quantity(
                    ("head", "segment", "band"), "probability", mass, "difference"
                ),
                "near_best": Quantity(("head", "segment", "share"), "keys", keys),
            }
        )

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        mass = zeros(batch, heads, "mass", last=(self.bands,))
        near = zeros(batch, heads, "near", last=(len(self.shares),))
        return mass | near

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store both numbers of each query."""
        pattern = rows.pattern
        mass = fn.band_mass(pattern, self.bands, rows.queries.start, rows.keys.start)
        sums["mass"][:, :, rows.queries] = mass
        sums["near"][:, :, rows.queries] = fn.near_best(pattern, self.shares)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the queries of each segment."""
        members = rearrange(batch.members().float(), "batch segment query -> batch segment query 1")
        sees = rearrange(self._sees(batch, window), "batch query band -> batch 1 query band")
        return {
            "band_mass": _mean(sums["mass"], members * sees),
            "near_best": _mean(sums["near"], members),
        }

    def _sees(self, batch: Batch, window: Window) -> Float[Tensor, "batch query band"]:
        """1 where a query sees every key of a band."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        edges = constant(fn.band_edges(self.bands), positions.device)
        widths = (edges[1:] - edges[:-1]).clamp(min=1)
        seen = seen_keys(batch, positions, window).float()
        return (fn.band_mass(seen, self.bands) == widths).float()


def _mean(
    value: Float[Tensor, "batch head query each"],
    weight: Float[Tensor, "batch segment query #each"],
) -> Float[Tensor, "batch head segment each"]:
    """The mean over the counted queries; NaN if there are none."""
    weight = weight.expand(*weight.shape[:-1], value.shape[-1])
    total = torch.einsum("bhqe,bsqe->bhse", value, weight)
    count = weight.sum(2)[:, None]
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
