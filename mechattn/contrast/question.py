"""What a comparison asks: a quantity, two conditions, a null, units and levels; and whether they can
be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from typing_extensions import Self

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import (
    Null,
    Scale,
    check_condition,
    check_layer,
    has_dilution,
    variable_of,
)
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.results.result import Result, part_of
from mechattn.stats.intervals import check_level
from mechattn.stats.resolution import RESAMPLES
from mechattn.stats.units import Unit


@dataclass(frozen=True)
class Question:
    """Which quantity is compared between which conditions, and how.

    Args:
        result: The result that contains ``condition``.
        condition: A condition.
        to: The condition to compare it with.
        quantity: A quantity stored for each prompt, such as "received", "mass" or "scale".
        segment: The segment; None for all of them, which makes the family of tests larger.
        other: The result that contains ``to``, for the same prompts; this one by default.
        null: "dilution": the original tokens keep their attention to each other, and give way to
            the inserted ones in equal parts; the default where the quantity has it. "uniform": all
            keys get the same; the default elsewhere. "blind", for models that add something to
            their scores besides content (ALiBi, learned sinks): the softmax of these terms alone.
        scale: "log-ratio" or "difference"; by default the quantity's own. A cell without a ratio (0
            in some prompt) is left out, with a warning that names it.
        unit: "auto" uses groups of prompts (``Prompt.group``) as units if there are any, by the
            means over their prompts; "prompt" uses single prompts.
        matched: Refuse two conditions that insert different numbers of tokens.
        level: The level of the intervals.
        resamples: The number of resamples for bootstrap and sign flips.
        seed: The seed of the resampling.

    Raises:
        OptionError: A null, scale, unit or level is unknown.
    """

    result: Result
    condition: str
    to: str = BASELINE
    quantity: str = "received"
    segment: str | None = "question"
    other: Result | None = None
    null: Null | None = None
    scale: Scale | None = None
    unit: Unit = "auto"
    matched: bool = True
    level: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(Unit, unit=self.unit)
        check_level(self.level)
        check_counts(resamples=self.resamples)
        if self.null is not None:
            check_choice(Null, null=self.null)
        if self.scale is not None:
            check_choice(Scale, scale=self.scale)

    @property
    def reference(self) -> Result:
        """The result that contains ``to``."""
        if self.other is None:
            return self.result
        return self.other

    @cached_property
    def null_used(self) -> Null:
        """The null, as asked for or by default."""
        if self.null is not None:
            return self.null
        if all(has_dilution(side, self.quantity, self.segment) for side in self.sides):
            return "dilution"
        return "uniform"

    @property
    def sides(self) -> list[tuple[Result, str]]:
        """Both conditions with their results."""
        return [(self.result, self.condition), (self.reference, self.to)]

    def part(self, dim: str, block: slice) -> Self:
        """The same question of a block of layers or prompts."""
        result = part_of(self.result, dim, block)
        other = self.other
        if other is not None:
            other = part_of(other, dim, block)
        return replace(self, result=result, other=other, null=self.null_used)

    def at_layer(self, layer: int | None) -> Self:
        """The same question of one layer; of all where it is None."""
        if layer is None:
            return self
        variable = variable_of(self.result, self.quantity)
        check_layer(layer, variable)
        index = variable.layer.values.tolist().index(layer)
        return self.part("layer", slice(index, index + 1))

    def check_alike(self) -> None:
        """Refuse other prompts, and two conditions that insert different numbers of tokens.

        Raises:
            OptionError: They cannot be compared prompt by prompt.
        """
        # Parts of a result say by themselves whether their prompts are alike.
        prompts = {**self.result.provenance["prompts"], "alike": None}
        reference_prompts = {**self.reference.provenance["prompts"], "alike": None}
        if prompts != reference_prompts:
            raise OptionError(
                "the two results are of different prompts, and a paired comparison needs the same"
                " ones: run both with the same load_prompts"
            )
        if self.result is self.reference and self.condition == self.to:
            raise OptionError(
                f"{self.condition!r} is compared with itself: name another condition to compare it"
                " with"
            )
        if not self.matched or BASELINE in (self.condition, self.to):
            return

        counts = []
        for result, condition in self.sides:
            check_condition(result, condition)
            is_inserted = result["sequences"].origin.sel(condition=condition) == -1
            counts.append(is_inserted.sum("pos").values)
        count, reference_count = counts
        if not count.any() or not reference_count.any():
            return
        differing = np.flatnonzero(count != reference_count)
        if len(differing):
            prompt = differing[0]
            raise OptionError(
                f"{self.condition!r} inserts {count[prompt]} tokens, {self.to!r}"
                f" {reference_count[prompt]}, so their difference would be one of length too. Give"
                " both the same count, or say matched=False"
            )
