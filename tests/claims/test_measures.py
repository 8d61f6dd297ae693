"""Each number of a claim beside a slow one, on the toy's own attention."""

import math

import numpy as np
import pytest
from scipy import stats

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.claims import attention_measures as of
from mechattn.claims import measures
from mechattn.claims.claim import Measure
from mechattn.claims.measures import NotMeasured
from mechattn.claims.protocol import ACTIVATIONS, ANALYSES, arm_conditions, attention_conditions
from mechattn.claims.register import CLAIMS
from mechattn.results.overall import overall_change
from tests.claims import synthetic as made

SLASH = ma.MeaninglessTokens()
PROMPTS = 5


@pytest.fixture(scope="module")
def result(toy, prompts):
    return ma.run(toy, prompts[:PROMPTS], attention_conditions(SLASH), ANALYSES, positions="prompts", progress=False)


@pytest.fixture(scope="module")
def activations(toy, prompts):
    many = attention_conditions(SLASH) | arm_conditions("LlamaForCausalLM")
    return ma.run(toy, prompts[:PROMPTS], many, ACTIVATIONS, layers=0, progress=False)


@pytest.fixture(scope="module")
def patterns(toy, prompts):
    """The whole attention of layer 0, [condition][prompt] of [head, query, key], with each token's origin and segment."""
    found = {}
    for name, condition in {"baseline": ma.Baseline(), **attention_conditions(SLASH)}.items():
        for i, prompt in enumerate(prompts[:PROMPTS]):
            sequence = condition.apply(prompt, toy, 0)
            _, cache = toy.run_with_cache(sequence.tokens[None])
            pattern = cache["blocks.0.attn.hook_pattern"][0].double().numpy()
            found[name, i] = pattern, sequence.origin.numpy(), sequence.segment.numpy()
    return found


def received(pattern, origin):
    """[head, key]: the mean attention of the original queries after it."""
    heads, length, _ = pattern.shape
    out = np.full((heads, length), math.nan)
    for head in range(heads):
        for key in range(length):
            later = [pattern[head, q, key] for q in range(key + 1, length) if origin[q] >= 0]
            if later:
                out[head, key] = sum(later) / len(later)
    return out


def uniform(pattern):
    return (
        np.broadcast_to(np.tril(np.ones(pattern.shape[1:])), pattern.shape)
        / np.arange(1, pattern.shape[1] + 1)[:, None]
    )


def question_means(pattern, origin, segment):
    keys = np.flatnonzero(segment == SEGMENTS.index("question"))
    return np.nanmean(received(pattern, origin)[:, keys])


def test_the_fall_and_what_is_beyond_uniform(result, patterns):
    for i in range(PROMPTS):
        ours, theirs = (question_means(*patterns[name, i]) for name in ("slash", "baseline"))
        null, their_null = (
            question_means(uniform(p), o, s) for p, o, s in (patterns["slash", i], patterns["baseline", i])
        )
        assert abs(of.fall(result, "slash")[i] - math.log(ours / theirs)) < 1e-5
        beyond = math.log(ours / theirs) - math.log(null / their_null)
        assert abs(of.fall_beyond_uniform(result, "slash")[i] - beyond) < 1e-5
        other = question_means(*patterns["sentence", i])
        assert abs(of.fall(result, "sentence", "slash")[i] - math.log(other / ours)) < 1e-5
    assert (
        abs(np.expm1(of.fall(result, "slash").mean()) - overall_change(result, "slash", "received", layer=0)[0][0])
        < 1e-5
    )


def test_peaks(result, patterns):
    found = of.peaks(result, "slash")
    for i in range(PROMPTS):
        curves = {}
        for name in ("slash", "baseline"):
            pattern, origin, segment = patterns[name, i]
            after = (origin[:, None] < origin[None, :]).sum(1)
            keep = np.flatnonzero((segment == SEGMENTS.index("question")) & (after >= 8))
            curves[name] = received(pattern, origin)[:, keep], received(uniform(pattern), origin)[0, keep]
        (ours, null), (theirs, their_null) = curves["slash"], curves["baseline"]
        per_head = []
        for head in range(len(ours)):
            keys = [k for k in range(ours.shape[1]) if not math.isnan(ours[head, k])]
            ranked = sorted(keys, key=lambda k: -ours[head, k] * theirs[head, k])
            high = ranked[: max(1, round(0.1 * len(keys)))]
            change = {k: math.log(ours[head, k] / theirs[head, k]) - math.log(null[k] / their_null[k]) for k in keys}
            rest = [change[k] for k in keys if k not in high]
            per_head.append(sum(change[k] for k in high) / len(high) - sum(rest) / len(rest))
        assert abs(found[i] - np.mean(per_head)) < 1e-4


def test_peaks_are_chosen_on_both_conditions():
    """Where each condition has noise of its own, peaks of the baseline alone fall; those of both do not."""
    rng = np.random.default_rng(0)
    values = made.attention(200)
    data = values["received_attention"].received_by_origin_per_prompt
    data.values[:] = 0.01 * np.exp(0.3 * rng.standard_normal(data.shape))
    assert abs(of.peaks(values, "slash").mean()) < 0.02
    one, other = (np.log(data.values[:, i, 0, :, made.SYSTEM :]) for i in (1, 0))
    top = np.argsort(-other, axis=-1)[..., :2]
    assert np.take_along_axis(one - other, top, -1).mean() < -0.3, "negative control"


def test_evenness(result, patterns):
    for name in ("slash", "sentence"):
        for i in range(PROMPTS):
            pattern, origin, _ = patterns[name, i]
            got = received(pattern, origin)[:, origin == -1]
            share = got / got.sum(1, keepdims=True)
            effective = [math.exp(-sum(p * math.log(p) for p in head)) for head in share]
            assert abs(of.evenness(result, name)[i] - np.mean(effective) / got.shape[1]) < 1e-5
    apart = of.evenness_apart(result, "slash", "sentence")
    assert np.allclose(apart, of.evenness(result, "slash") - of.evenness(result, "sentence"))


def test_layers(result):
    table = result.compare("slash", quantity="received")
    assert of.deeper(result, "slash").shape == (PROMPTS,)
    scale = result["affine_shift"].scale.sel(condition="slash", segment="question").values.astype(float)
    error = result["affine_shift"].relative_error.sel(condition="slash", segment="question").values.astype(float)
    for i in range(PROMPTS):
        flat = scale[i].ravel()
        assert (
            abs(of.scale_spread(result, "slash")[i] - np.sqrt(((flat - flat.mean()) ** 2).mean()) / flat.mean()) < 1e-9
        )
        assert abs(of.affine_first(result, "slash")[i] - error[i, 0].mean()) < 1e-9
        assert abs(of.affine_deeper(result, "slash")[i] - error[i, 1:].mean()) < 1e-9
    share = result["attention_focus"].self_share.sel(condition="baseline", segment="question").values.astype(float)
    apart = share[:, 0].mean(-1) - share[:, 1:].mean((-1, -2))
    assert np.allclose(of.early_less_late(result, "self_share"), apart)
    assert np.allclose(of.late_less_early(result, "self_share"), -apart)
    null = result["received_attention"].received_by_segment_uniform.sel(segment="question").values.astype(float)
    mean = result["received_attention"].received_by_segment.sel(segment="question").mean("head").values.astype(float)
    beyond = np.log(mean[:, 1] / mean[:, 0]) - np.log(null[:, 1] / null[:, 0])
    assert np.allclose(of.deeper(result, "slash"), (beyond[:, 1] + beyond[:, 2]) / 2 - beyond[:, 0], atol=1e-6)
    assert len(table) == 32


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    values = made.attention(6)
    mass, size = values["attention_focus"].first_mass, values["head_updates"].magnitude
    mass.values[:] = rng.random(mass.shape)
    size.values[:] = rng.random(size.shape)
    at = {"condition": "baseline", "segment": "question", "layer": slice(1, None)}
    expected = [
        stats.spearmanr(one.ravel(), other.ravel())[0] for one, other in zip(mass.sel(at).values, size.sel(at).values)
    ]
    assert np.allclose(of.sink_and_update(values), expected)


def test_activations(activations):
    values = activations["mlp_activations"].near_zero_by_segment.sel(segment="question").values[..., 0].astype(float)
    names = activations.conditions
    for name in ("slash", "arm"):
        assert np.allclose(measures.near_zero(activations, name), np.log(values[:, names.index(name)] / values[:, 0]))
    table = activations.agreement("slash", "arm").set_index("other")
    assert abs(measures.agreement(activations, "slash", "arm").mean() - table.cosine["arm"]) < 1e-9
    apart = measures.agreement_apart(activations, "slash", "arm", "direction")
    assert abs(apart.mean() - table.beyond["direction"]) < 1e-9


def test_answers():
    rng = np.random.default_rng(0)
    right = {name: rng.random((30, 4)) < 0.4 for name in ("baseline", "arm")}
    several = made.answers(right, 4)
    each = several.pass_at_k(4).set_index("condition").estimate
    assert abs(measures.pass_at_k(several, "arm").value - (each["arm"] - each["baseline"])) < 1e-9
    one = made.answers({name: some[:, 0] for name, some in right.items()})
    got, expected = measures.accuracy_apart(one, "arm"), one.compare("arm")
    assert (got.value, got.low, got.high, got.n) == tuple(expected[k] for k in ("difference", "low", "high", "n"))
    with pytest.raises(NotMeasured, match="answers under 'slash' were left out"):
        measures.accuracy_apart(one, "slash")


def test_groups_of_prompts_are_the_units():
    values = made.attention(12)
    values["received_attention"].received_by_segment.values[:, 1] *= np.exp(np.arange(12))[:, None, None, None]
    values.datasets["sequences"]["group"] = ("prompt", np.array([f"g{i // 3}" for i in range(12)]))
    measure = Measure("", "fall", ("slash",))
    estimate, chance = measures.found(measure, "attention", made.evidence(12, attention=values, random_attention=()))
    assert (estimate.n, chance) == (4, None)
    assert abs(estimate.value - 5.5) < 1e-9
    assert abs(estimate.low - stats.t.interval(0.95, 3, 5.5, stats.sem([1.0, 4, 7, 10]))[0]) < 1e-9


def test_every_measure_of_the_register_is_one():
    known = {*measures.OF_PROMPTS, *measures.OF_ANSWERS}
    asked = [m for claim in CLAIMS for m in (*(part.measure for part in claim.parts), claim.control) if m]
    assert {measure.of for measure in asked} <= known
    for measure in asked:
        answers = measure.of in measures.OF_ANSWERS
        assert answers == any(
            c.needs in ("answers", "length", "place", "samples")
            for c in CLAIMS
            if measure in (c.control, *(p.measure for p in c.parts))
        )
