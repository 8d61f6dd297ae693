"""Attention in row blocks against the whole square in float64."""

import pytest
import torch
from torch.testing import assert_close

from mechattn.functional.attention import Attention, EdgeMask, PatternRows, attention_by_rows


def square(q, k, v, scale, bias=None, window=None, softcap=None, sinks=None, edge_mask=None):
    """Pattern and output from the whole [query, key] matrix."""
    groups = q.shape[1] // k.shape[1]
    length = q.shape[2]
    scores = scale * q @ k.repeat_interleave(groups, 1).transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[:, :, None]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    if edge_mask is not None:
        cut = edge_mask.queries[:, :, None] & edge_mask.keys[:, None] & (distance != 0)
        hidden = hidden | cut[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # one more column, whose share goes nowhere
        column = sinks[:, None, None].expand(len(q), -1, length, 1)
        scores = torch.cat([scores, column], -1)
    pattern = scores.softmax(-1)[..., :length]
    return pattern, pattern @ v.repeat_interleave(groups, 1)


def extras(heads, length):
    """What may be added to scores or hidden, for two sequences."""
    draw = torch.Generator().manual_seed(1)
    positions = torch.arange(length).expand(2, -1)
    # Blind queries may stand among the keys that they don't see; each still sees itself.
    return {
        "softcap": 3.0,
        "bias": torch.randn(2, heads, length, dtype=torch.float64, generator=draw),
        "sinks": torch.linspace(-2, 9, heads, dtype=torch.float64),
        "edge_mask": EdgeMask(positions % 3 == 1, positions % 4 == 1),
    }


def random_qkv(batch, heads, kv_heads, length, width, dtype=torch.float64, d_value=None):
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, d_value or width)]
    return [
        2 * torch.randn(batch, n, length, d, generator=generator, dtype=dtype) for n, d in shapes
    ]


def in_blocks(q, k, v, scale, block=64, queries=None, **options):
    pattern = torch.full((*q.shape[:3], q.shape[2]), torch.nan, dtype=torch.float64)

    def see(rows):
        pattern[:, :, rows.queries] = 0.0
        pattern[:, :, rows.queries, rows.keys] = rows.pattern.double()

    out = attention_by_rows(Attention(q, k, v, scale, **options), see, block, queries)
    return pattern, out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "block"),
    [(4, 4, 1, 64), (4, 2, 7, 2), (6, 1, 130, 64)],
)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("extra", extras(1, 1))
def test_blocks_are_the_square(heads, kv_heads, length, block, window, extra):
    q, k, v = random_qkv(2, heads, kv_heads, length, 8)
    options = {"window": window, extra: extras(heads, length)[extra]}
    expected, out = square(q, k, v, 0.4, **options)
    got, streamed = in_blocks(q, k, v, 0.4, block=block, **options)
    assert_close(got, expected, atol=1e-12, rtol=0)
    assert_close(streamed, out, atol=1e-12, rtol=0)


@pytest.mark.parametrize("extra", extras(1, 1))
def test_the_square_would_notice(extra):
    q, k, v = random_qkv(2, 2, 2, 40, 8)
    options = {"window": 6, extra: extras(2, 40)[extra]}
    expected, _ = square(q, k, v, 0.4, **options)
    for changed in ({"window": 7}, {extra: None}):
        assert (in_blocks(q, k, v, 0.4, **options | changed)[0] - expected).abs().max() > 0.01
    assert (in_blocks(q, k, v, 0.41, **options)[0] - expected).abs().max() > 0.001


def test_half_precision_is_computed_in_float32():
    q, k, v = random_qkv(1, 2, 1, 90, 16, torch.bfloat16)
    got, out = in_blocks(q, k, v, 0.25)
    expected, exact = square(q.double(), k.double(), v.double(), 0.25)
    assert_close(got, expected, atol=2e-6, rtol=0)  # what a bfloat16 softmax could not reach
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)


def test_single_rows_are_rounded_as_blocks_are():
    """With a scale that is no power of two, a query that is scaled in bfloat16 would be rounded twice."""
    q, k, v = random_qkv(1, 4, 2, 90, 16, torch.bfloat16)
    blocks, _ = in_blocks(q, k, v, 128**-0.5)
    rows = Attention(q, k, v, 128**-0.5).rows(torch.arange(90)[None], 90)
    assert_close(rows.double(), blocks, atol=1e-6, rtol=0)


@pytest.mark.parametrize("extra", ["window", *extras(1, 1)])
def test_single_rows_are_rows_of_the_square(extra):
    """Any queries, in any order, of some of the sequences; looked up in a pattern that was shown, just so."""
    q, k, v = random_qkv(2, 4, 2, 20, 8)
    options = {extra: (extras(4, 20) | {"window": 6})[extra]}
    whole, _ = square(q, k, v, 0.4, **options)
    sequences = torch.tensor([1, 0])
    computed = Attention(q, k, v, 0.4, **options).of(sequences)
    shown = PatternRows(whole, v).of(sequences)
    for queries, keys in (
        (torch.tensor([[3, 19, 0], [7, 7, 18]]), 20),
        (torch.tensor([[2], [4]]), 5),
    ):
        expected = torch.stack([whole[s][:, q, :keys] for s, q in zip(sequences, queries)])
        got = computed.rows(queries, keys)
        assert_close(got, expected, atol=1e-12, rtol=0)
        assert torch.equal(shown.rows(queries, keys), expected)


def test_some_queries_have_the_rows_of_all():
    q, k, v = random_qkv(2, 4, 2, 130, 8, d_value=5)
    pattern, out = in_blocks(q, k, v, 0.3, window=50)
    queries = slice(37, 121)
    some, some_out = in_blocks(q, k, v, 0.3, queries=queries, window=50)
    assert_close(some[:, :, queries], pattern[:, :, queries])
    assert_close(some_out[:, :, queries], out[:, :, queries])
    assert int(some.isnan().all(-1).sum()) == 2 * 4 * (130 - (121 - 37)), "no other was shown"
