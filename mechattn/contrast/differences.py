"""The differences between two conditions, prompt by prompt, and the differences that the null expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import xarray as xr

from mechattn.contrast.quantities import (
    FURTHER,
    NULLS,
    absent,
    check_condition,
    check_present,
    chosen,
    values_of,
    variable_of,
    which_have,
)
from mechattn.errors import OptionError, warn
from mechattn.results.provenance import stored_condition
from mechattn.stats.paired import ROUNDING
from mechattn.stats.units import Units

if TYPE_CHECKING:
    from mechattn.contrast.contrast import Contrast

Scale = Literal["log-ratio", "difference"]
Labels = Mapping[str, list[object]]  # of further dimensions: those with values in both conditions
Four = tuple[xr.DataArray, xr.DataArray, xr.DataArray | None, xr.DataArray | None]
NO_NULL = "no null is known; a change may be there by definition"


@dataclass(frozen=True, eq=False)
class Differences:
    """Differences by prompt; arrays are [prompt, *cells]."""

    ours: xr.DataArray
    theirs: xr.DataArray  # the values of the condition that it is compared with
    difference: xr.DataArray  # ``log(ours / theirs)``, or ``ours − theirs``
    expected: np.ndarray | None  # the difference under the null; None if no null is known
    null: str  # in words
    cells: np.ndarray  # which have a difference in every prompt [*cells]
    scale: Scale

    @property
    def left_out(self) -> list[str]:
        """The names of the cells without a difference."""
        labels = [(dim, self.difference[dim].values) for dim in self.difference.dims[1:]]
        where = np.argwhere(~self.cells)
        return [" ".join(f"{dim} {of[i]}" for (dim, of), i in zip(labels, at)) for at in where]

    def rounding(self, units: Units, some: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The largest mean difference that counts as none [*cells]: the float32 error between two equal numbers."""
        if self.scale == "log-ratio":
            return np.full(self.cells.shape, ROUNDING)
        return ROUNDING * units.means(abs(self.theirs.values))[some].mean(0)


def differences(asked: Contrast, labels: Labels | None = None) -> Differences:
    """The differences of a comparison; ``labels`` where the results hold only some of their layers."""
    parts = aligned(asked, labels_of([asked]) if labels is None else labels)
    variable = variable_of(asked.result, asked.quantity)
    ratio = variable.attrs.get("compared", "ratio") == "ratio"  # not if the baseline may be 0
    scale: Scale = asked.scale or ("log-ratio" if ratio else "difference")
    ours, theirs, null, their_null = parts
    difference = ours.copy(data=_between(ours.values, theirs.values, scale))
    if null is not None and their_null is not None:
        expected, words = _expected(null.values, their_null.values, scale), NULLS[asked.null_used]
    elif _alike(asked):
        expected, words = np.zeros(ours.shape), "no difference"
    else:
        expected, words = None, NO_NULL
    cells = np.ones(ours.shape[1:], dtype=bool)
    for part in parts:
        if part is not None:
            least = part.values.min(
                0
            )  # NaN if a prompt has none; a value that is 0 or negative has no ratio
            cells &= least > 0 if scale == "log-ratio" else ~np.isnan(least)
    return Differences(ours, theirs, difference, expected, words, cells, scale)


def labels_of(blocks: Iterable[Contrast]) -> Labels:
    """The labels of a quantity's further dimensions that both conditions have, in any of some blocks of layers."""
    have: dict[str, list[set[object]]] = {}
    order: dict[str, list[object]] = {}
    for asked in blocks:
        for result, condition in asked.sides:
            check_condition(result, condition)
        variables = [variable_of(result, asked.quantity) for result, _ in asked.sides]
        dims = [
            dim
            for dim in FURTHER
            if dim in variables[0].dims and (dim != "segment" or asked.segment is None)
        ]
        if not dims:
            break  # and nothing is read
        values = [
            chosen(variable, name, asked.segment)
            for variable, (_, name) in zip(variables, asked.sides)
        ]
        for dim in dims:
            order[dim] = values[0][dim].values.tolist()
            sets = have.setdefault(dim, [set(), set(), set()])
            for found, one in zip(sets, values):
                others = [
                    other
                    for other in one.dims
                    if other != dim and (other != "prompt" or dim != "band")
                ]
                there = (
                    one.notnull()
                )  # of a band in every prompt, as short prompts don't reach as far back
                there = (there.all("prompt") if dim == "band" else there).any(others)
                found |= set(one[dim].values[there.values].tolist())
                if (
                    dim == "to_segment"
                ):  # attention to what comes later is 0 in every prompt and condition
                    others = [other for other in one.dims if other != dim]
                    sets[2] |= set(
                        one[dim].values[(one.fillna(0) != 0).any(others).values].tolist()
                    )
    both = {
        dim: ours & theirs & (read if dim == "to_segment" else ours)
        for dim, (ours, theirs, read) in have.items()
    }
    return {dim: [label for label in order[dim] if label in both[dim]] for dim in have}


def aligned(asked: Contrast, labels: Labels) -> Four:
    """Values and references, and the nulls of both, with the same coordinates."""
    quantity, segment = asked.quantity, asked.segment
    made = []
    for result, condition in asked.sides:
        values, null = values_of(result, condition, quantity, segment, asked.null_used)
        values = values.sel(
            {dim: of for dim, of in labels.items() if of != values[dim].values.tolist()}
        )
        check_present(values, quantity, segment, (result, condition), asked.sides)
        if null is not None:
            shared = [
                dim for dim in null.dims if not np.array_equal(null[dim].values, values[dim].values)
            ]
            null = (
                null.sel({dim: values[dim] for dim in shared})
                .broadcast_like(values)
                .transpose(*values.dims)
            )
        made.append((values, null))
    (ours, null), (theirs, their_null) = made
    for dim in ("prompt", "layer", "head"):
        if dim in ours.dims and not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(
                f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other"
            )
    options = [variable_of(result, quantity).attrs.get("options") for result, _ in asked.sides]
    if options[0] != options[1]:
        raise OptionError(
            f"{quantity!r} was measured with {options[0]} in one result, {options[1]} in the other"
        )
    return ours, theirs, null, their_null


def check_measured(asked: Contrast) -> None:
    """Refuse a comparison of a quantity that a condition lacks in some prompts."""
    for side in asked.sides:
        if lacking := int((~which_have(side, asked.quantity, asked.segment)).sum()):
            raise absent(lacking, asked.quantity, asked.segment, side, asked.sides)


def check_cells(asked: Contrast, scale: Scale, cells: int, left_out: Seq[str]) -> None:
    """Refuse a comparison without cells; warn of missing ones."""
    if len(left_out) == cells:
        check_measured(asked)
        lacks = (
            'ratio in any cell; compare it with scale="difference"'
            if scale == "log-ratio"
            else "value in any cell"
        )
        raise OptionError(f"{asked.quantity!r} has no {lacks}")
    if left_out:
        shown = ", ".join(left_out[:4]) + (" …" if len(left_out) > 4 else "")
        warn(
            f"{len(left_out)} of {cells} cells are left out ({shown}): {asked.quantity!r} is not there, or it is 0 or "
            'negative in some prompt and has no ratio, which scale="difference" does not need'
        )


def _between(one: np.ndarray, other: np.ndarray, scale: Scale) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # in omitted cells
        made = one / other if scale == "log-ratio" else one - other
        return np.log(made, out=made) if scale == "log-ratio" else made


def _expected(null: np.ndarray, their_null: np.ndarray, scale: Scale) -> np.ndarray:
    """The difference of the nulls, computed once where all heads share a number."""
    strides = zip(null.strides, their_null.strides)
    one = tuple(slice(None) if any(each) else slice(1) for each in strides)
    return np.broadcast_to(_between(null[one], their_null[one], scale), null.shape)


def _alike(asked: Contrast) -> bool:
    """Whether two conditions differ only in which tokens they insert, so no change between them is by definition."""
    if not all(stored_condition(result, name).inserts_only for result, name in asked.sides):
        return False
    return np.array_equal(
        *(result["sequences"].origin.sel(condition=name).values for result, name in asked.sides)
    )
