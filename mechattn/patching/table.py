"""Results of patching as a table: effect, interval, q, share of the whole effect, and controls."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mechattn.errors import OptionError
from mechattn.patching.metrics import WORDS
from mechattn.stats.intervals import FEWEST, t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

CONTROLS = ("other_prompt", "random")


@dataclass(frozen=True, eq=False)
class Patching:
    """The effects of patching, by prompt.

    Args:
        effects: "effect", "other_prompt" and "random" [prompt layer head], or [prompt layer], in the units of the
            metric; NaN where not requested, and in "other_prompt" for a prompt that is longer than all others. "whole"
            [prompt]: the metric of the other run minus that of the unpatched run.
        units: The units of replication.
        about: The model, the prompts, the condition, the metric, the direction, the method.
    """

    effects: xr.Dataset
    units: Units
    about: Mapping[str, Any]

    @property
    def whole(self) -> tuple[float, float, float]:
        """The whole effect: its mean over prompts, with a 95 % interval."""
        found = t_interval(self.units.means(self.effects.whole.values))
        return float(found.estimate), float(found.low), float(found.high)

    def _table(self, level: float, top: int | None = None, ranked: bool = False, half: bool = False) -> pd.DataFrame:
        """Rows for the tested cells, which are all, or those that one half of the units ranks highest; the first."""
        import pandas as pd

        finding, shown = (slice(0, None, 2), slice(1, None, 2)) if half else (slice(None), slice(None))
        effect, cells = self._cells("effect")
        order = np.argsort(-abs(effect[finding].mean(0)), kind="stable") if ranked else np.arange(len(cells))
        order = order[:top] if half else order
        values = {name: self._cells(name)[0][shown][:, order] for name in ("effect", *CONTROLS)}
        beyond = values["effect"] - values["random"]
        found, further = t_interval(values["effect"], level), t_interval(beyond, level)
        rises = self.about["metric"] == WORDS["kl"] and self.about["direction"] == "noising"  # whatever is patched
        tested = "beyond_random" if rises else "effect"
        whole, low, high = t_interval(self.units.means(self.effects.whole.values)[shown], level)
        dims = self.effects.effect.dims[1:]
        made = pd.DataFrame(
            {
                **{str(dim): [cells[i][at] for i in order] for at, dim in enumerate(dims)},
                "effect": found.estimate,
                "low": found.low,
                "high": found.high,
                "q": paired(beyond if rises else values["effect"], None, bootstrap=False).q,
                "share": np.nan if low <= 0 <= high else found.estimate / whole,
                **{name: np.nanmean(values[name], 0) for name in CONTROLS},
                "beyond_random": further.estimate,
                "beyond_random_low": further.low,
                "beyond_random_high": further.high,
                "n": len(beyond),
            }
        )[:top]
        family = f"{len(order)} {dims[-1]}{'s' * (len(order) > 1)} {self.about['method']}"
        made.attrs = {"tested": tested, "family": family + ", ranked on the other half" * half}
        return made

    def _every(self, level: float) -> pd.DataFrame:
        """One row for each cell, in order."""
        _check_level(level)
        self.units.refuse_below(FEWEST, instead="")
        return self._table(level)

    def _cells(self, name: str) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """The requested values [unit cell], and the layer (and head) of each cell."""
        there = ~np.isnan(self.effects.effect.values).any(0)
        values = self.effects[name].values[:, there]
        labels = [self.effects[dim].values for dim in self.effects.effect.dims[1:]]
        cells = [tuple(int(label[i]) for label, i in zip(labels, at, strict=True)) for at in np.argwhere(there)]
        return self.units.means(values), cells

    def _lines(self, table: pd.DataFrame | None) -> list[str]:
        first = f"{self.about['metric']}; {self.about['direction']}, {self.about['method']}, {self.units.words}"
        if table is None:
            return [first, f"no interval from fewer than {FEWEST}: .effects has the numbers"]
        mean, low, high = self.whole
        shown = table.to_string(index=False, float_format=lambda x: f"{x:.3g}")
        of = f"of {table.attrs['tested']}"
        tests = f"q {of}, over {table.attrs['family']}" if "q" in table else f"p {of}"
        return [first, f"whole effect {mean:+.3g} [{low:+.3g}, {high:+.3g}]; {tests}", shown]


@dataclass(frozen=True, eq=False)
class LayerPatching(Patching):
    """The effect of the residual stream after each layer on the answer; ``print(patching)`` shows it."""

    def layers(self, level: float = 0.95) -> pd.DataFrame:
        """One row per layer, in order, with the columns of :meth:`HeadPatching.heads`.

        Raises:
            OptionError: There are too few prompts, or ``level`` is not a probability.
        """
        return self._every(level)

    def __str__(self) -> str:
        return "\n".join(self._lines(self.layers() if self.units.n >= FEWEST else None))


@dataclass(frozen=True, eq=False)
class SetPatching(Patching):
    """The effect of several heads' outputs together on the answer; ``print(patching)`` shows it."""

    def table(self, level: float = 0.95) -> pd.DataFrame:
        """One row with ``heads``, their number, and the columns of :meth:`HeadPatching.heads`, with ``p`` for q.

        Raises:
            OptionError: There are too few prompts, or ``level`` is not a probability.
        """
        made = self._every(level)
        return made.rename(columns={"set": "heads", "q": "p"})  # a single test, so nothing to adjust

    def __str__(self) -> str:
        named = ", ".join(f"{layer}.{head}" for layer, head in self.about["heads"])
        return "\n".join([f"heads {named} together", *self._lines(self.table() if self.units.n >= FEWEST else None)])


@dataclass(frozen=True, eq=False)
class HeadPatching(Patching):
    """The effect of each head's output on the answer; ``print(patching)`` shows the largest.

    Args:
        checked: If all heads are attributed: exact and attributed effects of some of them, by prompt.
    """

    checked: pd.DataFrame | None = None

    def heads(self, top: int | None = None, select: Literal["half"] | None = None, level: float = 0.95) -> pd.DataFrame:
        """One row per head, the largest effect first.

        ``effect`` with its interval and ``q`` (sign flips over prompts, Benjamini-Hochberg over all heads attributed or
        patched, whatever ``top``; too small if they were named for being the largest on these same prompts); ``share``
        of the whole effect, a ratio of means, NaN if the whole effect's interval holds 0; the mean effects of both
        controls; ``beyond_random``: effect minus that of a random direction of the same norm, with its interval. With
        "kl" and "noising" no effect is below 0: ``q`` tests ``beyond_random``, as ``.attrs`` and the print say.

        Args:
            top: The number of heads to return; all by default.
            select: "half" ranks heads on one half of the prompts and reports them on the other; ``q`` is then over the
                ``top`` heads, as other prompts have chosen them.
            level: The level of the intervals.

        Raises:
            OptionError: There are too few prompts, or an option is not allowed.
        """
        if select not in (None, "half"):
            raise OptionError(f'select={select!r}: give "half" or None')
        _check_level(level)
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise OptionError(f"top={top!r}: give a number of heads, at least 1, or None for all")
        self.units.refuse_below(FEWEST if select is None else 2 * FEWEST, instead="")
        return self._table(level, top, ranked=True, half=select == "half")

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

    def compared(self, exact: Seq[np.ndarray], sample: Seq[tuple[int, int]]) -> HeadPatching:
        """Return a copy with the exact effects of some heads on the first prompts."""
        import pandas as pd

        rows = [
            {
                "prompt": str(prompt),
                "layer": layer,
                "head": head,
                "exact": value,
                "attributed": float(self.effects.effect.sel(prompt=prompt, layer=layer, head=head)),
            }
            for prompt, values in zip(self.effects.prompt.values, exact, strict=False)
            for (layer, head), value in zip(sample, values, strict=True)
        ]
        return replace(self, checked=pd.DataFrame(rows))

    def __str__(self) -> str:
        lines = self._lines(self.heads(top=8) if self.units.n >= FEWEST else None)
        if self.agreement is not None and self.checked is not None:
            correlation, error = self.agreement
            lines.append(
                f"attributed against exact on {len(self.checked)} pairs of head and prompt: correlation "
                f"{correlation:.3f}, error {error:.2f} of the exact effects' root mean square"
            )
        return "\n".join(lines)


def _check_level(level: Any) -> None:
    if not isinstance(level, (int, float)) or not 0.5 <= level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.95")
