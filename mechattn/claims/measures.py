"""What a measure of a claim is, the table of all of them, and how they read a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, expm1, inf, isfinite
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import xarray as xr
from pydantic import Field

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.results.result import Result

Kind = Literal["log-ratio", "share", "points", "number"]
Range = tuple[float, float] | Callable[..., tuple[float, float]]
Layers = Literal["all", "first", "next", "later", "early", "rest"]  # 0; 1 and 2; from 1 on; a sixth, 0 to 3 of 24
Layer = Annotated[int, Field(ge=0, le=1000)]
Of = TypeVar("Of", bound=Callable[..., Any])
UNIT: dict[Kind, str] = {"log-ratio": " %", "share": " %", "points": " points", "number": ""}
SHARE, APART, POSITIVE = (0.0, 1.0), (-1.0, 1.0), (0.0, inf)


class NotApplicable(OptionError):
    """A model has not got what a claim is about."""


@dataclass(frozen=True)
class Measure:
    """A named number, pure of everything but the result it is read from."""

    of: Callable[..., Any]  # of(result, *conditions, **options): one float64 a prompt; of an evaluation, an estimate
    needs: tuple[str, ...]  # the analyses that the result must have; "answers" for an evaluation
    kind: Kind  # "log-ratio" is shown as a change in percent, "share" in percent
    says: str  # what it is, in a sentence
    range: Range | None = None  # what it can take; of the same arguments where the model decides; None for a log-ratio


MEASURES: dict[str, Measure] = {}  # every name that a register may use; the modules measures_* fill it


def measure(needs: str, kind: Kind, range: Range | None = None) -> Callable[[Of], Of]:
    """Enter a function in the table, with the first line of its docstring."""

    def entered(of: Of) -> Of:
        MEASURES[of.__name__] = Measure(of, tuple(needs.split()), kind, (of.__doc__ or "").partition("\n")[0], range)
        return of

    return entered


def measure_named(name: str) -> Measure:
    """One of the table (OptionError where there is none)."""
    if name not in MEASURES:
        raise OptionError(f"measure = {name!r}: there is no such measure; choose one of {', '.join(sorted(MEASURES))}")
    return MEASURES[name]


def figure(value: float, kind: Kind, digits: int | None = None) -> str:
    """A number without its unit; one digit after the point, of a plain number two."""
    if not isfinite(value):
        return "?"
    digits = (2 if kind == "number" else 1) if digits is None else digits
    scaled = 100 * expm1(value) if kind == "log-ratio" else value if kind == "number" else 100 * value
    shown = round(scaled, digits) + 0.0  # no "−0.0"
    return f"{shown:{'+' if kind in ('log-ratio', 'points') else ''}.{digits}f}".replace("-", "−")


def with_unit(value: float, kind: Kind) -> str:
    """Such as "−30.3 %"."""
    return figure(value, kind) + UNIT[kind]


def taken(result: Result, dataset: str, quantity: str, condition: str) -> xr.DataArray:
    """One quantity under one condition (NotApplicable where the model cannot have it)."""
    if condition not in result.conditions:
        raise NotApplicable(f"the model cannot be run under {condition!r}")
    return result[dataset][quantity].sel(condition=condition)


def by_head(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """A quantity of heads, of the question where it has segments [prompt, layer, head]."""
    found = taken(result, dataset, quantity, condition)
    found = found.sel(segment="question") if "segment" in found.dims else found
    return found.transpose("prompt", "layer", "head").values.astype(np.float64)


def blind(result: Result, dataset: str, quantity: str) -> str:
    """The name of a quantity's null: with the model's own biases where it has them (ALiBi), else uniform."""
    return next(name for name in (f"{quantity}_blind", f"{quantity}_uniform") if name in result[dataset])


def null(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """The same of a head that is blind to content [prompt, layer]."""
    found = taken(result, dataset, blind(result, dataset, quantity), condition)
    found = found.sel(segment="question") if "segment" in found.dims else found
    found = found.mean("head") if "head" in found.dims else found
    return found.transpose("prompt", "layer").values.astype(np.float64)


def places(result: Result, condition: str, segment: str) -> np.ndarray:
    """Which positions hold a segment [prompt, pos]."""
    return np.asarray(taken(result, "sequences", "segment_index", condition).values == SEGMENTS.index(segment))


def in_layers(values: np.ndarray, layers: Layers) -> np.ndarray:
    """Some of the layers [prompt, layer, …] (NotApplicable where a model of one layer has none of them)."""
    n = values.shape[1]
    if n < 2 and layers not in ("all", "first"):
        raise NotApplicable("the model has one layer")
    early = ceil(n / 6)
    ends = {"all": (0, n), "first": (0, 1), "next": (1, 3), "later": (1, n), "early": (0, early), "rest": (early, n)}
    return values[:, slice(*ends[layers])]


def log_ratio(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """log(values / baseline), infinite or NaN where one of them is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / baseline)
