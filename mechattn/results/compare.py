"""A table of how a quantity differs between two conditions, layer by layer and head by head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.quantities import NULLS, Null, check_layer, values_of, variable_of
from mechattn.results.random_null import check_random, random_columns
from mechattn.results.stored_conditions import stored_condition
from mechattn.results.units import shared_units, units_of
from mechattn.stats.comparison import relative_change
from mechattn.stats.intervals import FEWEST, Interval
from mechattn.stats.paired import EXACT, ROUNDING, Paired, enough, paired, without_rounding
from mechattn.stats.resolution import resolution
from mechattn.stats.units import Unit, Units

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from mechattn.results.result import Result

Scale = Literal["log-ratio", "difference"]
NO_NULL = "no null is known; a change may be there by definition"
_INSERTIONS = ("MeaninglessTokens", "RepeatedWord", "RandomTokens", "RandomSentence", "ShuffledSentence", "Text")
Parts = tuple["xr.DataArray", "xr.DataArray", "xr.DataArray | None", "xr.DataArray | None"]
FEWEST_TO_SELECT = 6  # prompts: of 2⁶ patterns of signs, the two extreme ones give p = 0.03
_COLUMNS = [name for name in Paired.__dataclass_fields__ if name != "n"]


def compare(
    result: Result,
    condition: str,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    other: Result | None,
    select: Literal["half"] | None,
    matched: bool,
    null: Null,
    scale: Scale | None,
    unit: Unit,
    level: float,
    resamples: int,
    seed: int,
    random: Seq[Result] | None = None,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.compare`, which explains the arguments."""
    _check_options(select, level, null, scale)
    other = result if other is None else other
    _check_prompts(result, other)
    if random is not None:
        check_random(random, result, other, (condition, to))
    if matched:
        _check_lengths(result, condition, other, to)
    parts = _aligned(result, condition, other, to, quantity, by, segment, null)
    ours, theirs = parts[:2]
    scale = scale or _own_scale(variable_of(result, quantity, by))
    cells, left_out = _compared(parts, quantity, scale)
    difference, expected = _differences(*parts, scale)
    against, null_words = _null(expected, parts, null, _alike(result, condition, other, to))
    units = shared_units(result, other, ours.sizes["prompt"], unit)
    finding, shown = _halves(units, select)
    each, size = units.means(difference.values), units.means(abs(theirs.values))
    of_null = None if against is None else units.means(against)

    def rounding_of(some: np.ndarray) -> np.ndarray:
        return ROUNDING * (np.ones(cells.shape) if scale == "log-ratio" else size[some].mean(0))

    def found(some: np.ndarray) -> Paired:
        at = None if of_null is None else of_null[some][:, cells]
        return paired(each[some][:, cells], at, level, resamples, seed, rounding_of(some)[cells])

    if select == "half":
        cells[cells] = found(finding).q < 0.05
    numbers = found(shown)
    means = {
        name: units.means(of.values)[shown][:, cells].mean(0) for name, of in (("value", ours), ("reference", theirs))
    }
    table = _table(difference, cells, means, numbers).assign(scale=scale)
    can = resolution(numbers.n, max(1, int(cells.sum())), resamples=resamples, unit=units.unit)
    table.attrs = {
        "condition": condition,
        "to": to,
        "quantity": quantity,
        "segment": segment or "all",
        "family": f"{int(cells.sum())} tests: {' × '.join(map(str, difference.dims[1:]))}",
        "unit": units.unit,
        "null": null_words,
        "left_out": left_out,
        "smallest_q": can.smallest_p,  # where all tests reach it
        "resolution": str(can),
        "level": level,
        "resamples": resamples,
        "patterns": None if numbers.n <= EXACT else enough(resamples, int(cells.sum())),
        "seed": seed,
        "select": select or "none",
        "models": ", ".join(sorted({_model(result), _model(other)})),
    }
    if random is not None:

        def change(draw: Result) -> xr.DataArray:
            return _differences(*_aligned(draw, condition, draw, to, quantity, by, segment, "uniform"), scale)[0]

        def mean(values: np.ndarray) -> np.ndarray:
            return units.means(values)[shown].mean(0)

        columns, said = random_columns(random, difference, change, mean, cells, level, rounding_of(shown))
        attrs, table = table.attrs | said, table.assign(**columns)
        table.attrs = attrs
    return table


def family_size(
    result: Result, condition: str, quantity: str, by: str, segment: str | None, select: str | None
) -> tuple[int, int]:
    """How many tests a comparison with the baseline makes, and of how many prompts.

    Raises:
        OptionError: What :func:`compare` refuses.
    """
    _check_options(select, 0.95, "uniform", None)
    parts = _aligned(result, condition, result, BASELINE, quantity, by, segment, "uniform")
    cells, _ = _compared(parts, quantity, _own_scale(variable_of(result, quantity, by)))
    return int(cells.sum()), parts[0].sizes["prompt"]


def what_is_tested(
    result: Result, condition: str, quantity: str, by: str, segment: str | None, unit: Unit, layer: int | None = None
) -> tuple[np.ndarray, Units]:
    """What :func:`compare` with the baseline tests, [unit, cell]: differences less those of the null; and the units.

    NaN in cells that are left out; of one layer, where one is named.

    Raises:
        OptionError: What :func:`compare` refuses.
    """
    parts = _aligned(result, condition, result, BASELINE, quantity, by, segment, "uniform")
    scale = _own_scale(variable_of(result, quantity, by))
    cells, _ = _compared(parts, quantity, scale)
    difference, expected = _differences(*parts, scale)
    against, _ = _null(expected, parts, "uniform", _alike(result, condition, result, BASELINE))
    units = units_of(result, parts[0].sizes["prompt"], unit)
    size = 1.0 if scale == "log-ratio" else units.means(abs(parts[1].values)).mean(0)
    d = units.means(difference.values - (0.0 if against is None else against))
    d = np.where(cells, without_rounding(d, ROUNDING * size), np.nan)
    if layer is not None:
        check_layer(layer, difference)
        d = d[:, difference.layer.values == layer]
    return d.reshape(units.n, -1), units


def _check_options(select: str | None, level: float, null: str, scale: str | None) -> None:
    if select not in (None, "half"):
        raise OptionError(
            f'select={select!r}: "half" finds heads on one half of the prompts and reports them on the other'
        )
    if not isinstance(level, (int, float)) or not 0.5 <= level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.95")
    if null == "random-weights":
        raise OptionError(
            'null="random-weights": a result holds no model to draw weights for; make them with ma.run_random(model, '
            "prompts, conditions) and pass random=…, whose columns stand beside those of the uniform null"
        )
    for name, given, known in (("null", null, Null), ("scale", scale, Scale)):
        if given not in (*get_args(known), None):
            raise OptionError(f"{name}={given!r}: choose one of {', '.join(map(repr, get_args(known)))}")


def _own_scale(variable: xr.DataArray) -> Scale:
    """How a quantity is compared by default: by its ratio, or by its difference where the baseline may be 0."""
    return "log-ratio" if variable.attrs.get("compared", "ratio") == "ratio" else "difference"


def _compared(parts: Parts, quantity: str, scale: Scale) -> tuple[np.ndarray, list[str]]:
    """The cells that have a difference in every prompt, and the names of those that are left out.

    A value that is 0 or negative has no ratio; one that is NaN in every prompt is not there at all in this layer.
    """
    ours = parts[0]
    cells = np.ones(ours.shape[1:], dtype=bool)
    for part in parts:
        if part is not None:
            cells &= ((part > 0) if scale == "log-ratio" else part.notnull()).all("prompt").values
    labels = [ours[dim].values for dim in ours.dims[1:]]
    left_out = [
        " ".join(f"{dim} {label[i]}" for dim, label, i in zip(ours.dims[1:], labels, at)) for at in np.argwhere(~cells)
    ]
    if not cells.any():
        raise OptionError(
            f"{quantity!r} has no {'ratio' if scale == 'log-ratio' else 'value'} in any cell"
            + ('; compare it with scale="difference"' if scale == "log-ratio" else "")
        )
    if left_out:
        shown = ", ".join(left_out[:4]) + (" …" if len(left_out) > 4 else "")
        warnings.warn(
            f"{len(left_out)} of {cells.size} cells are left out ({shown}): {quantity!r} is not there, or it is 0 or "
            'negative in some prompt and has no ratio, which scale="difference" needs not',
            stacklevel=4,
        )
    return cells, left_out


def _differences(
    ours: xr.DataArray, theirs: xr.DataArray, null: xr.DataArray | None, their_null: xr.DataArray | None, scale: Scale
) -> tuple[xr.DataArray, np.ndarray | None]:
    """What was measured and what the null expects, each prompt's; ratios as their logarithms."""

    def between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):  # in cells that are left out
            return np.log(one / other) if scale == "log-ratio" else one - other

    expected = None if null is None or their_null is None else between(null.values, their_null.values)
    return ours.copy(data=between(ours.values, theirs.values)), expected


def _null(expected: np.ndarray | None, parts: Parts, null: Null, alike: bool) -> tuple[np.ndarray | None, str]:
    """What the null expects, each prompt's, None where none is known; and its name."""
    if expected is not None:
        return expected, NULLS[null]
    return (np.zeros(parts[0].shape), "no difference") if alike else (None, NO_NULL)


def _alike(one: Result, condition: str, other: Result, to: str) -> bool:
    """Whether two conditions do the same but for what they insert, so that no change between them is by definition."""
    made = [stored_condition(r, name) for r, name in ((one, condition), (other, to))]
    if not all(some.inserts_only and some.kind in _INSERTIONS for some in made):
        return False
    origins = [r["sequences"].origin.sel(condition=name).values for r, name in ((one, condition), (other, to))]
    return np.array_equal(*origins)


def _halves(units: Units, select: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The units on which cells are found, and those on which they are reported."""
    every = np.arange(units.n)
    if select is None:
        units.refuse_below(FEWEST)
    else:
        units.refuse_below(2 * FEWEST_TO_SELECT, ": below, no head can be found on one half of them (q < 0.05)")
    return (every, every) if select is None else (every[::2], every[1::2])


def _table(difference: xr.DataArray, cells: np.ndarray, means: dict[str, np.ndarray], numbers: Paired) -> pd.DataFrame:
    """One row a cell: its coordinates, the means, and all that ``paired`` found."""
    import pandas as pd

    index = np.argwhere(cells)
    labels = {dim: difference[dim].values[index[:, i]] for i, dim in enumerate(difference.dims[1:])}
    made = pd.DataFrame(labels | means | {name: getattr(numbers, name) for name in _COLUMNS})
    made = made.assign(n=numbers.n)
    # What a table that is cut off should still show.
    first = [*labels, "difference", "null", "beyond", "beyond_low", "beyond_high", "q", "n", "low", "high"]
    return made[[*first, *(name for name in made if name not in first)]]


def overall_change(
    result: Result,
    condition: str,
    quantity: str,
    segment: str | None = "question",
    layer: int | None = None,
    unit: Unit = "auto",
) -> tuple[Interval, Interval | None]:
    """Relative change from the baseline of each prompt's mean over layers and heads, and the same under the null.

    Args:
        result: A result.
        condition: Compared with the baseline.
        quantity: A positive quantity, such as "received".
        segment: The segment that it is about.
        layer: One layer; all by default.
        unit: As for :func:`compare`.

    Raises:
        OptionError: A value is not positive, so there is no ratio; or what :func:`compare` refuses.
    """
    parts = _aligned(result, condition, result, BASELINE, quantity, "segment", segment, "uniform")
    if set(parts[0].dims) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number for each head, and their mean would mean nothing")
    if layer is not None:
        check_layer(layer, parts[0])
    chosen = [part if part is None or layer is None else part.sel(layer=layer) for part in parts]
    values, reference, null, null_reference = (
        np.empty(0) if p is None else p.mean([d for d in p.dims if d != "prompt"]).values for p in chosen
    )
    if variable_of(result, quantity, "segment").attrs.get("compared") == "difference":
        raise OptionError(f"{quantity!r} is 0 in the baseline by definition, so it has no relative change")
    if not ((values > 0).all() and (reference > 0).all()):
        raise OptionError(f"{quantity!r} is not positive in every prompt, so it has no relative change")
    units = units_of(result, len(values), unit)
    units.refuse_below(FEWEST)
    of_null = relative_change(null, null_reference, units) if null.size else None
    return relative_change(values, reference, units), of_null


def _aligned(
    result: Result, condition: str, other: Result, to: str, quantity: str, by: str, segment: str | None, kind: Null
) -> Parts:
    """Values and references, and the nulls of both, with the same coordinates."""
    import xarray as xr

    ours, null = values_of(result, condition, quantity, by, segment, kind)
    theirs, their_null = values_of(other, to, quantity, by, segment, kind)
    for dim in ("prompt", "layer", "head"):
        if dim in ours.dims and not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other")
    options = [variable_of(r, quantity, by).attrs.get("options") for r in (result, other)]
    if options[0] != options[1]:
        raise OptionError(f"{quantity!r} was measured with {options[0]} in one result, {options[1]} in the other")
    ours, theirs = xr.align(ours, theirs, join="inner")  # an absent segment, such as the baseline's inserted one
    if "to_segment" in ours.dims:  # attention to what comes later is 0 in every prompt and condition
        other_dims = [dim for dim in ours.dims if dim != "to_segment"]
        some = ((ours != 0) | (theirs != 0)).any(other_dims)
        ours, theirs = ours.isel(to_segment=some.values), theirs.isel(to_segment=some.values)
    if null is not None and their_null is not None:
        null, their_null = null.sel(ours.coords), their_null.sel(ours.coords)
    return ours, theirs, null, their_null


def _model(result: Result) -> str:
    return str(result.provenance["model"]["name"])


def _check_prompts(one: Result, other: Result) -> None:
    if one is not other and one.provenance["prompts"] != other.provenance["prompts"]:
        raise OptionError(
            "the two results are of different prompts, and a paired comparison needs the same ones: run both with the "
            f"same load_prompts (hashes {one.provenance['prompts']['hash']} and {other.provenance['prompts']['hash']})"
        )


def _check_lengths(one: Result, condition: str, other: Result, to: str) -> None:
    """Two ways of inserting are compared at the same number of inserted tokens, prompt by prompt."""
    counts = [
        (result["sequences"].origin.sel(condition=name) == -1).sum("pos").values
        for result, name in ((one, condition), (other, to))
        if name in result.conditions
    ]
    if len(counts) == 2 and all(count.any() for count in counts) and (counts[0] != counts[1]).any():
        where = int(np.flatnonzero(counts[0] != counts[1])[0])
        raise OptionError(
            f"{condition!r} inserts {int(counts[0][where])} tokens, {to!r} {int(counts[1][where])} (prompt {where}), "
            "so their difference would be one of length too. Give both the same count, or say matched=False"
        )
