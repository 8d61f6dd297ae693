"""The methods of a result that forward to packages above this one: tables, pages and storage.

This is the only file of the package that imports from above, so it does so within functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from mechattn.axes import BASELINE
from mechattn.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

    from mechattn.contrast.contrast import Contrast, Verdict
    from mechattn.contrast.quantities import Null, Scale
    from mechattn.contrast.table import Columns, Ranking
    from mechattn.results.result import Result
    from mechattn.stats.units import Resolution, Unit


class Options(TypedDict, total=False):
    """Options of every comparison, as keywords of the methods below. :class:`mechattn.Contrast`
    explains each.

    With their defaults: ``segment`` ("question"), ``other`` (None), ``null`` (None: "dilution" if
    the quantity has it, otherwise "uniform"), ``scale`` (None: that of the quantity), ``unit``
    ("auto"), ``matched`` (True), ``level`` (0.95), ``resamples`` (9999) and ``seed`` (0).
    """

    segment: str | None
    other: Result | None
    null: Null | None
    scale: Scale | None
    unit: Unit
    matched: bool
    level: float
    resamples: int
    seed: int


class ForwardingMethods:
    """The methods of a :class:`mechattn.Result` that make tables, texts, pages and files."""

    def verdict(
        self,
        condition: str | None = None,
        segment: str = "question",
        *,
        to: str = BASELINE,
        unit: Unit = "auto",
        margin: float | None = None,
        null: Null | None = None,
    ) -> Verdict:
        """Test how the attention that a segment receives changes between two conditions, and
        whether it changes as a null predicts.

        Args:
            condition: The condition; by default the first that is neither the baseline nor ``to``.
            segment: A segment that every prompt has.
            to: The condition to compare it with.
            unit: "auto" uses groups of prompts as units if there are any; "prompt" uses single
                prompts.
            margin: The largest difference that counts as equal, as for :meth:`compare`. The verdict
                then also says which heads change as the null does, to within ± margin.
            null: As for :class:`mechattn.Contrast`.

        Raises:
            OptionError: There is no such condition or segment, or there are fewer than 3 prompts
                (or groups).
        """
        contrast = self._contrast(condition, to=to, segment=segment, unit=unit, null=null)
        return contrast.verdict(margin=margin)

    def compare(
        self,
        condition: str,
        to: str = BASELINE,
        quantity: str = "received",
        *,
        select: Literal["half"] | None = None,
        top: int | None = None,
        by: Ranking | None = None,
        random: Sequence[Result] | None = None,
        margin: float | None = None,
        columns: Columns = "main",
        **options: Unpack[Options],
    ) -> pd.DataFrame:
        """Return a table that compares a quantity between two conditions, paired by prompt, with
        one row per layer and head.

        ``difference`` is the mean over prompts of ``log(value / reference)``: −0.22 is a fall by a
        fifth. If the quantity can be 0 or negative, it is the mean of ``value − reference``.
        ``null`` is the difference that would result if the original tokens kept their attention to
        each other (or under uniform attention, see :class:`mechattn.Contrast`), and ``beyond =
        difference − null``. If no null is known, null and beyond are NaN and the difference is
        tested; ``table.attrs["null"]`` then says that the definition may cause part of it.

        Rows are named by their heads (``table.loc["L1H2"]``). The columns are those that a paper
        prints: layer, head; change, change_low, change_high and change_null, fractions (−0.2 is a
        fall by a fifth), or, for a quantity that has no ratio, difference, difference_low,
        difference_high and null, in its own unit; q_beyond, q_difference and n. ``columns="all"``
        has difference and beyond with t, bootstrap-t and simultaneous intervals, null, value and
        reference (means over prompts); p of all tests; effect_size (d_z), skewness, p_flip,
        p_family and detectable, which refer to what is tested (``table.attrs["tested"]``); and
        columns that say what the numbers are.

        Each p is two-sided: the larger of a sign-flip test's and, from 10 prompts on, of a
        bootstrap-t test's, which allows for tails as long as those of the table's other heads. Each
        q is Benjamini-Hochberg over the table. p_family bounds the probability of any false
        finding. ``table.attrs["skewed"]`` says where the two tests disagree. All are valid only if
        the number of prompts was fixed beforehand.

        Args:
            condition: A condition.
            to: The condition to compare it with.
            quantity: A quantity stored for each prompt, such as "received", "mass" or "scale".
            select: "half" selects heads on one half of the prompts and reports them on the other,
                because the interval of a head selected on the same prompts is too narrow. Do not
                select again from this table (``.nsmallest(3)``); use ``top=3``.
            top: With ``select``, the number of heads, the furthest from 0 first; by default those
                with q < 0.05.
            by: What ranks the ``top`` heads: "difference", the default, or "beyond". If no null is
                known, the difference ranks them in either case (``table.attrs["ranked_by"]``).
            random: The results of ``run_random`` for this run. Adds q_random, of the larger of
                p_beyond and p_random: below 0.05, neither the null, chance over prompts nor random
                weights explain the change. ``columns="all"`` has p_random too, null_random (mean
                change of the layer's heads in models with random weights), and random_low and
                random_high (95 % prediction interval for a head of one more such model).
            margin: The largest difference that counts as equal, as a fraction for a log-ratio (0.02
                is 2 %). Adds q_same, by two one-sided t tests: below 0.05, the tested difference
                lies within ± margin. It is too small if differences are very skewed
                (docs/concepts/intervals.md).
            columns: "main", or "all", which :func:`mechattn.adjust` needs.
            options: See :class:`~mechattn.results.forwarding_methods.Options`: segment, null,
                scale, unit, level …

        Raises:
            OptionError: There is no such condition, quantity or segment; the prompts differ, or
                there are fewer than 3 (or groups); ``random`` does not belong to this run; or a
                layer doesn't fit in memory.

        Source: Romano and Wolf 2005; Benjamini and Hochberg 1995; Schuirmann 1987.
        """
        contrast = self._contrast(condition, to=to, quantity=quantity, **options)
        return contrast.table(
            select=select, top=top, by=by, random=random, margin=margin, columns=columns
        )

    def across(
        self,
        conditions: Sequence[str],
        to: str = BASELINE,
        quantity: str = "received",
        **options: Unpack[Options],
    ) -> pd.DataFrame:
        """Test whether a change holds for conditions that were not run, such as other fillers.

        A finding about "/" is not a finding about meaningless tokens. Prompts and conditions are
        both treated as samples: for each head, ``beyond = mean + prompt + condition + rest``.
        Columns: layer, head; mean, low and high, an interval that holds for other prompts and other
        conditions, p and q; condition_sd, unit_sd and rest_sd, the spread of each part; new_low and
        new_high, the interval for a new condition on a new prompt; n and conditions.

        Args:
            conditions: At least six conditions of one kind, such as fillers from ``ma.sweep``.
            to: As for :meth:`compare`.
            quantity: As for :meth:`compare`.
            options: As for :meth:`compare`.

        Raises:
            OptionError: As for :meth:`compare`, or there are fewer than six conditions.

        Source: Clark 1973; Satterthwaite 1946.
        """
        contrast = self._contrast(None, to=to, quantity=quantity, **options)
        return contrast.across(conditions)

    def resolution(
        self,
        condition: str | None = None,
        quantity: str = "received",
        *,
        select: Literal["half"] | None = None,
        draws: int | None = None,
        q: float = 0.05,
        **options: Unpack[Options],
    ) -> Resolution:
        """Report what the table of :meth:`compare` can detect with these prompts, and how many
        prompts would be enough.

        ``print(result.resolution())`` says for example "with 12 prompts and 784 tests no p can pass
        q < 0.05 alone (smallest p 0.00049): 8 tests must reach it together, or use 19 prompts".

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            quantity: As for :meth:`compare`.
            select: "half" reports on a table with ``select="half"``, which tests on half of the
                prompts.
            draws: The number of models with random weights; reports what ``q_random`` can show.
            q: The q below which a test counts as a finding.
            options: As for :meth:`compare`.

        Raises:
            OptionError: :meth:`compare` refuses the options, or q is not a probability.
        """
        contrast = self._contrast(condition, quantity=quantity, **options)
        return contrast.resolution(select=select, draws=draws, q=q)

    def heads(
        self,
        quantity: str | None = None,
        top: int | None = 10,
        *,
        condition: str = BASELINE,
        segment: str = "question",
        select: Literal["half"] | None = None,
        unit: Unit = "auto",
        level: float = 0.95,
    ) -> pd.DataFrame:
        """List the heads with the largest values of a quantity, with intervals over prompts and the
        value under uniform attention.

        Columns: layer, head; the quantity (mean over prompts); shrunken, the mean moved towards
        that of all heads, because the largest of many estimates is too large (not with ``select``);
        low and high (t interval); uniform, the value under uniform attention (NaN if it is not
        known); n.

        Args:
            quantity: A quantity with one number for each head, such as "previous_mass", "entropy",
                "magnitude"; by default "received" or, without it, the first quantity.
            top: The number of heads; None for all.
            condition: The condition.
            segment: The segment of queries or keys, for quantities by segment.
            select: "half" ranks on one half of the prompts and reports the other. Without it, the
                interval of a head is too optimistic if it was picked because its value is large.
            unit: As for :meth:`compare`.
            level: The level of the intervals.

        Raises:
            OptionError: No such quantity, condition or segment, more than one number per head, or
                too few prompts.
        """
        from mechattn.contrast.head_tables import ranked_heads

        return ranked_heads(
            self._result,
            quantity,
            top,
            condition=condition,
            segment=segment,
            select=select,
            unit=unit,
            level=level,
        )

    def stability(
        self,
        condition: str | None = None,
        quantity: str = "received",
        *,
        top: int | None = 10,
        by: Ranking | None = None,
        layer: int | None = None,
        conditions: Sequence[str] | None = None,
        splits: int = 200,
        patterns: int = 999,
        **options: Unpack[Options],
    ) -> pd.DataFrame:
        """Measure how much selections of heads overlap when they are made on random disjoint halves
        of the prompts.

        The overlap is the Jaccard index ``|A ∩ B| / |A ∪ B|``, averaged over splits; by_chance is
        its exact expectation for two random selections of the same sizes, from the hypergeometric
        distribution.

        Columns: condition, other, jaccard, low and high (2.5 and 97.5 % of the splits), by_chance,
        selected (the mean number of heads), none_selected (the fraction of splits without an index
        because neither half selects a head), on_all (the index of two conditions on all prompts).

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            quantity: As for :meth:`compare`.
            top: The number of heads that change most; None selects those with q_difference < 0.05.
            by: What ranks the ``top`` heads, as for :meth:`compare`.
            layer: Only heads of this layer; by default all.
            conditions: Several conditions, such as fillers, in place of ``condition``. There is one
                row for each, and one for each pair, in which the first selects on one half and the
                second on the other.
            splits: The number of random splits.
            patterns: The number of sign patterns that are tried for q if there are too many to try
                all; at least 20 per test.
            options: As for :meth:`compare`; ``seed`` is that of the splits.

        Raises:
            OptionError: :meth:`compare` refuses the options, there are too few prompts or fewer
                heads than ``top``, or both ``condition`` and ``conditions`` are given.

        Source: Stability over resampled inputs, arXiv:2510.00845.
        """
        if condition is not None and conditions is not None:
            raise OptionError("give condition=… or conditions=[…], not both")
        contrast = self._contrast(condition, quantity=quantity, **options)
        return contrast.stability(
            top=top,
            by=by,
            layer=layer,
            conditions=conditions,
            splits=splits,
            patterns=patterns,
        )

    def agreement(
        self,
        condition: str,
        other_condition: str,
        to: str = BASELINE,
        *,
        controls: Sequence[str] | None = None,
        unit: Unit = "auto",
        level: float = 0.95,
    ) -> pd.DataFrame:
        """Compute for each layer the cosine between the changes of MLP activations that two
        conditions make, and between the first of them and controls.

        ``Σ ⟨Δ, Δ'⟩ / √(Σ ‖Δ‖² Σ ‖Δ'‖²)`` over the question's tokens and all channels, one number
        per prompt. The table has means with t intervals over prompts. Equal histograms of
        activations do not imply agreement.

        Columns: condition, other, layer, cosine, cosine_low, cosine_high; beyond (the first pair's
        cosine minus this one's, paired by prompt), beyond_low, beyond_high; n. The first rows
        compare the two conditions, the others the first one with each control.

        Args:
            condition: A condition, such as "slash".
            other_condition: Another condition, such as "arm".
            to: The condition from which both changes are measured.
            controls: Conditions to compare the first one with as controls; by default all others of
                the result.
            unit: As for :meth:`compare`.
            level: The level of the intervals.

        Raises:
            OptionError: The result lacks a condition or the analysis, or has fewer than 3 prompts.
        """
        from mechattn.contrast.same_direction import agreement

        return agreement(
            self._result,
            condition,
            other_condition,
            to=to,
            controls=controls,
            unit=unit,
            level=level,
        )

    def attention_budget(
        self, condition: str | None = None, layer: int | None = None
    ) -> pd.DataFrame:
        """List how the attention of the question's queries changes, payer by payer and cause by
        cause, in points of 100.

        Columns: payer, the segment that receives the attention (question, inserted, system,
        template, first, answer, changed; only those with tokens); cause, "all" and then each known
        cause in the order distance, mass, hidden states, which add up to "all"; change, change_low
        and change_high, the mean over heads, layers and the question's queries, then over prompts,
        with its 95 % t interval over prompts. If distance and hidden states are one cause,
        ``table.attrs["one_cause"]`` says why.

        Args:
            condition: The condition; by default the first that isn't the baseline.
            layer: One layer; by default all.

        Raises:
            OptionError: The result has no ``ma.analyses.AttentionBudget()``, or no such condition
                or layer.
        """
        from mechattn.contrast.budget_table import payers_and_causes

        return payers_and_causes(self._result, condition, layer)

    def methods(self, *tables: pd.DataFrame) -> str:
        """Return a methods paragraph for a paper; every number in it comes from the result.

        It states the model, versions, verification, prompts and their groups, conditions with what
        they inserted, analyses, nulls and seed, and how each table was computed.

        Args:
            tables: Tables from :meth:`compare`.

        Raises:
            OptionError: A table has no record of how it was made.
        """
        from mechattn.contrast.methods_paragraph import methods

        return methods(self._result, tables)

    def save(self, path: str | Path) -> None:
        """Store the result as a Zarr folder, here or at an address such as "s3://bucket/r.zarr".

        A folder that is there is replaced when the new one is complete; if that fails, it is kept.
        At an address, an old result is deleted first.

        Args:
            path: A path that ends with ".zarr".

        Raises:
            OutputError: The path cannot be written or contains something that mechattn did not
                write, the disk is full, the result is a selection without some conditions, layers
                or segments, or it cannot be read back.
        """
        from mechattn.store.writing import save_result

        save_result(self._result, path)

    def page(
        self,
        path: str | Path,
        layer: int | None = None,
        heads: Sequence[int | str] | int | str | None = None,
        force: bool = False,
        *,
        top: int = 3,
    ) -> Path:
        """Write a page that opens offline: how attention changed, a map of all heads, figures and
        provenance.

        Args:
            path: The HTML file.
            layer: The layer of the lines, from 0; by default that in the first head's name, or of
                the head that changes most.
            heads: One or several heads of the lines, from 0, or by name, such as "L1H2"; the first
                is selected on the map. By default ``top`` heads are chosen.
            force: Replace a file that mechattn did not write.
            top: The number of heads to choose: those that change most on one half of the prompts
                are shown on the other. Without ``keep="prompts"`` in the run, the first heads are
                shown.

        Raises:
            MechattnError: The figures cannot be drawn, the file cannot be written, or it was not
                written by mechattn.
        """
        from mechattn.pages.page import HeadChoice, results_page

        choice = HeadChoice(layer, heads, top)
        return results_page([self._result], path, [], force=force, choice=choice)

    @property
    def _result(self) -> Result:
        return cast("Result", self)

    def _contrast(self, condition: str | None, **options: Any) -> Contrast:
        """The comparison of a condition, by default the first besides the baseline and ``to``."""
        from mechattn.contrast.contrast import Contrast

        if "to_segment" in options:
            raise OptionError(
                f"to_segment={options['to_segment']!r}: the table has a row for each to_segment;"
                ' for one of them use result.sel(to_segment=…).compare(…, quantity="flow"), whose'
                " q-values are computed from its rows alone"
            )

        known_options = [*Options.__annotations__, "to", "quantity"]
        for option in options:
            if option not in known_options:
                raise OptionError(
                    f"a comparison has no option {option!r}; its options are"
                    f" {', '.join(known_options)}"
                )

        result = self._result
        if condition is None and options.get("other") is None:
            references = (BASELINE, options.get("to"))
            compared_names = (name for name in result.conditions if name not in references)
            condition = next(compared_names, None)
        return Contrast(result, result.condition(condition), **options)
