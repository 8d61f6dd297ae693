"""Adds the columns from results of the same run on random weights to a comparison table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.contrast.differences import Differences, differences, no_cells
from mechattn.contrast.quantities import variable_of
from mechattn.contrast.question import Question
from mechattn.errors import OptionError
from mechattn.results.provenance import stored_condition
from mechattn.results.result import Result, part_of
from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import FEWEST_DRAWS, against_draws
from mechattn.stats.resolution import random_words
from mechattn.stats.units import Units

# How the provenance of a model with redrawn weights starts its description of them.
MARK = "random: "


def check_random(random: Any, contrast: Question) -> None:
    """Refuse results that are too few, not from random models, or from a different run."""
    result = contrast.result
    conditions = (contrast.condition, contrast.to)
    is_list = isinstance(random, (list, tuple))
    if not is_list or not all(hasattr(draw, "provenance") for draw in random):
        raise OptionError(
            "random=…: give a list of results, as ma.run_random(model, prompts, conditions) returns"
        )
    draws = list(random)
    if len(draws) < FEWEST_DRAWS:
        raise OptionError(
            f"random holds {len(draws)} results; give at least {FEWEST_DRAWS}: run_random(…,"
            " draws=3)"
        )
    if contrast.other is not None:
        raise OptionError(
            "random=… belongs to one model; compare two conditions of one result, without other=…"
        )
    for number, draw in enumerate(draws):
        why = _unlike(draw, result, conditions)
        if why:
            raise OptionError(
                f"random[{number}] {why}: run ma.run_random with the model, prompts, conditions,"
                " analyses and seed of the result"
            )
    kinds = sorted({_kind_of_weights(draw) for draw in draws})
    if len(kinds) > 1:
        raise OptionError(f"random mixes {' and '.join(kinds)}; give draws of one kind at a time")
    hashes = {
        run.provenance["model"].get("weights_hash", number)
        for number, run in enumerate([*draws, result])
    }
    if len(hashes) <= len(draws):
        raise OptionError(
            "random holds the same weights twice, or those of the result; draw each with another"
            " seed, as run_random does"
        )


class BesideRandom:
    """Gathers the changes of random models for a table whose layers are processed in blocks."""

    def __init__(
        self, random: Sequence[Result], contrast: Question, units: Units, unit_indices: np.ndarray
    ) -> None:
        self.random = random
        self.contrast = contrast
        self.units = units
        self.unit_indices = unit_indices  # of those that the table reports
        self._means: list[np.ndarray] = []
        self._draws: list[np.ndarray] = []
        self._rounding: list[np.ndarray] = []
        self._dims: list[Any] = []

    def see(self, block: Differences) -> None:
        """Add the differences of some layers."""
        of_draws = [self._mean(self._change(draw, block)) for draw in self.random]
        self._means.append(self._mean(block.difference))
        self._draws.append(np.stack(of_draws))
        self._rounding.append(block.rounding(self.units, self.unit_indices))
        self._dims = list(block.difference.dims[1:])

    def table(self, table: pd.DataFrame, mask: np.ndarray) -> pd.DataFrame:
        """Return the table with the columns null_random, random_low, random_high, p_random and
        q_random.
        """
        means = np.concatenate(self._means)
        draws = np.concatenate(self._draws, axis=1)
        rounding = np.concatenate(self._rounding)
        head_axis = self._dims.index("head") if "head" in self._dims else None
        beside = against_draws(means, draws, head_axis, table.attrs["level"], rounding)

        # Of cells that the other half of the prompts didn't choose, p is 1.
        p_both = np.where(np.isnan(beside.p), np.nan, 1.0)
        p_both[mask] = np.maximum(table[f"p_{table.attrs['tested']}"], beside.p[mask])
        with_random = table.assign(
            null_random=beside.mean[mask],
            random_low=beside.low[mask],
            random_high=beside.high[mask],
            p_random=beside.p[mask],
            q_random=false_discovery(p_both)[mask],
        )
        kind = _kind_of_weights(self.random[0]).removeprefix(MARK)
        count = len(self.random)
        tests = int((~np.isnan(p_both)).sum())
        with_random.attrs = table.attrs | {
            "null_random": (
                f"random weights ({kind}): {count} draws, {beside.compared} heads compared"
            ),
            "smallest_p_random": 1 / (beside.compared + 1),
            "tests_random": tests,
            "resolution_random": random_words(count, tests, beside.compared),
        }
        return with_random

    def _mean(self, difference: xr.DataArray) -> np.ndarray:
        of_units = self.units.means(difference.values)[self.unit_indices]
        return np.asarray(of_units.mean(0))

    def _change(self, draw: Result, block: Differences) -> xr.DataArray:
        """The differences of a draw in the cells of the result; NaN where the draw has none."""
        if "layer" in block.difference.dims:
            layers = variable_of(draw, self.contrast.quantity).layer.values
            draw = part_of(draw, "layer", np.isin(layers, block.difference.layer.values))
        contrast = replace(self.contrast, result=draw, scale=block.scale, null="uniform")
        of_draw = differences(contrast)
        if not of_draw.cells.any() and of_draw.ours.notnull().any():
            raise no_cells(self.contrast, block.scale)
        return of_draw.difference.reindex_like(block.difference)


def _unlike(draw: Result, result: Result, conditions: Sequence[str]) -> str:
    """How the run of a random model differs from that of the result; empty if it does not."""
    theirs = draw.provenance["model"]
    ours = result.provenance["model"]
    if not _weights(draw).startswith(MARK):
        return f"comes from {theirs['name']}, whose weights are not random"
    for detail in ("architecture", "layers", "heads", "parameters"):
        if theirs.get(detail) != ours.get(detail):
            return (
                f"comes from another model ({detail} {theirs.get(detail)}, in the result"
                f" {ours.get(detail)})"
            )
    if draw.provenance["prompts"]["hash"] != result.provenance["prompts"]["hash"]:
        return "has other prompts"
    for name in conditions:
        if name not in draw.conditions:
            return f"has no condition {name!r}"
        if stored_condition(draw, name) != stored_condition(result, name):
            return f"has a different condition named {name!r}"
        if not _same_tokens(draw, result, name):
            return f"read other tokens with {name!r}, so its seed or tokenizer differs"
    return ""


def _same_tokens(draw: Result, result: Result, condition: str) -> bool:
    """Whether two runs read the same tokens; the width of the padding depends on their other
    conditions.
    """
    tokens = draw["sequences"].tokens.sel(condition=condition).values
    other_tokens = result["sequences"].tokens.sel(condition=condition).values
    width = min(tokens.shape[-1], other_tokens.shape[-1])
    is_padding = (tokens[..., width:] == -2).all() and (other_tokens[..., width:] == -2).all()
    return bool(is_padding) and np.array_equal(tokens[..., :width], other_tokens[..., :width])


def _weights(result: Result) -> str:
    return str(result.provenance["model"].get("weights", ""))


def _kind_of_weights(result: Result) -> str:
    return _weights(result).split(",")[0]
