"""The differences between two conditions, prompt by prompt, and the differences that the null expects."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.errors import OptionError, warn
from mechattn.results.quantities import NULLS, Null, There, selected, there, values_of, variable_of
from mechattn.results.stored_conditions import stored_condition
from mechattn.stats.paired import ROUNDING
from mechattn.stats.units import Units

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.results.result import Result

Scale = Literal["log-ratio", "difference"]
Parts = tuple["xr.DataArray", "xr.DataArray", "xr.DataArray | None", "xr.DataArray | None"]
NO_NULL = "no null is known; a change may be there by definition"
_INSERTIONS = (
    "MeaninglessTokens", "RepeatedWord", "RandomTokens", "RandomSentence", "ShuffledSentence", "Text", "Counting",
    "RepeatQuestion",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Both:
    """What two conditions have of further dimensions, in all layers together.

    Args:
        ours: Of a condition.
        theirs: Of the one that it is compared with.
        read: The segments that anything looks at, of those that both have; None where that is no dimension.
    """

    ours: There
    theirs: There
    read: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Differences:
    """Differences by prompt; arrays are [prompt, *cells].

    Args:
        ours: The values of a condition.
        theirs: The values of the condition that it is compared with.
        difference: ``log(ours / theirs)``, or ``ours − theirs``.
        expected: The difference under the null; None if no null is known.
        null: The null, in words.
        cells: Which cells have a difference in every prompt [*cells].
        left_out: The names of the others.
        scale: "log-ratio" or "difference".
    """

    ours: xr.DataArray
    theirs: xr.DataArray
    difference: xr.DataArray
    expected: np.ndarray | None
    null: str
    cells: np.ndarray
    left_out: list[str]
    scale: Scale

    def rounding(self, units: Units, some: np.ndarray) -> np.ndarray:
        """The largest mean difference that counts as none [*cells]: the float32 error between two equal numbers."""
        if self.scale == "log-ratio":
            return np.full(self.cells.shape, ROUNDING)
        return ROUNDING * units.means(abs(self.theirs.values))[some].mean(0)


def differences(
    result: Result,
    condition: str,
    other: Result,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    null: Null = "uniform",
    scale: Scale | None = None,
    part: Both | None = None,
) -> Differences:
    """The differences for :meth:`mechattn.results.result.Result.compare`, which explains the arguments.

    With ``part`` the results have only some of the layers; the caller reports omitted cells (:func:`check_cells`) when
    all layers are done.

    Raises:
        OptionError: There is nothing to compare, or the results were measured with different options.
    """
    parts = aligned(result, condition, other, to, quantity, by, segment, null, part)
    scale = scale or _own_scale(variable_of(result, quantity, by))
    cells, left_out = _compared(parts, scale)
    difference, expected = _differences(*parts, scale)
    expected, words = _null(expected, parts, null, _alike(result, condition, other, to))
    return Differences(parts[0], parts[1], difference, expected, words, cells, left_out, scale)


def aligned(
    result: Result,
    condition: str,
    other: Result,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    kind: Null,
    part: Both | None = None,
) -> Parts:
    """Values and references, and the nulls of both, with the same coordinates."""
    ours, theirs, null, their_null = _values_alike(result, condition, other, to, quantity, by, segment, kind, part)
    if "to_segment" in ours.dims:  # attention to what comes later is 0 in every prompt and condition
        some = _read(ours, theirs) if part is None else part.read
        ours, theirs = ours.isel(to_segment=some), theirs.isel(to_segment=some)
    if null is not None and their_null is not None:
        null, their_null = selected(null, ours), selected(their_null, ours)
    return ours, theirs, null, their_null


def _values_alike(
    result: Result,
    condition: str,
    other: Result,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    kind: Null,
    part: Both | None,
) -> Parts:
    """Values and references of the segments that both have, and the nulls of each, as they are."""
    import xarray as xr

    ours, null = values_of(result, condition, quantity, by, segment, kind, None if part is None else part.ours)
    theirs, their_null = values_of(other, to, quantity, by, segment, kind, None if part is None else part.theirs)
    for dim in ("prompt", "layer", "head"):
        if dim in ours.dims and not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other")
    options = [variable_of(r, quantity, by).attrs.get("options") for r in (result, other)]
    if options[0] != options[1]:
        raise OptionError(f"{quantity!r} was measured with {options[0]} in one result, {options[1]} in the other")
    # One may have a segment that the other lacks, such as the inserted one.
    ours, theirs = xr.align(ours, theirs, join="inner", copy=False)
    return ours, theirs, null, their_null


def _read(ours: xr.DataArray, theirs: xr.DataArray) -> np.ndarray:
    """Which segments any prompt, layer or head looks at."""
    others = [dim for dim in ours.dims if dim != "to_segment"]
    found: np.ndarray = ((ours != 0) | (theirs != 0)).any(others).values
    return found


def in_both(
    blocks: Seq[tuple[Result, Result]], condition: str, to: str, quantity: str, by: str, segment: str | None, kind: Null
) -> Both:
    """What two conditions have in any of some blocks of layers; read where a quantity has further dimensions."""
    both = Both(
        there((one for one, _ in blocks), condition, quantity, by, segment),
        there((other for _, other in blocks), to, quantity, by, segment),
    )
    if "to_segment" not in both.ours:
        return both
    read: np.ndarray | None = None
    for one, other in blocks:
        here = _read(*_values_alike(one, condition, other, to, quantity, by, segment, kind, both)[:2])
        read = here if read is None else read | here
    return replace(both, read=read)


def _own_scale(variable: xr.DataArray) -> Scale:
    """The default scale of a quantity: the ratio, or the difference if the baseline may be 0."""
    return "log-ratio" if variable.attrs.get("compared", "ratio") == "ratio" else "difference"


def _compared(parts: Parts, scale: Scale) -> tuple[np.ndarray, list[str]]:
    """The cells that have a difference in every prompt, and the names of those that are left out.

    A value that is 0 or negative has no ratio; one that is NaN in every prompt does not exist in this layer.
    """
    ours = parts[0]
    cells = np.ones(ours.shape[1:], dtype=bool)
    for part in parts:
        if part is not None:
            least = part.values.min(0)  # NaN if a prompt has none
            cells &= least > 0 if scale == "log-ratio" else ~np.isnan(least)
    labels = [ours[dim].values for dim in ours.dims[1:]]
    left_out = [
        " ".join(f"{dim} {label[i]}" for dim, label, i in zip(ours.dims[1:], labels, at)) for at in np.argwhere(~cells)
    ]
    return cells, left_out


def refuse_no_cells(quantity: str, scale: Scale, cells: int, left_out: list[str]) -> None:
    """Refuse a comparison of no cell.

    Raises:
        OptionError: All of them are left out.
    """
    if len(left_out) == cells:
        raise OptionError(
            f"{quantity!r} has no {'ratio' if scale == 'log-ratio' else 'value'} in any cell"
            + ('; compare it with scale="difference"' if scale == "log-ratio" else "")
        )


def check_cells(quantity: str, scale: Scale, cells: int, left_out: list[str]) -> None:
    """Refuse a comparison without any cell; warn if some cells are left out.

    Args:
        quantity: The compared quantity.
        scale: The scale of the comparison.
        cells: The number of cells.
        left_out: The names of those without a difference.

    Raises:
        OptionError: All cells are left out.
    """
    refuse_no_cells(quantity, scale, cells, left_out)
    if left_out:
        shown = ", ".join(left_out[:4]) + (" …" if len(left_out) > 4 else "")
        warn(
            f"{len(left_out)} of {cells} cells are left out ({shown}): {quantity!r} is not there, or it is 0 or "
            'negative in some prompt and has no ratio, which scale="difference" does not need',
        )


def _differences(
    ours: xr.DataArray, theirs: xr.DataArray, null: xr.DataArray | None, their_null: xr.DataArray | None, scale: Scale
) -> tuple[xr.DataArray, np.ndarray | None]:
    """The measured differences and those under the null, by prompt; ratios as logarithms."""

    def between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):  # in omitted cells
            made = one / other if scale == "log-ratio" else one - other
            return np.log(made, out=made) if scale == "log-ratio" else made

    difference = ours.copy(data=between(ours.values, theirs.values))
    if null is None or their_null is None:
        return difference, None
    strides = zip(null.values.strides, their_null.values.strides)  # 0 where all heads share a number
    one = tuple(slice(None) if any(each) else slice(1) for each in strides)
    return difference, np.broadcast_to(between(null.values[one], their_null.values[one]), null.shape)


def _null(expected: np.ndarray | None, parts: Parts, null: Null, alike: bool) -> tuple[np.ndarray | None, str]:
    """The values under the null, by prompt (None if no null is known), and its name."""
    if expected is not None:
        return expected, NULLS[null]
    return (np.zeros(parts[0].shape), "no difference") if alike else (None, NO_NULL)


def _alike(one: Result, condition: str, other: Result, to: str) -> bool:
    """Whether two conditions differ only in which tokens they insert, so no change between them is by definition."""
    made = [stored_condition(r, name) for r, name in ((one, condition), (other, to))]
    if not all(some.inserts_only and some.kind in _INSERTIONS for some in made):
        return False
    origins = [r["sequences"].origin.sel(condition=name).values for r, name in ((one, condition), (other, to))]
    return np.array_equal(*origins)
