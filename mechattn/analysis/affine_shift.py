"""How inserted tokens change the output of attention: dilution, a shift, re-routing, changed
values."""

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
_NO_NULL = "it depends on the values"
_LEAST = 1e-3  # of the output
_PARTS = ("dilution", "shift", "rerouting", "new_values")
_FIT = ("before", "both", "after")
_PER_QUERY = ("scale", "question_ratio", "total_variation", "output", "shift", "residual", "change")
# The others depend on the values too.
_OF_THE_PATTERN = ("scale", "question_ratio", "total_variation")
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
    """Test per head whether attention with inserted tokens equals ``λ · output + Σσ``
    (arXiv:2510.01032, section 3).

    The exact decomposition in every layer is ``output' = λ · output + Σσ + re-routing + new
    values`` (``functional.head_outputs.Split``). The published form leaves out the last two terms.
    This is correct only in layer 0, and only where the distances between the original tokens have
    not changed. All outputs are those of single heads, before W_O.

    Args:
        per_query: Also keep λ, ρ_Q, the total variation, the relative error and the shift's norm
            and share at each position.
    """

    name = "affine_shift"
    per_query: bool = False

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment, and the rank of the shift over the queries after
        the insertion."""
        by_segment = ("head", "segment")
        by_head = ("head",)
        scale = "attention left to the original keys: lambda in the paper"
        ratio = "attention to all question keys, over that without inserted tokens: rho_Q"
        variation = "1/2 sum over original keys of |A'/lambda - A|: 0 if only diluted"
        error = "|output' - lambda output - shift| / |output'|: what the affine form misses"
        shift = "|sum over inserted keys of A' v'|"
        quantities = {
            "scale": Quantity(by_segment, "probability", scale),
            "question_ratio": Quantity(by_segment, "ratio", ratio),
            "total_variation": Quantity(by_segment, "probability", variation, "difference"),
            "relative_error": Quantity(by_segment, "share", error, "difference", _NO_NULL),
            "output_norm": Quantity(by_segment, "value norm", "|output'|", no_null=_NO_NULL),
            "shift_norm": Quantity(by_segment, "value norm", shift, "difference", _NO_NULL),
            "shift_share": Quantity(
                by_segment, "share", "|shift| / |output'|", "difference", _NO_NULL
            ),
        }
        of_change = "change> / |change|^2, of queries after the insertion; adds up to 1"
        for part in _PARTS:
            share = f"<{part}, {of_change}"
            quantities[f"change_by_{part}"] = Quantity(
                by_segment, "share", share, "difference", _NO_NULL
            )
        fit = (
            "sum over the question's queries of products of outputs less their means, without and"
            " with inserted tokens"
        )
        for name in _FIT:
            quantities[f"fit_{name}"] = Quantity(
                by_head, "value norm squared", f"{fit} ({name})", no_null=_NO_NULL
            )
        for name in _BY_POSITION if self.per_query else ():
            own = f"{name} of the query at this position"
            no_null = "" if name in _OF_THE_PATTERN else _NO_NULL
            quantities[f"{name}_at"] = Quantity(
                ("head", "key"), "as without _at", own, no_null=no_null
            )
        shifts = "over the shifts of the original queries after the insertion"
        first = f"s1^2 / sum s^2 {shifts}"
        rank = f"exp entropy of s / sum s {shifts} (Roy and Vetterli 2007)"
        quantities["shift_rank_one_share"] = Quantity(by_head, "share", first, no_null=_NO_NULL)
        quantities["shift_effective_rank"] = Quantity(by_head, "dimensions", rank, no_null=_NO_NULL)
        return quantities

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return zeros(batch, heads, *_PER_QUERY, *(f"by_{part}" for part in _PARTS))

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Add norms and products of the parts for each query, and the Gram matrix of the shifts."""
        aligned = rows.aligned
        baseline = rows.baseline
        parts = fn.split(
            rows.pattern,
            rows.v,
            rows.batch.inserted[:, rows.keys],
            aligned,
            rows.v_aligned,
            baseline,
            rows.v_baseline,
        )
        change = parts.change
        ratio = fn.question_ratio(aligned, baseline, rows.segment == SEGMENTS.index("question"))
        numbers = {
            "scale": parts.scale,
            "question_ratio": ratio.nan_to_num(_NONE, posinf=_NONE),
            "total_variation": fn.total_variation(aligned, baseline, parts.scale.clamp(min=1e-30)),
            "output": parts.output.norm(dim=-1),
            "shift": parts.shift.norm(dim=-1),
            "residual": (parts.rerouting + parts.new_values).norm(dim=-1),
            "change": torch.linalg.vecdot(change, change),
        }
        for part in _PARTS:
            numbers[f"by_{part}"] = torch.linalg.vecdot(getattr(parts, part), change)
        for name, number in numbers.items():
            sums[name][..., rows.queries] = number

        # What a fit over the question's queries needs: sums and products of outputs without (x) and
        # with insertion (y).
        is_question = rows.batch.of_segment("question") & (rows.batch.origin >= 0)
        counted = is_question[:, None, rows.queries, None]
        x = parts.before.double() * counted
        y = parts.output.double() * counted
        _accumulate(sums, "fit_x", x.sum(-2))
        _accumulate(sums, "fit_y", y.sum(-2))
        _accumulate(sums, "fit_before", (x * x).sum((-1, -2)))
        _accumulate(sums, "fit_both", (x * y).sum((-1, -2)))
        _accumulate(sums, "fit_after", (y * y).sum((-1, -2)))

        shifts = parts.shift.double() * rows.batch.after_inserted[:, None, rows.queries, None]
        transposed = rearrange(shifts, "batch head query d_head -> batch head d_head query")
        _accumulate(sums, "gram", transposed @ shifts)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments; an inserted query has a scale but no baseline to compare with."""
        is_original = batch.origin >= 0
        question = batch.of_segment("question")
        sees_question = (question.cumsum(-1) > 0) & is_original
        has_ratio = (sums["question_ratio"] != _NONE) & sees_question[:, None]
        of_queries = {
            "scale": sums["scale"],
            "question_ratio": sums["question_ratio"].masked_fill(~has_ratio, torch.nan),
            "total_variation": sums["total_variation"],
            "relative_error": sums["residual"] / sums["output"],
            "shift_norm": sums["shift"],
            "shift_share": sums["shift"] / sums["output"],
        }
        members = batch.members()
        original_members = members & is_original[:, None]
        values = {}
        for name, value in of_queries.items():
            counted = members if name == "scale" else original_members
            values[name] = segment_mean(value, counted)
        values["output_norm"] = segment_mean(sums["output"], original_members)

        # If the change is within rounding error, its parts mean nothing.
        is_large = sums["change"] > (_LEAST * sums["output"]) ** 2
        change = torch.where(is_large, sums["change"], torch.nan)
        members_after = original_members & batch.after_inserted[:, None]
        for part in _PARTS:
            values[f"change_by_{part}"] = segment_mean(sums[f"by_{part}"] / change, members_after)

        n = (question & is_original).sum(-1)[:, None].clamp(min=1)
        x = sums["fit_x"]
        y = sums["fit_y"]
        values["fit_before"] = (sums["fit_before"] - (x * x).sum(-1) / n).float()
        values["fit_both"] = (sums["fit_both"] - (x * y).sum(-1) / n).float()
        values["fit_after"] = (sums["fit_after"] - (y * y).sum(-1) / n).float()

        energies = fn.spectrum(sums["gram"])
        without_insertion = ~batch.after_inserted.any(-1)[:, None]
        ranks = {
            "shift_rank_one_share": fn.rank_one_share(energies),
            "shift_effective_rank": fn.effective_rank(energies),
        }
        for name, rank in ranks.items():
            values[name] = rank.masked_fill(without_insertion, torch.nan).float()

        for name, value in of_queries.items() if self.per_query else ():
            counted = batch.real if name == "scale" else is_original
            values[f"{name}_at"] = value.masked_fill(~counted[:, None], torch.nan)
        return values


def _accumulate(sums: Sums, name: str, value: Tensor) -> None:
    """Add to a sum whose shape is known only now."""
    sums[name] = sums[name] + value if name in sums else value
