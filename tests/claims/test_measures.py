"""Each measure beside a slow one, and beside a case in which it must find nothing."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.claims import measures as of
from mechattn.claims import measures_heads as heads
from mechattn.claims import measures_heads as mlp
from mechattn.claims.measures import MEASURES, NotApplicable, in_layers, measure_named
from mechattn.claims.register import Measuring
from mechattn.errors import OptionError
from mechattn.functional.activations import redistribute
from mechattn.functional.head_outputs import split
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.model.patch.nonlinearities import at_nonlinearity
from mechattn.results.result import Result
from mechattn.stats.units import halves_of
from tests.known_answers import known_heads
from tests.known_answers.known_heads import VOCABULARY, repeated_spans

SLASH = ma.MeaninglessTokens(count=20)
CONDITIONS = {
    "slash": SLASH,
    "sentence": ma.RandomSentence(count=20),
    "unshifted": SLASH.unshifted(),
}
ARM = {
    "arm": ma.Baseline(intervention=ma.interventions.ARM()),
    "direction": ma.Baseline(intervention=ma.interventions.ARM(control="random_direction")),
}
PROMPTS = 4


@pytest.fixture(scope="module")
def result(toy, prompts):
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift(per_query=True)]
    return ma.run(toy, prompts[:PROMPTS], CONDITIONS, analyses, positions="prompts")


@pytest.fixture(scope="module")
def activations(toy, prompts):
    many = {"slash": SLASH, **ARM}
    return ma.run(toy, prompts[:PROMPTS], many, ma.analyses.MlpActivations(), layers=0)


@pytest.fixture(scope="module")
def tokens(toy, prompts):
    analyses = [
        ma.analyses.AttentionFocus(per_query=True),
        ma.analyses.HeadUpdates(per_query=True),
        ma.analyses.TopTargetUpdates(),
    ]
    return ma.run(
        toy, prompts[:PROMPTS], {}, [*analyses, ma.analyses.AttentionSinks()], positions="prompts"
    )


@pytest.fixture(scope="module")
def cached(toy, prompts):
    """Patterns and values of all layers, [condition, prompt], with each token's origin and segment."""
    found = {}
    for name, condition in {
        "baseline": ma.Baseline(),
        "slash": SLASH,
        "sentence": CONDITIONS["sentence"],
    }.items():
        for i, prompt in enumerate(prompts[:PROMPTS]):
            sequence = condition.apply(prompt, toy, 0)
            _, cache = toy.run_with_cache(sequence.tokens[None])
            pattern = [
                cache[f"blocks.{n}.attn.hook_pattern"][0].double().numpy()
                for n in range(toy.cfg.n_layers)
            ]
            v = cache["blocks.0.attn.hook_v"][0].double()
            v = v.repeat_interleave(toy.cfg.n_heads // v.shape[1], 1).transpose(0, 1).numpy()
            found[name, i] = pattern, v, sequence.origin.numpy(), sequence.segment.numpy()
    return found


def received(pattern, origin):
    """[head, key]: the mean attention of the original queries after it."""
    out = np.full(pattern.shape[:2], math.nan)
    for key in range(pattern.shape[1]):
        later = [q for q in range(key + 1, pattern.shape[1]) if origin[q] >= 0]
        if later:
            out[:, key] = pattern[:, later, key].mean(1)
    return out


def uniform(pattern):
    ones = np.tril(np.ones(pattern.shape[1:]))
    return np.broadcast_to(ones / ones.sum(1, keepdims=True), pattern.shape)


def of_segment(cached, name, i, segment, layer=0, null=False):
    pattern, _, origin, segments = cached[name, i]
    keys = segments == SEGMENTS.index(segment)
    return received(uniform(pattern[layer]) if null else pattern[layer], origin)[:, keys]


def log_ratio(cached, i, one, other, layer=0, null=False):
    means = [np.nanmean(of_segment(cached, n, i, "question", layer, null)) for n in (one, other)]
    return math.log(means[0] / means[1])


def near(found, expected, tolerance=1e-4):
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert found.dtype == np.float64


def test_the_fall_and_what_is_beyond_a_blind_head(result, cached):
    every = range(PROMPTS)
    near(of.fall(result, "slash"), [log_ratio(cached, i, "slash", "baseline") for i in every])
    near(
        of.fall(result, "sentence", "slash"),
        [log_ratio(cached, i, "sentence", "slash") for i in every],
    )
    beyond = [
        [
            log_ratio(cached, i, "slash", "baseline", n)
            - log_ratio(cached, i, "slash", "baseline", n, True)
            for n in range(3)
        ]
        for i in every
    ]
    near(of.fall_beyond_uniform(result, "slash"), [b[0] for b in beyond])
    near(
        of.fall_beyond_uniform(result, "slash", layers="next"), [(b[1] + b[2]) / 2 for b in beyond]
    )
    deeper = {
        "conditions": ["slash"],
        "options": {"layers": "next"},
        "less": {"options": {"layers": "first"}},
    }
    deeper = Measuring(measure="fall_beyond_uniform", **deeper)
    near(deeper(result), [(b[1] + b[2]) / 2 - b[0] for b in beyond])
    assert deeper.attainable(result) == (-math.inf, math.inf)
    for measure in (of.fall, of.fall_beyond_uniform, of.peaks, of.band):
        near(measure(result, "slash", "slash"), np.zeros(PROMPTS))  # nothing has changed


def test_peaks(result, cached):
    expected = []
    for i in range(PROMPTS):
        curves = {}
        for name in ("slash", "baseline"):
            pattern, _, origin, segment = cached[name, i]
            after = (origin[:, None] < origin[None, :]).sum(1)
            keep = np.flatnonzero((segment == SEGMENTS.index("question")) & (after >= 8))
            curves[name] = (
                received(pattern[0], origin)[:, keep],
                received(uniform(pattern[0]), origin)[0, keep],
            )
        (ours, null), (theirs, their_null) = curves["slash"], curves["baseline"]
        per_head = []
        for one, other in zip(ours, theirs, strict=True):
            ranked = sorted(range(len(one)), key=lambda k: -one[k] * other[k])
            high = ranked[: max(1, round(0.1 * len(one)))]
            change = np.log(one / other) - np.log(null / their_null)
            per_head.append(change[high].mean() - np.delete(change, high).mean())
        expected.append(np.mean(per_head))
    near(of.peaks(result, "slash"), expected)


def changed(result, dataset, quantity, change):
    """The same result, with one array replaced."""
    data = result[dataset].copy()
    data[quantity] = data[quantity].copy(data=change(data[quantity].values.copy()))
    return Result({**result.datasets, dataset: data}, result.provenance)


def test_peaks_are_chosen_on_both_conditions(result):
    """Where each condition has noise of its own, peaks of the baseline alone fall; those of both do not."""
    rng = np.random.default_rng(0)

    def noise(values):
        return np.exp(0.3 * rng.standard_normal(values.shape))

    noisy = changed(result, "received_attention", "received_by_origin_per_prompt", noise)
    null = changed(
        noisy, "received_attention", "received_uniform_by_origin_per_prompt", np.ones_like
    )
    assert abs(of.peaks(null, "slash").mean()) < 0.1
    data = null["received_attention"].received_by_origin_per_prompt.values
    one, other = (np.log(data[:, at, 0, :, 10:]) for at in (1, 0))
    top = np.argsort(-other, axis=-1)[..., :3]
    assert np.take_along_axis(one - other, top, -1).mean() < -0.3


def test_which_token_is_the_peak(result, cached):
    expected = []
    for i in range(PROMPTS):
        tops = [
            np.nanargmax(of_segment(cached, n, i, "question", 1), 1) for n in ("slash", "baseline")
        ]
        expected.append((tops[0] != tops[1]).mean())
    near(of.peak_moved(result, "slash", 1), expected)
    less = {"options": {"layer": 0}}
    moved = Measuring(measure="peak_moved", conditions=["slash"], options={"layer": 1}, less=less)
    near(moved(result), of.peak_moved(result, "slash", 1) - of.peak_moved(result, "slash", 0))
    assert (moved.kind, moved.attainable(result)) == ("points", (-1, 1))
    near(of.peak_moved(result, "baseline", 1), np.zeros(PROMPTS))
    with pytest.raises(NotApplicable, match="no layer 99"):
        of.peak_moved(result, "slash", 99)


def test_filler_beside_the_question(result, cached):
    def per_token(i, null):
        inserted, question = (
            of_segment(cached, "slash", i, name, null=null) for name in ("inserted", "question")
        )
        return math.log(np.nanmean(inserted) / np.nanmean(question))

    near(
        of.filler_beside_question(result, "slash"),
        [per_token(i, False) - per_token(i, True) for i in range(PROMPTS)],
    )
    data = result["received_attention"]
    null = data.received_by_segment_uniform.expand_dims(head=data["head"].values).transpose(
        *data.received_by_segment.dims
    )
    blind = changed(result, "received_attention", "received_by_segment", lambda _: null.values)
    near(of.filler_beside_question(blind, "slash"), np.zeros(PROMPTS))


def test_evenness(result, cached):
    for name in ("slash", "sentence"):
        expected = []
        for i in range(PROMPTS):
            got = of_segment(cached, name, i, "inserted")
            share = got / got.sum(1, keepdims=True)
            expected.append(
                np.mean([math.exp(-sum(p * math.log(p) for p in head)) for head in share])
                / got.shape[1]
            )
        near(of.evenness(result, name), expected)
    apart = Measuring(measure="evenness", conditions=["slash"], less={"conditions": ["sentence"]})
    near(apart(result), of.evenness(result, "slash") - of.evenness(result, "sentence"))
    low, high = of.evenness_range(result, "slash")
    assert apart.attainable(result) == (low - high, high - low)
    mask = result["sequences"].segment_index.sel(condition="slash").values == SEGMENTS.index(
        "inserted"
    )

    def one_gets_all(values):
        values[:, 1] = 0
        for row, inserted in zip(values[:, 1], mask, strict=True):
            row[..., inserted.argmax()] = 1
        return values

    near(
        of.evenness(
            changed(result, "received_attention", "received_per_prompt", one_gets_all), "slash"
        ),
        [low] * 4,
    )
    near(
        of.evenness(
            changed(result, "received_attention", "received_per_prompt", np.ones_like), "slash"
        ),
        [high] * 4,
    )


def test_bands(result, cached):
    curves = {}
    for name in ("slash", "baseline"):
        each = [of_segment(cached, name, i, "question") for i in range(PROMPTS)]
        shortest = min(one.shape[1] for one in each)
        aligned = np.stack([one[:, : shortest - 1] for one in each])
        curves[name] = [np.abs(one - aligned.mean(0)).mean() for one in aligned]
    near(of.band(result, "slash"), np.log(np.divide(curves["slash"], curves["baseline"])), 1e-3)


@pytest.mark.parametrize("layer", range(4))
def test_within_a_layer_the_affine_form_is_exact(toy, prompts, layer):
    """With a layer's own input, and the inserted keys hidden in this layer alone: out' = λ · out + Σσ, to rounding."""
    sequence = SLASH.apply(prompts[0], toy, 0)
    _, cache = toy.run_with_cache(sequence.tokens[None])
    scores, pattern, v = (
        cache[f"blocks.{layer}.attn.hook_{name}"] for name in ("attn_scores", "pattern", "v")
    )
    original = sequence.origin >= 0
    hidden = scores[..., original].softmax(-1)
    v = v.transpose(1, 2)
    some = slice(int(original.nonzero()[0]), None)
    parts = split(
        pattern[:, :, some], v, ~original[None], pattern[:, :, some][..., original], v[:, :, original],
        hidden[:, :, some], v[:, :, original],
    )  # fmt: skip
    asks = original[some]
    missed = (parts.output - parts.scale[..., None] * parts.before - parts.shift)[:, :, asks]
    assert float(missed.norm() / parts.output[:, :, asks].norm()) < 1e-5
    assert float(parts.shift.norm() / parts.output.norm()) > 0.1, (
        "the inserted tokens do nothing here"
    )


def test_the_affine_form(result):
    near(of.affine_identity(result, "unshifted"), np.zeros(PROMPTS))
    data = (
        result["affine_shift"]
        .sel(condition="slash", segment="question")
        .transpose("prompt", "layer", "head", ...)
    )
    error = data.relative_error.values.astype(float)
    near(of.affine_missed(result, "slash"), error[:, 0].mean(-1), 1e-9)
    near(of.affine_missed(result, "slash", "later"), error[:, 1:].mean((1, 2)), 1e-6)
    rest = (data.change_by_rerouting + data.change_by_new_values).values.astype(
        float
    )  # all four parts add up to 1
    rest = abs(rest)
    near(of.affine_explained(result, "slash"), 1 - rest[:, 0].mean(-1), 1e-5)
    later = 1 - rest[:, 1:].mean((1, 2))
    near(of.affine_explained(result, "slash", "later"), later, 1e-5)
    assert (of.affine_missed(result, "slash") > 0.01).all(), (
        "negative control: with shifted positions it is not exact"
    )
    with pytest.raises(NotApplicable, match="cannot be run under 'nothing'"):
        of.affine_missed(result, "nothing")


def test_a_window_is_no_identity(prompts):
    """Windows count places: in Gemma 3's first layer more than the inserted keys differs."""
    gemma = ma.run(
        "toy:gemma3", prompts[:2], {"unshifted": ma.MeaninglessTokens(count=55).unshifted()}, ma.analyses.AffineShift(per_query=True),
        layers=0, positions="prompts",
    )  # fmt: skip
    assert of.affine_missed(gemma, "unshifted").mean() > 0.05
    with pytest.raises(NotApplicable, match="a window"):
        of.affine_identity(gemma, "unshifted")


def test_the_best_affine_map(result, cached, toy):
    """Layer 0 beside a least-squares fit of its own; an exact map is found, and one fitted elsewhere is worse."""
    outs = {}
    for (name, i), (pattern, v, _, segment) in cached.items():
        outs[name, i] = (pattern[0] @ v)[:, segment == SEGMENTS.index("question")]
    centred = {at: x - x.mean(1, keepdims=True) for at, x in outs.items()}
    missed, (fitting, rest) = [], halves_of(PROMPTS)
    for h in range(toy.cfg.n_heads):
        x, y = (
            np.concatenate([centred[n, i][h].ravel() for i in fitting])
            for n in ("baseline", "slash")
        )
        a = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
        gone = [centred["slash", i][h] - a * centred["baseline", i][h] for i in rest]
        missed.append(
            [
                np.linalg.norm(g) / np.linalg.norm(centred["slash", i][h])
                for g, i in zip(gone, rest, strict=True)
            ]
        )
    fit = [f"fit_{name}" for name in ("before", "both", "after")]
    data = {n: result["affine_shift"][n].values for n in fit}
    same = result
    for name in fit:  # the later layers are those of layer 0, so that the mean over them is its own
        same = changed(
            same, "affine_shift", name, lambda values, name=name: data[name][:, :, :1] + 0 * values
        )
    near(of.best_affine_missed(same, "slash"), np.mean(missed, 0), 1e-3)
    half = {"fit_before": 1.0, "fit_both": 0.5, "fit_after": 0.25}  # out' − mean = (out − mean) / 2
    exact = result
    for name, value in half.items():
        exact = changed(exact, "affine_shift", name, lambda values, value=value: value + 0 * values)
    near(of.best_affine_missed(exact, "slash"), np.zeros(PROMPTS // 2))
    unlike = changed(exact, "affine_shift", "fit_both", np.zeros_like)
    near(of.best_affine_missed(unlike, "slash"), np.ones(PROMPTS // 2))


def test_the_direction_of_the_shift(result, cached):
    for name in ("slash", "sentence"):
        expected = []
        for i in range(PROMPTS):
            pattern, v, origin, _ = cached[name, i]
            inserted = np.flatnonzero(origin == -1)
            after = np.flatnonzero((origin >= 0) & (np.arange(len(origin)) > inserted[0]))
            shifts = [
                p[np.ix_(after, inserted)] @ values[inserted]
                for p, values in zip(pattern[0], v, strict=True)
            ]
            energies = [np.linalg.svd(shift, compute_uv=False) ** 2 for shift in shifts]
            expected.append(np.mean([e[0] / e.sum() for e in energies]))
        near(of.one_direction(result, name), expected, 1e-3)


def test_the_spread_of_lambda_is_over_the_queries_of_a_head(result, cached):
    expected = []
    for i in range(PROMPTS):
        pattern, _, origin, segment = cached["slash", i]
        scale = 1 - pattern[0][:, :, origin == -1].sum(-1)[:, segment == SEGMENTS.index("question")]
        expected.append(np.mean([np.std(head) / np.mean(head) for head in scale]))
    near(of.lambda_spread(result, "slash"), expected)
    assert of.lambda_spread_range(result, "slash")[1] > 3

    def one_for_each_head(values):
        return np.linspace(0.2, 0.9, values.shape[3])[:, None] + 0 * values

    alike = changed(result, "affine_shift", "scale_at_per_prompt", one_for_each_head)
    near(of.lambda_spread(alike, "slash"), np.zeros(PROMPTS))  # heads differ, queries do not


def test_statistics_of_activations(activations):
    data = activations["mlp_activations"].isel(layer=0)
    for quantity in ("near_zero", "l1", "l2", "gini", "variance"):
        values = data[f"{quantity}_by_segment"].sel(segment="question").values.astype(float)
        for name in ("slash", "arm"):
            at = activations.conditions.index(name)
            near(
                mlp.activations(activations, name, quantity),
                [math.log(row[at] / row[0]) for row in values],
                1e-9,
            )
    near(mlp.activations(activations, "baseline"), np.zeros(PROMPTS))
    assert (mlp.activations(activations, "arm") < -0.1).all(), (
        "ARM lowers the share near zero by construction"
    )


def test_large_activations(activations):
    data = activations["mlp_activations"].histogram.isel(layer=0)
    baseline = data.sel(condition="baseline").values.astype(float).mean(0)
    edges = [*data.bin.values, math.inf]

    def beyond(bound):
        return [k for k in range(len(edges) - 1) if edges[k] >= bound or edges[k + 1] <= -bound]

    bound = next(
        b
        for b in sorted({abs(e) for e in edges[1:-1]})
        if sum(baseline[k] for k in beyond(b)) <= 0.1
    )
    shares = {
        n: data.sel(condition=n).values.astype(float)[:, beyond(bound)].sum(1)
        for n in ("slash", "baseline")
    }
    near(mlp.large(activations, "slash"), np.log(shares["slash"] / shares["baseline"]), 1e-9)
    near(mlp.large(activations, "baseline"), np.zeros(PROMPTS))


def test_classes_of_tokens(activations):
    data = (
        activations["mlp_activations"]
        .near_zero_by_token_class.isel(layer=0)
        .sel(condition="baseline")
    )
    expected = []
    for row in data.transpose("prompt", "token_class"):
        there = [float(row.sel(token_class=n)) for n in ("digit", "operator", "conjunction")]
        expected.append(
            math.log(np.mean([x for x in there if x == x]) / float(row.sel(token_class="other")))
        )
    near(mlp.classes_near_zero(activations), expected, 1e-6)
    alike = changed(activations, "mlp_activations", "near_zero_by_token_class", np.ones_like)
    near(mlp.classes_near_zero(alike), np.zeros(PROMPTS))


def histograms(changes):
    """A result of one prompt whose histogram has moved, by condition."""
    edges = [-math.inf, -0.3, -0.1, 0.1, 0.3]
    base = np.array([0.1, 0.2, 0.4, 0.2, 0.1])
    names = ["baseline", *changes]
    data = np.stack([base, *(base + np.array(c) for c in changes.values())])[None, :, None]
    made = xr.Dataset(
        {"histogram": (("prompt", "condition", "layer", "bin"), data)},
        {"bin": edges, "condition": names, "layer": [0]},
    )
    return Result(
        {"mlp_activations": made, "sequences": xr.Dataset(coords={"condition": names})}, {}
    )


def test_agreement_of_distributions(activations):
    outward, inward = [0.05, 0, -0.1, 0, 0.05], [-0.05, 0, 0.1, 0, -0.05]
    half = [0.05, 0, -0.05, 0.05, -0.05]
    made = histograms(
        {"a": outward, "twice": [2 * x for x in outward], "b": inward, "c": half, "none": [0] * 5}
    )
    near(mlp.distribution_agreement(made, "a", "twice"), [1.0])
    near(mlp.distribution_agreement(made, "a", "b"), [-1.0])
    near(mlp.distribution_agreement(made, "a", "none"), [0.0])
    assert mlp.distribution_range(made, "a", "b") == pytest.approx((0, 1))
    assert mlp.distribution_range(made, "b", "a") == pytest.approx((-1, 0))
    # Below −0.3 and −0.1 the share grows (outward), at 0.1 it is unchanged, at 0.3 it grows (inward).
    change = np.cumsum(half)[:-1]
    size, good = np.linalg.norm(change), np.linalg.norm(change[:2])
    assert mlp.distribution_range(made, "c", "a")[1] == pytest.approx(good / size)
    data = activations["mlp_activations"].histogram.isel(layer=0).values.astype(float)
    expected = []
    for row in data:
        one, other = (
            np.array([sum((row[i] - row[0])[: k + 1]) for k in range(row.shape[1] - 1)])
            for i in (1, 2)
        )
        expected.append(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    near(mlp.distribution_agreement(activations, "slash", "arm"), expected, 1e-9)


def question_activations(toy, prompts, conditions):
    """[condition, prompt] of the first MLP's activations of the question's tokens, one sequence at a time."""
    found = {}
    for name, condition in conditions.items():
        for i, prompt in enumerate(prompts[:PROMPTS]):
            sequence = condition.apply(prompt, toy, 0)
            seen = {}
            with at_nonlinearity(
                toy, {0: lambda _, pre, post, seen=seen: seen.update(x=post.detach().double())}
            ):
                toy(sequence.tokens[None])
            x = seen["x"].reshape(len(sequence), -1)
            found[name, i] = x[sequence.of_segment("question")].numpy()
    return found


def test_agreement_entry_by_entry_beside_the_attainable(activations, toy, prompts):
    """The bound is reached by the very change, cut to the entries that ARM moves."""
    seen = question_activations(toy, prompts, {"baseline": ma.Baseline(), "slash": SLASH})
    bound = mlp.attainable_agreement(activations, "slash", "arm")
    for i in range(PROMPTS):
        before = torch.tensor(seen["baseline", i])
        change = seen["slash", i] - seen["baseline", i]
        moved = redistribute(before, torch.full_like(before, 0.5), 0.13, 99.5) != before
        cut = change * moved.numpy()
        best = (cut * change).sum() / np.linalg.norm(cut) / np.linalg.norm(change)
        assert bound[i] == pytest.approx(best, abs=2e-3)
    cosine = mlp.agreement(activations, "slash", "arm")
    table = activations.agreement("slash", "arm").set_index("other")
    assert abs(cosine.mean() - table.cosine["arm"]) < 1e-9
    assert (abs(cosine) <= bound).all()
    near(mlp.agreement_share(activations, "slash", "arm"), cosine / bound)
    assert mlp.agreement_range(activations, "slash", "arm")[1] == pytest.approx(bound.mean())
    near(mlp.agreement_share(activations, "slash", "slash"), np.ones(PROMPTS))
    near(
        mlp.agreement_share(activations, "baseline", "arm"), np.zeros(PROMPTS)
    )  # nothing changes: no agreement


def test_what_tokens_of_a_head_look_at_and_what_it_writes(tokens):
    focus, updates = (
        tokens["attention_focus"].isel(condition=0),
        tokens["head_updates"].isel(condition=0),
    )
    mass, size = focus.first_mass_at_per_prompt.values, updates.magnitude_at_per_prompt.values
    looks = (
        focus.first_mass.sel(segment="question")
        .transpose("layer", "head", "prompt")
        .values.astype(float)
        .mean(-1)
    )
    asks = tokens["sequences"].segment_index.isel(condition=0).values == SEGMENTS.index("question")
    chosen = [(n, h) for n in range(1, mass.shape[1]) for h in range(mass.shape[2])]
    chosen = [at for at in chosen if looks[at] >= 0.1] or chosen
    expected = [
        np.mean([stats.spearmanr(mass[i][at][asks[i]], size[i][at][asks[i]])[0] for at in chosen])
        for i in range(PROMPTS)
    ]
    near(heads.first_and_update(tokens), expected, 1e-6)
    rng = np.random.default_rng(0)
    noise = changed(
        tokens, "head_updates", "magnitude_at_per_prompt", lambda values: rng.random(values.shape)
    )
    assert abs(heads.first_and_update(noise)).max() < 0.1

    def at_first(values):
        return np.where(np.arange(values.shape[-1]) % 2, 0.0, 5.0) + 0 * values

    def small_there(values):
        return np.where(np.arange(values.shape[-1]) % 2, 0.25, 1.0) + 0 * values

    some = changed(tokens, "attention_focus", "target_at_per_prompt", at_first)
    near(
        heads.update_at_first(
            changed(some, "head_updates", "magnitude_at_per_prompt", np.ones_like)
        ),
        np.zeros(PROMPTS),
    )
    written = changed(some, "head_updates", "magnitude_at_per_prompt", small_there)
    near(heads.update_at_first(written), np.full(PROMPTS, math.log(0.25)))
    nowhere = changed(tokens, "attention_focus", "target_at_per_prompt", np.ones_like)
    with pytest.raises(NotApplicable, match="no later head looks at the first token"):
        heads.update_at_first(nowhere)


def test_heads_by_layer(tokens):
    focus = tokens["attention_focus"].isel(condition=0).sel(segment="question")
    own = focus.self_mass.transpose("prompt", "layer", "head").values.astype(float)
    pairs = [
        [stats.spearmanr(row[n], row[n + 1])[0] for n in range(own.shape[1] - 1)] for row in own
    ]
    near(heads.heads_related(tokens), np.mean(pairs, 1), 1e-9)
    near(heads.focus(tokens, "self_mass", "early"), own[:, 0].mean(-1), 1e-6)
    near(heads.focus(tokens, "self_mass", "rest"), own[:, 1:].mean((1, 2)), 1e-6)
    near(heads.focus(tokens, "self_mass"), own.mean((1, 2)), 1e-6)
    alike = changed(
        tokens, "attention_focus", "self_mass", lambda values: values[:, :, :1] + 0 * values
    )
    near(heads.heads_related(alike), np.ones(PROMPTS))
    near(heads.focus(alike, "self_mass", "early"), heads.focus(alike, "self_mass", "rest"))
    for dataset, name in (
        ("head_updates", "orientation"),
        ("top_target_updates", "top_target_orientation"),
    ):
        expected = abs(
            tokens[dataset][name].isel(condition=0).sel(segment="question").values.astype(float)
        )
        near(heads.turned(tokens, dataset), expected.mean((1, 2)), 1e-6)


def test_sinks_beside_a_blind_head(tokens):
    data = tokens["attention_sinks"].isel(condition=0)
    alpha = data.first_alpha.transpose("prompt", "layer", "head").values.astype(float)
    near(heads.sink_rate(tokens, 2), (alpha[:, 2:] > 0.3).mean((1, 2)))
    blind = data.first_alpha_uniform.transpose("prompt", "layer").values.astype(float)
    near(
        heads.first_beyond_uniform(tokens, 2),
        np.log(alpha[:, 2:].mean((1, 2)) / blind[:, 2:].mean(1)),
    )
    even = changed(
        tokens,
        "attention_sinks",
        "first_alpha",
        lambda values: blind[:, None, :, None] + 0 * values,
    )
    near(heads.first_beyond_uniform(even), np.zeros(PROMPTS))
    with pytest.raises(NotApplicable, match="those from 99 on"):
        heads.sink_rate(tokens, 99)
    focus = tokens["attention_focus"].isel(condition=0).sel(segment="question")
    back = focus.distance.transpose("prompt", "layer", "head").values.astype(float).mean(-1)
    null = focus.distance_uniform.transpose("prompt", "layer").values.astype(float)
    near(heads.distance_early(tokens), np.log(back[:, :2] / null[:, :2]).mean(1))
    even = changed(tokens, "attention_focus", "distance", lambda values: _spread(null, values))
    near(heads.distance_early(even), np.zeros(PROMPTS))


def _spread(null, values):
    """A blind head's numbers, in the shape of the measured ones [prompt, condition, layer, head, segment]."""
    return null[:, None, :, None, None] + 0 * np.nan_to_num(values)


@pytest.fixture(scope="module")
def written():
    """A model whose heads were written by hand: previous token, first token, induction …, on repeated spans."""
    model = known_heads.handmade_model()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.bias.fill_(
                0.01
            )  # so that the median of the stream is not 0; the norms take it out
    hooked = ma.load_model(model, tokenizer=lettered_tokenizer(VOCABULARY))
    rows, _ = repeated_spans(8, torch.Generator().manual_seed(0))
    prompts = [ma.Prompt(tokens=tuple(row), id=str(i)) for i, row in enumerate(rows.tolist())]
    return ma.run(
        hooked,
        prompts,
        {},
        [ma.analyses.AttentionFocus(), ma.analyses.AttentionSinks(), ma.analyses.DirectLogits()],
    )


def test_heads_that_were_written_are_the_strongest(written):
    for quantity, layers in (
        ("induction_mass", "later"),
        ("previous_mass", "first"),
        ("previous_mass", "all"),
    ):
        assert heads.strongest(written, quantity, layers).min() > 0.9, quantity
    assert abs(heads.strongest(written, "induction_mass", "first")).max() < 0.1
    logits = written["direct_logits"].next_token_logit.sel(
        condition="baseline", segment="question", layer=1, head=0
    )
    near(heads.copies(written), logits.values[halves_of(len(logits))[1]], 1e-9)
    near(heads.sink_rate(written), np.full(8, 1 / 8))  # the first-token head alone


def test_a_head_is_measured_on_other_prompts_than_it_is_chosen_on(written):
    """Of heads without any difference the best is better on the prompts it was chosen on, and no better on others."""
    rng = np.random.default_rng(0)
    flat = changed(written, "attention_focus", "induction_mass_uniform", np.zeros_like)
    best, others = [], []
    for _ in range(40):
        noise = changed(
            flat,
            "attention_focus",
            "induction_mass",
            lambda values: rng.standard_normal(values.shape),
        )
        values = (
            noise["attention_focus"]
            .induction_mass.sel(condition="baseline", segment="question")
            .values
        )
        best.append(values[halves_of(len(values))[0]].mean(0).max())
        others.append(heads.strongest(noise, "induction_mass").mean())
    assert np.mean(best) > 0.5
    assert abs(np.mean(others)) < 0.2
    with pytest.raises(NotApplicable, match="one prompt is too few"):
        heads.strongest(
            Result({n: d.isel(prompt=[0]) for n, d in flat.datasets.items()}, {}), "induction_mass"
        )


def test_without_a_sink_there_is_nothing_to_say_of_it(tokens):
    none = changed(tokens, "attention_sinks", "first_sink", np.zeros_like)
    for measure in (heads.sink_value, heads.sink_rank):
        with pytest.raises(NotApplicable, match="no head gives the first token"):
            measure(none)
    every = changed(tokens, "attention_sinks", "first_sink", np.ones_like)
    near(
        heads.sink_value(every),
        every["attention_sinks"].value_drain.isel(condition=0).values.astype(float).mean((1, 2)),
    )
    with pytest.raises(NotApplicable, match="none to compare with"):
        heads.sink_rank(every)


def test_the_rank_of_heads_with_a_sink_is_beside_that_of_the_others(tokens):
    first = np.arange(8) == 0
    sinks = changed(tokens, "attention_sinks", "first_sink", lambda values: first + 0 * values)
    ranks = changed(
        sinks,
        "attention_sinks",
        "output_rank",
        lambda values: np.where(first, 2.0, 6.0) + 0 * values,
    )
    near(heads.sink_rank(ranks), np.full(PROMPTS, math.log(2 / 6)))
    near(
        heads.sink_rank(changed(sinks, "attention_sinks", "output_rank", np.ones_like)),
        np.zeros(PROMPTS),
    )


def test_the_table_has_every_measure_with_words_and_a_range():
    for name, measure in MEASURES.items():
        assert measure.of.__name__ == name
        assert measure.says.endswith("."), name
        assert (
            measure.range is None or callable(measure.range) or measure.range[0] < measure.range[1]
        ), name
    with pytest.raises(OptionError, match="there is no such measure; choose one of accuracy_apart"):
        measure_named("eval")


def test_which_layers():
    values = np.arange(24.0)[None, :, None]
    found = {
        name: in_layers(values, name)[0, :, 0].tolist()
        for name in ("all", "first", "next", "later", "early")
    }
    assert found == {
        "all": [*range(24)], "first": [0], "next": [1, 2], "later": [*range(1, 24)], "early": [0, 1, 2, 3],
    }  # fmt: skip
    assert in_layers(values, "rest")[0, :, 0].tolist() == [*range(4, 24)]
    assert in_layers(values[:, :1], "all").shape == (1, 1, 1)
    with pytest.raises(NotApplicable, match="the model has one layer"):
        in_layers(values[:, :1], "rest")
