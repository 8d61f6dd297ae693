"""How inserted tokens change the output of attention: dilution, a shift, re-routing, changed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from mechattn.analysis.analysis import AnalysisBase, PairedRows, Quantity, Sums, zeros
from mechattn.axes import SEGMENTS
from mechattn.functional import head_outputs as fn
from mechattn.functional.received import segment_mean
from mechattn.prompts.token_sequences import Batch

_NONE = -1.0  # stands for an undefined ratio, as sums must be finite
_LEAST = 1e-3  # of the output
_PARTS = ("dilution", "shift", "rerouting", "new_values")
_FIT = ("before", "both", "after")
_PER_QUERY = ("scale", "question_ratio", "total_variation", "output", "shift", "residual", "change")
_OF_THE_PATTERN = (
    "scale",
    "question_ratio",
    "total_variation",
)  # the others depend on the values too
_BY_POSITION = (
    "scale",
    "question_ratio",
    "total_variation",
    "relative_error",
    "shift_norm",
    "shift_share",
)


@dataclass(frozen=True)
class AffineShift(AnalysisBase):
    """Test per head whether attention with inserted tokens equals ``λ · output + Σσ`` (arXiv:2510.01032, section 3).

    The exact decomposition in every layer is ``output' = λ · output + Σσ + re-routing + new values``
    (``functional.head_outputs.Split``). The published form leaves out the last two terms. This is correct only in
    layer 0, and only where the distances between the original tokens have not changed. All outputs are those of single
    heads, before W_O.

    Args:
        per_query: Also keep λ, ρ_Q, the total variation, the relative error and the shift's norm and share at each
            position.
    """

    name = "affine_shift"
    per_query: bool = False

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment, and the rank of the shift over the queries after the insertion."""
        of = ("head", "segment")
        scale = "attention left to the original keys: lambda in the paper"
        ratio = "attention to all question keys, over that without inserted tokens: rho_Q"
        variation = "1/2 sum over original keys of |A'/lambda - A|: 0 if only diluted"
        values = "it depends on the values"
        split = "|output' - lambda output - shift| / |output'|: what the affine form misses"
        rank = "over the shifts of the original queries after the insertion"
        effective = f"exp entropy of s / sum s {rank} (Roy and Vetterli 2007)"
        fit = "sum over the question's queries of products of outputs less their means, without and with inserted tokens"
        part_of = "change> / |change|^2, of queries after the insertion; adds up to 1"
        shares = {
            f"change_by_{p}": Quantity(of, "share", f"<{p}, {part_of}", "difference", values)
            for p in _PARTS
        }
        by_position = {
            name: "" if name in _OF_THE_PATTERN else values
            for name in _BY_POSITION
            if self.per_query
        }
        about, dims = "of the query at this position", ("head", "key")
        at = {
            f"{n}_at": Quantity(dims, "as without _at", f"{n} {about}", no_null=w)
            for n, w in by_position.items()
        }
        return {
            "scale": Quantity(of, "probability", scale),
            "question_ratio": Quantity(of, "ratio", ratio),
            "total_variation": Quantity(of, "probability", variation, "difference"),
            "relative_error": Quantity(of, "share", split, "difference", values),
            "output_norm": Quantity(of, "value norm", "|output'|", no_null=values),
            "shift_norm": Quantity(
                of, "value norm", "|sum over inserted keys of A' v'|", "difference", values
            ),
            "shift_share": Quantity(of, "share", "|shift| / |output'|", "difference", values),
            **shares,
            **{
                f"fit_{name}": Quantity(
                    ("head",), "value norm squared", f"{fit} ({name})", no_null=values
                )
                for name in _FIT
            },
            **at,
            "shift_rank_one_share": Quantity(
                ("head",), "share", f"s1^2 / sum s^2 {rank}", no_null=values
            ),
            "shift_effective_rank": Quantity(("head",), "dimensions", effective, no_null=values),
        }

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return zeros(batch, heads, *_PER_QUERY, *(f"by_{part}" for part in _PARTS))

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Add norms and products of the parts for each query, and the Gram matrix of the shifts."""
        inserted = rows.batch.inserted[:, rows.keys]
        aligned, baseline = rows.aligned, rows.baseline
        parts = fn.split(
            rows.pattern, rows.v, inserted, aligned, rows.v_aligned, baseline, rows.v_baseline
        )
        change = parts.change
        ratio = fn.question_ratio(aligned, baseline, rows.segment == SEGMENTS.index("question"))
        made = {
            "scale": parts.scale,
            "question_ratio": ratio.nan_to_num(_NONE, posinf=_NONE),
            "total_variation": fn.total_variation(aligned, baseline, parts.scale.clamp(min=1e-30)),
            "output": parts.output.norm(dim=-1),
            "shift": parts.shift.norm(dim=-1),
            "residual": (parts.rerouting + parts.new_values).norm(dim=-1),
            "change": torch.linalg.vecdot(change, change),
            **{f"by_{part}": torch.linalg.vecdot(getattr(parts, part), change) for part in _PARTS},
        }
        for name, value in made.items():
            sums[name][..., rows.queries] = value
        asks = (rows.batch.of_segment("question") & (rows.batch.origin >= 0))[
            :, None, rows.queries, None
        ]
        x, y = (part.double() * asks for part in (parts.before, parts.output))
        fit = {
            "x": x.sum(-2),
            "y": y.sum(-2),
            "before": (x * x).sum((-1, -2)),
            "both": (x * y).sum((-1, -2)),
        }
        for name, value in {**fit, "after": (y * y).sum((-1, -2))}.items():
            sums[f"fit_{name}"] = sums.get(f"fit_{name}", torch.zeros_like(value)) + value
        shifts = parts.shift.double() * rows.batch.after_inserted[:, None, rows.queries, None]
        gram = rearrange(shifts, "batch head query d_head -> batch head d_head query") @ shifts
        sums["gram"] = sums["gram"] + gram if "gram" in sums else gram

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments; an inserted query has a scale but no baseline to compare with."""
        members, after, at_original = batch.members(), batch.after_inserted, batch.origin >= 0
        asks = (
            batch.of_segment("question").cumsum(-1) > 0
        ) & at_original  # the queries that see a question token
        original = members & at_original[:, None]
        there = (sums["question_ratio"] != _NONE) & asks[:, None]
        each = {
            "scale": sums["scale"],
            "question_ratio": sums["question_ratio"].masked_fill(~there, torch.nan),
            "total_variation": sums["total_variation"],
            "relative_error": sums["residual"] / sums["output"],
            "shift_norm": sums["shift"],
            "shift_share": sums["shift"] / sums["output"],
        }
        energies = fn.spectrum(sums["gram"])
        n = (batch.of_segment("question") & at_original).sum(-1)[:, None].clamp(min=1)
        x, y = sums["fit_x"], sums["fit_y"]
        means = zip(_FIT, ((x * x).sum(-1), (x * y).sum(-1), (y * y).sum(-1)), strict=True)
        nothing = ~after.any(-1)[:, None]
        # If the change is within rounding error, its parts mean nothing.
        change = torch.where(
            sums["change"] > (_LEAST * sums["output"]) ** 2, sums["change"], torch.nan
        )
        late = original & after[:, None]
        return {
            **{
                name: segment_mean(value, members if name == "scale" else original)
                for name, value in each.items()
            },
            "output_norm": segment_mean(sums["output"], original),
            **{
                f"change_by_{part}": segment_mean(sums[f"by_{part}"] / change, late)
                for part in _PARTS
            },
            **{
                f"fit_{name}": (sums[f"fit_{name}"] - product / n).float()
                for name, product in means
            },
            "shift_rank_one_share": fn.rank_one_share(energies)
            .masked_fill(nothing, torch.nan)
            .float(),
            "shift_effective_rank": fn.effective_rank(energies)
            .masked_fill(nothing, torch.nan)
            .float(),
            **{
                f"{name}_at": value.masked_fill(
                    ~(batch.real if name == "scale" else at_original)[:, None], torch.nan
                )
                for name, value in (each.items() if self.per_query else ())
            },
        }
