"""A model's heads beside those of random models: the formula by loops, the rate at which nothing is found."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import against_draws


def by_loops(found, draws, level=0.95):
    """Cells [layer, head], one after another."""

    def moments(layer, others):
        values = np.ravel([draw[layer] for draw in others])
        return values.mean(), values.std(ddof=1)

    random = []
    for i, draw in enumerate(draws):
        others = [*draws[:i], *draws[i + 1 :]]
        for layer, heads in enumerate(draw):
            mean, s = moments(layer, others)
            random += [abs(x - mean) / s for x in heads]
    random.sort()
    made = []
    for layer, heads in enumerate(found):
        mean, s = moments(layer, draws)
        half = random[math.ceil(level * (len(random) + 1)) - 1] * s
        for x in heads:
            p = (1 + sum(other >= abs(x - mean) / s for other in random)) / (1 + len(random))
            made.append((mean, mean - half, mean + half, p))
    return np.array(made).T


@pytest.fixture
def numbers():
    generator = np.random.default_rng(0)
    return generator.normal(size=(3, 5)) * 2, generator.normal(size=(4, 3, 5))


def test_the_numbers_are_those_of_loops(numbers):
    found, draws = numbers
    made = against_draws(found, draws, head_axis=1)
    got = np.broadcast_arrays(made.mean, made.low, made.high, made.p)
    assert_allclose(np.reshape(got, (4, -1)), by_loops(found, draws), atol=1e-12)
    assert made.compared == 60
    outside = (found < made.low) | (found > made.high)
    assert_array_equal(outside, made.p < 0.05)


def test_the_loops_would_notice_a_self_comparison(numbers):
    found, draws = numbers
    kept = by_loops(found, [*draws, draws[0]])
    assert abs(by_loops(found, draws) - kept).max() > 1e-3


def test_a_further_random_model_is_rarely_found():
    """Also where whole models differ (by 0.5 in a layer, where heads differ by 1)."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(200):
        every = generator.standard_t(6, size=(4, 4, 8)) + 0.5 * generator.normal(size=(4, 4, 1))
        p = against_draws(every[0], every[1:], head_axis=1).p.ravel()
        found.append([p < 0.05, false_discovery(p) < 0.05])
    rate, discovered = np.mean(found, axis=(0, 2))
    assert 0.02 < rate < 0.06
    assert discovered < 0.02


def test_rounding_is_no_difference():
    draws = np.zeros((3, 2, 4))
    found = np.array([[1e-7, 0, 0, 0], [1e3, 0, 0, 0]])
    p = against_draws(found, draws, head_axis=1, rounding=1e-5).p
    assert p[0, 0] == 1
    assert p[1, 0] == 1 / 25
    assert (against_draws(found, draws, head_axis=1).p[:, 0] == 1 / 25).all(), (
        "without it a digit of float32 would count, and a head beside random ones of 0 is far out"
    )


def test_a_layer_without_values_stays_empty(numbers):
    found = numbers[0].copy()
    draws = numbers[1].copy()
    found[2] = np.nan
    draws[:, 2] = np.nan
    made = against_draws(found, draws, head_axis=1)
    assert np.isnan(made.p[2]).all()
    assert_allclose(made.p[:2], against_draws(found[:2], draws[:, :2], head_axis=1).p)
    assert np.isnan(false_discovery(made.p)[2]).all()
