"""Statistics of tensors from anywhere, against loops over rows in float64, for every option."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine.queries_and_keys import Statistic

BATCH, HEADS, KV, LENGTH, WIDTH = 2, 4, 2, 70, 8  # more than a block of rows
LENGTHS = [70, 41]
ALL = Statistic.__args__
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"window": 9},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": torch.tensor([0.5, 0.1, 0.02, 0.0])},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, -1.0, 5.0])},
    "all": {
        "window": 20,
        "softcap": 3.0,
        "alibi": torch.tensor([0.5, 0.1, 0.02, 0.0]),
        "sinks": torch.zeros(4),
    },
}


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator)
    k, v = (torch.randn(BATCH, KV, LENGTH, WIDTH, generator=generator) for _ in range(2))
    counted = torch.rand(BATCH, LENGTH, generator=generator) < 0.6
    segments = {"some": torch.rand(BATCH, LENGTH, generator=generator) < 0.3}
    return q, k, v, counted, segments | {"others": ~segments["some"]}


def by_loops(
    q, k, v, counted, segments, scale=WIDTH**-0.5, window=None, softcap=None, alibi=None, sinks=None
):
    q, k, v = (tensor.double().numpy() for tensor in (q, k, v))
    shape = (BATCH, HEADS, LENGTH)
    made = {name: np.full(shape, np.nan) for name in ALL}
    made["mass"] = np.full((*shape, len(segments)), np.nan)
    made["output"] = np.full((*shape, WIDTH), np.nan)
    for row, head in np.ndindex(BATCH, HEADS):
        received = {key: [] for key in range(LENGTHS[row])}
        for query in range(LENGTHS[row]):
            first = max(0, query + 1 - window) if window else 0
            seen = range(first, query + 1)
            scores = [
                scale * float(q[row, head, query] @ k[row, head // (HEADS // KV), key])
                for key in seen
            ]
            if softcap:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            if alibi is not None:  # as it is written: the further, the less
                scores = [
                    score - float(alibi[head]) * (query - key)
                    for score, key in zip(scores, seen, strict=True)
                ]
            # A learned sink has a score of its own, which knows no distance.
            most = max(scores)
            sink = 0.0 if sinks is None else math.exp(sink_score(sinks, alibi, head, query) - most)
            total = sum(math.exp(score - most) for score in scores) + sink
            row_of = {
                key: math.exp(score - most) / total for key, score in zip(seen, scores, strict=True)
            }
            ordered = sorted(row_of.values(), reverse=True)
            half, kept = 0, 0.0
            while kept < 0.5 * sum(ordered) - 1e-6:
                kept += ordered[half]
                half += 1
            here = {
                "entropy": -sum(p * math.log(p) for p in row_of.values() if p > 0),
                "self_mass": row_of[query],
                "first_mass": row_of.get(0, 0.0),
                "previous_mass": row_of.get(query - 1, 0.0) if query else math.nan,
                "largest": ordered[0],
                "target": max(row_of, key=lambda key: (row_of[key], -key)),
                "concentration": ordered[0] - (ordered[1] if len(ordered) > 1 else 0.0),
                "distance": sum(p * (query - key) for key, p in row_of.items()),
                "half_mass_keys": half,
            }
            for name, value in here.items():
                made[name][row, head, query] = value
            for i, mask in enumerate(segments.values()):
                made["mass"][row, head, query, i] = sum(
                    p for key, p in row_of.items() if mask[row, key]
                )
            made["output"][row, head, query] = sum(
                p * v[row, head // (HEADS // KV), key] for key, p in row_of.items()
            )
            if counted[row, query]:
                for key in seen:
                    if key < query:
                        received[key].append(row_of[key])
        for key, given in received.items():
            made["received"][row, head, key] = np.mean(given) if given else math.nan
    return made


def sink_score(sinks, alibi, head, query):
    """Scores count ALiBi from the first key here, from the query there; a sink's is compared with the former."""
    return float(sinks[head]) - (0.0 if alibi is None else float(alibi[head]) * query)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_statistic_by_loops(tensors, name):
    q, k, v, counted, segments = tensors
    expected = by_loops(*tensors, **OPTIONS[name])
    got = ma.measure(
        q, k, v, lengths=LENGTHS, counted=counted, segments=segments, statistics=ALL,
        scores=ma.AttentionScores(**OPTIONS[name]),
    )  # fmt: skip
    assert list(got) == list(ALL)
    for statistic, value in got.items():
        np.testing.assert_allclose(
            value.numpy(), expected[statistic], rtol=1e-5, atol=2e-6, err_msg=statistic
        )
    precise = ma.measure(
        q.double(), k.double(), v.double(), lengths=LENGTHS, counted=counted, segments=segments, statistics=ALL,
        scores=ma.AttentionScores(**OPTIONS[name]),
    )  # fmt: skip
    for statistic, value in precise.items():
        np.testing.assert_allclose(
            value.numpy(), expected[statistic], rtol=1e-6, atol=1e-9, err_msg=statistic
        )


@pytest.mark.parametrize(
    "fault", ["kv heads swapped", "ALiBi doubled", "sink dropped", "window off by one"]
)
def test_the_loops_would_notice(tensors, fault):  # negative control
    q, k, v, counted, segments = tensors
    options = dict(OPTIONS["all"])
    if fault == "kv heads swapped":
        k = k.flip(1)
    elif fault == "ALiBi doubled":
        options["alibi"] = 2 * options["alibi"]
    elif fault == "sink dropped":
        del options["sinks"]
    else:
        options["window"] += 1
    expected = by_loops(*tensors, **OPTIONS["all"])
    scores = ma.AttentionScores(**options)
    got = ma.measure(q, k, v, scores=scores, lengths=LENGTHS, counted=counted, segments=segments)
    for statistic, value in got.items():
        assert np.nanmax(abs(value.numpy() - expected[statistic])) > 1e-3


def test_it_is_what_run_measures(toy, prompts):
    """The queries and keys that a hook shows after RoPE give the numbers of ``run``."""
    prompt = prompts[0]
    result = ma.run(
        toy, [prompt], {}, [ma.ReceivedAttention(), ma.analyses.AttentionFocus(per_query=True)], keep="prompts",
    )  # fmt: skip
    tokens = result["sequences"].tokens.values[0]
    _, cache = toy.run_with_cache(torch.tensor(tokens))
    layer = 2
    q, k = (cache[f"blocks.{layer}.attn.hook_rot_{name}"].transpose(1, 2) for name in "qk")
    got = ma.measure(q, k, statistics=["received", "entropy", "previous_mass"])
    for name, of in (
        ("received", "received_attention"),
        ("entropy", "attention_focus"),
        ("previous_mass", "attention_focus"),
    ):
        suffix = "_per_prompt" if name == "received" else "_at_per_prompt"
        expected = result[of][name + suffix].isel(prompt=0, condition=0, layer=layer).values
        known = ~np.isnan(expected)
        np.testing.assert_allclose(
            got[name][0].numpy()[known], expected[known], rtol=1e-4, atol=1e-6
        )


def test_uniform_attention_is_the_null(tensors):
    q, k, *_ = tensors
    got = ma.measure(torch.zeros_like(q), k, statistics=["entropy", "largest"])
    seen = torch.arange(1.0, LENGTH + 1)
    torch.testing.assert_close(got["entropy"], seen.log().expand_as(got["entropy"]))
    torch.testing.assert_close(got["largest"], (1 / seen).expand_as(got["largest"]))


def test_half_precision_is_computed_in_float32(tensors):
    q, k, *_ = (tensor.bfloat16() for tensor in tensors[:2])
    got = ma.measure(q, k)
    torch.testing.assert_close(got, ma.measure(q.float(), k.float()), equal_nan=True)
