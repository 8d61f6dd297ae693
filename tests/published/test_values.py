"""Each value beside a slow float64 one from the model's own patterns, and beside a case in which nothing changes."""

import math
from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from scipy import stats

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.published.values import NotMeasurable, ValueSelection, value_of
from mechattn.results.result import Result

CONDITIONS = {"slash": ma.MeaninglessTokens(count=20), "sentence": ma.RandomSentence(count=20)}
PROMPTS = 4


def asked_for(quantities, condition="slash", to="baseline", layers=(0,), less_layers=()):
    return ValueSelection(
        quantities=list(quantities),
        condition=condition,
        to=to,
        layers=list(layers),
        less_layers=list(less_layers),
    )


RECEIVED = asked_for(("received_by_segment",))
CURVES = asked_for(("received",))


@pytest.fixture(scope="module")
def result(toy, prompts):
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift()]
    return ma.run(toy, prompts[:PROMPTS], CONDITIONS, analyses, keep="prompts")


@pytest.fixture(scope="module")
def activations(toy, prompts):
    conditions = {"slash": CONDITIONS["slash"]}
    return ma.run(toy, prompts[:PROMPTS], conditions, ma.analyses.MlpActivations(), layers=0)


@pytest.fixture(scope="module")
def cached(toy, prompts):
    """The patterns of all layers, each token's origin and segment, by condition and prompt."""
    known = {}
    for name, condition in {"baseline": ma.Baseline(), **CONDITIONS}.items():
        for i, prompt in enumerate(prompts[:PROMPTS]):
            sequence = condition.apply(prompt, toy, 0)
            _, cache = toy.run_with_cache(sequence.tokens[None])
            patterns = [cache["pattern", n][0].double().numpy() for n in range(toy.cfg.n_layers)]
            known[name, i] = patterns, sequence.origin.numpy(), sequence.segment.numpy()
    return known


def received(cached, name, i, segment, layer=0):
    """[head, key]: the mean attention of the original queries after each key of a segment."""
    patterns, origin, segments = cached[name, i]
    pattern = patterns[layer]
    columns = []
    for key in np.flatnonzero(segments == SEGMENTS.index(segment)):
        later = [q for q in range(key + 1, pattern.shape[1]) if origin[q] >= 0]
        columns.append(pattern[:, later, key].mean(1) if later else np.full(len(pattern), np.nan))
    return np.stack(columns, axis=1)


def curve(cached, name, i, layer=0):
    """The same of the question, without keys that fewer than eight original tokens follow."""
    _, origin, segments = cached[name, i]
    keys = np.flatnonzero(segments == SEGMENTS.index("question"))
    followers = np.array([(origin[key + 1 :] >= 0).sum() for key in keys])
    return received(cached, name, i, "question", layer)[:, followers >= 8]


def near(values, expected, tolerance=1e-4):
    assert_allclose(values, expected, atol=tolerance)
    assert values.dtype == np.float64
    assert len(values) == PROMPTS


def changed(result, dataset, quantity, change):
    """The same result, with one array replaced."""
    data = result[dataset].copy()
    data[quantity] = data[quantity].copy(data=change(data[quantity].values.copy()))
    return Result({**result.datasets, dataset: data}, result.provenance)


def log_change(cached, i, after, before, layer=0):
    means = [np.nanmean(received(cached, name, i, "question", layer)) for name in (after, before)]
    return math.log(means[0] / means[1])


def test_the_change_of_what_the_question_receives(result, cached):

    def changes(*of, layer=0):
        return np.array([log_change(cached, i, *of, layer) for i in range(PROMPTS)])

    of_layers = [changes("slash", "baseline", layer=layer) for layer in range(3)]
    near(value_of(result, "change", RECEIVED), of_layers[0])
    beside = asked_for(RECEIVED.quantities, "sentence", "slash")
    near(value_of(result, "change", beside), changes("sentence", "slash"))
    deeper = asked_for(RECEIVED.quantities, layers=(1, 2), less_layers=(0,))
    expected = (of_layers[1] + of_layers[2]) / 2 - of_layers[0]
    near(value_of(result, "change", deeper), expected)
    assert (abs(value_of(result, "change", RECEIVED)) > 0.05).all(), "something has changed"


@pytest.mark.parametrize("function", ["change", "change_at_peaks", "peak_moved", "band_width"])
def test_nothing_changes_between_a_condition_and_itself(result, function):
    quantity = RECEIVED if function == "change" else CURVES
    same = asked_for(quantity.quantities, "slash", "slash")
    near(value_of(result, function, same), np.zeros(PROMPTS))


def test_the_share_of_layers_that_fall(result, cached):
    expected = [
        np.mean([log_change(cached, i, "slash", "baseline", n) < 0 for n in range(4)])
        for i in range(PROMPTS)
    ]
    near(value_of(result, "layers_falling", RECEIVED), expected)

    def rising_in_layer_1(values):
        values[:, 1, 1] *= 100  # [prompt, condition, layer, …]
        return values

    rising = changed(result, "received_attention", "received_by_segment", rising_in_layer_1)
    assert (value_of(rising, "layers_falling", RECEIVED) <= 0.75).all()


def test_an_inserted_token_beside_one_of_the_question(result, cached):
    inserted, question = (
        [np.nanmean(received(cached, "slash", i, name)) for i in range(PROMPTS)]
        for name in ("inserted", "question")
    )
    expected = np.log(np.divide(inserted, question))
    near(value_of(result, "inserted_beside_question", RECEIVED), expected)


def test_peaks_are_those_of_both_conditions(result, cached):
    changes = []
    for i in range(PROMPTS):
        after, before = (curve(cached, name, i) for name in ("slash", "baseline"))
        of_heads = []
        for one, other in zip(after, before, strict=True):
            peaks = np.argsort(-one * other)[: max(1, round(0.1 * len(one)))]
            of_heads.append(np.log(one / other)[peaks].mean())
        changes.append(np.mean(of_heads))
    near(value_of(result, "change_at_peaks", CURVES), changes)


def test_exchangeable_noise_does_not_make_peaks_fall(result):
    """Peaks of the baseline alone would fall by a third."""
    rng = np.random.default_rng(0)
    noisy = changed(
        result,
        "received_attention",
        "received_by_origin_per_prompt",
        lambda values: np.exp(0.3 * rng.standard_normal(values.shape)),
    )
    assert abs(value_of(noisy, "change_at_peaks", CURVES).mean()) < 0.1
    both = noisy["received_attention"].received_by_origin_per_prompt.values
    after, before = (np.log(both[:, at, 0, :, 10:]) for at in (1, 0))
    peaks = np.argsort(-before, axis=-1)[..., :3]
    assert np.take_along_axis(after - before, peaks, -1).mean() < -0.3


def test_whether_the_peak_is_another_token(result, cached):
    after, before = (
        np.array([curve(cached, name, i, 1).argmax(1) for i in range(PROMPTS)])
        for name in ("slash", "baseline")
    )
    expected = (after != before).mean(1)
    near(value_of(result, "peak_moved", asked_for(("received",), layers=(1,))), expected)


def test_how_far_prompts_lie_from_their_mean(result, cached):
    widths = {}
    for name in ("slash", "baseline"):
        curves = [curve(cached, name, i).T for i in range(PROMPTS)]
        aligned = np.array(
            list(zip(*curves))
        )  # key, prompt, head; as many keys as the shortest has
        widths[name] = abs(aligned - aligned.mean(1, keepdims=True)).mean((0, 2))
    expected = np.log(np.divide(widths["slash"], widths["baseline"]))
    near(value_of(result, "band_width", CURVES), expected, 1e-3)


def test_how_evenly_inserted_tokens_receive(result, cached):
    def evenness(name, i):
        got = received(cached, name, i, "inserted")
        return np.exp(stats.entropy(got, axis=1)).mean() / got.shape[1]

    asked = asked_for(("received",), "slash", "sentence")
    expected = [evenness("slash", i) - evenness("sentence", i) for i in range(PROMPTS)]
    near(value_of(result, "evenness_apart", asked), expected)
    even = changed(result, "received_attention", "received_per_prompt", np.ones_like)
    near(value_of(even, "evenness_apart", asked), np.zeros(PROMPTS))


def test_the_affine_share_and_the_direction_of_the_shift(result):
    asked = asked_for(("change_by_rerouting", "change_by_new_values"))
    data = result["affine_shift"].sel(condition="slash", layer=0)
    parts = data.sel(segment="question")
    affine = (parts.change_by_dilution + parts.change_by_shift).astype(float)
    expected = 1 - abs(1 - affine).mean("head")  # all four parts add up to 1
    near(value_of(result, "affine_share", asked), expected.values)
    nothing_else = result
    for name in asked.quantities:
        nothing_else = changed(nothing_else, "affine_shift", name, np.zeros_like)
    near(value_of(nothing_else, "affine_share", asked), np.ones(PROMPTS))

    level = value_of(result, "level", asked_for(("shift_rank_one_share",)))
    near(level, np.ones(PROMPTS), 1e-3)  # one repeated token has one value vector in layer 0
    other = value_of(result, "level", asked_for(("shift_rank_one_share",), "sentence"))
    assert other.mean() < 0.98


def test_activations(activations):
    data = activations["mlp_activations"].isel(layer=0)
    for quantity in ("near_zero", "l1", "l2", "variance"):
        values = data[f"{quantity}_by_segment"].sel(segment="question").astype(float)
        after, before = (values.sel(condition=name).values for name in ("slash", "baseline"))
        asked = asked_for((f"{quantity}_by_segment",))
        near(value_of(activations, "change", asked), np.log(after / before), 1e-9)


def test_large_activations(activations):
    shares = activations["mlp_activations"].histogram.isel(layer=0).astype(float)
    edges = [*shares.bin.values, math.inf]
    baseline = shares.sel(condition="baseline").values

    nearest = np.array([max(low, -high) for low, high in pairwise(edges)])  # to zero, of each bin
    bounds = sorted({abs(edge) for edge in edges[1:-1]})
    bound = next(b for b in bounds if baseline.mean(0)[nearest >= b].sum() <= 0.1)
    after = shares.sel(condition="slash").values
    expected = np.log(after[:, nearest >= bound].sum(1) / baseline[:, nearest >= bound].sum(1))
    near(value_of(activations, "change_of_large", asked_for(("histogram",))), expected, 1e-9)
    same = asked_for(("histogram",), "baseline")
    near(value_of(activations, "change_of_large", same), np.zeros(PROMPTS))


def test_classes_of_tokens(activations):
    asked = asked_for(("near_zero_by_token_class",), "baseline")
    shares = activations["mlp_activations"].near_zero_by_token_class.isel(layer=0)
    shares = shares.sel(condition="baseline").astype(float)
    classes = shares.sel(token_class=["digit", "operator", "conjunction"]).mean("token_class")
    expected = np.log(classes / shares.sel(token_class="other"))
    near(value_of(activations, "classes_beside_other", asked), expected, 1e-6)
    alike = changed(activations, "mlp_activations", "near_zero_by_token_class", np.ones_like)
    near(value_of(alike, "classes_beside_other", asked), np.zeros(PROMPTS))


def updates(target, size):
    """A result of one prompt with these strongest targets and updates [layer, head, key]; layer 0 has no attention."""
    dims = ("prompt", "condition", "layer", "head", "key")
    coords = {"condition": ["baseline"], "layer": np.arange(len(target)) + 1}
    focus = xr.Dataset({"target_at_per_prompt": (dims, np.array(target)[None, None])}, coords)
    written = xr.Dataset({"magnitude_at_per_prompt": (dims, np.array(size)[None, None])}, coords)
    sequences = xr.Dataset(coords={"condition": ["baseline"]})
    datasets = {"attention_focus": focus, "head_updates": written, "sequences": sequences}
    return Result(datasets, {})


def test_updates_where_the_first_token_is_the_strongest_target():
    asked = asked_for(("target_at", "magnitude_at"), "baseline")
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, (6, 2, 9))
    size = rng.random((6, 2, 9))
    ratios = []
    for layer in (3, 4, 5):
        of_layer = size[layer, :, 1:]
        ratios.append(of_layer[target[layer, :, 1:] == 0].mean() / of_layer.mean())
    value = value_of(updates(target, size), "updates_at_first", asked)
    assert_allclose(value, [np.mean(ratios)], rtol=1e-12)

    alike = value_of(updates(target, np.ones_like(size)), "updates_at_first", asked)
    assert_allclose(alike, [1.0])
    silent = value_of(updates(target, size * (target > 0)), "updates_at_first", asked)
    assert_allclose(silent, [0.0])
    with pytest.raises(NotMeasurable, match="no head looks at the first token"):
        value_of(updates(np.ones_like(target), size), "updates_at_first", asked)
    with pytest.raises(NotMeasurable, match="no layer 4"):
        value_of(updates(target[:3], size[:3]), "updates_at_first", asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (asked_for(("received_by_segment",), layers=(99,)), "no layer 99"),
        (asked_for(("received_by_segment",), "nothing"), "cannot be run under 'nothing'"),
        (asked_for(("l1_by_segment",)), "has no l1_by_segment"),
    ],
)
def test_what_a_result_does_not_have(result, asked, message):
    with pytest.raises(NotMeasurable, match=message):
        value_of(result, "change", asked)


def test_no_ratio_to_nothing(result):
    nothing = changed(result, "received_attention", "received_by_segment", np.zeros_like)
    with pytest.raises(NotMeasurable, match="is 0, so there is no ratio"):
        value_of(nothing, "change", RECEIVED)
