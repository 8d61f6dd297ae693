"""The result of a run: labelled numbers and their provenance. It draws nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.markup import table
from mechattn.results.provenance import Provenance
from mechattn.shown import shown

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from mechattn.stats.comparison import Verdict
    from mechattn.stats.resolution import Resolution


@dataclass(frozen=True)
class Result:
    """The result of a run: one xarray dataset per analysis, and their provenance.

    ``result["received_attention"]`` is a dataset. Its dimensions are named: prompt, condition, layer, head, segment,
    key, original_key. Every variable has units and a description.
    """

    datasets: Mapping[str, xr.Dataset]
    provenance: Provenance

    def __getitem__(self, name: str) -> xr.Dataset:
        if name not in self.datasets:
            raise OptionError(f"this result has no {name!r}; it has {', '.join(map(repr, self.datasets))}")
        return self.datasets[name]

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions, the baseline first."""
        return [str(c) for c in self["sequences"].condition.values]

    def shown_condition(self, name: str | None = None) -> str:
        """The condition to show in a figure: by default the first that isn't the baseline, or else the baseline.

        Raises:
            OptionError: There is no such condition.
        """
        return BASELINE if name == BASELINE or [name, *self.conditions] == [None, BASELINE] else self.condition(name)

    def condition(self, name: str | None = None) -> str:
        """The condition to compare with the baseline; by default the first that isn't the baseline.

        Raises:
            OptionError: There is no such condition, or only the baseline.
        """
        if name == BASELINE:
            raise OptionError("the baseline is what others are compared with; name another condition")
        others = [condition for condition in self.conditions if condition != BASELINE]
        if not others:
            raise OptionError("this result has only the baseline; run it with a condition such as MeaninglessTokens()")
        if name not in (None, *others):
            raise OptionError(f"there is no condition {name!r}; the result has {', '.join(map(repr, others))}")
        return name or others[0]

    def verdict(
        self,
        condition: str | None = None,
        segment: str = "question",
        *,
        unit: Literal["auto", "prompt"] = "auto",
        memory: str = "2GiB",
    ) -> Verdict:
        """Test how the attention that a segment receives changes from the baseline, compared with uniform attention.

        Args:
            condition: The condition to compare with the baseline; by default the first other one.
            segment: A segment that every prompt has.
            unit: As for :meth:`compare`.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: There is no such condition or segment, or there are fewer than 3 prompts (or groups).
        """
        from mechattn.results.verdict import verdict

        return verdict(self, condition, segment, unit, memory)

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
        memory: str = "2GiB",
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
            memory: The memory that this may take; if all layers don't fit, they are processed a few at a time.

        Raises:
            OptionError: There is no such condition, quantity or segment; the prompts differ, or there are fewer than 3
                (or groups); ``random`` does not belong to this run; or a layer doesn't fit in memory.
        """
        from mechattn.results.compare import compare

        return compare(
            self, condition, to, quantity, by, segment, other, select, matched, null, scale, unit, level, resamples,
            seed, random, memory,
        )  # fmt: skip

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
        memory: str = "2GiB",
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
            memory: As for :meth:`compare`.

        Raises:
            OptionError: :meth:`compare` refuses the options, or the level is not a probability.
        """
        from mechattn.results.resolution import resolution_of

        return resolution_of(self, condition, quantity, by, segment, select, unit, level, resamples, memory)

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
        memory: str = "2GiB",
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
            memory: As for :meth:`compare`.

        Raises:
            OptionError: No such quantity, condition or segment, more than one number per head, or too few prompts.
        """
        from mechattn.results.heads import ranked_heads

        return ranked_heads(self, quantity, top, condition, segment, select, unit, level, memory)

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
        memory: str = "2GiB",
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
            memory: As for :meth:`compare`.

        Raises:
            OptionError: :meth:`compare` refuses the options; too few prompts, or fewer heads than ``choose``.

        Source:
            Stability over resampled inputs, arXiv:2510.00845.
        """
        from mechattn.results.stability import stability

        return stability(
            self, condition, quantity, by, segment, choose, layer, over, unit, resamples, patterns, seed, memory
        )  # fmt: skip

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
        memory: str = "2GiB",
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
            memory: As for :meth:`compare`.

        Raises:
            OptionError: The result has no such condition, quantity or analysis, or fewer than 3 prompts.
        """
        from mechattn.results.agreement import agreement

        return agreement(self, condition, other, over, quantity, controls, unit, level, memory)

    def methods(self, *tables: pd.DataFrame) -> str:
        """Write a methods paragraph for a paper; every number in it comes from the result.

        It states the model, versions, verification, prompts and their groups, conditions with what they inserted,
        analyses, nulls and seed; and how each table was computed.

        Args:
            tables: Tables from :meth:`compare`.

        Raises:
            OptionError: A table has no record of how it was made.
        """
        from mechattn.results.methods import methods

        return methods(self, tables)

    def digest(self) -> str:
        """A hash of the numbers: every array with its name, dimensions and attributes, without the provenance.

        Equal runs, stored or not, have the same digest. With another CPU or number of threads, the last digits differ.
        """
        from mechattn.results.digest import numbers_digest

        return numbers_digest(self.datasets)

    def to_dataframe(self, name: str, quantity: str | None = None) -> pd.DataFrame:
        """Return a tidy table with one row per prompt, condition, layer, head and so on.

        Args:
            name: The analysis.
            quantity: One of its quantities; by default all per segment.
        """
        dataset = self[name]
        if quantity is not None and quantity not in dataset:
            raise OptionError(f"{name} has no quantity {quantity!r}; it has {', '.join(map(repr, dataset))}")
        by_segment = [v for v in dataset if "segment" in dataset[v].dims] or list(dataset)
        return dataset[quantity or by_segment].to_dataframe().dropna(how="all").reset_index()

    def merge(self, *others: Result) -> Result:
        """Merge this result with others of the same run on other prompts; see :func:`mechattn.merge_results`."""
        import mechattn

        return mechattn.merge_results([self, *others])

    def save(self, path: str | Path) -> None:
        """Save to "….zarr" or "….nc", completely or not at all; see :func:`mechattn.save_result`."""
        import mechattn

        mechattn.save_result(self, path)

    def page(
        self,
        path: str | Path,
        layer: int = 0,
        heads: Seq[int] | None = None,
        force: bool = False,
        *,
        choose: int = 3,
        memory: str = "2GiB",
    ) -> Path:
        """Write one HTML file with the figures, which opens offline; see :func:`mechattn.page`."""
        import mechattn

        return mechattn.page(self, path, layer, heads, force, choose=choose, memory=memory)

    def _repr_html_(self) -> str:
        from mechattn.results.units import units_of

        about, model, sizes = self.provenance, self.provenance["model"], self["sequences"].sizes
        units = units_of(self, sizes["prompt"])
        rows = [
            ("model", f"{model['name']}, {model['layers']} layers × {model['heads']} heads, {model['dtype']}"),
            ("verified", model["verified"]),
            ("prompts", sizes["prompt"]),
            *([] if units.of is None else [("groups", units.n)]),
            *((f"condition {name}", about["conditions"].get(name, {}).get("written", "")) for name in self.conditions),
            *((name, ", ".join(map(str, d))) for name, d in self.datasets.items() if name != "sequences"),
            ("seed", about.get("seed", "")),
        ]
        return table(rows, "Result")

    def __repr__(self) -> str:
        model, prompts, names = self.provenance["model"]["name"], self["sequences"].sizes["prompt"], self.conditions
        of = f"{prompts} prompts × {len(names)} conditions ({', '.join(names)})"
        return shown(f"Result({model}: {of}; {', '.join(name for name in self.datasets if name != 'sequences')})")
