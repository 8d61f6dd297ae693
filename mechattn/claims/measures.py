"""What a measure of a claim is, the table of all; and those of received attention and the affine form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, expm1, inf, isfinite
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import xarray as xr
from pydantic import Field

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OptionError
from mechattn.results.result import Result
from mechattn.stats.units import halves_of

Kind = Literal["log-ratio", "share", "points", "number"]
Range = tuple[float, float] | Callable[..., tuple[float, float]]
Layers = Literal[
    "all", "first", "next", "later", "early", "rest"
]  # 0; 1 and 2; from 1 on; a sixth, 0 to 3 of 24
Layer = Annotated[int, Field(ge=0, le=1000)]
Of = TypeVar("Of", bound=Callable[..., Any])
UNIT: dict[Kind, str] = {"log-ratio": " %", "share": " %", "points": " points", "number": ""}
SHARE, APART, POSITIVE = (0.0, 1.0), (-1.0, 1.0), (0.0, inf)
_RECEIVED, _AFFINE = "received_attention", "affine_shift"
_PEAKS = 0.1  # of the question's tokens
_QUERIES = 8  # after a key, at least: what one or two pay to it is hardly a mean


class NotApplicable(OptionError):
    """A model has not got what a claim is about."""


@dataclass(frozen=True)
class Measure:
    """A named number, pure of everything but the result it is read from."""

    of: Callable[
        ..., Any
    ]  # of(result, *conditions, **options): one float64 a prompt; of an evaluation, an estimate
    needs: tuple[str, ...]  # the analyses that the result must have; "answers" for an evaluation
    kind: Kind  # "log-ratio" is shown as a change in percent, "share" in percent
    says: str  # what it is, in a sentence
    range: Range | None = (
        None  # what it can take; of the same arguments where the model decides; None for a log-ratio
    )


MEASURES: dict[
    str, Measure
] = {}  # every name that a register may use; the modules measures_* fill it


def measure(needs: str, kind: Kind, range: Range | None = None) -> Callable[[Of], Of]:
    """Enter a function in the table, with the first line of its docstring."""

    def entered(of: Of) -> Of:
        MEASURES[of.__name__] = Measure(
            of, tuple(needs.split()), kind, (of.__doc__ or "").partition("\n")[0], range
        )
        return of

    return entered


def measure_named(name: str) -> Measure:
    """One of the table (OptionError where there is none)."""
    if name not in MEASURES:
        raise OptionError(
            f"measure = {name!r}: there is no such measure; choose one of {', '.join(sorted(MEASURES))}"
        )
    return MEASURES[name]


def figure(value: float, kind: Kind, digits: int | None = None) -> str:
    """A number without its unit; one digit after the point, of a plain number two."""
    if not isfinite(value):
        return "?"
    digits = (2 if kind == "number" else 1) if digits is None else digits
    scaled = (
        100 * expm1(value) if kind == "log-ratio" else value if kind == "number" else 100 * value
    )
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
    return next(
        name for name in (f"{quantity}_blind", f"{quantity}_uniform") if name in result[dataset]
    )


def null(result: Result, dataset: str, quantity: str, condition: str) -> np.ndarray:
    """The same of a head that is blind to content [prompt, layer]."""
    found = taken(result, dataset, blind(result, dataset, quantity), condition)
    found = found.sel(segment="question") if "segment" in found.dims else found
    found = found.mean("head") if "head" in found.dims else found
    return found.transpose("prompt", "layer").values.astype(np.float64)


def places(result: Result, condition: str, segment: str) -> np.ndarray:
    """Which positions hold a segment [prompt, pos]."""
    return np.asarray(
        taken(result, "sequences", "segment_index", condition).values == SEGMENTS.index(segment)
    )


def in_layers(values: np.ndarray, layers: Layers) -> np.ndarray:
    """Some of the layers [prompt, layer, …] (NotApplicable where a model of one layer has none of them)."""
    n = values.shape[1]
    if n < 2 and layers not in ("all", "first"):
        raise NotApplicable("the model has one layer")
    early = ceil(n / 6)
    ends = {
        "all": (0, n),
        "first": (0, 1),
        "next": (1, 3),
        "later": (1, n),
        "early": (0, early),
        "rest": (early, n),
    }
    return values[:, slice(*ends[layers])]


def log_ratio(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """log(values / baseline), infinite or NaN where one of them is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values / baseline)


@measure(_RECEIVED, "log-ratio")
def fall(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio of what the question's tokens receive in layer 0, mean over heads."""
    return log_ratio(*(_received(result, name)[:, 0] for name in (condition, to)))


@measure(_RECEIVED, "log-ratio")
def fall_beyond_uniform(
    result: Result, condition: str, to: str = BASELINE, layers: Layers = "first"
) -> np.ndarray:
    """The fall less that of a head that is blind to content, mean over layers."""
    ours = log_ratio(*(_received(result, name) for name in (condition, to)))
    theirs = log_ratio(
        *(null(result, _RECEIVED, "received_by_segment", name) for name in (condition, to))
    )
    return np.asarray(in_layers(ours - theirs, layers).mean(1))


@measure(_RECEIVED, "log-ratio")
def peaks(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """The fall at the peaks less that elsewhere in the question, beyond a blind head's, layer 0.

    The peaks of a head and prompt are the tenth of the keys with the largest geometric mean of both conditions, among
    those that eight original tokens or more come after.
    """
    ours, theirs = (_by_origin(result, name, "") for name in (condition, to))
    of = "_blind" if "received_blind_by_origin_per_prompt" in result[_RECEIVED] else "_uniform"
    expected = log_ratio(*(_by_origin(result, name, of) for name in (condition, to)))
    question = places(result, BASELINE, "question")
    lengths = (taken(result, "sequences", "origin", BASELINE).values >= 0).sum(-1)
    found = []
    for prompt, length in enumerate(lengths):
        keys = np.flatnonzero(question[prompt, : max(0, length - _QUERIES)])
        one, other, null_of = (
            ours[prompt][:, keys],
            theirs[prompt][:, keys],
            expected[prompt][:, keys],
        )
        there = np.isfinite(null_of).all(0) & (one > 0).all(0) & (other > 0).all(0)
        found.append(_at_peaks(np.log(one[:, there]), np.log(other[:, there]), null_of[:, there]))
    return np.array(found)


def _at_peaks(one: np.ndarray, other: np.ndarray, expected: np.ndarray) -> float:
    """Of the logarithms of two conditions [head, key]."""
    count = max(1, round(_PEAKS * one.shape[1]))
    if one.shape[1] <= count:
        return float("nan")
    high = np.argsort(np.argsort(-(one + other), axis=1, kind="stable"), axis=1) < count
    beyond = one - other - expected
    means = [np.where(some, beyond, 0.0).sum(1) / some.sum(1) for some in (high, ~high)]
    return float((means[0] - means[1]).mean())


@measure(_RECEIVED, "share", SHARE)
def peak_moved(result: Result, condition: str, layer: Layer = 1) -> np.ndarray:
    """Share of a layer's heads whose most attended token of the question is another one than in the baseline."""
    if layer >= result[_RECEIVED].sizes["layer"]:
        raise NotApplicable(f"the model has no layer {layer}")
    question = places(result, BASELINE, "question")
    tops = []
    for name in (condition, BASELINE):
        values = _by_origin(result, name, "", layer)
        keys = question[:, None, : values.shape[-1]]
        tops.append(np.where(keys & np.isfinite(values), values, -1.0).argmax(-1))
    return (tops[0] != tops[1]).mean(-1)


@measure(_RECEIVED, "log-ratio")
def filler_beside_question(result: Result, condition: str) -> np.ndarray:
    """Log-ratio of what an inserted token receives to what one of the question does, beyond a blind head's, layer 0."""
    logs = []
    for quantity in ("received_by_segment", blind(result, _RECEIVED, "received_by_segment")):
        values = taken(result, _RECEIVED, quantity, condition).isel(layer=0).astype(np.float64)
        values = values.mean("head") if "head" in values.dims else values
        logs.append(
            log_ratio(*(values.sel(segment=name).values for name in ("inserted", "question")))
        )
    return logs[0] - logs[1]


def evenness_range(result: Result, condition: str) -> tuple[float, float]:
    """One token may receive all, or each as much as the next."""
    return 1 / int(places(result, condition, "inserted").sum(1).min()), 1.0


@measure(_RECEIVED, "share", evenness_range)
def evenness(result: Result, condition: str) -> np.ndarray:
    """Effective number of inserted tokens by what they receive in layer 0, over their number; mean over heads."""
    data = taken(result, _RECEIVED, "received_per_prompt", condition).isel(layer=0).values
    found = []
    for prompt, mask in zip(data, places(result, condition, "inserted"), strict=True):
        received = prompt[:, np.flatnonzero(mask)].astype(np.float64)
        share = received / received.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        found.append((np.exp(entropy) / share.shape[1]).mean())
    return np.array(found)


@measure(_RECEIVED, "log-ratio")
def band(result: Result, condition: str, to: str = BASELINE) -> np.ndarray:
    """Log-ratio of a prompt's distance from the mean of all, over heads of layer 0 and the question's places."""
    shortest = int(places(result, BASELINE, "question").sum(1).min())
    found = []
    for name in (condition, to):
        values = _by_origin(result, name, "")
        first = places(result, BASELINE, "question").argmax(1)
        aligned = np.stack(
            [v[:, at : at + shortest - 1] for v, at in zip(values, first, strict=True)]
        )
        found.append(abs(aligned - aligned.mean(0)).mean((1, 2)))
    return log_ratio(*found)


@measure(_AFFINE, "share", POSITIVE)
def affine_missed(result: Result, condition: str, layers: Layers = "first") -> np.ndarray:
    """‖out' − λ · out − Σσ‖ / ‖out'‖ of the question's queries, mean over heads and layers."""
    return np.asarray(
        in_layers(by_head(result, _AFFINE, "relative_error", condition), layers).mean((1, 2))
    )


@measure(_AFFINE, "share", POSITIVE)
def affine_identity(result: Result, condition: str) -> np.ndarray:
    """What the affine form misses in layer 0 where only the inserted keys differ: 0 but for rounding."""
    seen = taken(result, _AFFINE, "scale_at_uniform_per_prompt", condition).isel(layer=0).values
    inserted, question = (
        places(result, condition, name)[:, : seen.shape[1]] for name in ("inserted", "question")
    )
    expected = 1 - inserted.cumsum(1) / np.arange(1, seen.shape[1] + 1)
    if not np.allclose(
        seen[question], expected[question], atol=1e-4
    ):  # more than the inserted keys differs
        raise NotApplicable(
            "queries of layer 0 do not see all keys before them (a window, or learned sinks)"
        )
    return affine_missed(result, condition)


@measure(_AFFINE, "share", (-inf, 1.0))
def affine_explained(result: Result, condition: str, layers: Layers = "first") -> np.ndarray:
    """Share of the change of outputs that is dilution and shift, by ⟨part, change⟩ / ‖change‖²; less what overshoots.

    All parts add up to 1, and the others are re-routing and new values: 1 − |their share|, mean over heads and layers.
    """
    parts = [
        by_head(result, _AFFINE, f"change_by_{part}", condition)
        for part in ("rerouting", "new_values")
    ]
    return np.asarray(1 - in_layers(np.abs(parts[0] + parts[1]), layers).mean((1, 2)))


@measure(_AFFINE, "share", POSITIVE)
def best_affine_missed(result: Result, condition: str) -> np.ndarray:
    """What out' ≈ a · out + b misses of how the question's outputs differ, ‖·‖ / ‖out' − mean‖, mean of later layers.

    One a for each head, fitted on one half of the prompts and measured on the other, whose b is their own.
    """
    xx, xy, yy = (
        in_layers(by_head(result, _AFFINE, f"fit_{name}", condition), "later")
        for name in ("before", "both", "after")
    )
    fitting, rest = halves_of(len(xx))
    a = xy[fitting].sum(0) / xx[fitting].sum(0)
    return np.asarray(np.sqrt(np.maximum(yy - 2 * a * xy + a**2 * xx, 0) / yy)[rest].mean((1, 2)))


@measure(_AFFINE, "share", SHARE)
def one_direction(result: Result, condition: str) -> np.ndarray:
    """s₁² / Σ s² of the shifts Σσ of all later queries, layer 0, mean over heads."""
    return by_head(result, _AFFINE, "shift_rank_one_share", condition)[:, 0].mean(-1)


def lambda_spread_range(result: Result, condition: str) -> tuple[float, float]:
    """λ lies in [0, 1]: of n values at most √(n − 1)."""
    return 0.0, float(np.sqrt(places(result, condition, "question").sum(1).min() - 1))


@measure(_AFFINE, "share", lambda_spread_range)
def lambda_spread(result: Result, condition: str) -> np.ndarray:
    """Standard deviation of λ over its mean, over the question's queries of a head of layer 0; mean over heads."""
    scale = taken(result, _AFFINE, "scale_at_per_prompt", condition).isel(layer=0)
    values = scale.transpose("prompt", "head", "key").values.astype(np.float64)
    found = []
    for of_heads, asks in zip(values, places(result, condition, "question"), strict=True):
        of_queries = of_heads[:, np.flatnonzero(asks)]
        found.append((of_queries.std(1) / of_queries.mean(1)).mean())
    return np.array(found)


def _received(result: Result, condition: str) -> np.ndarray:
    """What the question receives, mean over heads [prompt, layer]."""
    return by_head(result, _RECEIVED, "received_by_segment", condition).mean(-1)


def _by_origin(result: Result, condition: str, of: str, layer: int = 0) -> np.ndarray:
    """What each original key receives [prompt, head or 1, key]."""
    found = taken(result, _RECEIVED, f"received{of}_by_origin_per_prompt", condition).isel(
        layer=layer
    )
    found = found if "head" in found.dims else found.expand_dims("head")
    return found.transpose("prompt", "head", "original_key").values.astype(np.float64)
