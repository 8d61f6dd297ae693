"""What inserted tokens do to the output of attention: dilution, a shift, re-routing, changed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import PairedRows, Quantity, Sums
from mechattn.functional import affine as fn
from mechattn.functional.received import segment_mean
from mechattn.prompts.sequences import Batch, Sequence

_PARTS = ("dilution", "shift", "rerouting", "new_values")
_PER_QUERY = ("scale", "total_variation", "output", "shift", "residual", "change", *(f"by_{p}" for p in _PARTS))


@dataclass(frozen=True)
class AffineShift:
    """How far attention with inserted tokens is ``λ · output + Σσ``, head by head (arXiv:2510.01032, section 3).

    Exactly, in every layer: ``output' = λ · output + Σσ + re-routing + new values`` (``functional.affine.Split``). The
    published form leaves the last two out, which is right in layer 0 alone, and there where the distance of the
    original tokens to each other has not changed. All outputs are those of single heads, before W_O.
    """

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return "affine_shift"

    @property
    def options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment, and the rank of the shift over the queries after the insertion."""
        segment = ("head", "segment")
        mean = ", mean over the queries of the segment"
        after = "; of queries after the insertion"
        shares = {
            f"change_by_{part}": Quantity(
                segment, "share", f"<{part}, change> / |change|^2: the parts add up to 1{after}{mean}"
            )
            for part in _PARTS
        }
        return {
            "scale": Quantity(
                segment, "probability", "attention left to the original keys: lambda in the paper" + mean
            ),
            "scale_uniform": Quantity(
                ("segment",), "probability", "the same if every head attended uniformly to the keys it can see" + mean
            ),
            "scale_at": Quantity(
                ("head", "key"), "probability", "attention that the query leaves to the original keys"
            ),
            "total_variation": Quantity(
                segment, "probability", "1/2 sum over original keys of |A'/lambda - A|: 0 if only diluted" + mean
            ),
            "relative_error": Quantity(
                segment, "share", "|output' - lambda output - shift| / |output'|: what the affine form misses" + mean
            ),
            "output_norm": Quantity(segment, "value norm", "|output'|" + mean),
            "shift_norm": Quantity(segment, "value norm", "|sum over inserted keys of A' v'|" + mean),
            "shift_share": Quantity(segment, "share", "|shift| / |output'|" + mean),
            **shares,
            "shift_rank_one_share": Quantity(
                ("head",), "share", "s1^2 / sum s^2 over the shifts of the original queries after the insertion"
            ),
            "shift_effective_rank": Quantity(
                ("head",),
                "dimensions",
                "exp entropy of s / sum s over the shifts of these queries (Roy, Vetterli 2007)",
            ),
        }

    def problem(self, sequence: Sequence) -> str | None:
        """Every sequence can be measured: one without inserted tokens has a scale of 1 and no shift."""
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """Nothing measured yet."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1])
        return {name: torch.zeros(shape, device=batch.tokens.device) for name in _PER_QUERY}

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Norms and products of the parts, query by query; the Gram matrix of the shifts."""
        inserted = rows.batch.inserted
        parts = fn.split(
            rows.pattern,
            rows.v,
            inserted[:, rows.keys],
            rows.aligned,
            rows.v_aligned,
            rows.baseline,
            rows.v_baseline,
        )
        change = parts.change
        made = {
            "scale": parts.scale,
            "total_variation": fn.total_variation(rows.aligned, rows.baseline, parts.scale.clamp(min=1e-30)),
            "output": parts.output.norm(dim=-1),
            "shift": parts.shift.norm(dim=-1),
            "residual": (parts.rerouting + parts.new_values).norm(dim=-1),
            "change": torch.linalg.vecdot(change, change),
            **{f"by_{part}": torch.linalg.vecdot(getattr(parts, part), change) for part in _PARTS},
        }
        for name, value in made.items():
            sums[name][..., rows.queries] = value
        shifts = parts.shift.double() * self._after(rows.batch)[:, None, rows.queries, None]
        gram = shifts.transpose(-1, -2) @ shifts
        sums["gram"] = sums["gram"] + gram if "gram" in sums else gram

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments; an inserted query has a scale, and nothing to be compared with."""
        members, after = batch.members(), self._after(batch)
        original = members & (batch.origin >= 0)[:, None]
        null = segment_mean(fn.uniform_scale(batch.inserted, window, batch.hidden)[:, None], members)

        def mean(value: Float[Tensor, "batch head query"], over: Bool[Tensor, "batch query"] | None = None) -> Tensor:
            return segment_mean(value, original if over is None else original & over[:, None])

        energies = fn.spectrum(sums["gram"])
        measured = after.any(-1)[:, None]
        return {
            "scale": segment_mean(sums["scale"], members),
            "scale_uniform": null.squeeze(1),
            "scale_at": sums["scale"].masked_fill(~batch.real[:, None], torch.nan),
            "total_variation": mean(sums["total_variation"]),
            "relative_error": mean(sums["residual"] / sums["output"]),
            "output_norm": mean(sums["output"]),
            "shift_norm": mean(sums["shift"]),
            "shift_share": mean(sums["shift"] / sums["output"]),
            **{f"change_by_{part}": mean(sums[f"by_{part}"] / sums["change"], after) for part in _PARTS},
            "shift_rank_one_share": fn.rank_one_share(energies).masked_fill(~measured, torch.nan).float(),
            "shift_effective_rank": fn.effective_rank(energies).masked_fill(~measured, torch.nan).float(),
        }

    def _after(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """The original queries that can see an inserted token."""
        return (batch.inserted.cumsum(-1) > 0) & (batch.origin >= 0)
