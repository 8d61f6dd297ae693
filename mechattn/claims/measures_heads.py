"""Measures of heads without inserted tokens, and of what tokens and ARM do to the first MLP and to answers."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy.stats import rankdata

from mechattn.axes import BASELINE
from mechattn.claims import measures as m
from mechattn.claims.rules import Estimate, estimated
from mechattn.evaluation.answer_units import units_of
from mechattn.evaluation.evaluation import Evaluation
from mechattn.results.result import Result
from mechattn.stats.accuracy import detectable_difference, pass_at_k
from mechattn.stats.intervals import wilson_interval
from mechattn.stats.units import halves_of

Mass = Literal[
    "self_mass",
    "first_mass",
    "previous_mass",
    "duplicate_mass",
    "induction_mass",
    "self_share",
    "first_share",
]
Written = Literal["head_updates", "top_target_updates"]
_FOCUS, _SINKS, _UPDATES = "attention_focus", "attention_sinks", "head_updates"
_BOTH, _LOGITS = f"{_FOCUS} {_UPDATES}", "direct_logits"
_LOOKS = 0.1  # of a head's attention on the first token, for it to look there at all
_TOKENS = 3  # of a head that look at the first token, and that do not, at least
_LOCAL = 2  # layers
_OF = "mlp_activations"
_LARGE = 0.1  # of the activations in the baseline
_CLASSES, _OTHER = ("digit", "operator", "conjunction"), "other"
Statistic = Literal["near_zero", "l1", "l2", "gini", "variance"]
Tries = Annotated[int, Field(ge=1, le=1000)]


@m.measure(_FOCUS, "share", m.SHARE)
def focus(result: Result, quantity: Mass, layers: m.Layers = "all") -> np.ndarray:
    """What heads give a target, or the share of queries whose strongest target it is; mean over layers."""
    return np.asarray(
        m.in_layers(m.by_head(result, _FOCUS, quantity, BASELINE), layers).mean((1, 2))
    )


@m.measure(_BOTH, "number", m.APART)
def first_and_update(result: Result) -> np.ndarray:
    """Spearman's ρ over a head's tokens of attention to the first one with ‖Δ‖ / ‖h‖; mean over later heads that look.

    A head looks at the first token if a tenth of its attention goes there; random weights have none that do, and all
    of their later heads count.
    """
    mass, size = (
        _tokens(result, *of) for of in ((_FOCUS, "first_mass_at"), (_UPDATES, "magnitude_at"))
    )
    looks = _looking(result)
    question = m.places(result, BASELINE, "question")
    rows = [
        rank_correlation(*(values[prompt][looks][:, asks] for values in (mass, size))).mean()
        for prompt, asks in enumerate(question)
    ]
    return np.array(rows)


@m.measure(_BOTH, "log-ratio")
def update_at_first(result: Result) -> np.ndarray:
    """Log-ratio of a head's ‖Δ‖ / ‖h‖ at tokens whose strongest target is the first one to that at its other tokens."""
    target, size = (
        _tokens(result, *of) for of in ((_FOCUS, "target_at"), (_UPDATES, "magnitude_at"))
    )
    looks = _looking(result)
    found = []
    for prompt, asks in enumerate(m.places(result, BASELINE, "question")):
        at_first, updates = target[prompt][looks][:, asks] == 0, size[prompt][looks][:, asks]
        there, elsewhere = at_first.sum(1), (~at_first).sum(1)
        both = (there >= _TOKENS) & (elsewhere >= _TOKENS)
        if not both.any():
            raise m.NotApplicable(
                f"in prompt {prompt} no later head looks at the first token with some of its tokens"
            )
        means = (
            (updates * some).sum(1)[both] / some.sum(1)[both] for some in (at_first, ~at_first)
        )
        found.append(m.log_ratio(*means).mean())
    return np.array(found)


@m.measure(_FOCUS, "number", m.APART)
def heads_related(result: Result, quantity: Mass = "self_mass") -> np.ndarray:
    """Spearman's ρ over the index of heads between neighbouring layers, mean over pairs of layers."""
    values = m.by_head(result, _FOCUS, quantity, BASELINE)
    return rank_correlation(values[:, :-1], m.in_layers(values, "later")).mean(1)


@m.measure("", "number", m.SHARE)
def turned(result: Result, of: Written = "head_updates") -> np.ndarray:
    """|cosine| of a head's update with the hidden state, mean over layers and heads."""
    quantity = "top_target_orientation" if of == "top_target_updates" else "orientation"
    return np.asarray(abs(m.by_head(result, of, quantity, BASELINE)).mean((1, 2)))


@m.measure(_SINKS, "share", m.SHARE)
def sink_rate(result: Result, from_layer: m.Layer = 0) -> np.ndarray:
    """Share of heads, from a layer on, that give the first token more than 0.3 of their attention (2410.10781)."""
    return _from(m.by_head(result, _SINKS, "first_sink", BASELINE), from_layer).mean((1, 2))


@m.measure(_SINKS, "log-ratio")
def first_beyond_uniform(result: Result, from_layer: m.Layer = 0) -> np.ndarray:
    """Log-ratio of what heads from a layer on give the first token, on average, to what blind heads do."""
    ours = _from(m.by_head(result, _SINKS, "first_alpha", BASELINE).mean(-1), from_layer).mean(1)
    return m.log_ratio(
        ours, _from(m.null(result, _SINKS, "first_alpha", BASELINE), from_layer).mean(1)
    )


@m.measure(_FOCUS, "log-ratio")
def distance_early(result: Result) -> np.ndarray:
    """Log-ratio of how far back the heads of layers 0 and 1 look to how far blind heads do."""
    ours = m.by_head(result, _FOCUS, "distance", BASELINE).mean(-1)[:, :_LOCAL]
    return m.log_ratio(ours, m.null(result, _FOCUS, "distance", BASELINE)[:, :_LOCAL]).mean(1)


@m.measure(_SINKS, "number", m.POSITIVE)
def sink_value(result: Result) -> np.ndarray:
    """‖v‖ of the first token over the mean of all, mean over the heads whose sink it is."""
    return m.by_head(result, _SINKS, "value_drain", BASELINE)[:, _sinks(result)].mean(1)


@m.measure(_SINKS, "log-ratio")
def sink_rank(result: Result) -> np.ndarray:
    """Log-ratio of the effective rank of the outputs of heads with a sink to that of the others."""
    rank, sinks = m.by_head(result, _SINKS, "output_rank", BASELINE), _sinks(result)
    if sinks.all():
        raise m.NotApplicable(
            "every head has a sink at the first token, so there are none to compare with"
        )
    return m.log_ratio(rank[:, sinks].mean(1), rank[:, ~sinks].mean(1))


@m.measure(_FOCUS, "share", m.APART)
def strongest(result: Result, quantity: Mass, layers: m.Layers = "all") -> np.ndarray:
    """A quantity of one head beyond a blind head's: chosen on one half of the prompts, measured on the other."""
    values = (
        m.by_head(result, _FOCUS, quantity, BASELINE)
        - m.null(result, _FOCUS, quantity, BASELINE)[..., None]
    )
    values = m.in_layers(values, layers)
    layer, head = _chosen(values)
    return np.asarray(values[halves_of(len(values))[1], layer, head])


@m.measure(f"{_FOCUS} {_LOGITS}", "number", (-inf, inf))
def copies(result: Result) -> np.ndarray:
    """What the strongest induction head adds to the logit of the next token, in logits, chosen on other prompts."""
    layer, head = _chosen(m.by_head(result, _FOCUS, "induction_mass", BASELINE))
    added = m.by_head(result, _LOGITS, "next_token_logit", BASELINE)
    return added[halves_of(len(added))[1], layer, head]


def rank_correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Spearman's ρ over the last axis; 0 where all are alike."""
    centred = [
        ranks - ranks.mean(-1, keepdims=True)
        for ranks in (rankdata(x, axis=-1) for x in (one, other))
    ]
    norms = np.sqrt((centred[0] ** 2).sum(-1) * (centred[1] ** 2).sum(-1))
    return np.divide(
        (centred[0] * centred[1]).sum(-1), norms, out=np.zeros_like(norms), where=norms > 0
    )


def _chosen(values: np.ndarray) -> tuple[int, int]:
    """The head with the largest mean over one half of the prompts."""
    if len(values) < 2:
        raise m.NotApplicable(
            "one prompt is too few to choose a head on others than it is measured on"
        )
    layer, head = np.unravel_index(
        values[halves_of(len(values))[0]].mean(0).argmax(), values.shape[1:]
    )
    return int(layer), int(head)


def _sinks(result: Result) -> np.ndarray:
    """Which heads have a sink at the first token, in most prompts [layer, head]."""
    found = m.by_head(result, _SINKS, "first_sink", BASELINE).mean(0) > 0.5
    if not found.any():
        raise m.NotApplicable("no head gives the first token more than 0.3 of its attention")
    return np.asarray(found)


def _looking(result: Result) -> np.ndarray:
    """The heads beyond the first sixth of the layers that look at the first token; all of them where none does."""
    mass = m.by_head(result, _FOCUS, "first_mass", BASELINE)
    early = mass.shape[1] - m.in_layers(mass, "rest").shape[1]
    mass = mass.mean(0)
    late = np.arange(len(mass))[:, None] >= early
    looks = late & (mass >= _LOOKS)
    return looks if looks.any() else np.broadcast_to(late, mass.shape)


def _tokens(result: Result, dataset: str, quantity: str) -> np.ndarray:
    """A quantity of each token [prompt, layer, head, pos]."""
    found = m.taken(result, dataset, f"{quantity}_per_prompt", BASELINE)
    return found.transpose("prompt", "layer", "head", "key").values.astype(np.float64)


def _from(values: np.ndarray, layer: int) -> np.ndarray:
    if layer >= values.shape[1]:
        raise m.NotApplicable(
            f"the model has {values.shape[1]} layers, and this is about those from {layer} on"
        )
    return values[:, layer:]


@m.measure(_OF, "log-ratio")
def activations(result: Result, condition: str, quantity: Statistic = "near_zero") -> np.ndarray:
    """Log-ratio to the baseline of a statistic of the question's activations (near_zero, l1, l2, gini, variance)."""
    of = f"{quantity}_by_segment"
    ours, theirs = (_first(result, of, name, segment="question") for name in (condition, BASELINE))
    return _positive(ours, theirs, quantity)


@m.measure(_OF, "log-ratio")
def large(result: Result, condition: str) -> np.ndarray:
    """Log-ratio to the baseline of the share of large activations: above the bound that a tenth exceed there."""
    edges = result[_OF].bin.values.astype(np.float64)  # left edges; the first is −∞
    right = np.append(edges[1:], np.inf)
    ours, theirs = (_first(result, "histogram", name) for name in (condition, BASELINE))
    for bound in sorted({abs(edge) for edge in edges[1:]}):
        beyond = (edges >= bound) | (right <= -bound)
        if theirs.mean(0)[beyond].sum() <= _LARGE:
            return _positive(ours[:, beyond].sum(1), theirs[:, beyond].sum(1), "large")
    raise m.NotApplicable("more than a tenth of the activations lie beyond the last bin")


@m.measure(_OF, "log-ratio")
def classes_near_zero(result: Result, condition: str = BASELINE) -> np.ndarray:
    """Log-ratio of the share near zero at digits, operators and conjunctions (mean of those there) to the rest."""
    classes = [
        _first(result, "near_zero_by_token_class", condition, token_class=name) for name in _CLASSES
    ]
    there = np.isfinite(classes)
    mean = np.where(there, classes, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    return _positive(
        mean, _first(result, "near_zero_by_token_class", condition, token_class=_OTHER), "near_zero"
    )


def distribution_range(result: Result, one: str, other: str) -> tuple[float, float]:
    """What a change can reach that moves mass outward alone, as ARM's does, beside that of the first condition."""
    change = _change(result, one)
    outward = np.where(result[_OF].bin.values[1:] > 0, change < 0, change > 0) * change
    size = np.linalg.norm(change, axis=1)
    low, high = (
        _over(np.linalg.norm(part, axis=1), size).mean() for part in (change - outward, outward)
    )
    return -float(low), float(high)


@m.measure(_OF, "number", distribution_range)
def distribution_agreement(result: Result, one: str, other: str) -> np.ndarray:
    """Cosine of two conditions' changes of the cumulative distribution of activations; 0 where one changes nothing."""
    ours, theirs = _change(result, one), _change(result, other)
    return _over(
        (ours * theirs).sum(1), np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    )


def attainable_agreement(result: Result, one: str, other: str) -> np.ndarray:
    """The largest cosine with the first change of any change of the entries that the other condition changes."""
    return np.sqrt(_over(_between(result, one, other, "change_within"), _between(result, one, one)))


def agreement_range(result: Result, one: str, other: str) -> tuple[float, float]:
    """The mean of the largest cosines, both ways."""
    largest = float(attainable_agreement(result, one, other).mean())
    return -largest, largest


@m.measure(_OF, "number", agreement_range)
def agreement(result: Result, one: str, other: str) -> np.ndarray:
    """Cosine of two conditions' changes, entry by entry; 0 where one changes nothing."""
    norms = np.sqrt(_between(result, one, one) * _between(result, other, other))
    return _over(_between(result, one, other), norms)


@m.measure(_OF, "share", m.APART)
def agreement_share(result: Result, one: str, other: str) -> np.ndarray:
    """The cosine of two changes over the largest that any change of the second's entries can have."""
    return _over(agreement(result, one, other), attainable_agreement(result, one, other))


def _first(result: Result, quantity: str, condition: str, **at: str) -> np.ndarray:
    """Of the first layer [prompt, …]."""
    return m.taken(result, _OF, quantity, condition).isel(layer=0).sel(at).values.astype(np.float64)


def _positive(ours: np.ndarray, theirs: np.ndarray, of: str) -> np.ndarray:
    if not ((ours > 0).all() and (theirs > 0).all()):
        raise m.NotApplicable(f"in some prompt {of} is 0, and there is no ratio")
    return m.log_ratio(ours, theirs)


def _change(result: Result, condition: str) -> np.ndarray:
    """Of the share of activations below each edge, from the baseline [prompt, edge]."""
    ours, theirs = (
        _first(result, "histogram", name).cumsum(1)[:, :-1] for name in (condition, BASELINE)
    )
    return ours - theirs


def _between(result: Result, one: str, other: str, quantity: str = "change_product") -> np.ndarray:
    return _first(result, quantity, one, other_condition=other)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def accuracy_range(
    evaluation: Evaluation, condition: str, to: str = BASELINE, k: int = 1
) -> tuple[float, float]:
    """A model at 99 % cannot gain more than a point."""
    _check(evaluation, to)
    n = evaluation.samples
    level = float(pass_at_k(evaluation.right(to).sum(1), n, min(k, n)).mean())
    return -level, 1 - level


@m.measure("answers", "points", accuracy_range)
def accuracy_apart(evaluation: Evaluation, condition: str, to: str = BASELINE) -> Estimate:
    """Share of problems solved less that under another condition (Newcombe's interval, McNemar's test)."""
    _check(evaluation, condition, to)
    made = evaluation.compare(condition, to)
    value, low, high, detectable, p = (
        float(made[name]) for name in ("difference", "low", "high", "detectable", "p")
    )
    n, exact = int(made["n"]), p if units_of(evaluation, "auto").of is None else None
    levels = (float(evaluation.right(to).mean()), float(evaluation.right(condition).mean()))
    return Estimate(value, low, high, n, detectable, exact, levels, detectable_difference(n, 0.0))


@m.measure("answers", "points", accuracy_range)
def pass_apart(
    evaluation: Evaluation, condition: str, to: str = BASELINE, k: Tries = 3
) -> Estimate:
    """pass@k less that under another condition."""
    _check(evaluation, condition, to)
    if evaluation.samples < k:
        raise m.NotApplicable(
            f"{evaluation.samples} answers to each problem were drawn, and pass@{k} takes {k} or more"
        )
    each = [
        pass_at_k(evaluation.right(name).sum(1), evaluation.samples, k) for name in (condition, to)
    ]
    values = units_of(evaluation, "auto").means(each[0] - each[1])
    alike = float(wilson_interval(0, len(values))[1])
    made = estimated(
        values, least=alike if np.ptp(values) == 0 else 0.0
    )  # no spread is no certainty
    return replace(made, levels=(float(each[1].mean()), float(each[0].mean())), floor=alike)


def _check(evaluation: Evaluation, *names: str) -> None:
    for name in names:
        if name not in evaluation.conditions:
            raise m.NotApplicable(f"no problem was answered under {name!r}")
