"""`MlpActivations`, gated and not, against plain transformers in float64, token by token, with numpy."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.prompts.token_classes import TOKEN_CLASSES, token_class
from tests.analysis.plain import SHORT, models, seen_in

CALIBRATION = tuple(ma.load_prompts("word-problems", limit=3, seed=1))


def activations(plain, ids):
    """[layer][pos, d_mlp] before and after the nonlinearity, from hooks of torch on the activation modules."""
    modules = [m for n, m in plain.named_modules() if n.endswith(("mlp.act_fn", "mlp.act"))]
    into = {("pre", n): module for n, module in enumerate(modules)}
    out_of = {("post", n): module for n, module in enumerate(modules)}
    seen, _ = seen_in(plain, ids, into, out_of)
    return [(seen["pre", n], seen["post", n]) for n in range(len(modules))]


def gini(size):
    return np.abs(size[:, None] - size).mean() / (2 * size.mean())


def of_tokens(post, pre, threshold):
    """Means over some tokens [pos, d_mlp] of what is measured of each."""
    size = np.abs(post)
    near_zero = size <= threshold
    # The minimum of GELU is at −0.75, of SiLU at −1.28; between them is nothing near zero.
    assert not (near_zero & (pre < -0.7) & (pre > -1.3)).any()
    from_mean = post - post.mean(1, keepdims=True)
    variance = (from_mean**2).mean(1)
    return {
        "near_zero": near_zero.mean(),
        "saturated": (near_zero & (pre < -1)).mean(),
        "l1": size.sum(1).mean(),
        "l2": np.linalg.norm(post, axis=1).mean(),
        "gini": np.mean([gini(row) for row in size]),
        "variance": variance.mean(),
        "kurtosis": ((from_mean**4).mean(1) / variance**2).mean(),
    }


@pytest.fixture(scope="module", params=[("toy:gemma3", "streaming"), ("toy:falcon", "hooks")])
def measured(request, prompts):
    """Both models, the result, the sequences of the second prompt, and what the plain model shows."""
    name, engine = request.param
    plain, hooked = models(name)
    conditions = {"slash": ma.MeaninglessTokens("/", 20), "sentence": ma.RandomSentence(20)}
    analysis = ma.analyses.MlpActivations("quantile", 0.2, calibration=CALIBRATION)
    result = ma.run(hooked, [prompts[0], SHORT], conditions, analysis, engine=engine)
    conditions = {"baseline": ma.Baseline()} | conditions
    sequences = {name: c.apply(SHORT, hooked) for name, c in conditions.items()}
    seen = {name: activations(plain, s.tokens.tolist()) for name, s in sequences.items()}
    return plain, hooked, result, sequences, seen


def thresholds_of(result):
    return result.provenance["analyses"]["mlp_activations"]["thresholds"]


def changes(sequences, seen, condition, layer):
    """How the question's tokens change, and what they were [pos, d_mlp]."""
    origin = sequences[condition].origin
    asks = sequences["baseline"].of_segment("question").nonzero().flatten()
    place = [int((origin == k).nonzero()) for k in asks]
    before = seen["baseline"][layer][1][asks]
    return seen[condition][layer][1][place] - before, before


def test_thresholds_are_medians_of_quantiles(measured):
    plain, hooked, result, _, _ = measured
    quantiles = []
    for prompt in CALIBRATION:
        ids = ma.Baseline().apply(prompt, hooked).tokens.tolist()
        sizes = [np.sort(np.abs(post).ravel()) for _, post in activations(plain, ids)]
        quantiles.append([size[round(0.2 * (size.size - 1))] for size in sizes])
    thresholds = list(thresholds_of(result).values())
    np.testing.assert_allclose(thresholds, np.median(quantiles, axis=0), rtol=1e-3)


@pytest.mark.parametrize("condition", ["baseline", "slash"])
def test_measures_of_the_question_equal_the_oracle(measured, condition):
    _, hooked, result, sequences, seen = measured
    question = sequences[condition].of_segment("question").numpy()
    asked = sequences["baseline"].tokens[sequences["baseline"].of_segment("question")]
    kinds = np.array([token_class(hooked.tokenizer.decode([token])) for token in asked])
    edges = [-1e9, *np.round(np.arange(-0.51, 1.52, 0.02), 2), 1e9]
    for layer in range(hooked.cfg.n_layers):
        pre, post = (values[question] for values in seen[condition][layer])
        threshold = thresholds_of(result)[str(layer)]
        numbers = of_tokens(post, pre, threshold)
        difference, before = changes(sequences, seen, condition, layer)
        relative = np.linalg.norm(difference, axis=1) / np.linalg.norm(before, axis=1)
        numbers["token_change"] = relative.mean()
        got = result["mlp_activations"].sel(condition=condition, layer=layer).isel(prompt=1)
        for metric, number in numbers.items():
            # A share changes by a step where an activation lies at the threshold.
            near = {"near_zero": 3 / post.size, "saturated": 3 / post.size, "token_change": 2e-5}
            mine = float(got[f"{metric}_by_segment"].sel(segment="question"))
            bound = near.get(metric, 1e-9)
            assert mine == pytest.approx(number, rel=2e-4, abs=bound), (layer, metric)
        others = got.near_zero_by_segment.sel(segment="template")
        assert abs(others - numbers["near_zero"]) > 1e-3, "other tokens have other numbers"
        share = (np.abs(difference + before) <= threshold).mean(1)
        for kind in TOKEN_CLASSES:
            expected = share[kinds == kind].mean() if kind in kinds else np.nan
            mine = float(got.near_zero_by_token_class.sel(token_class=kind))
            assert mine == pytest.approx(expected, abs=3e-3, nan_ok=True), (layer, kind)
        counts = np.histogram(post, edges)[0]
        assert np.abs(got.histogram.values - counts / counts.sum()).max() < 3 / counts.sum()


@pytest.mark.parametrize("other", ["slash", "sentence"])
def test_products_of_changes_equal_the_oracle(measured, other):
    _, hooked, result, sequences, seen = measured
    for layer in range(hooked.cfg.n_layers):
        first, _ = changes(sequences, seen, "slash", layer)
        second, _ = changes(sequences, seen, other, layer)
        of_layer = result["mlp_activations"].sel(condition="slash", layer=layer)
        scale = np.linalg.norm(first) * np.linalg.norm(second)
        got = float(of_layer.change_product.sel(other_condition=other).isel(prompt=1))
        assert got == pytest.approx((first * second).sum(), abs=1e-4 * scale), layer
        change = of_layer.token_change_by_segment.sel(segment="question")
        assert float(change.min()) > 0.01, "the oracle is tried where nothing changes"


def test_rules(toy, prompts):
    """MAD and absolute thresholds; the numbers of the rule are those of the calibration prompts."""
    plain, _ = models("toy:llama")
    values = []
    for prompt in CALIBRATION:
        _, post = activations(plain, ma.Baseline().apply(prompt, toy).tokens.tolist())[1]
        size = abs(post).ravel()
        middle = (size.size - 1) // 2
        mad = np.sort(abs(size - np.sort(size)[middle]))[middle]
        values.append(1.4826 * 0.3 * mad)
    by_mad = ma.analyses.MlpActivations("mad", 0.3, calibration=CALIBRATION)
    thresholds = by_mad.calibrated(toy, [1], prompts).thresholds
    assert thresholds[1] == pytest.approx(np.median(values), rel=1e-4)
    absolute = ma.analyses.MlpActivations("absolute", 0.01).calibrated(toy, [2], prompts)
    assert absolute.thresholds == {2: 0.01}
    with pytest.warns(UserWarning, match=r"1 of 1 calibration prompts .* are also measured"):
        ma.analyses.MlpActivations(calibration=prompts[:1]).calibrated(toy, [0], prompts)
    with pytest.raises(ma.MechattnError, match="there are no prompts"):
        ma.analyses.MlpActivations(calibration=[])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("3.5", "digit"),
        ("½", "digit"),
        (".", "other"),
        (" +", "operator"),
        ("\\times", "operator"),
        ("If", "conjunction"),
        ("▁because", "conjunction"),
        ("ands", "other"),
        ("", "other"),
    ],
)
def test_token_classes(text, kind):
    assert token_class(text) == kind
