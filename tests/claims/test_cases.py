"""Every claim on made-up numbers: one case that it must call supported, one contradicted, one that cannot be told."""

from dataclasses import replace

import numpy as np
import pytest

from mechattn.axes import SEGMENTS
from mechattn.claims.judged import judged
from mechattn.claims.register import CLAIMS
from tests.claims import synthetic as made

N = 24
LINES = {claim.key: claim for claim in CLAIMS}
Q, INSERTED = SEGMENTS.index("question"), made.SYSTEM + np.arange(made.INSERTED)
EXPECTED = {"positive": "supported", "negative": "contradicted", "underpowered": "cannot be told"}
CASES = {}


def case(key, positive, negative, line, spread):
    """A claim is made by a function of one number a prompt; the third case scatters about the line."""

    def register(make):
        rng = np.random.default_rng(0)
        noise = rng.standard_normal(N) * 1e-3
        scatter = rng.standard_normal(N)
        scatter = line + spread * (scatter - scatter.mean())
        CASES[key] = (make, {"positive": positive + noise, "negative": negative + noise, "underpowered": scatter})
        return make

    return register


def multiplied(values, condition, layers, factors):
    """Received attention of the question in a condition and some layers, times a factor of each prompt."""
    data = values.attention["received_attention"].received_by_segment
    at = made.CONDITIONS.index(condition)
    data.values[:, at, layers, :, Q] *= (
        np.exp(factors)[:, None, None] if isinstance(layers, slice) else np.exp(factors)[:, None]
    )
    return values


def put(dataset, name, condition, layers):
    """A quantity of the question in a condition and some layers."""

    def make(values, numbers):
        data = values.attention[dataset][name]
        data.values[:, made.CONDITIONS.index(condition), layers, :, Q] = numbers[:, None, None]
        return values

    return make


@case("attention_falls", -0.1, 0.05, -0.02, 0.3)
@case("more_than_dilution", -0.1, 0.05, -0.02, 0.3)
def first_layer(values, numbers):
    return multiplied(values, "slash", 0, numbers)


case("sentence_lower", -0.1, 0.05, -0.02, 0.3)(lambda values, numbers: multiplied(values, "sentence", 0, numbers))
case("less_in_deeper_layers", 0.2, -0.1, 0.02, 0.3)(
    lambda values, numbers: multiplied(values, "slash", slice(1, 3), numbers)
)


@case("at_peaks", -0.2, 0.2, -0.02, 0.3)
def at_peaks(values, numbers):
    data = values.attention["received_attention"].received_by_origin_per_prompt
    data.values[:, :, 0, :, [6, 9]] *= 8.0  # of twelve
    data.values[:, 1, 0, :, [6, 9]] *= np.exp(numbers)[None, :, None]
    return values


def shares(values, condition, of):
    """Two groups of inserted tokens, so that the effective share of the prompt is what is asked for, by bisection."""
    data = values.attention["received_attention"].received_per_prompt
    at = made.CONDITIONS.index(condition)
    half = made.INSERTED // 2
    for prompt, wanted in enumerate(of):
        low, high = 0.0, 1.0
        for _ in range(60):
            small = (low + high) / 2
            p = np.array([1.0] * half + [small] * half) / (half * (1 + small))
            effective = np.exp(-(p * np.log(np.maximum(p, 1e-300))).sum()) / made.INSERTED
            low, high = (small, high) if effective < wanted else (low, small)
        data.values[prompt, at, 0, :, INSERTED[half:]] *= small
    return values


case("shared_evenly", 0.97, 0.7, 0.9, 0.03)(lambda values, numbers: shares(values, "slash", numbers))
case("sentence_uneven", 0.3, 0.01, 0.05, 0.02)(lambda values, numbers: shares(values, "sentence", 1 - numbers))
case("affine_first_layer", 0.01, 0.2, 0.05, 0.04)(put("affine_shift", "relative_error", "slash", slice(0, 1)))
case("affine_deeper", 0.01, 0.2, 0.05, 0.04)(put("affine_shift", "relative_error", "slash", slice(1, None)))
case("itself_early", 0.4, 0.0, 0.25, 0.2)(put("attention_focus", "self_share", "baseline", slice(0, 1)))
case("first_token_late", 0.4, 0.0, 0.25, 0.2)(put("attention_focus", "first_share", "baseline", slice(1, None)))
case("updates_small", 0.1, 0.9, 0.5, 0.3)(put("head_updates", "magnitude", "baseline", slice(None)))
case("updates_across", 0.1, 0.9, 0.3, 0.2)(put("head_updates", "orientation", "baseline", slice(None)))


@case("one_lambda", 0.02, 0.4, 0.1, 0.08)
def one_lambda(values, numbers):
    for result in values.random_attention:  # a model whose λ are one number, where random ones are not
        result["affine_shift"].scale.values[:, 1, :, 1::2] = 1.0
    data = values.attention["affine_shift"].scale.values
    data[:, 1, :, ::2, Q] = (0.5 * (1 - numbers))[:, None, None]
    data[:, 1, :, 1::2, Q] = (0.5 * (1 + numbers))[:, None, None]
    return values


@case("first_token_no_update", 1, -1, 0, 0)
def sinks(values, numbers):
    """ρ is 1, −1, or of a random order."""
    rng = np.random.default_rng(1)
    focus, updates = values.attention["attention_focus"], values.attention["head_updates"]
    heads = np.arange(1.0, 1 + (made.LAYERS - 1) * made.HEADS) / 40
    for at, result in enumerate((values.attention, *values.random_attention)):
        result["attention_focus"].first_mass.values[:, 0, 1:, :, Q] = heads.reshape(-1, made.HEADS) / (10 if at else 1)
        for prompt in range(N):
            order = rng.permutation(heads).reshape(-1, made.HEADS)
            result["head_updates"].magnitude.values[prompt, 0, 1:, :, Q] = order
    sign = numbers.mean()
    if abs(sign) > 0.5:
        updates.magnitude.values[:, 0, 1:, :, Q] = focus.first_mass.values[:, 0, 1:, :, Q] * -sign + 1
    else:
        for prompt in range(0, N, 2):  # every other prompt, weakly
            rising = 1 - focus.first_mass.values[prompt, 0, 1:, :, Q]
            updates.magnitude.values[prompt, 0, 1:, :, Q] = rising + 0.5 * rng.permutation(heads).reshape(
                -1, made.HEADS
            )
    return values


@case("fewer_near_zero", -0.1, 0.05, -0.02, 0.3)
def near_zero(values, numbers, condition="slash"):
    data = values.activations["mlp_activations"].near_zero_by_segment
    data.values[:, made.MLP.index(condition), 0, Q] *= np.exp(numbers)
    return values


case("arm_lowers_near_zero", -0.5, 0.05, -0.02, 0.3)(lambda v, numbers: near_zero(v, numbers, "arm"))


@case("arm_does_the_same", 0.6, 0.0, 0.2, 0.15)
def agreement(values, numbers):
    data = values.activations["mlp_activations"].change_product
    one, other = made.MLP.index("slash"), made.MLP.index("arm")
    data.values[:, 0, one, other] = data.values[:, 0, other, one] = numbers
    return values


def test_every_claim_that_is_measured_in_prompts_has_its_cases():
    assert set(CASES) == {claim.key for claim in CLAIMS if claim.needs in ("attention", "activations")}


@pytest.mark.parametrize("which", EXPECTED)
@pytest.mark.parametrize("key", CASES)
def test_three_cases(key, which):
    make, numbers = CASES[key]
    found = judged(LINES[key], make(made.evidence(N), numbers[which]))
    assert found.outcome.word == EXPECTED[which], found


@pytest.mark.parametrize("key", [key for key in CASES if not LINES[key].by_definition])
def test_what_random_weights_do_as_well_is_not_supported(key):
    make, numbers = CASES[key]
    found = make(made.evidence(N), numbers["positive"])
    alike = replace(found, random_attention=(found.attention,) * 3, random_activations=(found.activations,) * 3)
    outcome = judged(LINES[key], alike).outcome
    assert outcome.word == "cannot be told"
    assert "random weights" in outcome.why
    without = judged(LINES[key], replace(alike, random_attention=(), random_activations=())).outcome
    assert without.word == "cannot be told", "and neither is what has nothing to be compared with"


@pytest.mark.parametrize("key", [key for key in CASES if LINES[key].by_definition])
def test_what_holds_by_definition_says_so(key):
    make, numbers = CASES[key]
    found = judged(LINES[key], replace(make(made.evidence(N), numbers["positive"]), random_attention=()))
    assert found.outcome.word == "supported"
    assert "without any training" in found.outcome.why


ALL, NONE = np.ones(80, dtype=bool), np.zeros(80, dtype=bool)
SOME = np.arange(80) % 2 == 0
FEW = np.arange(80) < 8
WORST = {"slash": SOME, "count=10": SOME, "place=start": SOME, "place=random": SOME, "place=before_answer": SOME}
ANSWERS = {  # right ones of each condition: better, worse, and hardly different
    "tokens_help": [{"slash": ALL}, {"slash": FEW}, {"slash": SOME}],
    "arm_helps": [{"arm": ALL}, {"arm": FEW}, {"arm": SOME}],
    "length_rises_then_falls": [
        {"count=40": ALL, "count=70": NONE},
        {"count=40": ALL, "count=70": ALL},
        {"count=40": SOME, "count=70": NONE},
    ],
    "best_before_the_question": [
        WORST | {"slash": ALL},
        WORST | {"place=start": ALL},
        WORST | {"place=random": NONE, "place=before_answer": NONE},
    ],
}


@pytest.mark.parametrize(("which", "i"), [("positive", 0), ("negative", 1), ("underpowered", 2)])
@pytest.mark.parametrize("key", ANSWERS)
def test_three_cases_of_answers(key, which, i):
    if (key, which) == ("length_rises_then_falls", "negative"):
        right = {"baseline": SOME, "count=40": SOME, "count=70": ALL}  # more is better, to the end
    else:
        right = {"baseline": SOME, **ANSWERS[key][i]}
    found = judged(LINES[key], made.evidence(4, answers=made.answers(right)))
    assert found.outcome.word == EXPECTED[which], found
    assert "training" not in found.outcome.why, "answers do not hold by definition"


@pytest.mark.parametrize(("which", "arm"), [("positive", 0.8), ("negative", 0.02), ("underpowered", 0.22)])
def test_three_cases_of_samples(which, arm):
    rng = np.random.default_rng(0)
    right = {name: rng.random((40, 4)) < p for name, p in (("baseline", 0.2), ("arm", arm))}
    found = judged(LINES["pass_at_k"], made.evidence(4, samples=made.answers(right, 4)))
    assert found.outcome.word == EXPECTED[which], found


def test_samples_that_are_all_alike_are_no_certainty():
    right = {name: np.ones((8, 4)) for name in ("baseline", "arm")}
    found = judged(LINES["pass_at_k"], made.evidence(4, samples=made.answers(right, 4)))
    assert found.outcome.word == "cannot be told"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_what_was_left_out_cannot_be_told_and_says_so(claim):
    nothing = made.evidence(4, attention=None, activations=None)
    found = judged(claim, nothing)
    assert (found.outcome.word, found.parts) == ("cannot be told", ())
    assert "left out" in found.outcome.why
    why = judged(claim, replace(nothing, missing={claim.needs: "it solves none of 20 problems"})).outcome.why
    assert why == "it solves none of 20 problems"


def test_one_layer_has_no_deeper_ones_and_no_sink_no_heads_that_look_at_it():
    values = made.evidence(N)
    one = values.attention.datasets | {
        name: data.isel(layer=[0]) for name, data in values.attention.datasets.items() if "layer" in data.dims
    }
    flat = replace(values, attention=replace(values.attention, datasets=one))
    for key in ("less_in_deeper_layers", "affine_deeper", "itself_early", "first_token_late", "first_token_no_update"):
        found = judged(LINES[key], flat).outcome
        assert (found.word, found.why) == ("not applicable", "the model has one layer")
    values.attention["attention_focus"].first_mass.values[:] = 0.01
    assert judged(LINES["first_token_no_update"], values).outcome.word == "not applicable"
