"""How far back attention reaches, on every scale, and over how many keys it spreads."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, AttentionRows, Quantity, Sums
from mechattn.errors import OptionError
from mechattn.functional import spread as fn
from mechattn.functional.received import visible_keys
from mechattn.prompts.sequences import Batch


@dataclass(frozen=True)
class AttentionSpread(AnalysisBase):
    """Measure each head's attention by distance, and count the keys with almost as much attention as the strongest.

    ``band_mass[t] = mean over q of Σ_{t ≤ q − k < 2t} A[q, k]``, over the queries of a segment that see the whole band;
    constant in t where attention is scale-invariant (arXiv:2505.17083). ``near_best[share] = mean over q of #{k : A[q,
    k] ≥ share · max A[q]}``: keys whose score is at most ``−log share`` below the best one's (gap counts,
    arXiv:2605.12697, read in its abstract). Bands count positions: inserted tokens move earlier tokens further away.

    Args:
        bands: The number of bands, labelled by their first distance: 0 (the token itself), 1, 2, 4, 8, ….
        shares: Fractions of the strongest key's attention.
    """

    bands: int = 12
    shares: tuple[float, ...] = (0.5, 0.1, 0.01)

    def __post_init__(self) -> None:
        if isinstance(self.bands, bool) or not isinstance(self.bands, int) or not 1 <= self.bands <= 24:
            raise OptionError(
                f"bands={self.bands!r}: give the number of bands, from 1 to 24; 12 bands reach back 2,047 tokens"
            )
        given = self.shares if isinstance(self.shares, (tuple, list)) else ()
        numbers = [s for s in given if isinstance(s, (int, float)) and not isinstance(s, bool) and 0 < s < 1]
        if not given or len(numbers) < len(given) or len(set(numbers)) < len(numbers):
            raise OptionError(f"shares={self.shares!r}: give different numbers between 0 and 1, such as (0.5, 0.1)")

    name = "attention_spread"

    @property
    def coords(self) -> Mapping[str, Seq[object]]:
        """The first distance of each band, and the shares."""
        return {"band": list(fn.band_edges(self.bands)[:-1]), "share": [float(share) for share in self.shares]}

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Attention by band, and numbers of keys by share."""
        mass = "attention at the distances band to 2 · band − 1, mean over the queries that see all of them"
        keys = "keys with at least this share of the strongest key's attention, mean over the queries of the segment"
        return {
            "band_mass": Quantity(("head", "segment", "band"), "probability", mass, "difference"),
            "near_best": Quantity(("head", "segment", "share"), "keys", keys),
        }

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        shape, device = (len(batch.rows), heads, batch.tokens.shape[1]), batch.tokens.device
        return {
            "mass": torch.zeros(*shape, self.bands, device=device),
            "near": torch.zeros(*shape, len(self.shares), device=device),
        }

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store both numbers of each query."""
        pattern = rows.pattern
        sums["mass"][:, :, rows.queries] = fn.band_mass(pattern, self.bands, rows.queries.start, rows.keys.start)
        sums["near"][:, :, rows.queries] = fn.near_best(pattern, self.shares)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment."""
        members = rearrange(batch.members().float(), "batch segment query -> batch segment query 1")
        seen = rearrange(self._sees(batch, window), "batch query band -> batch 1 query band")
        every = torch.ones(1, 1, 1, 1, device=members.device)
        return {
            "band_mass": _mean(sums["mass"], members * seen),
            "near_best": _mean(sums["near"], members * every),
        }

    def _sees(self, batch: Batch, window: int | None) -> Float[Tensor, "batch query band"]:
        """1 where a query sees every key of a band."""
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        seen = visible_keys(places, len(places), window)[None]
        if batch.edge_mask is not None:
            seen = seen & ~batch.edge_mask.unseen(places.expand(len(batch.rows), -1), slice(0, len(places)))
        edges = torch.tensor(fn.band_edges(self.bands), device=places.device)
        found = fn.band_mass(seen.float(), self.bands)
        return (found == (edges[1:] - edges[:-1]).clamp(min=1)).float().expand(len(batch.rows), -1, -1)


def _mean(
    value: Float[Tensor, "batch head query each"], weight: Float[Tensor, "batch segment query #each"]
) -> Float[Tensor, "batch head segment each"]:
    """The mean over the counted queries; NaN if there are none."""
    weight = weight.expand(*weight.shape[:-1], value.shape[-1])
    total = torch.einsum("bhqe,bsqe->bhse", value, weight)
    count = weight.sum(2)[:, None]
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
