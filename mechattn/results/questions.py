"""What a result can be asked: methods that only forward to the rooms above, the one file that imports upward."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from mechattn.axes import BASELINE
from mechattn.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.contrast.contrast import Contrast
    from mechattn.results.result import Result
    from mechattn.stats.comparison import Verdict
    from mechattn.stats.resolution import Resolution


class Questions:
    """The methods of a result."""

    def verdict(
        self,
        condition: str | None = None,
        segment: str = "question",
        *,
        unit: Literal["auto", "prompt"] = "auto",
    ) -> Verdict:
        """Test how the attention that a segment receives changes from the baseline, compared with uniform attention.

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            segment: A segment that every prompt has.
            unit: As for :meth:`compare`.

        Raises:
            OptionError: There is no such condition or segment, or there are fewer than 3 prompts (or groups).
        """
        return self._contrast(condition, segment=segment, unit=unit).verdict()

    def compare(
        self,
        condition: str,
        to: str = BASELINE,
        quantity: str = "received",
        by: str = "segment",
        *,
        segment: str | None = "question",
        other: Result | None = None,
        select: Literal["half"] | None = None,
        matched: bool = True,
        null: Literal["uniform", "blind"] = "uniform",
        scale: Literal["log-ratio", "difference"] | None = None,
        unit: Literal["auto", "prompt"] = "auto",
        level: float = 0.95,
        resamples: int = 9999,
        seed: int = 0,
        random: Seq[Result] | None = None,
    ) -> pd.DataFrame:
        """Compare a quantity between two conditions for every layer and head, paired by prompt; returns a tidy table.

        The difference is ``log(value / reference)``, so −0.22 is a fifth less. For a quantity that may be 0 by
        definition, it is ``value − reference``. The test is of ``beyond``, the difference minus that of its null, a
        head that attends uniformly (``…_uniform``). If no null is known, null and beyond are NaN, the difference itself
        is tested, and ``table.attrs["null"]`` says that the definition may cause part of the change. Columns: layer,
        head, value, reference (means over prompts); difference and beyond, each with t (…low, …high), bootstrap-t and
        simultaneous intervals; null; and for the tested difference effect_size (d_z), p (sign-flip), q
        (Benjamini-Hochberg over the table) and detectable (the smallest effect found with 80 % power); n.
        ``table.attrs`` has the unit that n counts, the family of tests, the null, and the smallest reachable q.

        Args:
            condition: A condition.
            to: The condition to compare it with.
            quantity: A quantity stored for each prompt, such as "received", "mass" or "scale".
            by: With ``by="segment"``, "received" means ``received_by_segment``.
            segment: The segment; None for all of them, which makes the family of tests larger.
            other: The result that contains ``to``, for the same prompts; this one by default.
            select: "half" finds cells (q < 0.05) on one half of the prompts and reports them on the other. If a head
                was selected for its effect on the same prompts, its interval is too narrow.
            matched: Refuse two conditions that insert different numbers of tokens.
            null: "uniform"; or "blind", for models that add something to their scores besides content (ALiBi, learned
                sinks): the softmax of these terms alone.
            scale: "log-ratio" or "difference"; by default the quantity's own. A cell without a ratio (0 in some prompt)
                is left out, with a warning that names it.
            unit: "auto" uses groups of prompts (``Prompt.group``) as units if there are any, by the means over their
                prompts; "prompt" uses single prompts.
            level: The level of the intervals.
            resamples: The number of resamples for bootstrap and sign flips.
            seed: The seed of the resampling.
            random: The results of ``run_random`` for this run. Adds null_random (mean change of the layer's heads in
                models with random weights), random_low and random_high (a prediction interval for a head of one more
                such model), p_random and q_random. If q and q_random are both below 0.05, training caused the change.

        Raises:
            OptionError: There is no such condition, quantity or segment; the prompts differ, or there are fewer than 3
                (or groups); ``random`` does not belong to this run; or a layer doesn't fit in memory.
        """
        from mechattn.contrast.contrast import Contrast

        asked = Contrast(self._result, condition, to, quantity, by, segment, other, null, scale, unit, matched)
        return asked.table(select=select, level=level, resamples=resamples, seed=seed, random=random)

    def resolution(
        self,
        condition: str | None = None,
        quantity: str = "received",
        by: str = "segment",
        *,
        segment: str | None = "question",
        select: Literal["half"] | None = None,
        unit: Literal["auto", "prompt"] = "auto",
        level: float = 0.05,
        resamples: int = 9999,
    ) -> Resolution:
        """Report what the table of :meth:`compare` can detect with these prompts, and how many would be enough.

        ``print(result.resolution())`` says for example "with 12 prompts and 784 tests no p can pass q < 0.05 alone
        (smallest p 0.00049): 8 tests have to reach it together; 19 would do".

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            quantity: As for :meth:`compare`.
            by: As for :meth:`compare`.
            segment: As for :meth:`compare`.
            select: "half" is for the half of the prompts on which cells are found.
            unit: As for :meth:`compare`.
            level: The q below which a test counts as a finding.
            resamples: As for :meth:`compare`.

        Raises:
            OptionError: :meth:`compare` refuses the options, or the level is not a probability.
        """
        asked = self._contrast(condition, quantity=quantity, by=by, segment=segment, unit=unit)
        return asked.resolution(select=select, level=level, resamples=resamples)

    def heads(
        self,
        quantity: str,
        top: int | None = 10,
        *,
        condition: str = BASELINE,
        segment: str = "question",
        select: Literal["half"] | None = None,
        unit: Literal["auto", "prompt"] = "auto",
        level: float = 0.95,
    ) -> pd.DataFrame:
        """List the heads with the largest values of a quantity, with intervals over prompts and the uniform null.

        Columns: layer, head, the quantity (mean over prompts), low and high (t interval), uniform (NaN where there is
        no such null), n.

        Args:
            quantity: A quantity with one number for each head, such as "previous_mass", "entropy", "magnitude".
            top: The number of heads; None for all.
            condition: The condition.
            segment: The segment of queries or keys, for quantities by segment.
            select: "half" ranks on one half of the prompts and reports the other. If a head was picked as the largest
                on the same prompts, its interval is too optimistic.
            unit: As for :meth:`compare`.
            level: The level of the intervals.

        Raises:
            OptionError: No such quantity, condition or segment, more than one number per head, or too few prompts.
        """
        from mechattn.contrast.ranked_heads import ranked_heads

        return ranked_heads(
            self._result, quantity, top, condition=condition, segment=segment, select=select, unit=unit, level=level
        )

    def stability(
        self,
        condition: str | None = None,
        quantity: str = "received",
        by: str = "segment",
        *,
        choose: int | None = 10,
        layer: int | None = None,
        over: Seq[str] | None = None,
        segment: str | None = "question",
        unit: Literal["auto", "prompt"] = "auto",
        resamples: int = 200,
        patterns: int = 999,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Measure how much selections of heads overlap when they are made on random disjoint halves of the prompts.

        The overlap is ``|A ∩ B| / |A ∪ B|`` (Jaccard), averaged over splits; by_chance is that of two random selections
        of the same sizes (exact, from the hypergeometric distribution). Columns: condition, other, jaccard, low and
        high (2.5 and 97.5 % of the splits), by_chance, selected (heads, on average), none_selected (fraction of splits
        without an index, as neither half selects any), on_all (the index of two conditions on all prompts).

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            quantity: As for :meth:`compare`.
            by: As for :meth:`compare`.
            choose: The number of heads with the largest tested differences; None selects those with q < 0.05.
            layer: Only heads of this layer; by default all.
            over: Several conditions, such as fillers: one row for each and one for each pair, in which the first
                selects on one half and the second on the other.
            segment: As for :meth:`compare`.
            unit: As for :meth:`compare`.
            resamples: The number of random splits.
            patterns: The number of sign patterns for q, if not all are tried; at least 20 per test.
            seed: The seed of the splits.

        Raises:
            OptionError: :meth:`compare` refuses the options; too few prompts, or fewer heads than ``choose``.

        Source:
            Stability over resampled inputs, arXiv:2510.00845.
        """
        if condition is not None and over is not None:
            raise OptionError("give condition=… or over=[…]: over names all conditions to compare")
        asked = self._contrast(condition, quantity=quantity, by=by, segment=segment, unit=unit)
        return asked.stability(choose=choose, layer=layer, over=over, resamples=resamples, patterns=patterns, seed=seed)

    def agreement(
        self,
        condition: str,
        other: str,
        over: str = BASELINE,
        quantity: str = "activations",
        *,
        controls: Seq[str] | None = None,
        unit: Literal["auto", "prompt"] = "auto",
        level: float = 0.95,
    ) -> pd.DataFrame:
        """Compute the cosine between the changes that two conditions make, by layer, and the same with controls.

        ``Σ ⟨Δ, Δ'⟩ / √(Σ ‖Δ‖² Σ ‖Δ'‖²)`` over the question's tokens and all channels, one number per prompt; means with
        t intervals over prompts. Equal histograms do not imply agreement. Columns: condition, other, layer, cosine,
        low, high; beyond (the first pair's cosine minus this one's, paired by prompt), beyond_low, beyond_high; n. The
        first rows compare the two conditions, the following ones the first condition with each control.

        Args:
            condition: A condition, such as "slash".
            other: Another condition, such as "arm".
            over: The condition from which both changes are measured.
            quantity: "activations", from ``MlpActivations``.
            controls: Conditions to compare the first one with as controls; by default all others of the result.
            unit: As for :meth:`compare`.
            level: The level of the intervals.

        Raises:
            OptionError: The result has no such condition, quantity or analysis, or fewer than 3 prompts.
        """
        from mechattn.contrast.agreement import agreement

        return agreement(self._result, condition, other, over, quantity, controls, unit, level)

    def methods(self, *tables: pd.DataFrame) -> str:
        """Write a methods paragraph for a paper; every number in it comes from the result.

        It states the model, versions, verification, prompts and their groups, conditions with what they inserted,
        analyses, nulls and seed; and how each table was computed.

        Args:
            tables: Tables from :meth:`compare`.

        Raises:
            OptionError: A table has no record of how it was made.
        """
        from mechattn.contrast.methods import methods

        return methods(self._result, tables)

    def save(self, path: str | Path) -> None:
        """Save to "….zarr", completely or not at all.

        Raises:
            OutputError: The place cannot be written, is full, or contains something that mechattn did not write; or the
                written result cannot be read back. What was there before is kept.
        """
        from mechattn.store.saving import save_result

        save_result(self._result, path)

    def page(
        self,
        path: str | Path,
        layer: int = 0,
        heads: Seq[int] | None = None,
        force: bool = False,
        *,
        choose: int = 3,
    ) -> Path:
        """Write a page that opens offline: how attention changed, a map of all heads, figures and provenance.

        Args:
            path: The HTML file.
            layer: The layer shown first, from 0.
            heads: The heads of the figure, from 0; the first is selected. By default heads are chosen.
            force: Replace a file that mechattn did not write.
            choose: The number of heads to choose by the largest change on one half of the prompts and show on the
                other. Without ``positions="prompts"`` in the run, the first heads are shown.

        Raises:
            MechattnError: The figures cannot be drawn, the file cannot be written, or it was not written by mechattn.
        """
        from mechattn.pages.page import page

        return page(self._result, path, layer, heads, force, choose=choose)

    @property
    def _result(self) -> Result:
        return cast("Result", self)

    def _contrast(self, condition: str | None, **asked: Any) -> Contrast:
        from mechattn.contrast.contrast import Contrast

        return Contrast(self._result, self._result.condition(condition), **asked)
