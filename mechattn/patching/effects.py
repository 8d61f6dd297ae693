"""Results of patching as one table: effect, interval, q, share of the whole effect, and controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import by_head
from mechattn.errors import OptionError
from mechattn.patching.answer_metrics import WORDS
from mechattn.prompts.prompt import Prompt
from mechattn.stats.intervals import FEWEST, Interval, ratio_interval, t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units, halves_of

CONTROLS = ("other_prompt", "random")
_SHOWN = 8  # heads that are printed
_AGREES = 0.8  # below this correlation, or with an error above 1 minus it, attribution says little
_COMPARED = 8  # cells on which attribution is compared with patching, half of them the largest


@dataclass(frozen=True, eq=False)
class Patching:
    """The effects of patching, by prompt; ``print(patching)`` shows the table, of heads the
    largest.

    Args:
        effects: "effect", "other_prompt" and "random" [prompt layer head], [prompt layer] or
            [prompt set], with "segment" or "position" after them if patched one by one, in the
            units of the metric; NaN where not requested or without a partner, and in "other_prompt"
            for a prompt that is longer than all others. "whole" [prompt]: the metric of the other
            run minus that of the unpatched run.
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

    def table(
        self, top: int | None = None, select: Literal["half"] | None = None, level: float = 0.95
    ) -> pd.DataFrame:
        """One row for each head, layer or set, in order; with ``top`` or ``select``, the largest
        effect first.

        ``effect`` with its interval and ``q_effect`` (tests of ``Result.compare``,
        Benjamini-Hochberg over all rows, whatever ``top``; too small if heads were named for being
        the largest on these same prompts); ``share`` of the whole effect, a ratio of means with
        Fieller's interval, NaN if the whole effect's interval holds 0; the mean effects of both
        controls; ``beyond_random``: effect minus that of a random direction of the same norm, with
        its interval and ``q_beyond_random``. With "kl" and "noising" no effect is below 0, so
        ``q_effect`` is NaN and ``beyond_random`` is tested, as ``.attrs["tested"]`` and the print
        say.

        Args:
            top: The number of rows to return; all by default.
            select: "half" ranks rows on one half of the prompts and reports them on the other; q is
                then over the ``top`` rows, as other prompts have chosen them.
            level: The level of the intervals.

        Raises:
            OptionError: There are too few prompts, or an option is not allowed.
        """
        if select not in (None, "half"):
            raise OptionError(f'select={select!r}: give "half" or None')
        if not isinstance(level, (int, float)) or not 0.5 <= level < 1:
            raise OptionError(f"level={level!r}: give a probability such as 0.95")
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise OptionError(f"top={top!r}: give a number of rows, at least 1, or None for all")
        half = select == "half"
        fewest = 2 * FEWEST if half else FEWEST
        self.units.refuse_below(fewest, instead="")

        # All rows are tested; with "half", those that one half of the units ranks highest.
        everyone = np.arange(self.units.n)
        ranking_units = everyone
        reported_units = everyone
        if half:
            ranking_units, reported_units = halves_of(self.units.n)

        effect, cells = self._cells("effect")
        order = np.arange(len(cells))
        if half or top is not None:
            size = abs(effect[ranking_units].mean(0))
            order = np.argsort(-size, kind="stable")
        if half:
            order = order[:top]
        values = {}
        for name in ("effect", *CONTROLS):
            if name in self.effects:
                values[name] = self._cells(name)[0][reported_units][:, order]
        beyond_random = values["effect"] - values["random"]
        whole = self.units.means(self.effects.whole.values)[reported_units]
        tests = paired(values["effect"], None, bootstrap_ends=False)
        tests_beyond = paired(beyond_random, None, bootstrap_ends=False)

        columns: dict[str, Any] = {}
        for index, label in enumerate(self.labels):
            columns[label] = [cells[cell][index] for cell in order]
        columns |= _with_ends("effect", t_interval(values["effect"], level))
        columns["q_effect"] = tests.q
        columns["q_beyond_random"] = tests_beyond.q
        columns |= _with_ends("share", ratio_interval(values["effect"], whole, level))
        for name in CONTROLS:
            if name in values:
                columns[name] = np.nanmean(values[name], 0)
        columns |= _with_ends("beyond_random", t_interval(beyond_random, level))
        columns["n"] = len(beyond_random)

        attrs = {
            "tested": "effect",
            "family": self._family(len(order), half),
            "skewed": tests.skewed,
        }
        if self._only_rises:
            columns["q_effect"] = np.nan
            attrs["tested"] = "beyond_random"
            attrs["skewed"] = tests_beyond.skewed
        table = pd.DataFrame(columns)[:top]
        table.attrs = attrs
        return by_head(table)

    @property
    def _only_rises(self) -> bool:
        """Whether the metric cannot fall, whatever is patched."""
        return self.about["metric"] == WORDS["kl"] and self.about["direction"] == "noising"

    def _family(self, count: int, half: bool) -> str:
        """The tests of a table in words, such as "32 heads patched"."""
        nouns = [label for label in self.labels if label not in ("segment", "position")]
        noun = nouns[-1]
        if noun == "reader":
            noun = "edge"
        slots = [label for label in self.labels if label in ("segment", "position")]
        if slots:
            noun = f"pairs of {noun} and {slots[0]}"
        elif count > 1:
            noun += "s"
        family = f"{count} {noun} {self.about['method']}"
        if half:
            family += ", ranked on the other half"
        return family

    def _cells(self, name: str) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
        """The requested values [unit cell], and the labels of each cell."""
        measured = self._measured
        labels = [self.effects[dim].values.tolist() for dim in self.labels]
        cells = []
        for indices in np.argwhere(measured):
            cells.append(tuple(label[i] for label, i in zip(labels, indices, strict=True)))
        return self.units.means(self.effects[name].values[:, measured]), cells

    @property
    def _measured(self) -> np.ndarray:
        """Which cells have an effect in every prompt."""
        return ~np.isnan(self.effects.effect.values).any(0)

    @property
    def agreement(self) -> tuple[float, float] | None:
        """Correlation of attributed and exact effects over the checked heads, and the error.

        The error is ``rms(attributed − exact) / rms(exact)``. None if no heads were checked.
        """
        if self.checked is None:
            return None
        exact = self.checked.exact.values
        attributed = self.checked.attributed.values
        mean_square = max(float(np.mean(exact**2)), 1e-300)
        error = np.sqrt(np.mean((attributed - exact) ** 2) / mean_square)
        correlation = np.nan
        if exact.std() > 0 and attributed.std() > 0:
            correlation = np.corrcoef(exact, attributed)[0, 1]
        return float(correlation), float(error)

    def compared(self, exact: Sequence[np.ndarray], sample: Sequence[int]) -> Patching:
        """A copy with the exact effects of some cells on the first prompts."""
        _, cells = self._cells("effect")
        attributed = self.effects.effect.values[:, self._measured]
        rows = []
        for index, values in enumerate(exact):
            prompt = str(self.effects.prompt.values[index])
            for cell, value in zip(sample, values, strict=True):
                row = {"prompt": prompt, **dict(zip(self.labels, cells[cell], strict=True))}
                row["exact"] = value
                row["attributed"] = attributed[index, cell]
                rows.append(row)
        return replace(self, checked=pd.DataFrame(rows))

    def __str__(self) -> str:
        about = self.about
        lines = [f"{about['metric']}; {about['direction']}, {about['method']}, {self.units.words}"]
        if self.units.n < FEWEST:
            lines.append(f"no interval from fewer than {FEWEST}: .effects has the numbers")
            return "\n".join(lines)

        top = None
        if "head" in self.labels or "reader" in self.labels:
            top = _SHOWN
        table = self.table(top=top)
        tested = f"q of {table.attrs['tested']}, over {table.attrs['family']}"
        cells = int(self._measured.sum())
        if len(table) < cells:
            tested += f"; {len(table)} of {cells} shown, the largest"
        mean, low, high = self.whole
        lines.append(f"whole effect {mean:+.3g} [{low:+.3g}, {high:+.3g}]; {tested}")
        if self.checked is not None:
            lines.append(self._agreement_words(self.checked))
        if table.attrs["skewed"]:
            lines.append(table.attrs["skewed"])
        lines.append(table.to_string(index=False, float_format=lambda x: f"{x:.3g}"))
        return "\n".join(lines)

    def _agreement_words(self, checked: pd.DataFrame) -> str:
        """How far attributed and exact effects agree, and what to do where they don't."""
        assert self.agreement is not None  # as some effects were checked
        correlation, error = self.agreement
        sentence = (
            f"attributed against exact on {len(checked)} effects in single prompts: correlation "
            f"{correlation:.3f}, error {error:.2f} of the exact effects' root mean square"
        )
        agrees = correlation >= _AGREES and error <= 1 - _AGREES
        if agrees or "head" not in self.labels:
            return sentence
        return f'{sentence}; do not rank heads by these: at="all" patches each exactly'


def effects_dataset(
    effects: Sequence[Mapping[str, np.ndarray]],
    prompts: Sequence[Prompt],
    axes: Mapping[str, list[str]],
) -> xr.Dataset:
    """The effects of each prompt [*axes] and the whole effect [] as one dataset, by prompt."""
    coords = {"prompt": [prompt.id for prompt in prompts], **axes}
    variables = {}
    for name in effects[0]:
        values = np.stack([effects_of_prompt[name] for effects_of_prompt in effects])
        variables[name] = (tuple(coords)[: values.ndim], values)
    return xr.Dataset(variables, coords)


def _with_ends(name: str, interval: Interval) -> dict[str, np.ndarray]:
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def checked_sample(patching: Patching, seed: int) -> list[int]:
    """The cells on which attribution is checked: those with the largest effects, and as many drawn
    at random.
    """
    effect, _ = patching._cells("effect")
    size = abs(effect.mean(0))
    largest = np.argsort(-size, kind="stable")[: (_COMPARED + 1) // 2].tolist()
    remaining = [cell for cell in range(len(size)) if cell not in largest]
    drawn = np.random.default_rng(seed).permutation(len(remaining))[: _COMPARED // 2]
    return [*largest, *(remaining[index] for index in drawn)]
