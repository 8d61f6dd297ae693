"""Results of patching as one table: effect, interval, q, share of the whole effect, and
controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.errors import check_choice, check_counts
from mechattn.patching.answer_metrics import WORDS
from mechattn.results.result import by_head
from mechattn.stats.intervals import FEWEST, Interval, ratio_interval, t_interval
from mechattn.stats.many_tests import PairedTests, paired_tests
from mechattn.stats.units import Resolution, Units, halves_of, resolution

Columns = dict[str, np.ndarray]  # of a table, by name

Control = Literal["other_prompt", "random"]
CONTROLS: tuple[Control, ...] = ("other_prompt", "random")
# What a positive effect means: denoising takes from the baseline, noising from the other version.
DIRECTIONS = {
    "denoising": "denoising (+: the baseline's output raises it)",
    "noising": "noising (−: the other version's output lowers it)",
}
CHECKED = 4  # prompts on which attribution is compared with patching
_SHOWN = 8  # heads that are printed
_AGREES = 0.8  # below this correlation of ranks, attribution does not order heads
_LARGEST_ERROR = 0.5  # of attributed effects, in the exact ones' root mean square
_COMPARED = 8  # cells on which attribution is compared with patching, half of them the largest


@dataclass(frozen=True, eq=False)
class Patching:
    """The effects of patching, by prompt; ``print(patching)`` shows the table, of heads the
    largest.

    Args:
        effects: "effect", and of the controls "other_prompt" and "random" [prompt layer head],
            [prompt layer] or [prompt set], with "segment" or "position" after them if patched one
            by one, in the units of the metric; NaN where not requested or without a partner, and in
            "other_prompt" for a prompt that is longer than all others. "whole" [prompt]: the metric
            of the other run minus that of the unpatched run.
        units: The units of replication.
        about: The model, the prompts, the condition, the metric, the direction, the method.
        checked: If all heads are attributed: exact and attributed effects of some of them, by
            prompt.
    """

    effects: xr.Dataset
    units: Units
    about: Mapping[str, Any]
    checked: pd.DataFrame | None = None

    @property
    def whole(self) -> Interval:
        """The whole effect: its mean over prompts, with a 95 % interval."""
        return t_interval(self.units.means(self.effects.whole.values))

    @property
    def labels(self) -> list[str]:
        """What a row of the table is: "layer" and "head", "layer", or "set"; and "segment"."""
        return [str(dim) for dim in self.effects.effect.dims[1:]]

    def table(self, top: int | None = None, select: Literal["half"] | None = None) -> pd.DataFrame:
        """One row for each head, layer or set, in order; with ``top`` or ``select``, the largest
        effect first.

        ``effect`` with its interval and ``q_effect`` (tests of ``Result.compare``,
        Benjamini-Hochberg over all rows, whatever ``top``; too small if heads were named for being
        the largest on these same prompts); ``share`` of the whole effect, a ratio of means with
        Fieller's interval, NaN if the whole effect's interval holds 0; the mean effects of the
        controls; ``beyond_other_prompt`` and ``beyond_random``: effect minus that of another
        prompt's output (over the prompts that have such a control), and of a random direction of
        the same norm, each with its interval and q. With "kl" and "noising" no effect is below 0,
        so ``q_effect`` is NaN and ``beyond_random`` is tested, as ``.attrs["tested"]`` and the
        print say. All rows are tested once, when the first table is made; intervals are of the rows
        that are returned. Of more than 4,000 rows a q above 0.05 may be too small, but one below is
        not.

        With so few prompts that no row can have q < 0.05 by itself, the rows whose interval is
        furthest from 0 come first instead of the largest; ``.attrs["resolution"]`` says how many
        would do.

        Args:
            top: The number of rows to return; all by default.
            select: "half" ranks rows on one half of the prompts and reports them on the other; q is
                then over the ``top`` rows, as other prompts have chosen them.

        Raises:
            OptionError: There are too few prompts, or an option is not allowed.
        """
        check_choice((None, "half"), select=select)
        if top is not None:
            check_counts(top=top)
        if select == "half":
            self.units.refuse_below(2 * FEWEST, instead="")
            ranking_units, reported_units = halves_of(self.units.n)
            ranking_effects = self._values("effect")[ranking_units]
            mean = ranking_effects.mean(0)
            order = np.argsort(-abs(mean), kind="stable")
            return self.rows(order[:top], reported_units)

        self.units.refuse_below(FEWEST, instead="")
        if top is None:
            return self.rows(np.arange(len(self._cells)))
        return self.rows(self._order[:top])

    def rows(self, rows: np.ndarray, reported_units: np.ndarray | None = None) -> pd.DataFrame:
        """These rows of the table, by number; on units that didn't choose them, they alone are
        tested.

        Args:
            rows: Numbers of rows, in the order in which the table has them.
            reported_units: The numbers of the units to report; by default all, and then q is over
                all rows.
        """
        if reported_units is None:
            units: Any = slice(None)
            tests = self._tests
            tested_rows = rows
            family = self._family(len(self._cells))
        else:
            units = reported_units
            tests = _tests_of(self._compared(units, rows))
            tested_rows = np.arange(len(rows))
            family = self._family(len(rows)) + ", ranked on the other half"

        compared = self._compared(units, rows)
        effect = compared["effect"]
        whole = self.units.means(self.effects.whole.values)[units]
        unit_count = len(effect)

        columns: dict[str, Any] = {}
        for index, label in enumerate(self.labels):
            columns[label] = [self._cells[row][index] for row in rows]

        effect_interval = t_interval(effect)
        columns |= _with_ends("effect", effect_interval)
        for name in compared:
            columns[f"q_{name}"] = tests[name].q[tested_rows]

        share_interval = ratio_interval(effect, whole)
        columns |= _with_ends("share", share_interval)

        for control in self.controls:
            control_effect = self._values(control)[units][:, rows]
            # A prompt that is longer than all others has no other prompt's output.
            columns[control] = np.nanmean(control_effect, 0)
        for control in self.controls:
            name = f"beyond_{control}"
            beyond_interval = _interval(compared[name])
            columns |= _with_ends(name, beyond_interval)
        columns["n"] = unit_count

        tested = "effect"
        if self._only_rises:
            columns["q_effect"] = np.nan
            tested = "beyond_random"

        test_count = len(tests["effect"].q)
        table = pd.DataFrame(columns)
        table.attrs = {
            "tested": tested,
            "family": family,
            "skewed": tests[tested].skewed,
            "resolution": resolution(unit_count, test_count, unit=self.units.kind),
        }
        return by_head(table)

    def _compared(self, units: Any, rows: Any) -> Columns:
        """The values to test [unit row]: effects, and what is beyond each control, without the
        units that lack it.
        """
        effect = self._values("effect")[units][:, rows]
        compared = {"effect": effect}
        for control in self.controls:
            control_effect = self._values(control)[units][:, rows]
            beyond = effect - control_effect
            lacks_control = np.isnan(beyond).any(1)
            compared[f"beyond_{control}"] = beyond[~lacks_control]
        return compared

    @cached_property
    def _tests(self) -> dict[str, PairedTests]:
        """The tests of all rows."""
        compared = self._compared(units=slice(None), rows=slice(None))
        return _tests_of(compared)

    @property
    def controls(self) -> list[str]:
        """The controls that were measured."""
        return [name for name in CONTROLS if name in self.effects]

    @property
    def resolution(self) -> Resolution:
        """What a number of units can find among this number of rows."""
        return resolution(self.units.n, len(self._cells), unit=self.units.kind)

    @property
    def _by_interval(self) -> bool:
        """Whether there are too few units for any row to be found by itself."""
        fewest = self.resolution.fewest
        return fewest is None or self.units.n < fewest

    @cached_property
    def _order(self) -> np.ndarray:
        """The rows, the largest effect first, or that whose interval is furthest from 0."""
        mean, low, high = t_interval(self._values("effect"))
        size = abs(mean)
        if self._by_interval:
            # How far the nearer end is from 0; below 0 where the interval holds 0.
            size = np.maximum(low, -high)
        return np.argsort(-size, kind="stable")

    @property
    def _only_rises(self) -> bool:
        """Whether the metric cannot fall, whatever is patched."""
        return self.about["metric"] == WORDS["kl"] and self.about["direction"] == "noising"

    def _family(self, count: int) -> str:
        """The tests of a table in words, such as "32 heads patched"."""
        method = self.about["method"]
        noun = self.labels[-1].replace("reader", "edge")

        if noun in ("segment", "position"):
            nouns = f"pairs of {self.labels[-2]} and {noun}"
        elif count == 1:
            nouns = noun
        else:
            nouns = f"{noun}s"
        return f"{count} {nouns} {method}"

    def _values(self, name: str) -> np.ndarray:
        """The requested values [unit cell]."""
        by_prompt = self.effects[name].values[:, self.measured]
        return self.units.means(by_prompt)

    @cached_property
    def _cells(self) -> list[tuple[Any, ...]]:
        """The labels of each cell."""
        indices = np.nonzero(self.measured)

        columns = []
        for dim, index in zip(self.labels, indices, strict=True):
            labels = self.effects[dim].values
            columns.append(labels[index].tolist())
        return list(zip(*columns, strict=True))

    @cached_property
    def measured(self) -> np.ndarray:
        """Which cells have an effect in every prompt."""
        is_missing = np.isnan(self.effects.effect.values)
        return ~is_missing.any(0)

    @property
    def agreement(self) -> tuple[float, float] | None:
        """Correlation of attributed and exact effects over the checked heads, and the error.

        The error is ``rms(attributed − exact) / rms(exact)``. None if no heads were checked.
        """
        if self.checked is None:
            return None

        exact = self.checked.exact
        attributed = self.checked.attributed
        correlation = exact.corr(attributed)
        mean_square_error = ((attributed - exact) ** 2).mean()
        mean_square = (exact**2).mean()
        error = np.sqrt(mean_square_error / mean_square)
        return float(correlation), float(error)

    @property
    def rank_agreement(self) -> float | None:
        """Spearman's correlation of the checked heads' mean attributed and exact effects; None if
        none were checked.
        """
        if self.checked is None:
            return None

        cells = self.checked.groupby(self.labels)
        means = cells[["attributed", "exact"]].mean()
        correlation = means.attributed.corr(means.exact, method="spearman")
        return float(correlation)

    def compared(self, exact: Iterable[np.ndarray], sample: Sequence[int]) -> Patching:
        """A copy with the exact effects of some cells on the first prompts.

        Args:
            exact: For each of the first prompts, the exact effects [sampled cell].
            sample: The numbers of these cells, as ``checked_sample`` draws them.
        """
        attributed = self.effects.effect.values[:, self.measured][:, sample]
        sampled_cells = [self._cells[cell] for cell in sample]
        cells = pd.DataFrame(sampled_cells, columns=self.labels)

        tables = []
        for index, values in enumerate(exact):
            prompt_id = str(self.effects.prompt.values[index])
            table = cells.assign(exact=values, attributed=attributed[index])
            table.insert(0, "prompt", prompt_id)
            tables.append(table)

        checked = pd.concat(tables, ignore_index=True)
        return replace(self, checked=checked)

    def __str__(self) -> str:
        about = self.about
        direction = DIRECTIONS.get(about["direction"], about["direction"])
        lines = [f"{about['metric']}; {direction}; {about['method']}, {self.units.words}"]
        if self.units.n < FEWEST:
            lines.append(f"no interval from fewer than {FEWEST}; mean effects, the largest first")
            means = self.effects.effect.mean("prompt").to_dataframe().dropna().reset_index()
            largest = means.sort_values("effect", key=abs, ascending=False)[:_SHOWN]
            lines.append(_printed(largest))
            return "\n".join(lines)

        top = None
        if "head" in self.labels or "reader" in self.labels:
            top = _SHOWN
        table = self.table(top=top)
        tested = f"q of {table.attrs['tested']}, over {table.attrs['family']}"
        if len(table) < len(self._cells):
            chosen = "the largest"
            if self._by_interval:
                chosen = "those whose interval is furthest from 0"
            tested += f"; {len(table)} of {len(self._cells)} shown, {chosen}"

        mean, low, high = self.whole
        lines.append(f"whole effect {mean:+.3g} [{low:+.3g}, {high:+.3g}]; {tested}")
        lines += self._cautions()
        lines.append(str(table.attrs["resolution"]))
        if self.checked is not None:
            lines.append(self._agreement_words(self.checked))
        lines.append(table.attrs["skewed"])
        lines.append(about.get("sharing", ""))

        # Intervals of shares and differences are in the table; a line would be too long with them.
        columns = [name for name in table if not str(name).startswith(("beyond_", "share_"))]
        lines.append(_printed(table[columns]))
        return "\n".join(filter(None, lines))

    def _cautions(self) -> list[str]:
        """What the whole effect's interval warns of."""
        _, low, high = self.whole
        cautions = []

        # Above 0 if the whole interval is on the side where no effect is expected.
        nearest_ends = {"noising": low, "denoising": -high}
        wrong_way = nearest_ends.get(self.about["direction"], 0)
        if wrong_way > 0 and self.about["metric"] == WORDS["logit_diff"]:
            cautions.append(
                "Careful: the other version favours the answer; are the two the wrong way round?"
            )
        if low < 0 < high:
            cautions.append(
                "Careful: the whole effect may be 0, so there may be nothing to find; does the"
                " model solve these prompts?"
            )
        return cautions

    def _agreement_words(self, checked: pd.DataFrame) -> str:
        """How far attributed and exact effects agree, and what to do where they don't."""
        assert self.agreement is not None  # as some effects were checked
        assert self.rank_agreement is not None
        correlation, error = self.agreement
        cells = len(checked[self.labels].drop_duplicates())

        sentence = (
            f"attributed against exact on {len(checked)} effects in single prompts: correlation"
            f" {correlation:.3f}, error {error:.2f} of the exact effects' root mean square; ranks"
            f" of the {cells} mean effects correlate {self.rank_agreement:.2f}"
        )
        if "head" not in self.labels:
            return sentence

        if self.rank_agreement < _AGREES:
            return f'{sentence}; do not rank heads by these: at="all" patches each exactly'
        if error > _LARGEST_ERROR:
            return f'{sentence}; their sizes are wrong: at="all" patches each exactly'
        return sentence


def _printed(table: pd.DataFrame) -> str:
    """A table as text, its numbers with three digits."""
    return table.to_string(index=False, float_format=lambda x: f"{x:.3g}")


def _tests_of(compared: Columns) -> dict[str, PairedTests]:
    """The tests of each column [unit row]; NaN with fewer units than a test needs."""
    tests = {}
    for name, values in compared.items():
        unit_count, row_count = values.shape
        if unit_count < FEWEST:
            nan = np.full(row_count, np.nan)
            tests[name] = PairedTests(nan, nan, "")
        else:
            tests[name] = paired_tests(values)
    return tests


def _interval(values: np.ndarray) -> Interval:
    """The t interval of each column; without ends where there are too few units."""
    unit_count, row_count = values.shape
    if unit_count >= FEWEST:
        return t_interval(values)

    nan = np.full(row_count, np.nan)
    mean = values.mean(0) if unit_count else nan
    return Interval(mean, nan, nan)


def _with_ends(name: str, interval: Interval) -> Columns:
    """The three columns of an interval."""
    return {
        name: interval.estimate,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
    }


def checked_sample(patching: Patching, seed: int) -> list[int]:
    """The cells on which attribution is checked: those with the largest effects, and as many drawn
    at random.

    Args:
        patching: Attributed effects.
        seed: The seed of the cells that are drawn.

    Returns:
        The numbers of cells, as the rows of ``patching.table()`` are counted.
    """
    mean = patching._values("effect").mean(0)
    half = _COMPARED // 2
    order = np.argsort(-abs(mean), kind="stable")
    largest = order[:half]

    generator = np.random.default_rng(seed)
    remaining = np.delete(np.arange(len(mean)), largest)
    drawn = generator.permutation(remaining)[:half]
    return [*largest.tolist(), *drawn.tolist()]
