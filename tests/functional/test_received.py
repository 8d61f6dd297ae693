"""Received attention against a loop over queries in float64."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mechattn.functional import received as fn
from mechattn.functional.attention import Attention, EdgeMask, attention_by_rows


def loop_over_queries(pattern, counted, window=None, include_self=False):
    """The mean over counted queries after each key that can see it, one key at a time."""
    heads, length, _ = pattern.shape
    out = torch.full((heads, length), torch.nan, dtype=torch.float64)
    for key in range(length):
        queries = [query for query in range(key + (not include_self), length) if counted[query]]
        seen = [query for query in queries if window is None or query - key < window]
        if seen:
            out[:, key] = pattern[:, seen, key].mean(1)
    return out


def received(pattern, counted, window=None, include_self=False, block=64):
    """The library's path, in blocks of query rows."""
    length = pattern.shape[-1]
    pattern = pattern[None]
    counted = counted[None]
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
@pytest.mark.parametrize("block", [3, 64])
def test_received_attention_equals_a_loop(random_pattern, window, include_self, block):
    pattern = random_pattern(heads=3, length=11, window=window)
    counted = torch.arange(11) % 4 != 1
    got = received(pattern, counted, window, include_self, block)
    expected = loop_over_queries(pattern, counted, window, include_self)
    assert_close(got, expected, atol=1e-12, rtol=0, equal_nan=True)


def test_the_loop_would_notice_a_shifted_mask(random_pattern):
    pattern = random_pattern(heads=3, length=11)
    counted = torch.ones(11, dtype=torch.bool)
    shifted = received(pattern.roll(1, -2), counted)
    assert (shifted - loop_over_queries(pattern, counted))[:, :-1].abs().max() > 0.01


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_uniform_numbers(window, include_self, is_cut):
    """What nulls are made of, by a loop over every query and the keys that it sees.

    Blind queries may stand among the keys that they don't see; each still sees itself.
    """
    keys, blind, counted = (
        torch.tensor([[digit == "1" for digit in row] for row in rows.split()])
        for rows in ("011010010 100000000", "001110111 000011000", "110111111 111110111")
    )
    sums, seeing = torch.zeros(2, 2, 9)
    visible = torch.zeros(2, 9, dtype=torch.float64)
    for row, query in np.ndindex(2, 9):
        seen = []
        for key in range(max(0, query + 1 - (window or 9)), query + 1):
            if not (is_cut and keys[row, key] and blind[row, query]) or key == query:
                seen.append(key)
        visible[row, query] = len(seen)
        for key in seen:
            if key < query or include_self:
                sums[row, key] += float(counted[row, query]) / len(seen)
                seeing[row, key] += float(counted[row, query])

    edge_mask = EdgeMask(blind, keys) if is_cut else None
    assert_close(fn.visible_counts(torch.ones_like(keys), window, edge_mask), visible)
    assert_close(fn.seeing_queries(counted, window, include_self, edge_mask), seeing)
    assert_close(blind_sums(counted, window, include_self, edge_mask), sums)
    if is_cut:  # negative control
        assert (blind_sums(counted, window, include_self) - sums).abs().max() > 0.1


def blind_sums(counted, window, include_self, edge_mask=None):
    """Column sums of queries that are zero, block by block."""
    zero = torch.zeros(*counted.shape, 1)[:, None]
    sums = torch.zeros(len(counted), 1, counted.shape[1])

    def see(rows):
        counted_rows = counted[:, rows.queries]
        sums[..., rows.keys] += fn.column_sums(rows.pattern, counted_rows)
        if not include_self:
            own = fn.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
            sums[..., rows.queries] -= own * counted_rows[:, None]

    attention = Attention(zero, zero, zero, 1.0, window=window, edge_mask=edge_mask)
    attention_by_rows(attention, see, block=4)
    return sums[:, 0]
