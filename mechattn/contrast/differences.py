"""The differences between two conditions in each prompt, and those that the null expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.contrast.quantities import (
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

# The labels of each segment dimension at which both conditions have values.
Labels = Mapping[str, list[object]]
_SEGMENT_DIMS = ("segment", "to_segment")


@dataclass(frozen=True, eq=False)
class Differences:
    """Differences between two conditions in each prompt.

    Args:
        ours: The values of the condition [prompt, *cells].
        theirs: The values of the condition that it is compared with [prompt, *cells].
        difference: ``log(ours / theirs)``, or ``ours − theirs`` [prompt, *cells].
        expected: The difference under the null [prompt, *cells]; None if no null is known.
        null: The null, in words.
        has_difference: A mask of the cells that have a difference in every prompt [*cells].
        scale: The scale of the differences, the same in every block of layers.
        predicts_no_change: Whether the null is that nothing changes.
    """

    ours: xr.DataArray
    theirs: xr.DataArray
    difference: xr.DataArray
    expected: np.ndarray | None
    null: str
    has_difference: np.ndarray
    scale: Scale
    predicts_no_change: bool

    @property
    def left_out(self) -> list[str]:
        """The names of the cells without a difference."""
        labels = pd.DataFrame(cell_labels(self, ~self.has_difference))
        names = []
        for cell in labels.to_dict("records"):
            words = [f"{dim} {label}" for dim, label in cell.items()]
            names.append(" ".join(words))
        return names

    def rounding(self, units: Units, unit_indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The largest mean difference over some units that counts as 0 [*cells].

        It allows for the difference between two float32 computations of the same number.
        """
        if self.scale == "log-ratio":
            return np.full(self.has_difference.shape, ROUNDING)
        reference_sizes = units.means(abs(self.theirs.values))
        return ROUNDING * reference_sizes[unit_indices].mean(0)


class Aligned(NamedTuple):
    """The values of both conditions and of their nulls, with the same coordinates.

    A null lacks dimensions along which it does not vary, such as head. It is None if it is not
    known.
    """

    ours: xr.DataArray
    theirs: xr.DataArray
    null: xr.DataArray | None
    their_null: xr.DataArray | None


def differences(contrast: Question, labels: Labels) -> Differences:
    """The differences of a comparison, at these labels of its segment dimensions."""
    ours, theirs, null, their_null = aligned(contrast, labels)
    scale = contrast.scale_used

    expected = None
    null_words = "no null is known; a change may be there by definition"
    predicts_no_change = False
    if null is not None and their_null is not None:
        # The broadcast is a view: one number for all heads is not copied for each.
        null_difference = _between(null, their_null, scale).broadcast_like(ours)
        expected = null_difference.transpose(*ours.dims).values
        null_words = NULLS[contrast.null_used]
    elif _inserts_alike(contrast):
        expected = np.zeros(ours.shape)
        null_words = "no difference"
        predicts_no_change = True

    # A cell counts if every prompt has its values in both conditions and under both nulls.
    has_difference = xr.ones_like(ours[0], dtype=bool)
    for values in (ours, theirs, null, their_null):
        if values is None:
            continue
        minimum = values.min("prompt", skipna=False)  # NaN if a prompt has no value
        if scale == "log-ratio":
            has_difference &= minimum > 0  # 0 and negative values have no ratio
        else:
            has_difference &= minimum.notnull()
    return Differences(
        ours=ours,
        theirs=theirs,
        difference=_between(ours, theirs, scale),
        expected=expected,
        null=null_words,
        has_difference=has_difference.values,
        scale=scale,
        predicts_no_change=predicts_no_change,
    )


def layers_of(contrast: Question, resamples: int = 0) -> Iterator[Differences]:
    """Yield the differences of a comparison, some layers at a time.

    Args:
        contrast: The question of the comparison.
        resamples: The number of resamples that must fit in memory beside the differences.
    """
    contrasts, labels = in_blocks(contrast, resamples)
    for block_contrast in contrasts:
        yield differences(block_contrast, labels)


def in_blocks(contrast: Question, resamples: int = 0) -> tuple[list[Question], Labels]:
    """The same question about each block of layers, and the labels of its segment dimensions that
    can be compared in any block.
    """
    quantity = contrast.quantity
    slices_of_layers = layer_blocks(contrast.result, quantity, contrast.segment, resamples)
    contrasts = [contrast.of_layers(layers) for layers in slices_of_layers]

    variable = variable_of(contrast.result, quantity)
    labels = {}
    for dim in _SEGMENT_DIMS:
        is_named = dim == "segment" and contrast.segment is not None
        if dim in variable.dims and not is_named:
            stored_labels = variable[dim].values.tolist()
            comparable_labels = _comparable(contrasts, dim)
            labels[dim] = [label for label in stored_labels if label in comparable_labels]
    return contrasts, labels


def cell_labels(block: Differences, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The labels (layer, head …) of the cells of a mask, by dimension [cell]."""
    indices = np.argwhere(mask).T  # [dim, cell]
    labels = {}
    for dim, index in zip(block.difference.dims[1:], indices, strict=True):
        labels[str(dim)] = block.difference[dim].values[index]
    return labels


def aligned(contrast: Question, labels: Labels) -> Aligned:
    """The values of both conditions and of their nulls, with the same coordinates.

    Raises:
        OptionError: The results have different prompts, layers or heads, measured the quantity with
            different options, or some prompts lack it in a cell that others have.
    """
    our_side, their_side = contrast.sides
    ours, null = _of_side(contrast, our_side, labels)
    theirs, their_null = _of_side(contrast, their_side, labels)
    quantity = contrast.quantity
    for dim in ("prompt", "layer", "head"):
        if dim not in ours.dims:
            continue
        if not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(
                f"{quantity!r} has different {dim}s in the two results ({ours.sizes[dim]} and"
                f" {theirs.sizes[dim]})"
            )

    # The options of the analysis, such as a threshold.
    options = variable_of(contrast.result, quantity).attrs.get("options")
    their_options = variable_of(contrast.reference, quantity).attrs.get("options")
    if options != their_options:
        raise OptionError(
            f"{quantity!r} was measured with {options} in one result and {their_options} in the"
            " other"
        )
    return Aligned(ours, theirs, null, their_null)


def check_cells(contrast: Question, cell_count: int, left_out: Sequence[str]) -> None:
    """Warn if some cells of a comparison are left out.

    Args:
        contrast: The question of the comparison.
        cell_count: The number of all cells.
        left_out: The names of the cells without a difference.

    Raises:
        OptionError: All are left out; the error says why.
    """
    quantity = contrast.quantity
    if len(left_out) == cell_count:
        for side in contrast.sides:
            check_measured(side, quantity, contrast.segment)
        if contrast.scale_used == "log-ratio":
            raise OptionError(
                f'{quantity!r} has no ratio in any cell; compare it with scale="difference"'
            )
        raise OptionError(f"{quantity!r} has no value in any cell")
    if left_out:
        names = ", ".join(left_out[:4])
        if len(left_out) > 4:
            names += " …"
        warn(
            f"{len(left_out)} of {cell_count} cells are left out ({names}): {quantity!r} has no"
            " value there, or it is 0 or negative in some prompt and has no ratio"
            ' (scale="difference" needs none)'
        )


def _between(ours: xr.DataArray, theirs: xr.DataArray, scale: Scale) -> xr.DataArray:
    """``log(ours / theirs)``, or ``ours − theirs``."""
    if scale == "difference":
        return ours - theirs
    with np.errstate(divide="ignore", invalid="ignore"):  # cells without a ratio are left out later
        log_ratio = ours / theirs
        np.log(log_ratio.values, out=log_ratio.values)  # in place, as there may be many
    return log_ratio


def _inserts_alike(contrast: Question) -> bool:
    """Whether two conditions insert the same number of tokens at the same places and do nothing
    else. No change between them then happens by definition.
    """
    for result, condition in contrast.sides:
        if not stored_condition(result, condition).inserts_only:
            return False
    origin = contrast.result["sequences"].origin.sel(condition=contrast.condition)
    their_origin = contrast.reference["sequences"].origin.sel(condition=contrast.to)
    return np.array_equal(origin.values, their_origin.values)


def _comparable(contrasts: Sequence[Question], dim: str) -> set[object]:
    """The labels of a segment dimension that have values in both conditions, in any of the
    contrasts, which are the blocks of layers of one comparison.

    Segments to which no attention is paid at all are left out of "to_segment".
    """
    labels_of_sides: list[set[object]] = [set(), set()]
    attended_labels: set[object] = set()
    for contrast in contrasts:
        for index, (result, condition) in enumerate(contrast.sides):
            check_condition(result, condition)
            variable = variable_of(result, contrast.quantity)
            values = values_in(variable, condition, contrast.segment)
            labels_of_sides[index] |= labels_where(values.notnull(), dim)
            attended_labels |= labels_where(values.fillna(0) != 0, dim)

    labels_of_both = set.intersection(*labels_of_sides)
    if dim == "to_segment":
        # Attention to later segments is 0 in every prompt and condition.
        return labels_of_both & attended_labels
    return labels_of_both


def _of_side(
    contrast: Question, side: Side, labels: Labels
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """The values of one condition and those of its null, at the labels that both conditions have.
    The latter are None if no null is known.
    """
    result, condition = side
    quantity = contrast.quantity
    segment = contrast.segment
    values, null = values_of(result, condition, quantity, segment, contrast.null_used)

    # Values are selected only if labels are left out: a selection copies, even if it keeps all.
    fewer_labels = {}
    for dim, comparable_labels in labels.items():
        if comparable_labels != values[dim].values.tolist():
            fewer_labels[dim] = comparable_labels
    comparable_values = values.sel(fewer_labels)
    check_present(comparable_values, quantity, segment, side)
    if null is None:
        return comparable_values, None

    null_labels = {dim: kept for dim, kept in fewer_labels.items() if dim in null.dims}
    return comparable_values, null.sel(null_labels)
