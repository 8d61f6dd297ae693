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
from mechattn.stats.intervals import FEWEST, Interval, ratio_interval, t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units, halves_of

CONTROLS = ("other_prompt", "random")
_SHOWN = 8  # heads that are printed
_AGREES = 0.8  # below this correlation, or with an error above 1 minus it, attribution says little
_COMPARED = 8  # cells on which attribution is compared with patching, half of them the largest


@dataclass(frozen=True, eq=False)
class Patching:
    """The effects of patching, by prompt; ``print(patching)`` shows the table, of heads the largest.

    Args:
        effects: "effect", "other_prompt" and "random" [prompt layer head], [prompt layer] or [prompt set], with
            "segment" or "position" after them if patched one by one, in the units of the metric; NaN where not
            requested or without a partner, and in "other_prompt" for a prompt that is longer than all others. "whole"
            [prompt]: the metric of the other run minus that of the unpatched run.
        units: The units of replication.
        about: The model, the prompts, the condition, the metric, the direction, the method.
        checked: If all heads are attributed: exact and attributed effects of some of them, by prompt.
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
        """One row for each head, layer or set, in order; with ``top`` or ``select``, the largest effect first.

        ``effect`` with its interval and ``q_effect`` (tests of ``Result.compare``, Benjamini-Hochberg over all rows,
        whatever ``top``; too small if heads were named for being the largest on these same prompts); ``share`` of the
        whole effect, a ratio of means with Fieller's interval, NaN if the whole effect's interval holds 0; the mean
        effects of both controls; ``beyond_random``: effect minus that of a random direction of the same norm, with its
        interval and ``q_beyond_random``. With "kl" and "noising" no effect is below 0, so ``q_effect`` is
        NaN and ``beyond_random`` is tested, as ``.attrs["tested"]`` and the print say.

        Args:
            top: The number of rows to return; all by default.
            select: "half" ranks rows on one half of the prompts and reports them on the other; q is then over the
                ``top`` rows, as other prompts have chosen them.
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
        self.units.refuse_below(2 * FEWEST if half else FEWEST, instead="")
        return self._table(top, half, level)

    def _table(self, top: int | None, half: bool, level: float) -> pd.DataFrame:
        """All rows are tested; with ``half``, those that one half of the units ranks highest, on the other half."""
        finding, shown = halves_of(self.units.n) if half else (np.arange(self.units.n),) * 2
        effect, cells = self._cells("effect")
        ranked = half or top is not None
        order = (
            np.argsort(-abs(effect[finding].mean(0)), kind="stable")
            if ranked
            else np.arange(len(cells))
        )
        order = order[:top] if half else order
        controls = [name for name in CONTROLS if name in self.effects]
        values = {name: self._cells(name)[0][shown][:, order] for name in ("effect", *controls)}
        beyond = values["effect"] - values["random"]
        found, further = t_interval(values["effect"], level), t_interval(beyond, level)
        rises = (
            self.about["metric"] == WORDS["kl"] and self.about["direction"] == "noising"
        )  # whatever is patched
        share = ratio_interval(
            values["effect"], self.units.means(self.effects.whole.values)[shown], level
        )
        columns: dict[str, Any] = {
            label: [cells[i][at] for i in order] for at, label in enumerate(self.labels)
        }
        columns |= _with_ends("effect", found)
        tests, of_beyond = (
            paired(d, None, bootstrap_ends=False) for d in (values["effect"], beyond)
        )
        columns |= {"q_effect": np.nan if rises else tests.q, "q_beyond_random": of_beyond.q}
        columns |= _with_ends("share", share) | {
            name: np.nanmean(values[name], 0) for name in controls
        }
        columns |= _with_ends("beyond_random", further) | {"n": len(beyond)}
        made = pd.DataFrame(columns)[:top]
        slot = next((label for label in self.labels if label in ("segment", "position")), None)
        noun, count = [label for label in self.labels if label != slot][-1], len(order)
        noun = "edge" if noun == "reader" else noun
        cells_words = f"pairs of {noun} and {slot}" if slot else f"{noun}{'s' * (count > 1)}"
        family = f"{count} {cells_words} {self.about['method']}"
        family += ", ranked on the other half" * half
        tested, skewed = ("beyond_random", of_beyond.skewed) if rises else ("effect", tests.skewed)
        made.attrs = {"tested": tested, "family": family, "skewed": skewed}
        return by_head(made)

    def _cells(self, name: str) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
        """The requested values [unit cell], and the labels of each cell."""
        there = ~np.isnan(self.effects.effect.values).any(0)
        labels = [self.effects[dim].values.tolist() for dim in self.labels]
        cells = [
            tuple(label[i] for label, i in zip(labels, at, strict=True))
            for at in np.argwhere(there)
        ]
        return self.units.means(self.effects[name].values[:, there]), cells

    @property
    def agreement(self) -> tuple[float, float] | None:
        """Correlation of attributed and exact effects over the checked heads, and the error.

        The error is ``rms(attributed − exact) / rms(exact)``. None if no heads were checked.
        """
        if self.checked is None:
            return None
        exact, made = self.checked.exact.values, self.checked.attributed.values
        error = np.sqrt(np.mean((made - exact) ** 2) / max(float(np.mean(exact**2)), 1e-300))
        varies = exact.std() > 0 and made.std() > 0
        return (float(np.corrcoef(exact, made)[0, 1]) if varies else float("nan")), float(error)

    def compared(self, exact: Sequence[np.ndarray], sample: Sequence[int]) -> Patching:
        """A copy with the exact effects of some cells on the first prompts."""
        cells, effect = self._cells("effect")[1], self.effects.effect.values
        attributed, rows = effect[:, ~np.isnan(effect).any(0)], []
        for i, (prompt, values) in enumerate(zip(self.effects.prompt.values, exact, strict=False)):
            for cell, value in zip(sample, values, strict=True):
                labels = dict(zip(self.labels, cells[cell], strict=True))
                rows.append(
                    {
                        "prompt": str(prompt),
                        **labels,
                        "exact": value,
                        "attributed": attributed[i, cell],
                    }
                )
        return replace(self, checked=pd.DataFrame(rows))

    def __str__(self) -> str:
        about = self.about
        lines = [f"{about['metric']}; {about['direction']}, {about['method']}, {self.units.words}"]
        if self.units.n < FEWEST:
            return "\n".join(
                [*lines, f"no interval from fewer than {FEWEST}: .effects has the numbers"]
            )
        mean, low, high = self.whole
        table = self.table(top=_SHOWN if {"head", "reader"} & set(self.labels) else None)
        tested = f"q of {table.attrs['tested']}, over {table.attrs['family']}"
        every = int((~np.isnan(self.effects.effect.values)).any(0).sum())
        tested += f"; {len(table)} of {every} shown, the largest" if len(table) < every else ""
        lines.append(f"whole effect {mean:+.3g} [{low:+.3g}, {high:+.3g}]; {tested}")
        if self.agreement is not None and self.checked is not None:
            correlation, error = self.agreement
            poor = not (correlation >= _AGREES and error <= 1 - _AGREES)
            lines.append(
                f"attributed against exact on {len(self.checked)} effects in single prompts: correlation "
                f"{correlation:.3f}, error {error:.2f} of the exact effects' root mean square"
                + '; do not rank heads by these: at="all" patches each exactly'
                * (poor and "head" in self.labels)
            )
        lines += [table.attrs["skewed"]] * bool(table.attrs["skewed"])
        lines.append(table.to_string(index=False, float_format=lambda x: f"{x:.3g}"))
        return "\n".join(lines)


def _with_ends(name: str, interval: Interval) -> dict[str, np.ndarray]:
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def checked_sample(made: Patching, seed: int) -> list[int]:
    """The cells on which attribution is checked: those with the largest effects, and as many drawn at random."""
    mean = abs(made._cells("effect")[0].mean(0))
    largest = np.argsort(-mean, kind="stable")[: (_COMPARED + 1) // 2].tolist()
    rest = [cell for cell in range(len(mean)) if cell not in largest]
    drawn = np.random.default_rng(seed).permutation(len(rest))[: _COMPARED // 2]
    return [*largest, *(rest[i] for i in drawn)]
