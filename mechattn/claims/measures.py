"""The measures of all claims by name: estimates with intervals, and those of random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mechattn.axes import BASELINE
from mechattn.claims import attention_measures
from mechattn.claims.attention_measures import NotApplicable
from mechattn.claims.claim import Measure, Needs
from mechattn.claims.rules import Chance, Estimate, beside_chance, estimated
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.units import units_of as problems_of
from mechattn.results.result import Result
from mechattn.results.units import units_of
from mechattn.stats.accuracy import pass_at_k as chance_of_one
from mechattn.stats.intervals import wilson_interval

OfPrompts = Callable[..., np.ndarray]
OfAnswers = Callable[..., Estimate]


@dataclass(frozen=True)
class Evidence:
    """What was measured of one model; None or empty where a stage was left out.

    Args:
        attention: Of all layers.
        activations: Of the first MLP.
        answers: Greedy answers.
        samples: Several sampled answers to each problem.
        random_attention: As ``attention``, of random weights.
        random_activations: As ``activations``, of random weights.
        missing: Why a stage has nothing.
    """

    attention: Result | None = None
    activations: Result | None = None
    answers: Evaluation | None = None
    samples: Evaluation | None = None
    random_attention: tuple[Result, ...] = ()
    random_activations: tuple[Result, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)


class NotMeasured(OptionError):
    """A claim asks for what the run has left out."""


def near_zero(result: Result, condition: str) -> np.ndarray:
    """Log-ratio to the baseline of the question's share of activations near zero, in the first layer [prompt]."""
    values = result["mlp_activations"].near_zero_by_segment.isel(layer=0).sel(segment="question")
    ours, theirs = (values.sel(condition=name).values.astype(np.float64) for name in (condition, BASELINE))
    if not ((ours > 0).all() and (theirs > 0).all()):
        raise NotApplicable("in some prompt no activation is near zero, and there is no ratio")
    return np.log(ours / theirs)


def agreement(result: Result, one: str, other: str) -> np.ndarray:
    """Cosine of two conditions' changes of the first MLP's activations; 0 where one changes nothing [prompt]."""
    product = result["mlp_activations"].change_product.isel(layer=0).astype(np.float64)

    def between(a: str, b: str) -> np.ndarray:
        return product.sel(condition=a, other_condition=b).values

    norms = np.sqrt(between(one, one) * between(other, other))
    return np.divide(between(one, other), norms, out=np.zeros_like(norms), where=norms > 0)


def agreement_apart(result: Result, one: str, other: str, control: str) -> np.ndarray:
    """The cosine of two changes less that of the first with a control [prompt]."""
    return agreement(result, one, other) - agreement(result, one, control)


def accuracy_apart(evaluation: Evaluation, condition: str, to: str = BASELINE) -> Estimate:
    """Accuracy less that of another condition, on the same problems."""
    _check_there(evaluation, condition, to)
    made = {name: float(value) for name, value in evaluation.compare(condition, to).items()}
    return Estimate(made["difference"], made["low"], made["high"], int(made["n"]), made["detectable"])


def pass_at_k(evaluation: Evaluation, condition: str, to: str = BASELINE) -> Estimate:
    """pass@k less that of another condition, k the number of samples, on the same problems."""
    _check_there(evaluation, condition, to)
    k = evaluation.samples
    each = [chance_of_one(evaluation.right(name).sum(1), k, k) for name in (condition, to)]
    values = problems_of(evaluation, "auto").means(each[0] - each[1])
    alike = wilson_interval(0, len(values))[1] if np.ptp(values) == 0 else 0.0  # no spread is no certainty
    return estimated(values, least=alike)


OF_PROMPTS: dict[str, OfPrompts] = {
    of.__name__: of
    for of in (
        attention_measures.fall, attention_measures.fall_beyond_uniform, attention_measures.deeper,
        attention_measures.peaks, attention_measures.evenness, attention_measures.evenness_apart,
        attention_measures.affine_first, attention_measures.affine_deeper, attention_measures.total_variation_first,
        attention_measures.total_variation_deeper, attention_measures.scale_spread,
        attention_measures.early_less_late, attention_measures.late_less_early, attention_measures.sink_and_update,
        attention_measures.magnitude, attention_measures.turned, near_zero, agreement, agreement_apart,
    )
}  # fmt: skip
NEEDS = {"sink_and_update": attention_measures.check_sinks}  # of the model itself; random weights need no such heads
OF_ANSWERS: dict[str, OfAnswers] = {of.__name__: of for of in (accuracy_apart, pass_at_k)}


def found(measure: Measure, needs: Needs, evidence: Evidence) -> tuple[Estimate, Chance | None]:
    """A number with its interval, and the same beside random weights where they were run.

    Raises:
        NotMeasured: The run has left out what it is of.
        NotApplicable: The model has not got what it is of.
    """
    if measure.of in OF_ANSWERS:
        return OF_ANSWERS[measure.of](_answers(needs, evidence), *measure.conditions), None
    activations = needs == "activations"
    result = evidence.activations if activations else evidence.attention
    draws = evidence.random_activations if activations else evidence.random_attention
    if result is None:
        raise NotMeasured(evidence.missing.get(needs, "it was left out of the plan"))
    if measure.of in NEEDS:
        NEEDS[measure.of](result)
    values, *random = [_of_units(measure, one) for one in (result, *draws)]
    return estimated(values), beside_chance(values, random)


def _of_units(measure: Measure, result: Result) -> np.ndarray:
    values = OF_PROMPTS[measure.of](result, *measure.conditions)
    return units_of(result, len(values)).means(values)


def _answers(needs: Needs, evidence: Evidence) -> Evaluation:
    evaluation = evidence.samples if needs == "samples" else evidence.answers
    if evaluation is None:
        raise NotMeasured(evidence.missing.get(needs, "it was left out of the plan"))
    return evaluation


def _check_there(evaluation: Evaluation, *names: str) -> None:
    for name in names:
        if name not in evaluation.conditions:
            raise NotMeasured(f"answers under {name!r} were left out of the plan")
