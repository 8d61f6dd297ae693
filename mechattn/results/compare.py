"""A table of how a quantity differs between two conditions, layer by layer and head by head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.stats.comparison import relative_change
from mechattn.stats.intervals import FEWEST, Interval
from mechattn.stats.paired import Paired, paired

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from mechattn.results.result import Result

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
    level: float,
    resamples: int,
    seed: int,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.compare`, which explains the arguments."""
    _check_options(select, level)
    other = result if other is None else other
    _check_prompts(result, other)
    if matched:
        _check_lengths(result, condition, other, to)
    parts = _aligned(result, condition, other, to, quantity, by, segment)
    ours, theirs, null, _ = parts
    log = _variable(result, quantity, by).attrs.get("compared", "ratio") == "ratio" and all(
        bool((part > 0).all()) for part in parts if part is not None
    )
    difference, expected = _differences(*parts, log)
    finding, shown = _halves(ours.sizes["prompt"], select)
    every = partial(paired, level=level, resamples=resamples, seed=seed)
    cells = np.ones(difference.shape[1:], dtype=bool)
    if select == "half":
        cells = every(difference.values[finding], expected.values[finding]).q < 0.05
    numbers = every(difference.values[shown][:, cells], expected.values[shown][:, cells])
    means = {
        "value": ours.values[shown][:, cells].mean(0),
        "reference": theirs.values[shown][:, cells].mean(0),
    }
    table = _table(difference, cells, means, numbers).assign(scale="log-ratio" if log else "difference")
    table.attrs = {
        "condition": condition,
        "to": to,
        "quantity": quantity,
        "segment": segment or "all",
        "family": f"{int(cells.sum())} tests: {' × '.join(map(str, difference.dims[1:]))}",
        "null": "uniform attention" if null is not None else "no difference",
        "smallest_q": max(2.0 ** (1 - numbers.n), 0.0 if numbers.n <= 12 else 1 / (resamples + 1)),
        "level": level,
        "select": select or "none",
        "models": ", ".join(sorted({_model(result), _model(other)})),
    }
    return table


def _check_options(select: str | None, level: float) -> None:
    if select not in (None, "half"):
        raise OptionError(
            f'select={select!r}: "half" finds heads on one half of the prompts and reports them on the other'
        )
    if not 0.5 <= level < 1:
        raise OptionError(f"level={level}: give a probability such as 0.95")


def _differences(
    ours: xr.DataArray, theirs: xr.DataArray, null: xr.DataArray | None, their_null: xr.DataArray | None, log: bool
) -> tuple[xr.DataArray, xr.DataArray]:
    """What was measured and what the null expects, each prompt's; ratios as their logarithms."""
    import xarray as xr

    def between(one: xr.DataArray, other: xr.DataArray) -> xr.DataArray:
        return xr.apply_ufunc(np.log, one / other) if log else one - other

    difference = between(ours, theirs)
    expected = difference * 0
    return difference, expected if null is None or their_null is None else expected + between(null, their_null)


def _halves(prompts: int, select: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The prompts on which cells are found, and those on which they are reported."""
    every = np.arange(prompts)
    fewest = FEWEST if select is None else 2 * FEWEST_TO_SELECT
    if prompts < fewest:
        why = "" if select is None else ": below, no head can be found on one half of them (q < 0.05)"
        raise OptionError(f"there are {prompts} prompts; give at least {fewest}{why}")
    return (every, every) if select is None else (every[::2], every[1::2])


def _table(difference: xr.DataArray, cells: np.ndarray, means: dict[str, np.ndarray], numbers: Paired) -> pd.DataFrame:
    """One row a cell: its coordinates, the means, and all that ``paired`` found."""
    import pandas as pd

    index = np.argwhere(cells)
    labels = {dim: difference[dim].values[index[:, i]] for i, dim in enumerate(difference.dims[1:])}
    made = pd.DataFrame(labels | means | {name: getattr(numbers, name) for name in _COLUMNS})
    made = made.assign(n=numbers.n)
    first = [*labels, "difference", "low", "high", "null", "q", "n"]  # what a table that is cut off should still show
    return made[[*first, *(name for name in made if name not in first)]]


def overall_change(
    result: Result, condition: str, quantity: str, segment: str | None = "question", layer: int | None = None
) -> tuple[Interval, Interval | None]:
    """Relative change from the baseline of each prompt's mean over layers and heads, and the same under the null.

    Args:
        result: A result.
        condition: Compared with the baseline.
        quantity: A positive quantity, such as "received".
        segment: The segment that it is about.
        layer: One layer; all by default.

    Raises:
        OptionError: A value is not positive, so there is no ratio; or what :func:`compare` refuses.
    """
    parts = _aligned(result, condition, result, BASELINE, quantity, "segment", segment)
    if set(parts[0].dims) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number for each head, and their mean would mean nothing")
    if layer is not None and layer not in parts[0].layer.values:
        raise OptionError(f"layer {layer} was not measured; there are {parts[0].layer.values.tolist()}")
    chosen = [part if part is None or layer is None else part.sel(layer=layer) for part in parts]
    values, reference, null, null_reference = (
        np.empty(0) if p is None else p.mean([d for d in p.dims if d != "prompt"]).values for p in chosen
    )
    if _variable(result, quantity, "segment").attrs.get("compared") == "difference":
        raise OptionError(f"{quantity!r} is 0 in the baseline by definition, so it has no relative change")
    if not ((values > 0).all() and (reference > 0).all()):
        raise OptionError(f"{quantity!r} is not positive in every prompt, so it has no relative change")
    return relative_change(values, reference), relative_change(null, null_reference) if null.size else None


def _aligned(
    result: Result, condition: str, other: Result, to: str, quantity: str, by: str, segment: str | None
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray | None, xr.DataArray | None]:
    """Values and references, and the nulls of both, with the same coordinates."""
    import xarray as xr

    ours, null = _values(result, condition, quantity, by, segment)
    theirs, their_null = _values(other, to, quantity, by, segment)
    for dim in ("prompt", "layer", "head"):
        if dim in ours.dims and not np.array_equal(ours[dim].values, theirs[dim].values):
            raise OptionError(f"{quantity!r} has other {dim}s in one result ({ours.sizes[dim]}) than in the other")
    options = [_variable(r, quantity, by).attrs.get("options") for r in (result, other)]
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


def _variable(result: Result, quantity: str, by: str) -> xr.DataArray:
    """The variable of a quantity."""
    dataset, name = _found(result, quantity, by)
    return dataset[name]


def _found(result: Result, quantity: str, by: str) -> tuple[xr.Dataset, str]:
    """The dataset that has a quantity for each prompt, and the variable's name."""
    names = (f"{quantity}_by_{by}", quantity)
    found = [(result[at], name) for at in result.datasets for name in names if name in result[at]]
    found = [(dataset, name) for dataset, name in found if "prompt" in dataset[name].dims]
    if not found:
        have = sorted(
            str(name).removesuffix(f"_by_{by}")
            for at in result.datasets
            for name, variable in result[at].data_vars.items()
            if at != "sequences" and {"prompt", "layer"} <= set(variable.dims) and not str(name).endswith("_uniform")
        )
        raise OptionError(f"no analysis of this result has {quantity!r} for each prompt; there are {', '.join(have)}")
    return found[0]


def _values(
    result: Result, condition: str, quantity: str, by: str, segment: str | None
) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Each prompt's values [prompt, layer, head, …] in a condition, and those of the null; checked to be there."""
    if condition not in result.conditions:
        raise OptionError(
            f"there is no condition {condition!r}; the result has {', '.join(map(repr, result.conditions))}"
        )
    dataset, name = _found(result, quantity, by)
    values = _chosen(dataset[name], condition, segment)
    uniform = f"{name}_uniform"
    null = _chosen(dataset[uniform], condition, segment) if uniform in dataset else None
    for dim in ("segment", "to_segment"):
        values = values.dropna(dim, how="all") if dim in values.dims else values
    if values.isnull().any():
        bad = values.isnull().any([dim for dim in values.dims if dim != "prompt"])
        raise OptionError(
            f"{int(bad.sum())} of {values.sizes['prompt']} prompts have no {quantity!r} in the segment {segment!r} "
            f"with {condition!r}; compare a segment that all prompts have, in both conditions"
        )
    if null is not None:
        shared = {dim: values[dim] for dim in null.dims}
        null = null.sel(shared).broadcast_like(values).transpose(*values.dims)
    return values, null


def _chosen(variable: xr.DataArray, condition: str, segment: str | None) -> xr.DataArray:
    chosen = variable.sel(condition=condition).astype(np.float64)
    if "segment" in chosen.dims and segment is not None:
        if segment not in chosen.segment.values:
            raise OptionError(
                f"segment={segment!r}: choose one of {', '.join(map(repr, chosen.segment.values.tolist()))}"
            )
        chosen = chosen.sel(segment=segment)
    first = [dim for dim in ("prompt", "layer", "head") if dim in chosen.dims]
    return chosen.transpose(*first, ...).reset_coords(drop=True)


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
