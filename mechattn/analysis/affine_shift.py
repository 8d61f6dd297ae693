"""How inserted tokens change the output of attention: by dilution, a shift, re-routing and new
values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mechattn.analysis.analysis import (
    DEPENDS_ON_VALUES,
    HEAD_AND_SEGMENT,
    AnalysisBase,
    PairedRows,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    means_by_segment,
    nan_outside,
    of_each,
    of_each_query,
    zeros,
)
from mechattn.axes import SEGMENTS
from mechattn.functional import head_outputs as fn
from mechattn.prompts.token_sequences import Batch

# Replaces the ratio of a query that pays no attention to question keys in the baseline, since sums
# must be finite.
_UNDEFINED = -1.0
# The smallest change that is divided into parts, as a fraction of the output's norm. A smaller one
# may be a rounding error.
_SMALLEST_CHANGE = 1e-3
_PARTS = ("dilution", "shift", "rerouting", "new_values")
_OF_QUERIES = {
    "scale": Quantity(
        HEAD_AND_SEGMENT, "probability", "attention left to the original keys: lambda in the paper"
    ),
    "question_ratio": Quantity(
        HEAD_AND_SEGMENT,
        "ratio",
        "attention to all question keys, over that without inserted tokens: rho_Q",
    ),
    "total_variation": Quantity(
        HEAD_AND_SEGMENT,
        "probability",
        "1/2 sum over original keys of |A'/lambda - A|: 0 if only diluted",
        compared="difference",
    ),
    "relative_error": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "|output' - lambda output - shift| / |output'|: what the affine form misses",
        compared="difference",
        no_null=DEPENDS_ON_VALUES,
    ),
    "shift_norm": Quantity(
        HEAD_AND_SEGMENT,
        "value norm",
        "|sum over inserted keys of A' v'|",
        compared="difference",
        no_null=DEPENDS_ON_VALUES,
    ),
    "shift_share": Quantity(
        HEAD_AND_SEGMENT,
        "share",
        "|shift| / |output'|",
        compared="difference",
        no_null=DEPENDS_ON_VALUES,
    ),
}


@dataclass(frozen=True)
class AffineShift(AnalysisBase):
    """Test per head whether attention with inserted tokens equals ``λ · output + Σσ``
    (arXiv:2510.01032, section 3).

    The exact decomposition in every layer is ``output' = λ · output + Σσ + re-routing + new
    values`` (``functional.head_outputs.Split``). The published form leaves out the last two terms.
    That is correct only in layer 0, and only if the distances between the original tokens have not
    changed. All outputs are those of single heads, before W_O.

    Args:
        per_query: Also keep, at each position, the scale λ, the question ratio ρ_Q, the total
            variation, the relative error, and the norm and share of the shift.
    """

    name = "affine_shift"
    per_query: bool = False

    @property
    def quantities(self) -> Quantities:
        """Means over the queries of each segment, and how many dimensions the shifts of the queries
        after the insertion span."""
        quantities = dict(_OF_QUERIES)
        quantities["output_norm"] = Quantity(
            HEAD_AND_SEGMENT, "value norm", "|output'|", no_null=DEPENDS_ON_VALUES
        )
        for name in _PARTS:
            formula = f"<{name}, change> / |change|^2, of queries after the insertion; adds up to 1"
            quantities[f"change_by_{name}"] = Quantity(
                HEAD_AND_SEGMENT, "share", formula, compared="difference", no_null=DEPENDS_ON_VALUES
            )

        over_shifts = "over the shifts of the original queries after the insertion"
        quantities["shift_rank_one_share"] = Quantity(
            ("head",),
            "share",
            f"s1^2 / sum s^2 {over_shifts}",
            no_null=DEPENDS_ON_VALUES,
            title="rank-one share of the shift Σσ",
        )
        quantities["shift_effective_rank"] = Quantity(
            ("head",),
            "dimensions",
            f"exp entropy of s / sum s {over_shifts} (Roy and Vetterli 2007)",
            no_null=DEPENDS_ON_VALUES,
        )

        if self.per_query:
            quantities |= of_each(_OF_QUERIES)
        return quantities

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zeros for each query and number, without the Gram matrix of the shifts."""
        norms = ["output_norm", "shift_norm", "error_norm", "squared_change"]
        products = [f"by_{name}" for name in _PARTS]
        return zeros(batch, heads, "scale", "question_ratio", "total_variation", *norms, *products)

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Store norms and products of the parts for each query, and add the Gram matrix of the
        shifts."""
        split = split_rows(rows)
        change = split.change
        is_question = rows.segment == SEGMENTS.index("question")
        question_ratio = fn.question_ratio(rows.aligned, rows.baseline, is_question)
        divisor = split.scale.clamp(min=1e-30)  # λ is 0 if a query attends only to inserted tokens
        query_values = {
            "scale": split.scale,
            "question_ratio": question_ratio.nan_to_num(_UNDEFINED, posinf=_UNDEFINED),
            "total_variation": fn.total_variation(rows.aligned, rows.baseline, divisor),
            "output_norm": split.output.norm(dim=-1),
            "shift_norm": split.shift.norm(dim=-1),
            "error_norm": (split.rerouting + split.new_values).norm(dim=-1),
            "squared_change": torch.linalg.vecdot(change, change),
        }
        for part in _PARTS:
            query_values[f"by_{part}"] = torch.linalg.vecdot(getattr(split, part), change)

        for name, value in query_values.items():
            sums[name][..., rows.queries] = value

        after_insertion = rows.batch.after_inserted[:, None, rows.queries, None]
        shifts = split.shift.double() * after_insertion
        gram = shifts.mT @ shifts
        # ``start`` does not know d_head, so it has no zeros to which this could be added in place.
        sums["gram"] = sums.get("gram", 0) + gram

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over segments, and the rank of the shifts.

        An inserted query has a scale; all else needs the same query in the baseline.
        """
        is_undefined = sums["question_ratio"] == _UNDEFINED
        question_ratio = sums["question_ratio"].masked_fill(is_undefined, torch.nan)
        output_norm = nan_outside(sums["output_norm"], batch.original)
        query_values = {
            "scale": sums["scale"],
            "question_ratio": nan_outside(question_ratio, batch.original),
            "total_variation": nan_outside(sums["total_variation"], batch.original),
            "relative_error": sums["error_norm"] / output_norm,
            "shift_norm": nan_outside(sums["shift_norm"], batch.original),
            "shift_share": sums["shift_norm"] / output_norm,
        }

        # If the change is within rounding error, its parts mean nothing.
        is_large = sums["squared_change"] > (_SMALLEST_CHANGE * output_norm) ** 2
        has_parts = is_large & batch.after_inserted[:, None]
        squared_change = sums["squared_change"].masked_fill(~has_parts, torch.nan)
        shares = {f"change_by_{name}": sums[f"by_{name}"] / squared_change for name in _PARTS}

        values = means_by_segment(query_values | shares | {"output_norm": output_norm}, batch)
        if self.per_query:
            values |= of_each_query(query_values, _OF_QUERIES, batch)

        energies = fn.spectrum(sums["gram"])  # all 0 without a shift, which gives ranks of NaN
        values["shift_rank_one_share"] = fn.rank_one_share(energies).float()
        values["shift_effective_rank"] = fn.effective_rank(energies).float()
        return values


def split_rows(rows: PairedRows) -> fn.Split:
    """The parts of each query's output in a block of rows."""
    return fn.split(
        pattern=rows.pattern,
        v=rows.v,
        inserted=rows.batch.inserted[:, rows.keys],
        aligned=rows.aligned,
        v_aligned=rows.v_aligned,
        baseline=rows.baseline,
        v_baseline=rows.v_baseline,
    )
