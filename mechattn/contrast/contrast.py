"""One object for every comparison of two conditions: it carries the question, and answers it in several forms."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from mechattn.axes import BASELINE
from mechattn.contrast import across, detectable, overall, split_stability, table
from mechattn.contrast.differences import Scale
from mechattn.contrast.quantities import Null
from mechattn.errors import OptionError
from mechattn.stats.comparison import Verdict
from mechattn.stats.intervals import Interval
from mechattn.stats.paired import RESAMPLES
from mechattn.stats.resolution import Resolution
from mechattn.stats.units import Unit, check_unit

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.results.result import Result


@dataclass(frozen=True)
class Contrast:
    """A quantity in one condition, compared with another condition, prompt by prompt.

    ``result.compare("slash")`` makes one and returns its table. Keep the object to ask more of the same comparison.

    Args:
        result: The result that contains ``condition``.
        condition: A condition.
        to: The condition to compare it with.
        quantity: A quantity stored for each prompt, such as "received", "mass" or "scale".
        by: With ``by="segment"``, "received" means ``received_by_segment``.
        segment: The segment; None for all of them, which makes the family of tests larger.
        other: The result that contains ``to``, for the same prompts; this one by default.
        null: "uniform"; or "blind", for models that add something to their scores besides content (ALiBi, learned
            sinks): the softmax of these terms alone.
        scale: "log-ratio" or "difference"; by default the quantity's own. A cell without a ratio (0 in some prompt) is
            left out, with a warning that names it.
        unit: "auto" uses groups of prompts (``Prompt.group``) as units if there are any, by the means over their
            prompts; "prompt" uses single prompts.
        matched: Refuse two conditions that insert different numbers of tokens.
        level: The level of the intervals.
        resamples: The number of resamples for bootstrap and sign flips.
        seed: The seed of the resampling.

    Raises:
        OptionError: A null, scale, unit or level is unknown; the methods raise it where the result has no such
            condition, quantity or segment, the prompts differ, or there are fewer than 3 (or groups).
    """

    result: Result
    condition: str
    to: str = BASELINE
    quantity: str = "received"
    by: str = "segment"
    segment: str | None = "question"
    other: Result | None = None
    null: Null = "uniform"
    scale: Scale | None = None
    unit: Unit = "auto"
    matched: bool = True
    level: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        check_unit(self.unit)
        if not isinstance(self.level, (int, float)) or not 0.5 <= self.level < 1:
            raise OptionError(f"level={self.level!r}: give a probability such as 0.95")
        if self.null == "random-weights":
            raise OptionError(
                'null="random-weights": a result holds no model to draw weights for; make them with ma.run_random('
                "model, prompts, conditions) and pass random=…, whose columns come with those of the uniform null"
            )
        for name, given, known in (("null", self.null, Null), ("scale", self.scale, Scale)):
            if given not in (*get_args(known), None):
                raise OptionError(f"{name}={given!r}: choose one of {', '.join(map(repr, get_args(known)))}")

    @property
    def reference(self) -> Result:
        """The result that contains ``to``."""
        return self.result if self.other is None else self.other

    def with_results(self, result: Result, other: Result) -> Contrast:
        """The same question of other results, such as some layers of these."""
        return replace(self, result=result, other=None if other is result else other)

    def table(
        self,
        *,
        select: Literal["half"] | None = None,
        random: Seq[Result] | None = None,
        margin: float | None = None,
    ) -> pd.DataFrame:
        """One row for each layer and head; see :meth:`mechattn.Result.compare`.

        Args:
            select: "half" finds cells (q < 0.05) on one half of the prompts and reports them on the other.
            random: The results of ``run_random`` for this run.
            margin: The largest change that counts as none.

        Raises:
            OptionError: There is nothing to compare, or too few prompts; a layer doesn't fit in memory.
        """
        return table.table(self, select, random, margin)

    def across(self, conditions: Seq[str]) -> pd.DataFrame:
        """The mean change over several conditions, such as fillers, as a sample of others; see ``Result.across``.

        Args:
            conditions: At least six conditions; :attr:`condition` is not used.

        Raises:
            OptionError: As for :meth:`table`, or there are too few conditions.
        """
        return across.across(self, conditions)

    def overall(self, layer: int | None = None) -> tuple[Interval, Interval | None]:
        """The relative change of each prompt's mean over layers and heads, and the same under the null.

        Args:
            layer: One layer; by default all.

        Raises:
            OptionError: A value is not positive, so there is no ratio, or there are too few prompts.
        """
        return overall.overall(self, layer)

    def verdict(self) -> Verdict:
        """The overall change beside its null, and the heads that change more or less than theirs (q < 0.05).

        Raises:
            OptionError: As for :meth:`table` and :meth:`overall`, or the quantity has no null.
        """
        return overall.verdict(self)

    def resolution(self, *, select: Literal["half"] | None = None, q: float = 0.05) -> Resolution:
        """What the table can detect with these prompts, and how many would be enough.

        Args:
            select: "half" is for the half of the prompts on which cells are found.
            q: The q below which a test counts as a finding.

        Raises:
            OptionError: As for :meth:`table`, or q is not a probability.
        """
        return detectable.resolution(self, select, q)

    def stability(
        self,
        *,
        choose: int | None = 10,
        layer: int | None = None,
        over: Seq[str] | None = None,
        splits: int = 200,
        patterns: int = 999,
    ) -> pd.DataFrame:
        """How much selections of heads overlap on random disjoint halves; see :meth:`mechattn.Result.stability`."""
        return split_stability.stability(self, choose, layer, over, split_stability.Splits(splits, patterns, self.seed))
