"""What a measure of a claim is, and how it reads a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import xarray as xr

from mechattn.axes import SEGMENTS
from mechattn.claims.rules import NotApplicable
from mechattn.results.result import Result

Kind = Literal["log-ratio", "share", "points", "number"]
Range = tuple[float, float] | Callable[..., tuple[float, float]]
ANY, SHARE, APART = (-inf, inf), (0.0, 1.0), (-1.0, 1.0)


@dataclass(frozen=True)
class Measure:
    """A named number, pure of everything but the result it is read from.

    Args:
        of: ``of(result, *conditions, **options)`` gives one float64 a prompt; of an evaluation, an estimate.
        needs: The analyses that the result must have; "answers" for an evaluation.
        kind: Its units: "log-ratio" is shown as a change in percent, "share" in percent.
        says: What it is, in a sentence.
        range: The values that it can take; a function of the same arguments as ``of`` where this depends on the model.
    """

    of: Callable[..., Any]
    needs: tuple[str, ...]
    kind: Kind
    says: str
    range: Range = ANY

    def attainable(self, result: Any, *conditions: str, **options: Any) -> tuple[float, float]:
        """The smallest and the largest value that this model can show."""
        return self.range(result, *conditions, **options) if callable(self.range) else self.range


def taken(result: Result, dataset: str, quantity: str, condition: str) -> xr.DataArray:
    """One quantity under one condition.

    Raises:
        NotApplicable: The run has no such condition, since the model cannot have it.
    """
    if condition not in result.conditions:
        raise NotApplicable(f"the model cannot be run under {condition!r}")
    return result[dataset][quantity].sel(condition=condition)


def by_head(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """A quantity of heads, of the question where it has segments [prompt, layer, head]."""
    found = taken(result, dataset, quantity, condition)
    found = found.sel(segment="question") if "segment" in found.dims else found
    return found.transpose("prompt", "layer", "head").values.astype(np.float64)


def null(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """The same of a head that is blind to content: uniform, or with the model's own biases (ALiBi) [prompt, layer]."""
    name = next(n for n in (f"{quantity}_blind", f"{quantity}_uniform") if n in result[dataset])
    found = taken(result, dataset, name, condition)
    found = found.sel(segment="question") if "segment" in found.dims else found
    found = found.mean("head") if "head" in found.dims else found
    return found.transpose("prompt", "layer").values.astype(np.float64)


def places(result: Result, condition: str, segment: str) -> np.ndarray:
    """Which positions hold a segment [prompt, pos]."""
    return np.asarray(taken(result, "sequences", "segment_index", condition).values == SEGMENTS.index(segment))


def later(by_layer: np.ndarray) -> np.ndarray:
    """The layers after the first.

    Raises:
        NotApplicable: There are none.
    """
    if by_layer.shape[1] < 2:
        raise NotApplicable("the model has one layer")
    return by_layer[:, 1:]


def log_ratio(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """log(values / baseline), infinite or NaN where one of them is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / baseline)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Spearman's ρ over the last axis; 0 where all are alike."""
    from scipy.stats import rankdata

    centred = [ranks - ranks.mean(-1, keepdims=True) for ranks in (rankdata(x, axis=-1) for x in (one, other))]
    norms = np.sqrt((centred[0] ** 2).sum(-1) * (centred[1] ** 2).sum(-1))
    product = (centred[0] * centred[1]).sum(-1)
    return np.divide(product, norms, out=np.zeros_like(norms), where=norms > 0)
