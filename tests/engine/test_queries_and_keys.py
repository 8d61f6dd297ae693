"""Statistics of tensors from anywhere, against the whole matrix in float64, for every option."""

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


DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)


def seen(window):
    """Which keys each query sees."""
    return (DISTANCE >= 0) & ((window or LENGTH) > DISTANCE)


def pattern_of(q, k, scale=WIDTH**-0.5, window=None, softcap=None, alibi=None, sinks=None):
    """Probabilities of all keys, as one matrix."""
    scores = scale * q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if alibi is not None:
        # Counted from the first key and not from the query: a sink knows no distance.
        scores = scores + alibi.double()[:, None, None] * torch.arange(LENGTH)
    scores = scores.masked_fill(~seen(window), -math.inf)
    if sinks is not None:
        sink = sinks[:, None, None].expand(BATCH, HEADS, LENGTH, 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :LENGTH]


def by_matrix(tensors, **options):
    """Every statistic, from the whole matrix; NaN after the end of a sequence."""
    pattern = pattern_of(tensors["q"], tensors["k"], **options)
    masses = [
        (pattern * segment[:, None, None]).sum(-1) for segment in tensors["segments"].values()
    ]
    is_real = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    counted = (tensors["counted"] & is_real)[:, None, :, None]
    later = counted & seen(options.get("window")) & (DISTANCE > 0)
    expected = {
        "received": (pattern * later).sum(-2) / later.sum(-2),
        "entropy": -torch.xlogy(pattern, pattern).sum(-1),
        "largest": pattern.amax(-1),
        "target": pattern.argmax(-1).double(),
        "mass": torch.stack(masses, -1),
        "output": pattern @ tensors["v"].repeat_interleave(HEADS // KV_HEADS, 1),
    }
    for values in expected.values():
        values.transpose(1, 2)[~is_real] = math.nan
    return expected


@pytest.mark.parametrize("name", OPTIONS)
def test_every_statistic_of_the_whole_matrix(tensors, name):
    options = OPTIONS[name]
    scores = ma.AttentionScores(**options)
    measured = ma.measure(**tensors, lengths=LENGTHS, scores=scores)
    expected = by_matrix(tensors, **options)
    assert measured.keys() == expected.keys()
    for statistic, value in measured.items():
        np.testing.assert_allclose(
            value, expected[statistic], rtol=1e-6, atol=1e-9, err_msg=statistic
        )


@pytest.mark.parametrize("fault", ["heads swapped", "ALiBi doubled", "no sink", "wider window"])
def test_the_matrix_would_notice(tensors, fault):  # negative control
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
    expected = by_matrix(tensors, **OPTIONS["all"])
    for statistic in ("received", "entropy"):
        assert np.nanmax(abs(measured[statistic] - expected[statistic]).numpy()) > 1e-3


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


def test_padding_is_not_read(tensors):
    is_padding = torch.arange(LENGTH) >= torch.tensor(LENGTHS)[:, None]
    q, k, v = (tensors[name].masked_fill(is_padding[:, None, :, None], math.nan) for name in "qkv")
    measured = ma.measure(q, k, v, lengths=LENGTHS)
    expected = ma.measure(tensors["q"], tensors["k"], tensors["v"], lengths=LENGTHS)
    torch.testing.assert_close(measured, expected, equal_nan=True)
