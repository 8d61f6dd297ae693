"""Adds the columns from results of the same run on random weights to a comparison table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.contrast.differences import Differences, check_cells, differences
from mechattn.contrast.quantities import variable_of
from mechattn.errors import OptionError
from mechattn.results.provenance import stored_condition
from mechattn.results.result import Result, part_of
from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import FEWEST_DRAWS, against_draws
from mechattn.stats.resolution import random_words
from mechattn.stats.units import Units

if TYPE_CHECKING:
    from mechattn.contrast.contrast import Contrast

MARK = (
    "random: "  # how the provenance of a model with redrawn weights starts its description of them
)


def check_random(random: Any, asked: Contrast) -> None:
    """Refuse results that are too few, not from random models, or from a different run."""
    result, conditions = asked.result, (asked.condition, asked.to)
    draws = list(random) if isinstance(random, (list, tuple)) else None
    if draws is None or not all(hasattr(draw, "provenance") for draw in draws):
        raise OptionError(
            "random=…: give a list of results, as ma.run_random(model, prompts, conditions) returns"
        )
    if len(draws) < FEWEST_DRAWS:
        raise OptionError(
            f"random holds {len(draws)} results; give at least {FEWEST_DRAWS}: run_random(…, draws=3)"
        )
    if asked.other is not None:
        raise OptionError(
            "random=… belongs to one model; compare two conditions of one result, without other=…"
        )
    for number, draw in enumerate(draws):
        if why := _unlike(draw, result, conditions):
            raise OptionError(
                f"random[{number}] {why}: run ma.run_random with the model, prompts, conditions, analyses and seed of "
                "the result"
            )
    if len(kinds := sorted({_weights(draw).split(",")[0] for draw in draws})) > 1:
        raise OptionError(f"random mixes {' and '.join(kinds)}; give draws of one kind at a time")
    hashes = [
        r.provenance["model"].get("weights_hash", number)
        for number, r in enumerate([*draws, result])
    ]
    if len(set(hashes)) < len(hashes):
        raise OptionError(
            "random holds the same weights twice, or those of the result; draw each with another seed, as run_random "
            "does"
        )


class BesideRandom:
    """Gathers the changes of random models for a table whose layers are processed in blocks."""

    def __init__(
        self, random: Seq[Result], asked: Contrast, units: Units, shown: np.ndarray
    ) -> None:
        self.random, self.asked, self.units, self.shown = random, asked, units, shown
        self._means: list[np.ndarray] = []
        self._draws: list[np.ndarray] = []
        self._rounding: list[np.ndarray] = []
        self._dims: list[Any] = []

    def see(self, made: Differences) -> None:
        """Add the differences of some layers."""
        self._means.append(self._mean(made.difference))
        self._draws.append(np.stack([self._mean(self._change(draw, made)) for draw in self.random]))
        self._rounding.append(made.rounding(self.units, self.shown))
        self._dims = list(made.difference.dims[1:])

    def table(self, table: pd.DataFrame, cells: np.ndarray) -> pd.DataFrame:
        """Return the table with the columns null_random, random_low, random_high, p_random and q_random."""
        means, rounding = np.concatenate(self._means), np.concatenate(self._rounding)
        draws = np.concatenate(self._draws, axis=1)
        head = self._dims.index("head") if "head" in self._dims else None
        found = against_draws(means, draws, head, table.attrs["level"], rounding)
        both = np.where(
            np.isnan(found.p), np.nan, 1.0
        )  # of cells that the other half of the prompts didn't choose
        both[cells] = np.maximum(table[f"p_{table.attrs['tested']}"], found.p[cells])
        columns = {
            "null_random": found.mean[cells],
            "random_low": found.low[cells],
            "random_high": found.high[cells],
        }
        columns |= {"p_random": found.p[cells], "q_random": false_discovery(both)[cells]}
        kind = _weights(self.random[0]).removeprefix(MARK).split(",")[0]
        smallest, tests = 1 / (found.compared + 1), int((~np.isnan(both)).sum())
        beside = table.assign(**columns)
        beside.attrs = table.attrs | {
            "null_random": f"random weights ({kind}): {len(self.random)} draws, {found.compared} heads compared",
            "smallest_p_random": smallest,
            "tests_random": tests,
            "resolution_random": random_words(len(self.random), tests, found.compared),
        }
        return beside

    def _mean(self, difference: xr.DataArray) -> np.ndarray:
        return np.asarray(self.units.means(difference.values)[self.shown].mean(0))

    def _change(self, draw: Result, made: Differences) -> xr.DataArray:
        """The differences of a draw in the cells of the result; NaN where the draw has none."""
        if "layer" in made.difference.dims:
            layers = variable_of(draw, self.asked.quantity).layer.values
            draw = part_of(draw, "layer", np.isin(layers, made.difference.layer.values))
        found = differences(replace(self.asked, result=draw, scale=made.scale, null="uniform"))
        if not found.cells.any() and found.ours.notnull().any():
            check_cells(self.asked, made.scale, found.cells.size, found.left_out)
        return found.difference.reindex_like(made.difference)


def _unlike(draw: Result, result: Result, conditions: Seq[str]) -> str:
    """How the run of a random model differs from that of the result; empty if it does not."""
    theirs, ours = (r.provenance["model"] for r in (draw, result))
    if not _weights(draw).startswith(MARK):
        return f"comes from {theirs['name']}, whose weights are not random"
    for part in ("architecture", "layers", "heads", "parameters"):
        if theirs.get(part) != ours.get(part):
            return f"comes from another model ({part} {theirs.get(part)}, in the result {ours.get(part)})"
    if draw.provenance["prompts"]["hash"] != result.provenance["prompts"]["hash"]:
        return "has other prompts"
    for name in conditions:
        if name not in draw.conditions:
            return f"has no condition {name!r}"
        if stored_condition(draw, name) != stored_condition(result, name):
            return f"has a different condition named {name!r}"
        one, other = (r["sequences"].tokens.sel(condition=name).values for r in (draw, result))
        width = min(one.shape[-1], other.shape[-1])
        padded = (one[..., width:] == -2).all() and (
            other[..., width:] == -2
        ).all()  # by what else was in a run
        if not padded or not np.array_equal(one[..., :width], other[..., :width]):
            return f"read other tokens with {name!r}, so its seed or tokenizer differs"
    return ""


def _weights(result: Result) -> str:
    return str(result.provenance["model"].get("weights", ""))
