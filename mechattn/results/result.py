"""What a run returns: labelled numbers and where they come from. It draws nothing."""

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
    """One xarray dataset an analysis, and their provenance.

    ``result["received_attention"]`` is a dataset; its dimensions are named (prompt, condition, layer, head, segment,
    key, original_key), every variable has units and a description.
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
        """The condition that a figure is to show: by default the first that isn't the baseline, or else the baseline.

        Raises:
            OptionError: There is no such condition.
        """
        return BASELINE if name == BASELINE or [name, *self.conditions] == [None, BASELINE] else self.condition(name)

    def condition(self, name: str | None = None) -> str:
        """The condition that is compared with the baseline; by default the first that isn't it.

        Raises:
            OptionError: There is no such condition, or none but the baseline.
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
        """How the attention that a segment receives changed from the baseline, against its uniform null.

        Args:
            condition: Compared with the baseline; the first other condition by default.
            segment: One of the segments that every prompt has.
            unit: As for :meth:`compare`.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: No such condition or segment, or fewer than 3 prompts or groups of them.
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
        """How a quantity differs between two conditions, paired by prompt, for every layer and head: a tidy table.

        The difference is ``log(value / reference)``, so −0.22 is a fifth less; for a quantity that may be 0 by
        definition it is ``value − reference``. What is tested is ``beyond``, the difference less that of its null:
        the same quantity of a head that attends uniformly (``…_uniform``). Where no null is known, null and beyond are
        NaN, the difference itself is tested, and ``table.attrs["null"]`` says that a change may be there by definition.
        Columns: layer, head, value, reference (means over prompts); difference and beyond, each with t (…low, …high),
        bootstrap-t and simultaneous intervals; null; effect_size (d_z), p (sign-flip), q (Benjamini-Hochberg over the
        table), detectable (the smallest effect found with 80 % power), all of what is tested; n.
        ``table.attrs`` says what n counts ("unit"), the family, the null, and the smallest q that can be reached.

        Args:
            condition: A condition.
            to: What it is compared with.
            quantity: A quantity that each prompt has, such as "received", "mass" or "scale".
            by: With ``by="segment"`` "received" is ``received_by_segment``.
            segment: The segment it is about; None for all, which makes the family of tests larger.
            other: The result that holds ``to``, of the same prompts; this one by default.
            select: "half" finds cells (q < 0.05) on one half of the prompts and reports them on the other. If a head
                was selected for its effect on the same prompts, its interval is too narrow.
            matched: Refuse two conditions that insert different numbers of tokens.
            null: "uniform"; or "blind": softmax of what the model adds to its scores besides the content (ALiBi,
                learned sinks), for the models that do.
            scale: "log-ratio" or "difference"; by default that of the quantity. A cell that has no ratio (0 in some
                prompt) is left out, with a warning that names it.
            unit: "auto" takes groups of prompts as the units where prompts have them (``Prompt.group``), by the means
                of their prompts; "prompt" takes each prompt for itself.
            level: Of the intervals.
            resamples: Of bootstrap and sign flips.
            seed: Of the resampling.
            random: What ``run_random`` gave for this run. Adds null_random (mean change of the layer's heads in models
                with random weights), random_low and random_high (where a head of one more such model would lie),
                p_random and q_random. A head with both q and q_random below 0.05 shows what training has made.
            memory: What this may take; where all layers don't fit it, they are gone through some at a time.

        Raises:
            OptionError: No such condition, quantity or segment; different prompts; fewer than 3 of them, or of
                their groups; random models that are none, or of another run; a layer that doesn't fit the memory.
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
        """What this number of prompts can find in the table of :meth:`compare`, and how many would do.

        ``print(result.resolution())`` says for example "with 12 prompts and 784 tests no p can pass q < 0.05 alone
        (smallest p 0.00049): 8 tests have to reach it together; 19 would do".

        Args:
            condition: Compared with the baseline; the first other condition by default.
            quantity: As for :meth:`compare`.
            by: As for :meth:`compare`.
            segment: As for :meth:`compare`.
            select: "half": of the half of the prompts on which cells are found.
            unit: As for :meth:`compare`.
            level: The q below which a test is a finding.
            resamples: As for :meth:`compare`.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: What :meth:`compare` refuses, or a level that is no probability.
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
        """The heads with the largest values of a quantity, with intervals over prompts, beside uniform attention.

        Columns: layer, head, the quantity (mean over prompts), low and high (t interval), uniform (NaN where there is
        no such null), n.

        Args:
            quantity: A quantity with one number for each head, such as "previous_mass", "entropy", "magnitude".
            top: How many; None for all.
            condition: In this condition.
            segment: Whose queries or keys, where the quantity has segments.
            select: "half" ranks on one half of the prompts and shows the other: the interval of a head that was picked
                as the largest on the same prompts is too optimistic.
            unit: As for :meth:`compare`.
            level: Of the intervals.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: No such quantity, condition or segment; more than one number a head; too few prompts.
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
        """How much selections of heads share that are made on random disjoint halves of the prompts.

        ``|A ∩ B| / |A ∪ B|`` (Jaccard), its mean over splits, beside what two random selections of those sizes would
        share (exactly, from the hypergeometric distribution). Columns: condition, other, jaccard, low and high (2.5 and
        97.5 % of the splits), by_chance, selected (heads, on average), none_selected (the share of splits in which
        neither half selects any, which have no index), on_all (of two conditions: the index of their selections on all
        prompts).

        Args:
            condition: Compared with the baseline; the first other condition by default.
            quantity: As for :meth:`compare`.
            by: As for :meth:`compare`.
            choose: How many heads, by the size of what :meth:`compare` tests; None selects those with q < 0.05.
            layer: Among the heads of this layer; of all by default.
            over: Conditions, such as several fillers: a row for each, and one for each two of them, where the first
                selects on one half and the other on the other half.
            segment: As for :meth:`compare`.
            unit: As for :meth:`compare`.
            resamples: Random splits.
            patterns: Of signs, for q, where not all are tried; 20 for each test at least.
            seed: Of the splits.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: What :meth:`compare` refuses; too few prompts, or no such number of heads.

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
        """The cosine between the changes that two conditions make, layer by layer, beside those with controls.

        ``Σ ⟨Δ, Δ'⟩ / √(Σ ‖Δ‖² Σ ‖Δ'‖²)`` over the question's tokens and all channels, one number a prompt; means with t
        intervals over prompts. Two conditions whose histograms match need not agree at all. Columns: condition, other,
        layer, cosine, low, high; beyond (the first pair's cosine less this one's, paired by prompt), beyond_low,
        beyond_high; n. The first rows are of the two conditions, the next ones of the first with each control.

        Args:
            condition: A condition, such as "slash".
            other: Another, such as "arm".
            over: What both are changes from.
            quantity: "activations": those of ``MlpActivations``.
            controls: Other conditions to set beside them; all others of the result by default.
            unit: As for :meth:`compare`.
            level: Of the intervals.
            memory: As for :meth:`compare`.

        Raises:
            OptionError: No such condition, quantity or analysis in the result; fewer than 3 prompts.
        """
        from mechattn.results.agreement import agreement

        return agreement(self, condition, other, over, quantity, controls, unit, level, memory)

    def methods(self, *tables: pd.DataFrame) -> str:
        """What was done, as a paragraph for the methods of a paper; every number in it is one that the result holds.

        Model, versions, verification, prompts and their groups, conditions with what they inserted, analyses, nulls and
        seed; and for each table how it was computed.

        Args:
            tables: What :meth:`compare` gave.

        Raises:
            OptionError: A table doesn't say how it was made.
        """
        from mechattn.results.methods import methods

        return methods(self, tables)

    def digest(self) -> str:
        """A hash of the numbers: every array with its name, dimensions and attributes, nothing of the provenance.

        Equal runs, stored or not, have the same; with another CPU or number of threads the last digits differ.
        """
        from mechattn.results.digest import numbers_digest

        return numbers_digest(self.datasets)

    def to_dataframe(self, name: str, quantity: str | None = None) -> pd.DataFrame:
        """A tidy table: one row for each prompt, condition, layer, head and so on.

        Args:
            name: The analysis.
            quantity: One of its quantities; by default all that are per segment.
        """
        dataset = self[name]
        if quantity is not None and quantity not in dataset:
            raise OptionError(f"{name} has no quantity {quantity!r}; it has {', '.join(map(repr, dataset))}")
        by_segment = [v for v in dataset if "segment" in dataset[v].dims] or list(dataset)
        return dataset[quantity or by_segment].to_dataframe().dropna(how="all").reset_index()

    def merge(self, *others: Result) -> Result:
        """What :func:`mechattn.merge_results` makes of this result and others of the same run on other prompts."""
        import mechattn

        return mechattn.merge_results([self, *others])

    def save(self, path: str | Path) -> None:
        """What :func:`mechattn.save_result` writes: "….zarr" or "….nc", whole or not at all."""
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
        """What :func:`mechattn.page` writes: one HTML file with the figures, which opens offline."""
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
