"""Received attention against a loop over queries in float64."""

import pytest
import torch

from mechattn.functional import received as fn
from mechattn.functional.attention import Attention, EdgeMask, attention_by_rows


def loop_over_queries(pattern, counted, window=None, include_self=False):
    """The mean over counted queries after each key that can see it, one number at a time."""
    heads, length, _ = pattern.shape
    out = torch.full((heads, length), torch.nan, dtype=torch.float64)
    for head in range(heads):
        for key in range(length):
            seen = []
            for query in range(key if include_self else key + 1, length):
                if bool(counted[query]) and (window is None or query - key < window):
                    seen.append(float(pattern[head, query, key]))
            if seen:
                out[head, key] = sum(seen) / len(seen)
    return out


def received(pattern, counted, window=None, include_self=False, block=64):
    """The library's path, in blocks of query rows."""
    length = pattern.shape[-1]
    pattern, counted = pattern[None], counted[None]
    columns = torch.zeros((*pattern.shape[:2], length), dtype=torch.float64)
    own = torch.zeros_like(columns)
    for start in range(0, length, block):
        queries = torch.arange(start, min(start + block, length))
        columns += fn.column_sums(pattern[:, :, queries], counted[:, queries])
        own[..., queries] = (
            fn.self_attention(pattern[:, :, queries], start) * counted[:, None, queries]
        )
    seeing = fn.seeing_queries(counted, window, include_self)
    return fn.received_attention(columns if include_self else columns - own, seeing)[0]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("block", [1, 3, 64])
def test_received_attention_equals_a_loop(random_pattern, window, include_self, block):
    pattern = random_pattern(heads=3, length=11, window=window)
    counted = torch.tensor([True, False, True, True, False, True, True, True, True, False, True])
    got = received(pattern, counted, window, include_self, block)
    expected = loop_over_queries(pattern, counted, window, include_self)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0, equal_nan=True)


def test_the_loop_would_notice_a_shifted_mask(random_pattern):
    pattern, counted = random_pattern(heads=3, length=11), torch.ones(11, dtype=torch.bool)
    shifted = received(pattern.roll(1, -2), counted)
    assert (shifted - loop_over_queries(pattern, counted))[:, :-1].abs().max() > 0.01


def test_the_loop_would_notice_the_own_key(random_pattern):
    pattern, counted = random_pattern(heads=3, length=11), torch.ones(11, dtype=torch.bool)
    expected = loop_over_queries(pattern, counted)
    assert (received(pattern, counted, include_self=True) - expected)[:, :-1].abs().max() > 0.01


def test_a_key_that_no_counted_query_sees_is_nan(random_pattern):
    pattern, counted = (
        random_pattern(heads=2, length=5),
        torch.tensor([True, True, True, False, False]),
    )
    assert received(pattern, counted).isnan().tolist() == [[False, False, True, True, True]] * 2


def test_the_mean_of_a_segment_equals_a_loop(random_pattern):
    pattern, counted = (
        random_pattern(heads=2, length=7),
        torch.tensor([False, True, True, False, True, True, True]),
    )
    member = torch.tensor(
        [
            [True, True, False, False, False, False, False],
            [False, False, True, True, True, True, True],
        ]
    )
    per_key = loop_over_queries(pattern, counted)
    mean = fn.segment_mean(per_key[None], member[None])[0]
    for head in range(2):
        for segment in range(2):
            keys = [k for k in range(7) if member[segment, k]]
            known = [float(per_key[head, k]) for k in keys if not per_key[head, k].isnan()]
            assert mean[head, segment] == pytest.approx(sum(known) / len(known))


def test_an_empty_segment_has_no_mean(random_pattern):
    per_key = random_pattern(heads=1, length=4)[:, -1]
    assert fn.segment_mean(per_key[None], torch.zeros(1, 1, 4, dtype=torch.bool)).isnan().all()


def uniform_pattern(length, window=None):
    """The pattern of a head that is blind to content, row by row."""
    rows = torch.zeros(length, length, dtype=torch.float64)
    for query in range(length):
        seen = range(0 if window is None else max(0, query - window + 1), query + 1)
        rows[query, list(seen)] = 1 / len(seen)
    return rows


def blind_sums(counted, window=None, include_self=True, edge_mask=None):
    """Column sums of queries that are zero, block by block: what nulls are made of."""
    zero = torch.zeros(*counted.shape, 1)[:, None]
    sums = torch.zeros(len(counted), 1, counted.shape[1])

    def see(rows):
        own = (
            fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
            * counted[:, None, rows.queries]
        )
        sums[..., rows.keys] += fn.column_sums(rows.pattern, counted[:, rows.queries])
        sums[..., rows.queries] -= 0 if include_self else own

    attention_by_rows(
        Attention(zero, zero, zero, 1.0, window=window, edge_mask=edge_mask), see, block=4
    )
    return sums[:, 0]


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("include_self", [False, True])
def test_the_uniform_null_equals_a_loop(window, include_self):
    counted = torch.rand(3, 13, generator=torch.Generator().manual_seed(0)) < 0.6
    for row, got in zip(counted, blind_sums(counted, window, include_self), strict=True):
        pattern = uniform_pattern(13, window)
        if not include_self:
            pattern.fill_diagonal_(0)
        torch.testing.assert_close(got.double(), (pattern * row[:, None]).sum(0), atol=1e-6, rtol=0)


def test_the_drop_of_a_content_blind_head_by_definition():
    """30 system, 55 inserted and 100 question tokens under uniform attention: the drop that FIELD's null speaks of."""

    def question_received(inserted: int) -> float:
        length = 130 + inserted
        pattern = uniform_pattern(length)
        counted = torch.ones(length, dtype=torch.bool)
        counted[30 : 30 + inserted] = False
        return float(loop_over_queries(pattern[None], counted)[0, 30 + inserted : -1].mean())

    drop = 1 - question_received(55) / question_received(0)
    assert 0.22 < drop < 0.47


@pytest.mark.parametrize("window", [None, 4])
def test_uniform_numbers_where_keys_are_hidden(window):
    """By a loop over every query and the keys that it sees."""
    hidden = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    counted = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]]).bool()
    sums, seeing = torch.zeros(2, 9), torch.zeros(2, 9)
    for row in range(2):
        for q in range(9):
            keys = [
                k
                for k in range(q + 1)
                if q - k < (window or 9) and (not hidden[row, k] or hidden[row, q])
            ]
            for k in keys:
                sums[row, k] += float(counted[row, q]) / len(keys)
                seeing[row, k] += float(counted[row, q] and k < q)
    torch.testing.assert_close(
        blind_sums(counted, window, edge_mask=EdgeMask(~hidden, hidden)), sums
    )
    torch.testing.assert_close(
        fn.seeing_queries(counted, window, edge_mask=EdgeMask(~hidden, hidden)), seeing
    )
    assert (blind_sums(counted, window) - sums).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("include_self", [True, False])
def test_uniform_numbers_where_edges_are_cut(window, include_self):
    """Blind queries may stand among the keys that they don't see; each still sees itself."""
    keys = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    blind = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0, 0]]).bool()
    counted = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]]).bool()
    sums, seeing, visible = (
        torch.zeros(2, 9),
        torch.zeros(2, 9),
        torch.zeros(2, 9, dtype=torch.float64),
    )
    for row in range(2):
        for q in range(9):
            seen = [
                k
                for k in range(q + 1)
                if q - k < (window or 9) and not (keys[row, k] and blind[row, q] and k != q)
            ]
            visible[row, q] = len(seen)
            for k in seen:
                if k < q or include_self:
                    sums[row, k] += float(counted[row, q]) / len(seen)
                    seeing[row, k] += float(counted[row, q])
    edge_mask = EdgeMask(blind, keys)
    torch.testing.assert_close(fn.visible_counts(torch.ones_like(keys), window, edge_mask), visible)
    torch.testing.assert_close(blind_sums(counted, window, include_self, edge_mask), sums)
    torch.testing.assert_close(fn.seeing_queries(counted, window, include_self, edge_mask), seeing)
    assert (blind_sums(counted, window, include_self) - sums).abs().max() > 0.1
