"""A model's heads beside those of random models: the formula by loops, the rate at which nothing is found."""

import math

import numpy as np
import pytest

from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import against_draws


def by_loops(found, draws, level=0.95):
    """Cells [layer, head], in plain Python."""

    def z(x, layer, others):
        flat = [value for draw in others for value in draw[layer]]
        mean = sum(flat) / len(flat)
        s = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
        return abs(x - mean) / s, mean, s

    random = []
    for i, draw in enumerate(draws):
        others = [other for j, other in enumerate(draws) if j != i]
        random += [z(x, layer, others)[0] for layer, heads in enumerate(draw) for x in heads]
    random.sort()
    made = []
    for layer, heads in enumerate(found):
        for x in heads:
            own, mean, s = z(x, layer, draws)
            p = (1 + sum(other >= own for other in random)) / (1 + len(random))
            half = random[math.ceil(level * (len(random) + 1)) - 1] * s
            made.append((mean, mean - half, mean + half, p))
    return np.array(made).T


@pytest.fixture
def numbers():
    generator = np.random.default_rng(0)
    return generator.normal(size=(3, 5)) * 2, generator.normal(size=(4, 3, 5))


def test_the_numbers_are_those_of_loops(numbers):
    found, draws = numbers
    made = against_draws(found, draws, head_axis=1)
    expected = by_loops(found.tolist(), draws.tolist())
    for got, wanted in zip((made.mean, made.low, made.high, made.p), expected, strict=True):
        np.testing.assert_allclose(got.ravel(), wanted, atol=1e-12)
    assert made.compared == 60
    outside = (found < made.low) | (found > made.high)
    np.testing.assert_array_equal(outside, made.p < 0.05)


def test_the_loops_would_notice_that_a_draw_is_compared_with_itself(numbers):
    found, draws = numbers
    expected = by_loops(found.tolist(), draws.tolist())
    kept = by_loops(found.tolist(), [*draws.tolist(), draws[0].tolist()])
    assert abs(expected - kept).max() > 1e-3


def test_one_more_random_model_is_found_no_more_often_than_said():
    """Also where whole models differ (by 0.5 in a layer, where heads differ by 1)."""
    generator = np.random.default_rng(1)
    rates = []
    discoveries = []
    for _ in range(200):
        every = generator.standard_t(6, size=(4, 4, 8)) + 0.5 * generator.normal(size=(4, 4, 1))
        p = against_draws(every[0], every[1:], head_axis=1).p
        rates.append((p < 0.05).mean())
        discoveries.append((false_discovery(p.ravel()) < 0.05).mean())
    assert 0.02 < np.mean(rates) < 0.06
    assert np.mean(discoveries) < 0.02


def test_rounding_is_no_difference():
    draws = np.zeros((3, 2, 4))
    found = np.array([[1e-7, 0, 0, 0], [1e-3, 0, 0, 0]])
    p = against_draws(found, draws, head_axis=1, rounding=1e-5).p
    assert p[0, 0] == 1
    assert p[1, 0] == 1 / 25
    assert against_draws(found, draws, head_axis=1).p[0, 0] == 1 / 25, (
        "without it a digit of float32 would count"
    )


def test_a_layer_without_values_stays_empty(numbers):
    found = numbers[0].copy()
    draws = numbers[1].copy()
    found[2] = np.nan
    draws[:, 2] = np.nan
    made = against_draws(found, draws, head_axis=1)
    assert np.isnan(made.p[2]).all()
    np.testing.assert_allclose(made.p[:2], against_draws(found[:2], draws[:, :2], head_axis=1).p)
    assert np.isnan(false_discovery(made.p)[2]).all()
