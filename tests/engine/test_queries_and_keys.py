"""Statistics of tensors from anywhere, against loops over rows in float64, for every option."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 70, 8  # more than a block of rows
LENGTHS = [70, 41]
ALIBI = torch.tensor([0.5, 0.1, 0.02, 0.0])
OPTIONS = {
    "plain": {},
    "window": {"scale": 0.7, "window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, -1.0, 5.0])},
    "all": {"window": 20, "softcap": 3.0, "alibi": ALIBI, "sinks": torch.zeros(4)},
}


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, BATCH, KV_HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    counted = torch.rand(BATCH, LENGTH, generator=generator) < 0.6
    segment = torch.rand(BATCH, LENGTH, generator=generator) < 0.3
    segments = {"drawn": segment, "others": ~segment}
    return {"q": q, "k": k, "v": v, "counted": counted, "segments": segments}


def row_of_attention(
    q, k, query, head, scale=WIDTH**-0.5, window=None, softcap=None, alibi=None, sinks=None
):
    """Probabilities of the keys up to the query, as they are written: the further, the less."""
    scores = np.full(query + 1, -np.inf)
    for key in range(max(0, query + 1 - (window or LENGTH)), query + 1):
        score = scale * float(q[query] @ k[key])
        if softcap:
            score = softcap * math.tanh(score / softcap)
        if alibi is not None:
            score -= float(alibi[head]) * (query - key)
        scores[key] = score
    weights = np.exp(scores)
    if sinks is None:
        return weights / weights.sum()
    # The library counts ALiBi from the first key and not from the query; a sink knows no distance.
    sink = float(sinks[head]) - (0.0 if alibi is None else float(alibi[head]) * query)
    return weights / (weights.sum() + math.exp(sink))


def by_loops(tensors, **options):
    """Every statistic, one row at a time."""
    q, k, v = (tensors[name].numpy() for name in "qkv")
    masks = [mask.numpy() for mask in tensors["segments"].values()]
    by_query = (BATCH, HEADS, LENGTH)
    expected = {
        name: np.full(by_query, np.nan) for name in ("received", "entropy", "largest", "target")
    }
    expected["mass"] = np.full((*by_query, len(masks)), np.nan)
    expected["output"] = np.full((*by_query, WIDTH), np.nan)
    for batch, head in np.ndindex(BATCH, HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        received = {key: [] for key in range(LENGTHS[batch])}
        for query in range(LENGTHS[batch]):
            row = row_of_attention(q[batch, head], k[batch, kv_head], query, head, **options)
            place = (batch, head, query)
            expected["entropy"][place] = -sum(p * math.log(p) for p in row if p > 0)
            expected["largest"][place] = row.max()
            expected["target"][place] = row.argmax()
            expected["mass"][place] = [row[mask[batch, : query + 1]].sum() for mask in masks]
            expected["output"][place] = row @ v[batch, kv_head, : query + 1]
            if tensors["counted"][batch, query]:
                window = options.get("window") or LENGTH
                for key in range(max(0, query + 1 - window), query):
                    received[key].append(row[key])
        for key, probabilities in received.items():
            if probabilities:
                expected["received"][batch, head, key] = np.mean(probabilities)
    return expected


@pytest.mark.parametrize("name", OPTIONS)
def test_every_statistic_by_loops(tensors, name):
    options = OPTIONS[name]
    scores = ma.AttentionScores(**options)
    measured = ma.measure(**tensors, lengths=LENGTHS, scores=scores)
    expected = by_loops(tensors, **options)
    assert measured.keys() == expected.keys()
    for statistic, value in measured.items():
        np.testing.assert_allclose(
            value, expected[statistic], rtol=1e-6, atol=1e-9, err_msg=statistic
        )


@pytest.mark.parametrize("fault", ["heads swapped", "ALiBi doubled", "no sink", "wider window"])
def test_the_loops_would_notice(tensors, fault):  # negative control
    options = dict(OPTIONS["all"])
    changed = dict(tensors)
    if fault == "heads swapped":
        changed["k"] = tensors["k"].flip(1)
    elif fault == "ALiBi doubled":
        options["alibi"] = 2 * ALIBI
    elif fault == "no sink":
        del options["sinks"]
    else:
        options["window"] += 1
    measured = ma.measure(**changed, lengths=LENGTHS, scores=ma.AttentionScores(**options))
    expected = by_loops(tensors, **OPTIONS["all"])
    for statistic in ("received", "entropy"):
        assert np.nanmax(abs(measured[statistic].numpy() - expected[statistic])) > 1e-3


def test_it_is_what_run_measures(toy, prompts):
    """The queries and keys that a hook shows after RoPE give the numbers of ``run``."""
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionFocus(per_query=True)]
    result = ma.run(toy, prompts[:1], {}, analyses, keep="prompts")
    tokens = torch.tensor(result["sequences"].tokens.values[0])
    _, cache = toy.run_with_cache(tokens)
    layer = 2
    q, k = (cache[f"blocks.{layer}.attn.hook_rot_{name}"].transpose(1, 2) for name in "qk")
    measured = ma.measure(q, k)
    for name, values in (
        ("received", result["received_attention"].received_per_prompt),
        ("entropy", result["attention_focus"].entropy_at_per_prompt),
    ):
        expected = values.isel(prompt=0, condition=0, layer=layer).values
        known = ~np.isnan(expected)
        np.testing.assert_allclose(
            measured[name][0].numpy()[known], expected[known], rtol=1e-4, atol=1e-6
        )


def test_half_precision_is_computed_in_float32(tensors):
    q = tensors["q"].bfloat16()
    k = tensors["k"].bfloat16()
    torch.testing.assert_close(ma.measure(q, k), ma.measure(q.float(), k.float()), equal_nan=True)
