"""Top two, entropy, distance and shift against loops over single rows in float64."""

import math

import pytest
import torch

from mechattn.functional import focus as fn
from mechattn.functional.attention import mix


def test_each_row_by_hand(random_pattern):
    pattern = random_pattern(heads=3, length=9)[None]
    first, second, at = fn.top_two(pattern)
    entropy = fn.entropy(pattern)
    distance = fn.mean_distance(pattern)
    for head in range(3):
        for query in range(9):
            row = pattern[0, head, query].tolist()
            ranked = sorted(row, reverse=True)
            assert first[0, head, query] == ranked[0]
            assert second[0, head, query] == ranked[1]
            assert row[at[0, head, query]] == ranked[0]
            expected = -sum(p * math.log(p) for p in row if p > 0)
            assert float(entropy[0, head, query]) == pytest.approx(expected, abs=1e-12)
            expected = sum(p * (query - key) for key, p in enumerate(row))
            assert float(distance[0, head, query]) == pytest.approx(expected, abs=1e-12)


def test_the_pattern_is_put_back(random_pattern):
    pattern = random_pattern(heads=2, length=7)[None]
    before = pattern.clone()
    fn.top_two(pattern)
    assert torch.equal(pattern, before)


def test_a_block_with_keys_cut_off_on_the_left(random_pattern):
    pattern = random_pattern(heads=2, length=12, window=4)[None]
    whole = fn.mean_distance(pattern)[..., 8:]
    torch.testing.assert_close(fn.mean_distance(pattern[..., 8:, 5:], 8, first_key=5), whole)
    assert (fn.mean_distance(pattern[..., 8:, 5:], 8) - whole).abs().min() > 1, (
        "the loop would notice"
    )


def test_a_mix_is_a_sum_over_the_keys(random_pattern):
    pattern = torch.stack([random_pattern(4, 8, seed) for seed in (0, 1)])
    v = torch.randn(2, 2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    member = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    got = mix(pattern, v * member[:, None, :, None])
    for row in range(2):
        for head in range(4):
            for query in range(8):
                keys = [k for k in range(8) if member[row, k]]
                expected = sum(
                    (pattern[row, head, query, k] * v[row, head // 2, k] for k in keys),
                    torch.zeros(5),
                )
                torch.testing.assert_close(
                    got[row, head, query], expected.double(), atol=1e-12, rtol=0
                )
    assert got[0].abs().max() > 0.1
    assert got[1].abs().max() == 0
