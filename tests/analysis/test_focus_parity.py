"""Focus, updates, sinks and scores against plain transformers in float64, token by token, with numpy loops."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.analysis.received_attention import AttentionMap
from mechattn.axes import SEGMENTS
from mechattn.model.checkpoint import toy_names
from tests.analysis.plain import SHORT, models, passed, updates_of, windows

LATENT = "DeepSeek-V3 (latent attention)"
# Windows and a norm after attention; values of another width; updates that are multiplied.
NAMES = ["toy:gemma3", LATENT, "Granite"]
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
    result = ma.run(hooked, [SHORT, prompts[0]], {"slash": SLASH}, ANALYSES, keep="prompts")
    sequence = SLASH.apply(SHORT, hooked)
    run = passed(plain, sequence.tokens.tolist())
    return request.param, result, run, sequence, plain.config


def windows_of(name, config):
    """How far back each layer sees; tiny models are shorter than their windows."""
    return windows(config) if name in toy_names() else [10**9] * config.num_hidden_layers


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


QUANTITIES = tuple(ma.analyses.AttentionFocus(half_mass=True).quantities)


def focus_of_row(row, sequence, seen):
    """Every quantity of one query's row, by loops in float64; ``seen`` keys are in its window."""
    query = len(row) - 1
    ordered = np.sort(row)[::-1]
    target = int(np.argmax(row))
    repeats = [p for p in range(query) if sequence.tokens[p] == sequence.tokens[query]]
    behind = [p + 1 for p in repeats if p + 1 < query]
    entropy = -sum(p * math.log(p) for p in row if p > 0)
    return {
        "self_share": target == query,
        "first_share": target == 0,
        "previous_share": target == query - 1,
        "self_mass": row[query],
        "first_mass": row[0],
        "previous_mass": row[query - 1],
        "inserted_mass": row[sequence.inserted[: query + 1].numpy()].sum(),
        "duplicate_mass": row[repeats].sum() if repeats else math.nan,
        "induction_mass": row[behind].sum() if behind else math.nan,
        "concentration": ordered[0] - ordered[1],
        "entropy": entropy,
        "entropy_share": entropy / math.log(seen),
        "distance": row @ np.arange(query, -1, -1),
        "half_mass_keys": 1 + np.argmax(ordered.cumsum() >= 0.5 - 1e-6),
    }


def test_focus(measured):
    """The first and the last head's quantities from the rows that the analysis saw.

    What is left is rounding of sums.
    """
    name, result, _, sequence, config = measured
    length = len(sequence)
    segment = sequence.segment.numpy()
    wide = windows_of(name, config)
    heads = [0, -1]
    pattern = patterns(result, length)[:, heads]
    expected = {quantity: np.full(pattern.shape[:3], np.nan) for quantity in QUANTITIES}
    for layer, head, query in np.ndindex(pattern.shape[:3]):
        seen = min(query + 1, wide[layer])
        if seen < 2:
            continue
        row = pattern[layer, head, query, : query + 1]
        for quantity, value in focus_of_row(row, sequence, seen).items():
            expected[quantity][layer, head, query] = value
    for quantity, value in expected.items():
        mine = at(result, "attention_focus", f"{quantity}_at", length)[:, heads]
        if quantity == "half_mass_keys":
            wrong = (mine != value) & ~(np.isnan(mine) & np.isnan(value))
            assert wrong.mean() < 1e-3, quantity  # a sum that is half but for rounding may turn
            continue
        most = length if quantity == "distance" else 1
        rounding = 2 * length * ULP  # of a sum of so many terms, none above the most
        by_segment = got(result, "attention_focus", quantity)[:, heads]
        for ours, theirs in ((mine, value), (by_segment, means(value, segment))):
            assert_allclose(ours, theirs, rtol=rounding, atol=rounding * most, err_msg=quantity)


def test_the_oracle_would_notice_another_heads_rows(measured):
    _, result, _, sequence, _ = measured
    pattern = patterns(result, len(sequence))[:, ::-1]
    mine = at(result, "attention_focus", "self_mass_at", len(sequence))
    assert abs(mine - pattern.diagonal(0, -2, -1))[..., 1:].max() > 0.1


def written(plain, layer, top_target):
    """Every Δ of a layer [pos, head, d_model], built whole: of z, or of the strongest target alone."""
    if not top_target:
        return updates_of(plain, layer)
    pattern = plain.pattern[layer]
    v = plain.v[layer]
    target = pattern.argmax(-1)
    heads = range(len(target))
    z = np.stack([pattern[h].max(-1)[:, None] * v[h][target[h]] for h in heads], 1)
    return np.einsum("phd,hdm->phm", z, plain.w_o[layer]) * plain.gain[layer][:, None]


def updates(plain, top_target):
    """Magnitude, orientation and norm of each Δ [layer, head, pos]."""
    of_layers = []
    for layer in range(len(plain.z)):
        delta = written(plain, layer, top_target)
        resid = plain.resid[layer]
        size = np.linalg.norm(delta, axis=-1)
        stream = np.linalg.norm(resid, axis=-1)[:, None]
        product = np.einsum("pm,phm->ph", resid, delta)
        of_layers.append((size / stream, product / size / stream, size))
    return np.array(of_layers).transpose(1, 0, 3, 2)


def test_head_updates_with_the_whole_delta(measured):
    _, result, plain, sequence, _ = measured
    length = len(sequence)
    segment = sequence.segment.numpy()
    magnitude, orientation, norm = updates(plain, top_target=False)
    mine = at(result, "head_updates", "magnitude_at", length)
    assert_allclose(mine, magnitude, rtol=2e-4, atol=1e-6)
    for quantity, value in (
        ("magnitude", magnitude),
        ("orientation", orientation),
        ("update_norm", norm),
        ("parallel", magnitude * orientation),
        ("orthogonal", magnitude * np.sqrt(1 - orientation**2)),
    ):
        mine = got(result, "head_updates", quantity)
        assert_allclose(mine, means(value, segment), rtol=1e-3, atol=2e-5)

    original = (sequence.origin >= 0).numpy()
    bins = [*result["head_updates"].magnitude_bin.values, np.inf]
    counts = [[np.histogram(head[original], bins)[0] for head in layer] for layer in magnitude]
    differing = abs(got(result, "head_updates", "magnitude_counts") - np.array(counts)).sum()
    assert differing <= 4, "a value at an edge may turn"


def test_top_target_updates_with_the_whole_delta(measured):
    _, result, plain, sequence, _ = measured
    magnitude, orientation, _ = updates(plain, top_target=True)
    mine = at(result, "top_target_updates", "top_target_magnitude_at", len(sequence))
    off = abs(mine - magnitude) > 2e-4 * magnitude + 1e-6
    assert off.mean() < 2e-3, "a tie of the strongest target may turn, nothing else"
    mine = at(result, "top_target_updates", "top_target_orientation_at", len(sequence))
    assert (abs(mine - orientation) > 2e-4).mean() < 2e-3


def test_the_oracle_would_notice_another_head(measured):
    _, result, plain, sequence, _ = measured
    magnitude, _, _ = updates(plain, top_target=False)
    mine = at(result, "head_updates", "magnitude_at", len(sequence))[:, ::-1]
    assert abs(mine / magnitude - 1).max() > 0.05


def test_block_updates(measured):
    """Attention's update is Σ z W_O + b_O (after Gemma's norm), the MLP's what is left of the layer's."""
    _, result, plain, sequence, _ = measured
    length = len(sequence)
    mine = at(result, "block_updates", "block_magnitude_at", length)
    turned = at(result, "block_updates", "block_orientation_at", length)
    for layer, attention in enumerate(plain.attention):
        before = plain.resid[layer]
        after = plain.resid[layer + 1]
        middle = before + attention
        for block, (stream, delta) in enumerate(((before, attention), (middle, after - middle))):
            size = np.linalg.norm(delta, axis=-1)
            base = np.linalg.norm(stream, axis=-1)
            assert_allclose(mine[layer, block], size / base, rtol=5e-4)
            assert_allclose(turned[layer, block], (stream * delta).sum(-1) / size / base, atol=5e-4)


def sinks_of_head(pattern, window, inserted, original):
    """What follows from one head's rows, by loops over keys: α, vertical scores, sinks."""
    length = len(pattern)
    alpha = np.zeros(length)
    vertical = np.full(length, np.nan)
    enough = np.zeros(length, bool)
    for key in range(length):
        of_queries = pattern[key : key + window, key]
        enough[key] = len(of_queries) >= 16
        alpha[key] = of_queries.mean()
        if len(of_queries) > 4:
            vertical[key] = of_queries[4:].mean()
    after = [query for query in range(length) if original[query] and inserted[:query].any()]
    numbers = {
        "sinks": (alpha[enough] > 0.3).sum(),
        "first_sink": alpha[0] > 0.3,
        "strongest_alpha": alpha[enough].max(),
        "inserted_alpha": alpha[enough & inserted].max(),
        "span_mass": pattern[after][:, inserted].sum(1).mean(),
    }
    return alpha, vertical, numbers


def contribution_of_head(pattern, v, w_o, z):
    """What the first key contributes to one head's output, and the rank of the output."""
    norm = np.linalg.norm(v, axis=-1)
    worth = np.linalg.norm(v @ w_o, axis=-1)
    of_first = (pattern[:, 0] * worth[0]).mean()
    singular_values = np.linalg.svd(z, compute_uv=False)
    shares = singular_values / singular_values.sum()
    return {
        "value_drain": norm[0] / norm.mean(),
        "first_norm_share": of_first / (pattern @ worth).mean(),
        "first_output_share": of_first / np.linalg.norm(z @ w_o, axis=-1).mean(),
        "output_rank": np.exp(-sum(share * np.log(share) for share in shares if share > 0)),
    }


def test_sinks(measured):
    """From the rows that the analysis saw, and the plain model's values, outputs and residual stream."""
    name, result, plain, sequence, config = measured
    length = len(sequence)
    inserted = sequence.inserted.numpy()
    original = sequence.origin.numpy() >= 0
    wide = windows_of(name, config)
    sinks = result["attention_sinks"].sel(condition="slash").isel(prompt=0)
    for layer, pattern in enumerate(patterns(result, length)):
        of_layer = sinks.sel(layer=layer)
        for head, rows in enumerate(pattern):
            mine = of_layer.isel(head=head)
            alpha, vertical, numbers = sinks_of_head(rows, wide[layer], inserted, original)
            assert_allclose(mine.alpha_per_prompt[:length], alpha, atol=5e-6)
            assert_allclose(mine.vertical_per_prompt[:length], vertical, atol=5e-6)
            for quantity, value in numbers.items():
                assert float(mine[quantity]) == pytest.approx(float(value), abs=1e-5), quantity
            contribution = contribution_of_head(
                rows, plain.v[layer][head], plain.w_o[layer][head], plain.z[layer][:, head]
            )
            for quantity, value in contribution.items():
                relative = {"value_drain": 1e-4, "output_rank": 1e-2}.get(quantity, 1e-3)
                assert float(mine[quantity]) == pytest.approx(value, rel=relative), quantity
        stream = abs(plain.resid[layer + 1])
        if layer < len(plain.pattern) - 1:
            ratio = stream.max() / np.median(stream)
            assert float(of_layer.massive_ratio) == pytest.approx(ratio, rel=2e-3)
            assert float(of_layer.massive_position) == stream.max(1).argmax()


def test_masked_tokens_and_knockouts(prompts, shared):
    """A query sees fewer keys: no hidden target, and vertical scores over the queries that do see the key."""
    falcon = shared("toy:falcon")
    slash = ma.MeaninglessTokens("/", 20, place="start")
    edge_mask = slash.under(ma.interventions.AttentionKnockout("question", "inserted"))
    scores = ma.analyses.ScoreDecomposition(rank=2, per_query=True)
    analyses = [scores, ma.analyses.AttentionSinks(), AttentionMap()]
    conditions = {"masked": slash.masked(), "cut": edge_mask}
    result = ma.run(falcon, prompts[:1], conditions, analyses, keep="prompts")
    for name, condition in conditions.items():
        maps = result["attention_map"].pattern.sel(condition=name)[0]
        n = int((result["sequences"].origin.sel(condition=name)[0] >= -1).sum())
        rows = maps.values[..., :n, :n]
        scores = result["score_decomposition"].sel(condition=name)
        targets = scores.ranked_target_at_per_prompt[0].values[..., :n]
        known = ~np.isnan(targets)
        assert (rows[known][np.arange(known.sum()), targets[known].astype(int)] > 0).all()
        cut = condition.apply(prompts[0], falcon).cut_edges
        mine = result["attention_sinks"].vertical_per_prompt.sel(condition=name)[0].values[..., :n]
        for k in range(n):
            far = [q for q in range(k + 4, n) if not (cut.queries[q] and cut.keys[k])]
            expected = rows[:, :, far, k].mean(-1) if far else np.full(rows.shape[:2], np.nan)
            assert_allclose(mine[..., k], expected, atol=1e-5)


def test_a_narrow_window_leaves_no_counted_key(prompts, shared):
    gemma = shared("toy:gemma3")
    longer = ma.Prompt(" ".join(p.question for p in prompts[:3]), "Solve it.", id="0")
    analysis = ma.analyses.AttentionSinks(least_queries=70, gap=500)
    result = ma.run(gemma, longer, analyses=analysis)["attention_sinks"].isel(condition=0)
    wide = np.array(windows(gemma._mechattn.native.config)) > 64
    for name in ("strongest_alpha", "strongest_position", "sinks"):
        assert (result[name].notnull().all(["prompt", "head"]).values == wide).all(), name
    assert result.vertical.isnull().all(), "no query is so far away"


def test_an_ablated_head_has_no_share_of_an_output(toy):
    layer_heads = tuple((1, head) for head in range(8))
    ablated = ma.Baseline(intervention=ma.interventions.HeadAblation(layer_heads))
    analyses = [ma.analyses.AttentionSinks(), ma.analyses.HeadUpdates()]
    result = ma.run(toy, SHORT, {"off": ablated}, analyses)
    cell = dict(condition="off", layer=1, head=0)
    sinks = result["attention_sinks"].sel(cell)
    assert np.isnan([sinks.first_output_share, sinks.inactive]).all()
    assert (result["head_updates"].update_norm.sel(cell).sel(segment="question") == 0).all()


def test_half_precision_is_measured(shared):
    analyses = [
        ma.analyses.ScoreDecomposition(),
        ma.analyses.DirectLogits(),
        ma.analyses.HeadUpdates(),
        ma.analyses.AttentionSinks(),
        ma.analyses.BlockUpdates(),
    ]
    full, rounded = (
        ma.run(shared("toy:falcon", **options), SHORT, analyses=analyses)
        for options in ({}, {"dtype": torch.bfloat16, "verify": False})
    )
    for dataset, name in (
        ("head_updates", "magnitude"),
        ("score_decomposition", "alibi"),
        ("direct_logits", "next_token_logit"),
    ):
        expected, mine = (r[dataset][name].sel(segment="question").values for r in (full, rounded))
        assert abs(mine - expected).max() < 0.1 * abs(expected).max(), name
