"""`MlpActivations` on every toy against plain transformers in float64, token by token, with numpy."""

from itertools import product

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer
from mechattn.prompts.tokenization import TOKEN_CLASSES, token_class
from tests.parity.plain import MECHANISMS
from tests.parity.test_every_toy import alibi_in_the_mask_only, plain_and_hooked

CALIBRATION = tuple(ma.load_prompts("word-problems", limit=3, seed=1))


def activations(plain, ids):
    """[layer][pos, d_mlp] before and after the nonlinearity, from hooks of torch on the activation modules."""
    names = [n for n, _ in plain.named_modules() if n.endswith(("mlp.act_fn", "mlp.act"))]
    modules = dict(plain.named_modules())
    seen = []
    handles = [
        modules[n].register_forward_hook(
            lambda m, given, out: seen.append((given[0][0].clone(), out[0].clone()))
        )
        for n in names
    ]
    with torch.no_grad():
        plain(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return [(pre.numpy(), post.numpy()) for pre, post in seen]


def gini(size):
    return np.abs(size[:, None] - size).mean() / (2 * size.mean())


def of_tokens(post, pre, threshold):
    """Means over some tokens, one token at a time."""
    off = pre < -0.76  # the minimum of GELU; between it and SiLU's, −1.28, neither is near zero
    assert not ((np.abs(post) <= threshold) & (pre < -0.7) & (pre > -1.3)).any()
    made = {
        "near_zero": [],
        "saturated": [],
        "l1": [],
        "l2": [],
        "gini": [],
        "variance": [],
        "kurtosis": [],
    }
    for x, left in zip(post, off, strict=True):
        size = np.abs(x)
        made["near_zero"].append(np.mean(size <= threshold))
        made["saturated"].append(np.mean((size <= threshold) & left))
        made["l1"].append(size.sum())
        made["l2"].append(np.sqrt((x**2).sum()))
        made["gini"].append(gini(size))
        made["variance"].append(np.var(x))
        made["kurtosis"].append(np.mean((x - x.mean()) ** 4) / np.var(x) ** 2)
    return {name: np.mean(values) for name, values in made.items()}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mlp_activations_equal_the_oracle(name, prompts, monkeypatch):
    """Of both engines."""
    plain, hooked = plain_and_hooked(name, load_tokenizer(name))
    slash = ma.MeaninglessTokens("/", 20)
    sentence = ma.RandomSentence(20)
    analysis = ma.analyses.MlpActivations("quantile", 0.2, calibration=CALIBRATION)
    some = {"slash": slash, "sentence": sentence}
    results = [
        ma.run(hooked, prompts[:3], some, analysis, engine=engine)
        for engine in ("streaming", "hooks")
    ]
    conditions = {"baseline": ma.Baseline(), "slash": slash, "sentence": sentence}
    sequence = {c: condition.apply(prompts[1], hooked) for c, condition in conditions.items()}
    with alibi_in_the_mask_only(plain, monkeypatch):
        quantiles = [
            [
                np.sort(np.abs(post).ravel())[round(0.2 * (post.size - 1))]
                for _, post in activations(plain, ids)
            ]
            for ids in (ma.Baseline().apply(p, hooked).tokens.tolist() for p in CALIBRATION)
        ]
        seen = {c: activations(plain, made.tokens.tolist()) for c, made in sequence.items()}
    for result in results:
        thresholds = result.provenance["analyses"]["mlp_activations"]["thresholds"]
        for layer, values in enumerate(np.array(quantiles).T):
            assert thresholds[layer] == pytest.approx(np.median(values), rel=1e-3)
    texts = [hooked.tokenizer.decode([t]) for t in sequence["baseline"].tokens.tolist()]
    for layer in range(hooked.cfg.n_layers):
        changes = {}
        for condition, made in sequence.items():
            pre, post = seen[condition][layer]
            question = made.of_segment("question").numpy()
            numbers = of_tokens(post[question], pre[question], thresholds[layer])
            place = [int((made.origin == k).nonzero()) for k in range(len(sequence["baseline"]))]
            asks = sequence["baseline"].of_segment("question").numpy()
            before = seen["baseline"][layer][1][asks]
            changes[condition] = post[np.array(place)[asks]] - before
            relative = np.linalg.norm(changes[condition], axis=1) / np.linalg.norm(before, axis=1)
            share = np.abs(post[np.array(place)]) <= thresholds[layer]
            edges = [-np.inf, *np.round(np.arange(-0.51, 1.52, 0.02), 2), np.inf]
            counts = np.histogram(post[question].clip(-1e9, 1e9), np.clip(edges, -2e9, 2e9))[0]
            for result in results:
                at = result["mlp_activations"].sel(condition=condition, layer=layer).isel(prompt=1)
                where = result.provenance["engine"], layer, condition
                for metric, number in numbers.items():
                    got = float(at[f"{metric}_by_segment"].sel(segment="question"))
                    # A share changes by a step where an activation lies at the threshold.
                    near = 3 / post[question].size if metric in ("near_zero", "saturated") else 0
                    assert got == pytest.approx(number, rel=2e-4, abs=near + 1e-9), (where, metric)
                got = float(at.token_change_by_segment.sel(segment="question"))
                assert got == pytest.approx(relative.mean(), abs=2e-5), where
                for kind in TOKEN_CLASSES:
                    of_kind = [
                        i for i, text in enumerate(texts) if token_class(text) == kind and asks[i]
                    ]
                    got = float(at.near_zero_by_token_class.sel(token_class=kind))
                    expected = share[of_kind].mean() if of_kind else np.nan
                    assert got == pytest.approx(expected, abs=3e-3, nan_ok=True), (where, kind)
                assert np.abs(at.histogram.values - counts / counts.sum()).max() < 3 / counts.sum()
        for result, (one, other) in product(results, (("slash", "slash"), ("slash", "sentence"))):
            products = result["mlp_activations"].change_product.sel(
                condition=one, other_condition=other, layer=layer
            )
            scale = np.linalg.norm(changes[one]) * np.linalg.norm(changes[other])
            expected = (changes[one] * changes[other]).sum()
            assert float(products.isel(prompt=1)) == pytest.approx(expected, abs=1e-4 * scale), (
                layer,
                other,
            )
    for result in results:
        change = result["mlp_activations"].token_change_by_segment.sel(
            segment="question", condition="slash"
        )
        assert float(change.min()) > 0.01, "the oracle is tried where nothing changes"


def test_what_is_outside_of_the_question_does_not_count(toy, prompts):
    """The negative control of the segments: other tokens have other numbers."""
    data = ma.run(
        toy, prompts[:3], {"slash": ma.MeaninglessTokens("/", 20)}, ma.analyses.MlpActivations()
    )
    at = data["mlp_activations"].near_zero_by_segment.sel(condition="slash", layer=0)
    assert float(abs(at.sel(segment="question") - at.sel(segment="inserted")).min()) > 1e-3


def test_rules(toy, prompts):
    """MAD and absolute thresholds; the numbers of the rule are those of the calibration prompts."""
    plain, _ = plain_and_hooked("toy:llama", None)
    values = []
    for prompt in CALIBRATION:
        _, post = activations(plain, ma.Baseline().apply(prompt, toy).tokens.tolist())[1]
        size = np.sort(np.abs(post).ravel())
        mad = np.sort(np.abs(size - size[(size.size - 1) // 2]))[(size.size - 1) // 2]
        values.append(1.4826 * 0.3 * mad)
    made = ma.analyses.MlpActivations("mad", 0.3, calibration=CALIBRATION).calibrated(
        toy, [1], prompts
    )
    assert made.thresholds[1] == pytest.approx(np.median(values), rel=1e-4)
    assert ma.analyses.MlpActivations("absolute", 0.01).calibrated(
        toy, [0, 2], prompts
    ).thresholds == {
        0: 0.01,
        2: 0.01,
    }
    with pytest.warns(UserWarning, match=r"1 of 1 calibration prompts .* are also measured"):
        ma.analyses.MlpActivations(calibration=(prompts[0],)).calibrated(toy, [0], prompts)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 12", "digit"),
        ("3.5", "digit"),
        ("½", "digit"),
        (".", "other"),
        (" +", "operator"),
        ("=", "operator"),
        ("\\times", "operator"),
        (" and", "conjunction"),
        ("If", "conjunction"),
        ("▁because", "conjunction"),
        ("ands", "other"),
        ("Tom", "other"),
        ("", "other"),
        (" ", "other"),
    ],
)
def test_token_classes(text, kind):
    assert token_class(text) == kind
