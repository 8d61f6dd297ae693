"""The differences between two conditions, prompt by prompt, and the differences that the null
expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xarray as xr

from mechattn.contrast.quantities import (
    FURTHER_DIMS,
    NULLS,
    Scale,
    Side,
    check_condition,
    check_measured,
    check_present,
    labels_where,
    layer_blocks,
    values_in,
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


class Aligned(NamedTuple):
    """The values of both conditions and of their nulls, with the same coordinates; a null lacks the
    dimensions along which it is the same.
    """

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
    difference = _between(ours, theirs, scale)

    expected = None
    null_words = NO_NULL
    predicts_no_change = False
    if null is not None and their_null is not None:
        # A view: one number for all heads is not copied for each.
        expected = (
            _between(null, their_null, scale).broadcast_like(ours).transpose(*ours.dims).values
        )
        null_words = NULLS[contrast.null_used]
    elif _inserts_alike(contrast):
        expected = np.zeros(ours.shape)
        null_words = "no difference"
        predicts_no_change = True

    # A cell counts if every prompt has its values in both conditions and under both nulls.
    cells = xr.ones_like(ours[0], dtype=bool)
    for side_values in values:
        if side_values is None:
            continue
        # NaN if a prompt has none; a value that is 0 or negative has no ratio.
        least = side_values.min("prompt", skipna=False)
        if scale == "log-ratio":
            cells &= least > 0
        else:
            cells &= least.notnull()
    return Differences(
        ours, theirs, difference, expected, null_words, cells.values, scale, predicts_no_change
    )


def layers_of(contrast: Question, resamples: int = 0) -> Iterator[Differences]:
    """Yield the differences of a comparison, some layers at a time."""
    contrasts, labels = in_blocks(contrast, resamples)
    for block_contrast in contrasts:
        yield differences(block_contrast, labels)


def in_blocks(contrast: Question, resamples: int = 0) -> tuple[list[Question], Labels]:
    """The same question of some layers at a time, and the labels that both conditions have in any
    of them.
    """
    blocks = layer_blocks(contrast.result, contrast.quantity, contrast.segment, resamples)
    contrasts = [contrast.of_layers(block) for block in blocks]
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
    present: dict[tuple[str, int], set[object]] = {}  # by dimension and condition
    attended: set[object] = set()  # segments that get attention in any prompt

    for contrast in blocks:
        for side, (result, condition) in enumerate(contrast.sides):
            check_condition(result, condition)
            variable = variable_of(result, contrast.quantity)
            dims = [dim for dim in FURTHER_DIMS if dim in variable.dims]
            if contrast.segment is not None and "segment" in dims:
                dims.remove("segment")  # one is named
            if not dims:
                continue  # and nothing is read

            values = values_in(variable, condition, contrast.segment)
            for dim in dims:
                order.setdefault(dim, values[dim].values.tolist())
                has_value = values.notnull()
                if dim == "band":  # short prompts don't reach as far back
                    has_value = has_value.all("prompt")
                present.setdefault((dim, side), set()).update(labels_where(has_value, dim))
                if dim == "to_segment":
                    attended |= labels_where(values.fillna(0) != 0, dim)

    labels = {}
    for dim, dim_labels in order.items():
        comparable = present[dim, 0] & present[dim, 1]
        if dim == "to_segment":
            # Attention to what comes later is 0 in every prompt and condition.
            comparable &= attended
        labels[dim] = [label for label in dim_labels if label in comparable]
    return labels


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
    options, their_options = [
        variable_of(result, quantity).attrs.get("options") for result, _ in contrast.sides
    ]
    if options != their_options:
        raise OptionError(
            f"{quantity!r} was measured with {options} in one result, {their_options} in the other"
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

    differing = {}
    for null_dim in null.dims:
        if not np.array_equal(null[null_dim].values, values[null_dim].values):
            differing[null_dim] = values[null_dim]
    return values, null.sel(differing)


def no_cells_error(contrast: Question, scale: Scale) -> OptionError:
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
        raise no_cells_error(contrast, scale)
    if left_out:
        names = ", ".join(left_out[:4])
        if len(left_out) > 4:
            names += " …"
        warn(
            f"{len(left_out)} of {cells} cells are left out ({names}): {contrast.quantity!r} is not"
            ' there, or it is 0 or negative in some prompt and has no ratio, which scale="difference"'
            " does not need"
        )


def _between(ours: xr.DataArray, theirs: xr.DataArray, scale: Scale) -> xr.DataArray:
    """The difference of values on a scale."""
    if scale == "difference":
        return ours - theirs
    with np.errstate(divide="ignore", invalid="ignore"):  # in omitted cells
        ratio = ours / theirs
        np.log(ratio.values, out=ratio.values)  # in place, as there may be many
    return ratio


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
