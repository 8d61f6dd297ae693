"""Effects of patching by prompt, and their table with intervals, tests, shares and controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from mechattn.errors import check_choice, check_counts
from mechattn.results.result import by_head
from mechattn.stats.intervals import FEWEST, Interval, Moments, ratio_interval, t_interval
from mechattn.stats.many_tests import PairedTests, paired_tests
from mechattn.stats.units import Resolution, Units, halves_of, resolution

Columns = dict[str, np.ndarray]  # of a table, by name
Indices = np.ndarray | slice  # of units or cells
_ALL = slice(None)

Method = Literal["exact", "attribution"]
# How effects are measured; those of induction heads are from ablation.
_METHOD_WORDS = {
    "exact": "patched",
    "attribution": "attributed (first order)",
    "ablation": "ablated",
}
Control = Literal["other_prompt", "random"]
CONTROLS: tuple[Control, ...] = ("other_prompt", "random")
# What the sign of an effect means. Denoising puts in outputs of the baseline, and noising outputs
# of the other version.
DIRECTIONS = {
    "denoising": "denoising (+: the baseline's output raises it)",
    "noising": "noising (−: the other version's output lowers it)",
    "ablation": "mean ablation (+: copying needs the head)",
}
# The numbers of prompts and cells on which attribution is compared with patching: few, because each
# cell of each prompt takes a row of a pass. Half of the cells are the largest.
CHECKED_PROMPTS = 4
_CHECKED_CELLS = 8
_SHOWN = 8  # rows that are printed of heads and edges
# The print warns of attributed effects beyond these limits, which are chosen and not from a test.
_LEAST_RANK_CORRELATION = 0.8
_LARGEST_ERROR = 0.5  # in units of the exact effects' root mean square


@dataclass(frozen=True, eq=False)
class Patching:
    """The effects of patching, by prompt.

    ``print(patching)`` shows the table; of heads and edges it shows those with the largest effects.

    Args:
        effects: "effect", and the controls "other_prompt" and "random" if they were measured, in
            the units of the metric. Their axes are [prompt layer head], [prompt layer], [prompt
            set], [prompt writer reader] or [prompt path]. The axis "segment" or "position" follows
            if these were patched one by one. Cells that were not patched are NaN, and
            "other_prompt" is NaN for a prompt that is longer than all others. "whole" [prompt] is
            the metric of the other run minus that of the unpatched run.
        units: The units of replication.
        about: The model, the prompts, the condition, the metric (in words, and by its name), the
            direction and the method.
        checked: The exact and the attributed effects of some cells, by prompt; None unless effects
            are attributed.
    """

    effects: xr.Dataset
    units: Units
    about: Mapping[str, Any]
    checked: pd.DataFrame | None = None

    @property
    def whole(self) -> Interval:
        """The mean whole effect over units, with a 95 % interval."""
        return t_interval(self.units.means(self.effects.whole.values))

    @property
    def labels(self) -> list[str]:
        """The columns that name a row of the table, such as "layer" and "head"."""
        return [str(dim) for dim in self.effects.effect.dims[1:]]

    @property
    def controls(self) -> list[str]:
        """The controls that were measured."""
        return [name for name in CONTROLS if name in self.effects]

    @property
    def method_words(self) -> str:
        """How effects were measured, in words, such as "attributed (first order)"."""
        steps = self.about.get("steps", 1)
        if steps > 1:
            return f"attributed ({steps} steps)"
        return _METHOD_WORDS[self.about["method"]]

    @property
    def sharing_words(self) -> str:
        """Which heads share keys and values, in words; empty if none do, or without edges."""
        readers = self.about.get("readers_of_first_values", [])
        if len(readers) < 2:
            return ""
        return f"k and v are those of key-value heads: L0H0.v is read by {', '.join(readers)}"

    @property
    def resolution(self) -> Resolution:
        """What tests over these units can detect among all rows."""
        return resolution(self.units.n, len(self._cell_labels), unit=self.units.kind)

    @cached_property
    def measured(self) -> np.ndarray:
        """Which cells have an effect in every prompt, as a mask in the shape of one prompt's
        effects. They are the rows of the table.
        """
        is_missing = np.isnan(self.effects.effect.values)
        return ~is_missing.any(0)

    @property
    def agreement(self) -> tuple[float, float] | None:
        """The correlation of attributed and exact effects over the checked cells, and the error.

        The error is ``rms(attributed − exact) / rms(exact)``. None if no cells were checked.
        """
        if self.checked is None:
            return None
        exact = self.checked.exact
        attributed = self.checked.attributed
        mean_square_error = ((attributed - exact) ** 2).mean()
        error = np.sqrt(mean_square_error / (exact**2).mean())
        return float(exact.corr(attributed)), float(error)

    @property
    def rank_agreement(self) -> float | None:
        """Spearman's correlation of the checked cells' mean attributed and exact effects.

        None if no cells were checked, and NaN for a single cell.
        """
        if self.checked is None:
            return None
        means = self.checked.groupby(self.labels)[["attributed", "exact"]].mean()
        return float(means.attributed.corr(means.exact, method="spearman"))

    def table(self, top: int | None = None, select: Literal["half"] | None = None) -> pd.DataFrame:
        """The mean effect of each head, layer, set, edge or path, with intervals and tests.

        Columns after those that name the row:

        - ``effect``, the mean over units, with its interval, and ``q_effect``. The tests are those
          of ``Result.compare``, with Benjamini-Hochberg over all rows, whatever ``top`` is. This q
          is too small if heads were named because they are the largest on the same prompts.
        - ``share`` of the whole effect: a ratio of means with Fieller's interval, NaN if the
          interval of the whole effect contains 0.
        - ``other_prompt`` and ``random``, the mean effects of the controls.
        - ``beyond_other_prompt`` and ``beyond_random``, the effect minus that of the control, each
          with its interval and q. The first is over the units that have this control.
        - ``n``, the number of units.

        With "kl" and "noising" no effect is below 0. Then ``q_effect`` is NaN and
        ``beyond_random`` is tested, as ``.attrs["tested"]`` and the print say.

        All rows are tested once, when the first table is made. If there are more than 4,000 rows, a
        q above 0.05 may be too small, but a q below 0.05 is not.

        Args:
            top: The number of rows to return, those with the largest effects first. If there are
                too few units for any row to have q < 0.05 alone, those whose interval is furthest
                from 0 come first instead; ``.attrs["resolution"]`` says how many units would be
                enough. By default all rows are returned, in the order of their names.
            select: "half" ranks rows on one half of the units, by the size of the mean effect, and
                reports them on the other half. The q is then over only the ``top`` rows, since
                other prompts have chosen them.

        Raises:
            OptionError: There are too few prompts, or an argument is not allowed.
        """
        check_choice((None, "half"), select=select)
        if top is not None:
            check_counts(top=top)
        if select == "half":
            self.units.refuse_below(2 * FEWEST, instead="")
            ranking_units, reported_units = halves_of(self.units.n)
            ranking_means = self._values("effect", ranking_units).mean(0)
            cells = largest_first(ranking_means)[:top]
            tests = _tests_of(self._tested_values(reported_units, cells))
            family = f"{self._family(len(cells))}, ranked on the other half"
            return self._table(cells, reported_units, tests, _ALL, family)

        self.units.refuse_below(FEWEST, instead="")
        if top is None:
            return self.rows(np.arange(len(self._cell_labels)))
        return self.rows(self._order[:top])

    def rows(self, cells: np.ndarray) -> pd.DataFrame:
        """Some rows of the table, with q over all rows.

        Args:
            cells: The numbers of the rows to return, counted as in ``table()``.
        """
        family = self._family(len(self._cell_labels))
        return self._table(cells, _ALL, self._tests, cells, family)

    def with_exact(
        self, exact_effects: Iterable[Float[np.ndarray, " cell"]], sample: np.ndarray
    ) -> Patching:
        """A copy with the exact effects of some cells in the first prompts.

        Args:
            exact_effects: For each of the first prompts, the exact effects of the sampled cells.
            sample: The numbers of these cells, as ``checked_sample`` returns them.
        """
        attributed = self.effects.effect.values[:, self.measured][:, sample]
        sample_labels = self._cell_labels.iloc[sample]

        tables = []
        for index, exact in enumerate(exact_effects):
            table = sample_labels.assign(exact=exact, attributed=attributed[index])
            table.insert(0, "prompt", str(self.effects.prompt.values[index]))
            tables.append(table)
        return replace(self, checked=pd.concat(tables, ignore_index=True))

    def __str__(self) -> str:
        about = self.about
        direction = DIRECTIONS[about["direction"]]
        lines = [f"{about['metric']}; {direction}; {self.method_words}, {self.units.words}"]
        if self.units.n < FEWEST:
            lines.append(f"no interval from fewer than {FEWEST}; mean effects, the largest first")
            means = self._cell_labels.assign(effect=self._values("effect").mean(0))
            largest = means.sort_values("effect", key=abs, ascending=False)[:_SHOWN]
            lines.append(printed(largest))
            return "\n".join(lines)

        # There are few layers, sets and paths, so all of them are shown.
        top = None
        if "head" in self.labels or "reader" in self.labels:
            top = _SHOWN
        table = self.table(top=top)
        tests_words = f"q of {table.attrs['tested']}, over {table.attrs['family']}"
        if len(table) < len(self._cell_labels):
            criterion = "the largest"
            if self._has_few_units:
                criterion = "those whose interval is furthest from 0"
            tests_words += f"; {len(table)} of {len(self._cell_labels)} shown, {criterion}"

        mean, low, high = self.whole
        lines.append(f"whole effect {mean:+.3g} [{low:+.3g}, {high:+.3g}]; {tests_words}")
        lines += self._cautions()
        lines.append(str(table.attrs["resolution"]))
        lines.append(self._agreement_words())
        lines.append(table.attrs["skewed"])
        lines.append(self.sharing_words)

        # Intervals of shares and differences are in the table; a line would be too long with them.
        columns = [name for name in table if not str(name).startswith(("beyond_", "share_"))]
        lines.append(printed(table[columns]))
        return "\n".join(filter(None, lines))

    def _table(
        self,
        cells: np.ndarray,
        units: Indices,
        tests: Mapping[str, PairedTests],
        test_indices: Indices,
        family: str,
    ) -> pd.DataFrame:
        """Some rows of the table.

        Args:
            cells: The numbers of the rows.
            units: The units over which means are taken.
            tests: The tests of all rows that are tested together.
            test_indices: The index of each row in these tests.
            family: What is tested together, in words.
        """
        columns: dict[str, Any] = {}
        for label in self.labels:
            columns[label] = self._cell_labels[label].to_numpy()[cells]

        tested_values = self._tested_values(units, cells)
        effect = tested_values["effect"]
        columns |= with_ends("effect", t_interval(effect))
        for name in tested_values:
            columns[f"q_{name}"] = tests[name].q[test_indices]

        whole_effect = self.units.means(self.effects.whole.values)[units]
        columns |= with_ends("share", ratio_interval(effect, whole_effect))

        for control in self.controls:
            # The control is NaN for a prompt that is longer than all others.
            columns[control] = np.nanmean(self._values(control, units, cells), 0)
        for control in self.controls:
            name = f"beyond_{control}"
            # The ends are NaN if fewer than three units have this control.
            columns |= with_ends(name, Moments.of(tested_values[name]).interval())
        columns["n"] = len(effect)

        tested = "effect"
        if only_rises(self.about["metric_name"], self.about["direction"]):
            columns["q_effect"] = np.nan
            tested = "beyond_random"

        test_count = len(tests["effect"].q)
        table = pd.DataFrame(columns)
        table.attrs = {
            "tested": tested,
            "family": family,
            "skewed": tests[tested].skewed,
            "resolution": resolution(len(effect), test_count, unit=self.units.kind),
        }
        return by_head(table)

    @cached_property
    def _tests(self) -> dict[str, PairedTests]:
        """The tests of all rows."""
        return _tests_of(self._tested_values())

    def _tested_values(self, units: Indices = _ALL, cells: Indices = _ALL) -> Columns:
        """The values that are tested [unit cell]: effects, and their differences from each control.

        A unit that lacks a control is left out of its differences.
        """
        effect = self._values("effect", units, cells)
        tested_values = {"effect": effect}
        for control in self.controls:
            differences = effect - self._values(control, units, cells)
            lacks_control = np.isnan(differences).any(1)
            tested_values[f"beyond_{control}"] = differences[~lacks_control]
        return tested_values

    def _values(
        self, name: str, units: Indices = _ALL, cells: Indices = _ALL
    ) -> Float[np.ndarray, "unit cell"]:
        """A variable of ``effects``, averaged over the prompts of each unit, in measured cells."""
        by_prompt = self.effects[name].values[:, self.measured]
        return self.units.means(by_prompt)[units][:, cells]

    @cached_property
    def _cell_labels(self) -> pd.DataFrame:
        """The labels of each measured cell."""
        labels = [self.effects[dim].values for dim in self.labels]
        index = pd.MultiIndex.from_product(labels, names=self.labels)
        return index[self.measured.ravel()].to_frame(index=False)

    @cached_property
    def _order(self) -> np.ndarray:
        """The numbers of the rows, the largest effect first.

        With too few units, the row whose interval is furthest from 0 comes first.
        """
        mean, low, high = t_interval(self._values("effect"))
        if not self._has_few_units:
            return largest_first(mean)
        # The distance of the nearer end from 0, which is negative if the interval contains 0.
        distances = np.maximum(low, -high)
        return np.argsort(-distances, kind="stable")

    @property
    def _has_few_units(self) -> bool:
        """Whether there are too few units for any row to have q < 0.05 alone."""
        fewest = self.resolution.fewest
        return fewest is None or self.units.n < fewest

    def _family(self, count: int) -> str:
        """What is tested together, in words, such as "32 heads patched"."""
        ending = "" if count == 1 else "s"
        *first_labels, last_label = self.labels

        nouns = f"{last_label}{ending}"
        if last_label == "reader":
            nouns = f"edge{ending}"
        elif last_label in ("segment", "position"):
            nouns = f"pair{ending} of {first_labels[-1]} and {last_label}"
        return f"{count} {nouns} {self.method_words}"

    def _cautions(self) -> list[str]:
        """Warnings about the interval of the whole effect."""
        _, low, high = self.whole
        baseline_is_worse = high < 0
        if self.about["direction"] == "noising":
            baseline_is_worse = low > 0

        cautions = []
        if baseline_is_worse and self.about["metric_name"] == "logit_diff":
            cautions.append(
                "Careful: the other version favours the answer; are the two the wrong way round?"
            )
        if low < 0 < high:
            cautions.append(
                "Careful: the whole effect may be 0, so there may be nothing to find; does the"
                " model solve these prompts?"
            )
        return cautions

    def _agreement_words(self) -> str:
        """How well attributed and exact effects agree, and what to do if they don't.

        The text is empty if no cells were checked.
        """
        if self.checked is None or self.agreement is None or self.rank_agreement is None:
            return ""

        correlation, error = self.agreement
        sentence = (
            f"attributed against exact on {len(self.checked)} effects in single prompts:"
            f" correlation {correlation:.3f}, error {error:.2f} of the exact effects' root mean"
            " square"
        )
        cell_count = self.checked.groupby(self.labels).ngroups
        if cell_count > 1:
            sentence += f"; ranks of the {cell_count} mean effects correlate"
            sentence += f" {self.rank_agreement:.2f}"
        if "head" not in self.labels:
            return sentence

        if self.rank_agreement < _LEAST_RANK_CORRELATION:
            return f'{sentence}; do not rank heads by these: method="exact" patches each'
        if error > _LARGEST_ERROR:
            return f'{sentence}; their sizes are wrong: method="exact" patches each'
        return sentence


def only_rises(metric: Any, direction: str) -> bool:
    """Whether no patch can lower a metric, since it is smallest in the run that is patched."""
    return metric == "kl" and direction == "noising"


def largest_first(means: Float[np.ndarray, " cell"]) -> np.ndarray:
    """The numbers of cells, those whose means are furthest from 0 first."""
    return np.argsort(-abs(means), kind="stable")


def printed(table: pd.DataFrame) -> str:
    """A table as text, with three significant digits."""
    return table.to_string(index=False, float_format=lambda x: f"{x:.3g}")


def with_ends(name: str, interval: Interval) -> Columns:
    """The columns of an interval: the estimate, and its ends with "_low" and "_high"."""
    return {
        name: interval.estimate,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
    }


def checked_sample(patching: Patching, seed: int) -> np.ndarray:
    """Choose the cells on which attribution is checked.

    One half has the largest effects, and the other half is drawn at random from the rest.

    Args:
        patching: Attributed effects.
        seed: The seed of the draw.

    Returns:
        The numbers of the cells, counted as the rows of ``patching.table()``.
    """
    order = largest_first(patching._values("effect").mean(0))
    half = _CHECKED_CELLS // 2

    generator = np.random.default_rng(seed)
    random_order = generator.permutation(np.sort(order[half:]))
    return np.concatenate([order[:half], random_order[:half]])


def _tests_of(tested_values: Columns) -> dict[str, PairedTests]:
    """The tests of each variable [unit cell]; NaN with fewer units than a test needs."""
    tests = {}
    for name, values in tested_values.items():
        if len(values) >= FEWEST:
            tests[name] = paired_tests(values)
        else:
            nan = np.full(values.shape[1], np.nan)
            tests[name] = PairedTests(nan, nan, "")
    return tests
