"""Attention in row blocks against the whole square in float64."""

import pytest
import torch

from mechattn.functional.attention import Attention, EdgeMask, PatternRows, attention_by_rows


def square(q, k, v, scale, bias=None, window=None, softcap=None):
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
    pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return pattern, pattern @ v.repeat_interleave(groups, 1)


def random_qkv(batch, heads, kv_heads, length, width, dtype=torch.float64, d_value=None):
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, d_value or width)]
    return [
        2 * torch.randn(batch, n, length, d, generator=generator, dtype=dtype) for n, d in shapes
    ]


def in_blocks(q, k, v, scale, block=64, **options):
    pattern = torch.full((*q.shape[:3], q.shape[2]), torch.nan, dtype=torch.float64)

    def see(rows):
        pattern[:, :, rows.queries] = 0.0
        pattern[:, :, rows.queries, rows.keys] = rows.pattern.double()

    out = attention_by_rows(Attention(q, k, v, scale, **options), see, block)
    return pattern, out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "block"),
    [(4, 4, 1, 64), (4, 2, 7, 2), (6, 1, 130, 64)],
)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("extra", [{"softcap": 3.0}, {"bias": True}])
def test_blocks_are_the_square(heads, kv_heads, length, block, window, extra):
    q, k, v = random_qkv(2, heads, kv_heads, length, 8)
    if "bias" in extra:
        slopes = torch.linspace(0.1, 1, heads, dtype=torch.float64)
        extra = {"bias": (slopes[:, None] * torch.arange(length))[None]}
    expected, out = square(q, k, v, 0.4, window=window, **extra)
    got, streamed = in_blocks(q, k, v, 0.4, window=window, block=block, **extra)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(streamed, out, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_a_learned_sink_is_one_more_column(window):
    """Its score is among those of the softmax, and its share goes nowhere."""
    q, k, v = random_qkv(2, 4, 2, 70, 8)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 9.0], dtype=torch.float64)
    scores = 0.4 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    distance = torch.arange(70)[:, None] - torch.arange(70)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or 70)), -torch.inf)
    column = sinks[:, None, None].expand(2, -1, 70, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    got, out = in_blocks(q, k, v, 0.4, block=16, window=window, sinks=sinks)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(out, expected @ v.repeat_interleave(2, 1), atol=1e-12, rtol=0)
    single = Attention(q, k, v, 0.4, window=window, sinks=sinks).rows(
        torch.tensor([[0, 9, 69]] * 2), 70
    )
    torch.testing.assert_close(single, expected[:, :, [0, 9, 69]], atol=1e-12, rtol=0)
    assert (in_blocks(q, k, v, 0.4, window=window)[0] - expected).abs().max() > 0.1, (
        "without them it is another"
    )


def test_the_square_would_notice_a_window_or_a_scale(random_pattern):
    q, k, v = random_qkv(1, 2, 2, 40, 8)
    expected, _ = square(q, k, v, 0.4, window=6)
    assert (in_blocks(q, k, v, 0.4, window=7)[0] - expected).abs().max() > 0.01
    assert (in_blocks(q, k, v, 0.41, window=6)[0] - expected).abs().max() > 0.001


def test_half_precision_is_computed_in_float32():
    q, k, v = random_qkv(1, 2, 1, 90, 16, torch.bfloat16)
    got, out = in_blocks(q, k, v, 0.25)
    expected, exact = square(q.double(), k.double(), v.double(), 0.25)
    torch.testing.assert_close(
        got, expected, atol=2e-6, rtol=0
    )  # what a bfloat16 softmax could not reach
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)


def test_single_rows_are_rounded_as_blocks_are():
    """With a scale that is no power of two, a query that is scaled in bfloat16 would be rounded twice."""
    q, k, v = random_qkv(1, 4, 2, 90, 16, torch.bfloat16)
    blocks, _ = in_blocks(q, k, v, 128**-0.5)
    rows = Attention(q, k, v, 128**-0.5).rows(torch.arange(90)[None], 90)
    torch.testing.assert_close(rows.double(), blocks, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 3.0}, {"bias": True}, {"window": 6}, {"hidden": True}]
)
def test_single_rows_are_rows_of_the_square(extra):
    """Any queries, in any order, of some of the sequences; looked up in a pattern that was shown, just so."""
    q, k, v = random_qkv(3, 4, 2, 20, 8)
    if "bias" in extra:
        extra = {
            "bias": torch.randn(
                3, 4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
        }
    if "hidden" in extra:
        keys = torch.arange(20).expand(3, 20) % 7 == torch.tensor([[1], [2], [3]])
        extra = {"edge_mask": EdgeMask(~keys, keys)}
    attention = Attention(q, k, v, 0.4, **extra)
    whole, _ = in_blocks(q, k, v, 0.4, **extra)
    sequences = torch.tensor([2, 0])
    queries = torch.tensor([[3, 19, 0], [7, 7, 18]])
    expected = torch.stack([whole[s][:, rows] for s, rows in zip(sequences, queries, strict=True)])
    torch.testing.assert_close(
        attention.of(sequences).rows(queries, 20), expected, atol=1e-12, rtol=0
    )
    assert torch.equal(PatternRows(whole, v).of(sequences).rows(queries, 20), expected)
    early = torch.tensor([[2], [4]])
    edge_mask = attention.of(sequences).rows(early, 5)
    torch.testing.assert_close(
        edge_mask, PatternRows(whole, v).of(sequences).rows(early, 5), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("block", [3, 64])
def test_cut_edges_against_the_square(block):
    """Blind queries among the keys that they don't see; a token sees itself whatever is cut."""
    q, k, v = random_qkv(2, 4, 2, 15, 8)
    keys = torch.arange(15).expand(2, 15) % 4 == 1
    blind = torch.arange(15).expand(2, 15) % 3 == 1
    unseen = blind[:, :, None] & keys[:, None] & ~torch.eye(15, dtype=torch.bool)
    before, _ = square(q, k, v, 0.4)
    expected = (before.log() - 1e9 * unseen[:, None]).softmax(-1)
    got, out = in_blocks(q, k, v, 0.4, block=block, edge_mask=EdgeMask(blind, keys))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(out, expected @ v.repeat_interleave(2, 1), atol=1e-12, rtol=0)
    assert (blind & keys).any()
    assert (before - expected).abs().max() > 0.05


def test_some_queries_have_the_rows_of_all():
    q, k, v = random_qkv(2, 4, 2, 130, 8, d_value=5)
    attention = Attention(q, k, v, 0.3, window=50)
    pattern, out = in_blocks(q, k, v, 0.3, window=50)
    some = torch.full_like(pattern, torch.nan)

    def see(rows):
        some[:, :, rows.queries] = 0.0
        some[:, :, rows.queries, rows.keys] = rows.pattern

    queries = slice(37, 121)
    some_out = attention_by_rows(attention, see, queries_of=queries)
    torch.testing.assert_close(some[:, :, queries], pattern[:, :, queries])
    torch.testing.assert_close(some_out[:, :, queries], out[:, :, queries])
    assert some[:, :, : queries.start].isnan().all()
    assert some[:, :, queries.stop :].isnan().all()


def test_rows_need_no_values():
    q, k, v = random_qkv(2, 4, 2, 70, 8)
    pattern, _ = in_blocks(q, k, v, 0.3)
    same, out = in_blocks(q, k, v[..., :0], 0.3)
    torch.testing.assert_close(same, pattern)
    assert out.shape == (2, 4, 70, 0)
