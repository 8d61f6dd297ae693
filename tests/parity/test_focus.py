"""Focus, updates, sinks and scores against plain transformers in float64, token by token, with numpy loops."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis.received_attention import AttentionMap
from mechattn.axes import SEGMENTS
from mechattn.model.checkpoint import toy_names
from tests.parity.plain import MECHANISMS, models, passed
from tests.parity.test_every_toy import windows

LATENT = "DeepSeek-V3 (latent attention)"
NAMES = [*MECHANISMS, LATENT]
SLASH = ma.MeaninglessTokens("/", 20)
ULP = 2.0**-24  # a float32 number is rounded by so much of itself
ANALYSES = [
    ma.analyses.AttentionFocus(half_mass=True, per_query=True), ma.analyses.HeadUpdates(per_query=True),
    ma.analyses.TopTargetUpdates(per_query=True), ma.analyses.BlockUpdates(per_query=True), ma.analyses.AttentionSinks(), AttentionMap(),
]  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def measured(request, prompts):
    """Two prompts of different lengths in one batch; the shorter one, with filler, is looked at."""
    plain, hooked = models(request.param)
    some = sorted(prompts[:6], key=lambda p: len(SLASH.apply(p, hooked)))
    some = [some[0], some[-1]]
    result = ma.run(hooked, some, {"slash": SLASH}, ANALYSES, keep="prompts")
    sequence = SLASH.apply(some[0], hooked)
    with pytest.MonkeyPatch.context() as patch:
        return (
            request.param,
            result,
            passed(plain, sequence.tokens.tolist(), patch),
            sequence,
            plain.config,
        )


def got(result, dataset, name, length=None):
    array = result[dataset][name].sel(condition="slash").isel(prompt=0).values
    return array if length is None else array[..., :length]


def at(result, dataset, name, length):
    return got(result, dataset, f"{name}_per_prompt", length)


def means(values, segment):
    """[layer, head, segment] from [layer, head, pos], NaN left out."""
    parts = []
    for code in range(len(SEGMENTS)):
        part = values[..., segment == code]
        known = ~np.isnan(part)
        with np.errstate(invalid="ignore"):
            parts.append(np.where(known, part, 0).sum(-1) / known.sum(-1))
    return np.stack(parts, -1)


def patterns(result, length):
    """As the hooked model computed them, [layer head query key]."""
    return got(result, "attention_map", "pattern").astype(np.float64)[..., :length, :length]


def apart(pattern, plain):
    """How far each row of a layer is from the plain one, in what rounding of a score makes of it.

    A score is known to some ulp of the largest one, and a row moves by as much as its scores. How large scores are the
    logarithms of rows say, but for what all of a row have in common.
    """
    spread = np.log(plain.max(-1)) - np.log(np.where(plain > 0, plain, 1)).min(-1)
    return abs(pattern - plain).sum(-1) / (ULP * spread.max())


def test_patterns(measured):
    """The hooked model's, in float32, against those in float64. The largest seen: 5, in MPT's second layer."""
    _, result, plain, sequence, _ = measured
    mine = patterns(result, len(sequence))
    for layer, pattern in enumerate(plain.pattern):
        assert apart(mine[layer], pattern).max() < 20
        assert apart(mine[layer], pattern[::-1]).max() > 1e4, "negative control: another head's"


def test_focus(measured):
    """The first and the last head's quantities from the rows that the analysis saw, by loops in float64.

    What is left is rounding of sums.
    """
    name, result, plain, sequence, config = measured
    length, segment = len(sequence), sequence.segment.numpy()
    wide = windows(config) if name in toy_names() else [10**9] * len(plain.pattern)
    quantities = (
        "self_share", "first_share", "previous_share", "self_mass", "first_mass", "previous_mass", "inserted_mass",
        "duplicate_mass", "induction_mass",
        "concentration", "entropy", "entropy_share", "distance", "half_mass_keys",
    )  # fmt: skip
    heads = [0, -1]
    pattern = patterns(result, length)[:, heads]
    expected = {quantity: np.full(pattern.shape[:3], np.nan) for quantity in quantities}
    for layer, head, q in np.ndindex(pattern.shape[:3]):
        row = pattern[layer, head, q]
        seen = min(q + 1, wide[layer])
        if seen < 2:
            continue
        ordered = np.sort(row)[::-1]
        top = int(np.argmax(row))
        here = {
            "self_share": top == q, "first_share": top == 0, "previous_share": top == q - 1, "self_mass": row[q],
            "first_mass": row[0], "previous_mass": row[q - 1], "concentration": ordered[0] - ordered[1],
            "inserted_mass": sum(row[k] for k in range(q + 1) if sequence.inserted[k]),
            "entropy": -sum(p * math.log(p) for p in row if p > 0), "distance": sum(row[k] * (q - k) for k in range(q)),
            "half_mass_keys": next(n for n in range(1, length + 1) if ordered[:n].sum() >= 0.5 - 1e-6),
        }  # fmt: skip
        places = [p for p in range(q) if sequence.tokens[p] == sequence.tokens[q]]
        here["duplicate_mass"] = sum(row[p] for p in places) if places else math.nan
        behind = [p + 1 for p in places if p + 1 < q]
        here["induction_mass"] = sum(row[p] for p in behind) if behind else math.nan
        here["entropy_share"] = here["entropy"] / math.log(seen)
        for quantity, value in here.items():
            expected[quantity][layer, head, q] = value
    for quantity, value in expected.items():
        mine = at(result, "attention_focus", f"{quantity}_at", length)[:, heads]
        if quantity in ("self_share", "first_share", "previous_share"):
            np.testing.assert_array_equal(mine, value, err_msg=quantity)
        elif quantity == "half_mass_keys":
            wrong = (mine != value) & ~(np.isnan(mine) & np.isnan(value))
            assert wrong.mean() < 1e-3, quantity  # a sum that is half but for rounding may turn
            continue
        most = length if quantity == "distance" else 1
        rounding = length * ULP  # of a sum of so many terms, none above the most
        np.testing.assert_allclose(
            mine, value, rtol=rounding, atol=rounding * most, err_msg=quantity
        )
        by_segment = got(result, "attention_focus", quantity)[:, heads]
        np.testing.assert_allclose(
            by_segment,
            means(value, segment),
            rtol=2 * rounding,
            atol=2 * rounding * most,
            err_msg=quantity,
        )


def test_the_oracle_would_notice_another_heads_rows(measured):
    _, result, _, sequence, _ = measured
    pattern = patterns(result, len(sequence))[:, ::-1]
    mine = at(result, "attention_focus", "self_mass_at", len(sequence))
    assert abs(mine - pattern.diagonal(0, -2, -1))[..., 1:].max() > 0.1


def test_head_updates_with_the_whole_delta(measured):
    """Every Δ is built, [pos, head, d_model], in float64."""
    _, result, plain, sequence, _ = measured
    length, segment = len(sequence), sequence.segment.numpy()
    for dataset, prefix in (("head_updates", ""), ("top_target_updates", "top_target_")):
        magnitude, turned, norm = [], [], []
        for layer, (z, w_o, resid) in enumerate(zip(plain.z, plain.w_o, plain.resid, strict=False)):
            if prefix:
                top = plain.pattern[layer].argmax(-1)
                z = np.stack(
                    [
                        plain.pattern[layer][h].max(-1)[:, None] * plain.v[layer][h][top[h]]
                        for h in range(len(top))
                    ],
                    1,
                )
            delta = np.einsum("phd,hdm->phm", z, w_o) * plain.gain[layer][:, None]
            size = np.linalg.norm(delta, axis=-1)
            stream = np.linalg.norm(resid, axis=-1)[:, None]
            magnitude.append((size / stream).T)
            turned.append((np.einsum("pm,phm->ph", resid, delta) / size / stream).T)
            norm.append(size.T)
        magnitude, turned, norm = np.array(magnitude), np.array(turned), np.array(norm)
        mine = at(result, dataset, f"{prefix}magnitude_at", length)
        off = abs(mine - magnitude) > 2e-4 * magnitude + 1e-6
        assert off.mean() < (2e-3 if prefix else 1e-9), (
            "a tie of the strongest target may turn, nothing else"
        )
        mine = at(result, dataset, f"{prefix}orientation_at", length)
        assert (abs(mine - turned) > 2e-4).mean() < (2e-3 if prefix else 1e-9)
        if prefix:
            continue
        for quantity, value in {
            "magnitude": magnitude, "orientation": turned, "update_norm": norm, "parallel": magnitude * turned,
            "orthogonal": magnitude * np.sqrt(1 - turned**2),
        }.items():  # fmt: skip
            np.testing.assert_allclose(
                got(result, dataset, quantity), means(value, segment), rtol=1e-3, atol=2e-5
            )
        original = (sequence.origin >= 0).numpy()
        bins = result[dataset].magnitude_bin.values
        counts = np.stack(
            [[np.histogram(h[original], [*bins, np.inf])[0] for h in layer] for layer in magnitude]
        )
        assert abs(got(result, dataset, "magnitude_counts") - counts).sum() <= 4, (
            "a value at an edge may turn"
        )
        assert (
            got(result, dataset, "joint_counts").sum((1, 2)) == original.sum() * magnitude.shape[1]
        ).all()


def test_the_oracle_would_notice_another_head(measured):
    _, result, plain, sequence, _ = measured
    mine = at(result, "head_updates", "magnitude_at", len(sequence))[0]
    delta = np.einsum("phd,hdm->phm", plain.z[0], plain.w_o[0][::-1]) * plain.gain[0][:, None]
    other = (np.linalg.norm(delta, axis=-1) / np.linalg.norm(plain.resid[0], axis=-1)[:, None]).T
    assert abs(mine / other - 1).max() > 0.05


def test_block_updates(measured):
    """Attention's update is Σ z W_O + b_O (after Gemma's norm), the MLP's what is left of the layer's."""
    _, result, plain, sequence, _ = measured
    length = len(sequence)
    mine = at(result, "block_updates", "block_magnitude_at", length)
    turned = at(result, "block_updates", "block_orientation_at", length)
    for layer, attention in enumerate(plain.attention):
        before, after = plain.resid[layer], plain.resid[layer + 1]
        middle = before + attention
        for block, (stream, delta) in enumerate(((before, attention), (middle, after - middle))):
            size, base = np.linalg.norm(delta, axis=-1), np.linalg.norm(stream, axis=-1)
            np.testing.assert_allclose(mine[layer, block], size / base, rtol=5e-4)
            np.testing.assert_allclose(
                turned[layer, block], (stream * delta).sum(-1) / size / base, atol=5e-4
            )


def test_sinks(measured):
    """From the rows that the analysis saw, and the plain model's values, outputs and residual stream."""
    name, result, plain, sequence, config = measured
    length, inserted = len(sequence), sequence.inserted.numpy()
    wide = windows(config) if name in toy_names() else [10**9] * len(plain.pattern)
    for layer, pattern in enumerate(patterns(result, length)):
        here = result["attention_sinks"].sel(condition="slash", layer=layer).isel(prompt=0)
        for head, rows in enumerate(pattern):
            of = here.isel(head=head)
            alpha, vertical, seen = np.zeros(length), np.full(length, np.nan), np.zeros(length, int)
            for k in range(length):
                queries = [q for q in range(k, length) if q - k < wide[layer]]
                seen[k] = len(queries)
                alpha[k] = np.mean([rows[q, k] for q in queries])
                if far := [q for q in queries if q - k >= 4]:
                    vertical[k] = np.mean([rows[q, k] for q in far])
            np.testing.assert_allclose(of.alpha_per_prompt.values[:length], alpha, atol=5e-6)
            np.testing.assert_allclose(of.vertical_per_prompt.values[:length], vertical, atol=5e-6)
            enough = seen >= 16
            assert float(of.sinks) == (alpha[enough] > 0.3).sum()
            assert float(of.first_sink) == (alpha[0] > 0.3)
            np.testing.assert_allclose(float(of.strongest_alpha), alpha[enough].max(), atol=1e-5)
            np.testing.assert_allclose(
                float(of.inserted_alpha), alpha[enough & inserted].max(), atol=1e-5
            )
            after = [q for q in range(length) if sequence.origin[q] >= 0 and inserted[:q].any()]
            np.testing.assert_allclose(
                float(of.span_mass), np.mean([rows[q, inserted].sum() for q in after]), atol=1e-5
            )
            v, w_o, z = plain.v[layer][head], plain.w_o[layer][head], plain.z[layer][:, head]
            norm, worth = np.linalg.norm(v, axis=-1), np.linalg.norm(v @ w_o, axis=-1)
            np.testing.assert_allclose(float(of.value_drain), norm[0] / norm.mean(), rtol=1e-4)
            share = (rows[:, 0] * worth[0]).mean() / (rows @ worth).mean()
            np.testing.assert_allclose(float(of.first_norm_share), share, rtol=1e-3)
            output = np.linalg.norm(z @ w_o, axis=-1).mean()
            np.testing.assert_allclose(
                float(of.first_output_share), (rows[:, 0] * worth[0]).mean() / output, rtol=1e-3
            )
            s = np.linalg.svd(z, compute_uv=False)
            s = s / s.sum()
            rank = np.exp(-sum(x * np.log(x) for x in s if x > 0))
            np.testing.assert_allclose(float(of.output_rank), rank, rtol=1e-2)
        stream = abs(plain.resid[layer + 1])
        if layer < len(plain.pattern) - 1:
            np.testing.assert_allclose(
                float(here.massive_ratio), stream.max() / np.median(stream), rtol=2e-3
            )
            assert float(here.massive_position) == stream.max(1).argmax()
        assert float(here.length) == length


# Each has its biases elsewhere, or an ALiBi of its own.
SPLIT = {"toy:falcon": 0, "BLOOM": 2, "MPT": 0, "GPT-2": 2, "OPT": 0}


@pytest.mark.parametrize(("name", "rank"), SPLIT.items())
def test_the_parts_of_scores(name, rank, prompts, monkeypatch):
    """softmax(content + bias + ALiBi) = pattern, and each target's centred parts, from the weights by hand."""
    plain, hooked = models(name)
    analysis = ma.analyses.ScoreDecomposition(rank=rank, per_query=True)
    some = sorted(prompts[:6], key=lambda p: len(SLASH.apply(p, hooked)))
    result = ma.run(hooked, [some[0], some[-1]], {"slash": SLASH}, analysis, keep="prompts")
    sequence = SLASH.apply(some[0], hooked)
    length = len(sequence)
    made = passed(plain, sequence.tokens.tolist(), monkeypatch)
    data = result["score_decomposition"].sel(condition="slash").isel(prompt=0)
    for layer, pattern in enumerate(made.pattern):
        q, k = made.q[layer], made.k[layer]
        heads, width = len(q), q.shape[-1]
        b_q, b_k = biases(plain, layer, heads, width)
        content = np.einsum("hqd,hkd->hqk", q - b_q[:, None], k - b_k[:, None]) / width**0.5
        bias = np.einsum("hd,hkd->hk", b_q, k - b_k[:, None])[:, None] / width**0.5 + 0 * content
        alibi = slopes(plain, heads, length)[:, None] + 0 * content
        bracket = np.einsum("hqd,hd->hq", q, b_k)[..., None] / width**0.5
        raw = np.einsum("hqd,hkd->hqk", q, k) / width**0.5
        assert abs(content + bias + bracket - raw).max() < 1e-5 * max(1, abs(raw).max())
        visible = np.tril(np.ones((length, length), bool))
        total = np.where(visible, content + bias + alibi, -np.inf)
        own = np.exp(total - total.max(-1, keepdims=True))
        rounding = ULP * (
            abs(total[..., visible]).max() + 8
        )  # BLOOM and MPT round scores to float32 even here
        np.testing.assert_allclose(own / own.sum(-1, keepdims=True), pattern, atol=rounding)
        of = data.sel(layer=layer)
        of = {
            part: of[f"{part}_at_per_prompt"].values
            for part in ("ranked_target", "content", "bias", "alibi")
        }
        wrong = 0
        for head, query in np.ndindex(heads, length):
            if query <= rank:
                continue
            target = np.argsort(-total[head, query], kind="stable")[rank]
            if target != int(of["ranked_target"][head, query]):
                wrong += 1
                continue
            for part, value in (("content", content), ("bias", bias), ("alibi", alibi)):
                row = value[head, query, : query + 1]
                mine = float(of[part][head, query])
                assert abs(mine - (row[target] - row.mean())) < 2e-4 * max(1, abs(raw).max()), part
        assert wrong <= 0.002 * heads * length


def biases(plain, layer, heads, width):
    blocks = max((m for m in plain.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    found = dict(blocks[layer].named_parameters())
    for name, value in found.items():
        if name.endswith(("query_key_value.bias", "Wqkv.bias")):
            return value.detach().view(heads, 3, width).permute(1, 0, 2)[:2].numpy()
        if name.endswith("c_attn.bias"):
            return value.detach().view(3, heads, width)[:2].numpy()
    named = [
        next((v for n, v in found.items() if n.endswith(f"{part}_proj.bias")), None)
        for part in "qk"
    ]
    return [
        np.zeros((heads, width)) if v is None else v.detach().view(heads, width).numpy()
        for v in named
    ]


def slopes(plain, heads, length):
    """What transformers itself adds, by its own functions [head key]."""
    kind = plain.config.model_type
    if kind == "falcon":
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        alibi = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float64)
        return (
            alibi.view(heads, length).double().numpy() / (plain.config.hidden_size // heads) ** 0.5
        )
    if kind == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        return (
            build_alibi_tensor(torch.ones(1, length), heads, torch.float64)
            .view(heads, length)
            .numpy()
        )
    if kind == "mpt":
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        return build_mpt_alibi_tensor(heads, length).view(heads, length).double().numpy()
    return np.zeros((heads, length))


def test_masked_tokens_and_knockouts(prompts, shared):
    """A query sees fewer keys: no hidden target, and vertical scores over the queries that do see the key."""
    falcon = shared("toy:falcon")
    slash = ma.MeaninglessTokens("/", 20, place="start")
    edge_mask = slash.under(ma.interventions.AttentionKnockout("question", "inserted"))
    analyses = [
        ma.analyses.ScoreDecomposition(rank=2, per_query=True),
        ma.analyses.AttentionSinks(),
        AttentionMap(),
    ]
    result = ma.run(
        falcon,
        prompts[:1],
        {"masked": slash.masked(), "cut": edge_mask},
        analyses,
        keep="prompts",
    )
    for name in ("masked", "cut"):
        maps = result["attention_map"].pattern.sel(condition=name)[0]
        n = int((result["sequences"].origin.sel(condition=name)[0] >= -1).sum())
        rows = maps.values[..., :n, :n]
        targets = (
            result["score_decomposition"]
            .ranked_target_at_per_prompt.sel(condition=name)[0]
            .values[..., :n]
        )
        for layer, head, q in zip(*np.nonzero(~np.isnan(targets)), strict=True):
            assert rows[layer, head, q, int(targets[layer, head, q])] > 0
            assert (rows[layer, head, q] > 0).sum() >= 4 or q < 60, (
                "three keys at least, and underflow"
            )
        sequence = (slash.masked() if name == "masked" else edge_mask).apply(prompts[0], falcon)
        blind, hidden = sequence.edge_mask.queries.numpy(), sequence.edge_mask.keys.numpy()
        mine = result["attention_sinks"].vertical_per_prompt.sel(condition=name)[0].values[..., :n]
        for k in range(n):
            far = [q for q in range(k + 4, n) if not (blind[q] and hidden[k])]
            expected = rows[:, :, far, k].mean(-1) if far else np.full(rows.shape[:2], np.nan)
            np.testing.assert_allclose(mine[..., k], expected, atol=1e-5)


def test_no_key_is_seen_by_enough_queries_in_a_narrow_window(prompts, shared):
    gemma = shared("toy:gemma3")
    longer = ma.Prompt(" ".join(p.question for p in prompts[:3]), "Solve it.", id="0")
    result = ma.run(
        gemma,
        longer,
        {"slash": ma.MeaninglessTokens("/", 40)},
        ma.analyses.AttentionSinks(least_queries=70),
    )["attention_sinks"].sel(condition="slash")
    wide = np.array(windows(gemma._mechattn.native.config)) > 64
    for name in ("strongest_alpha", "strongest_position", "sinks"):
        assert (result[name].notnull().all(["prompt", "head"]).values == wide).all(), name
    long = ma.run(gemma, longer, analyses=ma.analyses.AttentionSinks(gap=500))["attention_sinks"]
    assert long.vertical.isnull().all(), "no query is so far away"


def test_an_ablated_head_has_no_share_of_an_output(toy, prompts):
    ablated = ma.Baseline(intervention=ma.interventions.HeadAblation(((1, 0),)))
    result = ma.run(
        toy,
        prompts[:3],
        {"off": ablated},
        [ma.analyses.AttentionSinks(), ma.analyses.HeadUpdates()],
    )
    off = result["attention_sinks"].sel(condition="off", layer=1, head=0)
    assert off.first_output_share.isnull().all()
    assert (off.inactive == 1).all()
    assert (
        result["head_updates"].update_norm.sel(condition="off", layer=1, head=0, segment="question")
        == 0
    ).all()


def test_half_precision_is_measured(prompts, shared):
    analyses = [
        ma.analyses.ScoreDecomposition(),
        ma.analyses.DirectLogits(),
        ma.analyses.HeadUpdates(),
        ma.analyses.AttentionSinks(),
        ma.analyses.BlockUpdates(),
    ]
    full = ma.run(shared("toy:falcon"), prompts[:2], analyses=analyses)
    for dtype in (torch.bfloat16, torch.float16):
        half = ma.run(ma.load_model("toy:falcon", dtype=dtype), prompts[:2], analyses=analyses)
        for dataset, name in (
            ("head_updates", "magnitude"),
            ("score_decomposition", "alibi"),
            ("direct_logits", "next_token_logit"),
        ):
            a, b = (r[dataset][name].sel(segment="question").values for r in (half, full))
            assert abs(a - b).max() < 0.1 * abs(b).max(), (dtype, name)
