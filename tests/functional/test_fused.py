"""Sums over queries from two calls of a fused kernel, against the whole square in float64."""

import pytest
import torch

from mechattn.functional.attention import Attention
from mechattn.functional.fused import fused_attention
from tests.functional.test_rows import square

KINDS = ["plain", "ALiBi", "sinks", "both"]


def made(kind, length, dtype=torch.float32, seed=0):
    """Six heads that read three, and three groups of queries, padding among those that count in none."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, heads, length, width, generator=draw)
        for heads, width in ((6, 12), (3, 12), (3, 20))
    )
    slopes = torch.rand(1, 6, 1, generator=draw) / 8
    bias = slopes * torch.arange(length) if kind in ("ALiBi", "both") else None
    sinks = torch.randn(6, generator=draw) if kind in ("sinks", "both") else None
    q, k, v = (part.to(dtype) for part in (q, k, v))
    if dtype == torch.float64:  # what is added to scores is in float32 else
        bias, sinks = (None if part is None else part.double() for part in (bias, sinks))
    weights = (torch.rand(2, length, 3, generator=draw) < 0.5).float()
    weights[1, length // 2 :] = 0
    return Attention(2 * q, k, v, 0.4, bias, sinks=sinks), weights


def by_squares(attention, weights):
    """From the whole matrix: output, column sums of each group, and each query's attention to itself."""
    q, k, v = (part.double() for part in (attention.q, attention.k, attention.v))
    pattern, out = square(q, k, v, attention.scale, bias=attention.bias, sinks=attention.sinks)
    return out, pattern.mT @ weights[:, None].double(), pattern.diagonal(0, -2, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 17])
def test_float64_agrees_with_the_square(kind, length):
    attention, weights = made(kind, length, torch.float64)
    fused = fused_attention(attention)
    expected = by_squares(attention, weights)
    got = (fused.out, fused.column_sums(weights), fused.own)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    assert (fused.column_sums(1 - weights) - expected[1]).abs().max() > 0.1, (
        "the square would notice other queries"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-3)])
def test_long_rows_agree_with_the_square(kind, dtype, tolerance):
    attention, weights = made(kind, 300, dtype)
    _, columns, _ = by_squares(attention, weights)
    got = fused_attention(attention).column_sums(weights)
    assert got.dtype == torch.float32
    assert float((got - columns).abs().max()) < tolerance * float(columns.max())


def test_bfloat16_would_lose_the_log_sum_exp_without_its_parts(monkeypatch):
    attention, weights = made("plain", 300, torch.bfloat16)
    right = fused_attention(attention).column_sums(weights)
    monkeypatch.setattr(
        "mechattn.functional.fused._in_parts", lambda number, dtype: number.to(dtype)[..., None]
    )
    wrong = fused_attention(attention).column_sums(weights)
    assert float((wrong - right).abs().max()) > 0.01 * float(right.max())
