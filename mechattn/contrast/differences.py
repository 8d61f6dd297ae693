"""The differences between two conditions, prompt by prompt, and the differences that the null
expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xarray as xr

from mechattn.contrast.quantities import (
    FURTHER,
    NULLS,
    Scale,
    Side,
    check_condition,
    check_measured,
    check_present,
    chosen,
    layer_blocks,
    values_of,
    variable_of,
)
from mechattn.contrast.question import Question
from mechattn.errors import OptionError, warn
from mechattn.results.provenance import stored_condition
from mechattn.stats.paired import ROUNDING
from mechattn.stats.units import Units

Labels = Mapping[str, list[object]]  # of further dimensions: those with values in both conditions
NO_NULL = "no null is known; a change may be there by definition"


@dataclass(frozen=True, eq=False)
class Differences:
    """Differences between two conditions in each prompt.

    Args:
        ours: The values of the condition [prompt, *cells].
        theirs: Those of the condition that it is compared with [prompt, *cells].
        difference: ``log(ours / theirs)``, or ``ours − theirs`` [prompt, *cells].
        expected: The difference under the null [prompt, *cells]; None if no null is known.
        null: The null, in words.
        cells: Which cells have a difference in every prompt [*cells].
        scale: The scale of the differences.
        predicts_no_change: Whether the null is that nothing changes.
    """

    ours: xr.DataArray
    theirs: xr.DataArray
    difference: xr.DataArray
    expected: np.ndarray | None
    null: str
    cells: np.ndarray
    scale: Scale
    predicts_no_change: bool

    @property
    def left_out(self) -> list[str]:
        """The names of the cells without a difference."""
        labels = cell_labels(self, ~self.cells)
        names = []
        for cell in zip(*labels.values(), strict=True):
            words = [f"{dim} {label}" for dim, label in zip(labels, cell, strict=True)]
            names.append(" ".join(words))
        return names

    def rounding(self, units: Units, unit_indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The largest mean difference that counts as none [*cells]: the float32 error between two
        equal numbers.
        """
        if self.scale == "log-ratio":
            return np.full(self.cells.shape, ROUNDING)
        sizes = units.means(abs(self.theirs.values))
        return ROUNDING * sizes[unit_indices].mean(0)


Blocks = Callable[[], Iterator[Differences]]


class Aligned(NamedTuple):
    """The values of both conditions and of their nulls, with the same coordinates."""

    ours: xr.DataArray
    theirs: xr.DataArray
    null: xr.DataArray | None
    their_null: xr.DataArray | None


def differences(contrast: Question, labels: Labels) -> Differences:
    """The differences of a comparison, at these labels of the further dimensions."""
    values = aligned(contrast, labels)
    ours, theirs, null, their_null = values

    scale = contrast.scale
    if scale is None:
        scale = "log-ratio"
        variable = variable_of(contrast.result, contrast.quantity)
        if variable.attrs.get("compared") == "difference":
            scale = "difference"  # as the baseline may be 0
    difference = ours.copy(data=_between(ours.values, theirs.values, scale))

    expected = None
    null_words = NO_NULL
    predicts_no_change = False
    if null is not None and their_null is not None:
        expected = _expected(null.values, their_null.values, scale)
        null_words = NULLS[contrast.null_used]
    elif _inserts_alike(contrast):
        expected = np.zeros(ours.shape)
        null_words = "no difference"
        predicts_no_change = True

    # A cell counts if every prompt has its values in both conditions and under both nulls.
    cells = np.ones(ours.shape[1:], dtype=bool)
    for side_values in values:
        if side_values is None:
            continue
        # NaN if a prompt has none; a value that is 0 or negative has no ratio.
        least = side_values.values.min(0)
        if scale == "log-ratio":
            cells &= least > 0
        else:
            cells &= ~np.isnan(least)
    return Differences(
        ours, theirs, difference, expected, null_words, cells, scale, predicts_no_change
    )


def layers_of(contrast: Question, resamples: int = 0) -> Blocks:
    """A function that yields the differences of a comparison, some layers at a time."""
    contrasts, labels = in_blocks(contrast, resamples)
    return lambda: (differences(block_contrast, labels) for block_contrast in contrasts)


def in_blocks(contrast: Question, resamples: int = 0) -> tuple[list[Question], Labels]:
    """The same question of some layers at a time, and the labels that both conditions have in any
    of them.
    """
    blocks = layer_blocks(contrast.result, contrast.quantity, contrast.segment, resamples)
    contrasts = [contrast.part("layer", block) for block in blocks]
    return contrasts, labels_of(contrasts)


def cell_labels(block: Differences, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The layer, head … of each cell of a mask."""
    indices = np.argwhere(mask).T  # [dim, cell]
    labels = {}
    for dim, index in zip(block.difference.dims[1:], indices, strict=True):
        labels[str(dim)] = block.difference[dim].values[index]
    return labels


def labels_of(blocks: Iterable[Question]) -> Labels:
    """The labels of a quantity's further dimensions that both conditions have, in any of some
    blocks of layers.

    Args:
        blocks: A comparison, some layers at a time.

    Returns:
        The labels of each further dimension, in the order of the result; empty if the quantity has
        none, or only segments of which the comparison names one.
    """
    order: dict[str, list[object]] = {}
    present: dict[str, list[set[object]]] = {}  # by dimension, of both conditions
    attended: set[object] = set()  # segments that get attention in any prompt

    for contrast in blocks:
        variables = []
        for result, condition in contrast.sides:
            check_condition(result, condition)
            variables.append(variable_of(result, contrast.quantity))
        dims = [dim for dim in FURTHER if dim in variables[0].dims]
        if contrast.segment is not None and "segment" in dims:
            dims.remove("segment")  # one is named
        if not dims:
            break  # and nothing is read

        sides = []
        for variable, (_, condition) in zip(variables, contrast.sides, strict=True):
            sides.append(chosen(variable, condition, contrast.segment))
        for dim in dims:
            order[dim] = sides[0][dim].values.tolist()
            label_sets = present.setdefault(dim, [set(), set()])
            for label_set, values in zip(label_sets, sides, strict=True):
                has_value = values.notnull()
                if dim == "band":  # short prompts don't reach as far back
                    has_value = has_value.all("prompt")
                label_set |= _labels_where(has_value, dim)
                if dim == "to_segment":
                    attended |= _labels_where(values.fillna(0) != 0, dim)

    labels = {}
    for dim, (ours, theirs) in present.items():
        comparable = ours & theirs
        if dim == "to_segment":
            # Attention to what comes later is 0 in every prompt and condition.
            comparable &= attended
        labels[dim] = [label for label in order[dim] if label in comparable]
    return labels


def _labels_where(mask: xr.DataArray, dim: str) -> set[object]:
    """The labels of a dimension at which any value of a mask is true."""
    over = [name for name in mask.dims if name != dim]
    has_any = mask.any(over).values
    return set(mask[dim].values[has_any].tolist())


def aligned(contrast: Question, labels: Labels) -> Aligned:
    """The values of both conditions and of their nulls, with the same coordinates.

    Raises:
        OptionError: The results have other prompts, layers or heads, or measured the quantity with
            other options.
    """
    ours, null = _of_side(contrast, contrast.sides[0], labels)
    theirs, their_null = _of_side(contrast, contrast.sides[1], labels)
    quantity = contrast.quantity
    for dim in ("prompt", "layer", "head"):
        if dim not in ours.dims:
            continue
        if not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(
                f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other"
            )

    # How the quantity was measured, such as with which threshold.
    options = []
    for result, _ in contrast.sides:
        variable = variable_of(result, quantity)
        options.append(variable.attrs.get("options"))
    if options[0] != options[1]:
        raise OptionError(
            f"{quantity!r} was measured with {options[0]} in one result, {options[1]} in the other"
        )
    return Aligned(ours, theirs, null, their_null)


def _of_side(
    contrast: Question, side: Side, labels: Labels
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """The values of one condition and of its null, with the labels that both conditions have."""
    result, condition = side
    quantity = contrast.quantity
    segment = contrast.segment
    values, null = values_of(result, condition, quantity, segment, contrast.null_used)

    # Selecting all labels would copy the values.
    fewer_labels = {}
    for dim, comparable in labels.items():
        if comparable != values[dim].values.tolist():
            fewer_labels[dim] = comparable
    values = values.sel(fewer_labels)
    check_present(values, quantity, segment, side)
    if null is None:
        return values, None

    # The null at the same labels, spread over every dimension of the values without copying it.
    differing = {}
    for null_dim in null.dims:
        if not np.array_equal(null[null_dim].values, values[null_dim].values):
            differing[null_dim] = values[null_dim]
    null = null.sel(differing)
    null = null.broadcast_like(values)
    return values, null.transpose(*values.dims)


def no_cells(contrast: Question, scale: Scale) -> OptionError:
    """The error for a comparison without a cell to compare."""
    for side in contrast.sides:
        check_measured(side, contrast.quantity, contrast.segment)
    if scale == "log-ratio":
        return OptionError(
            f'{contrast.quantity!r} has no ratio in any cell; compare it with scale="difference"'
        )
    return OptionError(f"{contrast.quantity!r} has no value in any cell")


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
            " there, or it is 0 or negative in some prompt and has no ratio, which"
            ' scale="difference"'
            " does not need"
        )


def _between(ours: np.ndarray, theirs: np.ndarray, scale: Scale) -> np.ndarray:
    """The difference of two values on a scale."""
    if scale == "difference":
        return ours - theirs
    with np.errstate(divide="ignore", invalid="ignore"):  # in omitted cells
        ratio = ours / theirs
        return np.log(ratio, out=ratio)


def _expected(null: np.ndarray, their_null: np.ndarray, scale: Scale) -> np.ndarray:
    """The difference of the nulls, computed once where all heads share a number.

    A null that was broadcast to the heads has a stride of 0 there: all read the same memory.
    """
    indices = []
    for stride, their_stride in zip(null.strides, their_null.strides, strict=True):
        is_shared = stride == their_stride == 0
        if is_shared:
            indices.append(slice(1))
        else:
            indices.append(slice(None))
    without_copies = tuple(indices)
    difference = _between(null[without_copies], their_null[without_copies], scale)
    return np.broadcast_to(difference, null.shape)


def _inserts_alike(contrast: Question) -> bool:
    """Whether two conditions differ only in which tokens they insert, so no change between them is
    by definition.
    """
    origins = []
    for result, condition in contrast.sides:
        if not stored_condition(result, condition).inserts_only:
            return False
        origin = result["sequences"].origin.sel(condition=condition)
        origins.append(origin.values)
    return np.array_equal(*origins)
