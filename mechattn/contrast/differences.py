"""The differences between two conditions, prompt by prompt, and the differences that the null
expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from mechattn.contrast.quantities import (
    FURTHER,
    NULLS,
    Scale,
    Side,
    absent,
    check_condition,
    check_present,
    chosen,
    values_of,
    variable_of,
    which_have,
)
from mechattn.contrast.question import Question
from mechattn.errors import OptionError, warn
from mechattn.results.provenance import stored_condition
from mechattn.stats.paired import ROUNDING
from mechattn.stats.units import Units

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
        dims = self.difference.dims[1:]
        names = []
        for indices in np.argwhere(~self.cells):
            labels = [
                f"{dim} {self.difference[dim].values[index]}" for dim, index in zip(dims, indices)
            ]
            names.append(" ".join(labels))
        return names

    def rounding(self, units: Units, unit_indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The largest mean difference that counts as none [*cells]: the float32 error between two
        equal numbers.
        """
        if self.scale == "log-ratio":
            return np.full(self.cells.shape, ROUNDING)
        sizes = units.means(abs(self.theirs.values))
        return ROUNDING * sizes[unit_indices].mean(0)


def differences(contrast: Question, labels: Labels | None = None) -> Differences:
    """The differences of a comparison; ``labels`` where the results hold only some of their
    layers."""
    if labels is None:
        labels = labels_of([contrast])
    ours, theirs, null, their_null = aligned(contrast, labels)
    variable = variable_of(contrast.result, contrast.quantity)
    scale = contrast.scale
    if scale is None:
        is_ratio = (
            variable.attrs.get("compared", "ratio") == "ratio"
        )  # not if the baseline may be 0
        scale = "log-ratio" if is_ratio else "difference"
    difference = ours.copy(data=_between(ours.values, theirs.values, scale))

    expected = None
    null_words = NO_NULL
    if null is not None and their_null is not None:
        expected = _expected(null.values, their_null.values, scale)
        null_words = NULLS[contrast.null_used]
    elif _inserts_alike(contrast):
        expected = np.zeros(ours.shape)
        null_words = "no difference"

    cells = np.ones(ours.shape[1:], dtype=bool)
    for values in (ours, theirs, null, their_null):
        if values is None:
            continue
        # NaN if a prompt has none; a value that is 0 or negative has no ratio.
        least = values.values.min(0)
        cells &= least > 0 if scale == "log-ratio" else ~np.isnan(least)
    return Differences(ours, theirs, difference, expected, null_words, cells, scale)


def labels_of(blocks: Iterable[Question]) -> Labels:
    """The labels of a quantity's further dimensions that both conditions have, in any of some
    blocks of layers.
    """
    present: dict[str, list[set[object]]] = {}  # by dimension, of both conditions
    attended: set[object] = set()  # segments that get attention in any prompt
    order: dict[str, list[object]] = {}
    for contrast in blocks:
        for result, condition in contrast.sides:
            check_condition(result, condition)
        variables = [variable_of(result, contrast.quantity) for result, _ in contrast.sides]
        dims = [dim for dim in FURTHER if dim in variables[0].dims]
        if contrast.segment is not None and "segment" in dims:
            dims.remove("segment")
        if not dims:
            break  # and nothing is read
        sides = [
            chosen(variable, condition, contrast.segment)
            for variable, (_, condition) in zip(variables, contrast.sides)
        ]
        for dim in dims:
            order[dim] = sides[0][dim].values.tolist()
            label_sets = present.setdefault(dim, [set(), set()])
            for label_set, values in zip(label_sets, sides):
                label_set |= _present_labels(values, dim)
                if dim == "to_segment":
                    attended |= _labels_where(values, dim, values.fillna(0) != 0)

    labels = {}
    for dim, (ours, theirs) in present.items():
        comparable = ours & theirs
        if dim == "to_segment":
            # Attention to what comes later is 0 in every prompt and condition.
            comparable &= attended
        labels[dim] = [label for label in order[dim] if label in comparable]
    return labels


def _present_labels(values: xr.DataArray, dim: str) -> set[object]:
    """The labels of a dimension that have a value; of a band in every prompt, as short ones don't
    reach as far back.
    """
    has_value = values.notnull()
    if dim == "band":
        has_value = has_value.all("prompt")
    return _labels_where(values, dim, has_value)


def _labels_where(values: xr.DataArray, dim: str, mask: xr.DataArray) -> set[object]:
    over = [name for name in mask.dims if name != dim]
    return set(values[dim].values[mask.any(over).values].tolist())


def aligned(contrast: Question, labels: Labels) -> Four:
    """Values and references, and the nulls of both, with the same coordinates."""
    ours, null = _of_side(contrast, contrast.sides[0], labels)
    theirs, their_null = _of_side(contrast, contrast.sides[1], labels)
    quantity = contrast.quantity
    for dim in ("prompt", "layer", "head"):
        if dim in ours.dims and not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(
                f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other"
            )
    options = [variable_of(result, quantity).attrs.get("options") for result, _ in contrast.sides]
    if options[0] != options[1]:
        raise OptionError(
            f"{quantity!r} was measured with {options[0]} in one result, {options[1]} in the other"
        )
    return ours, theirs, null, their_null


def _of_side(
    contrast: Question, side: Side, labels: Labels
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """The values of one condition and of its null, with the labels that both conditions have."""
    result, condition = side
    quantity = contrast.quantity
    values, null = values_of(result, condition, quantity, contrast.segment, contrast.null_used)
    fewer = {
        dim: kept_labels
        for dim, kept_labels in labels.items()
        if kept_labels != values[dim].values.tolist()
    }
    values = values.sel(fewer)
    check_present(values, quantity, contrast.segment, side, contrast.sides)
    if null is None:
        return values, None
    differing = [
        dim for dim in null.dims if not np.array_equal(null[dim].values, values[dim].values)
    ]
    null = null.sel({dim: values[dim] for dim in differing})
    return values, null.broadcast_like(values).transpose(*values.dims)


def check_measured(contrast: Question) -> None:
    """Refuse a comparison of a quantity that a condition lacks in some prompts."""
    for side in contrast.sides:
        lacking = int((~which_have(side, contrast.quantity, contrast.segment)).sum())
        if lacking:
            raise absent(lacking, contrast.quantity, contrast.segment, side, contrast.sides)


def no_cells(contrast: Question, scale: Scale) -> OptionError:
    """The error for a comparison without a cell to compare."""
    check_measured(contrast)
    quantity = contrast.quantity
    if scale == "log-ratio":
        return OptionError(
            f'{quantity!r} has no ratio in any cell; compare it with scale="difference"'
        )
    return OptionError(f"{quantity!r} has no value in any cell")


def check_cells(contrast: Question, scale: Scale, cells: int, left_out: Sequence[str]) -> None:
    """Refuse a comparison without cells; warn of missing ones."""
    if len(left_out) == cells:
        raise no_cells(contrast, scale)
    if left_out:
        names = ", ".join(left_out[:4])
        if len(left_out) > 4:
            names += " …"
        warn(
            f"{len(left_out)} of {cells} cells are left out ({names}): {contrast.quantity!r} is not"
            ' there, or it is 0 or negative in some prompt and has no ratio, which scale="difference"'
            " does not need"
        )


def _between(ours: np.ndarray, theirs: np.ndarray, scale: Scale) -> np.ndarray:
    if scale == "difference":
        return ours - theirs
    with np.errstate(divide="ignore", invalid="ignore"):  # in omitted cells
        ratio = ours / theirs
        return np.log(ratio, out=ratio)


def _expected(null: np.ndarray, their_null: np.ndarray, scale: Scale) -> np.ndarray:
    """The difference of the nulls, computed once where all heads share a number."""
    strides = zip(null.strides, their_null.strides)
    without_copies = tuple(slice(None) if any(pair) else slice(1) for pair in strides)
    difference = _between(null[without_copies], their_null[without_copies], scale)
    return np.broadcast_to(difference, null.shape)


def _inserts_alike(contrast: Question) -> bool:
    """Whether two conditions differ only in which tokens they insert, so no change between them is
    by definition.
    """
    if not all(stored_condition(result, name).inserts_only for result, name in contrast.sides):
        return False
    ours, theirs = (
        result["sequences"].origin.sel(condition=name).values for result, name in contrast.sides
    )
    return np.array_equal(ours, theirs)
