"""The rules, by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from mechattn.claims.rules import Chance, Estimate, Outcome, Rule, beside_chance, decide, estimated, together

BELOW = Rule("below", -0.02, 0.02)


def at(value, half=0.01):
    return Estimate(value, value - half, value + half, 20, 0.02)


def chance(apart, spread=0.01, half=0.001):
    return Chance(at(apart, half), (0.0, 0.0, 0.0), spread)


@pytest.mark.parametrize(
    ("value", "half", "word"),
    [
        (-0.1, 0.01, "supported"),
        (-0.1, 0.2, "cannot be told"),
        (-0.03, 0.01, "cannot be told"),  # it ends on the line
        (-0.01, 0.005, "contradicted"),  # a fall, too small to matter
        (0.1, 0.01, "contradicted"),  # the opposite
        (0.0, 0.0, "contradicted"),
    ],
)
def test_where_the_interval_lies(value, half, word):
    assert decide(BELOW, at(value, half), chance(-1.0)).word == word
    mirrored = Rule("above", 0.02, 0.02)
    assert decide(mirrored, at(-value, half), chance(1.0)).word == word


@pytest.mark.parametrize(
    ("apart", "spread", "half", "word"),
    [
        (-0.05, 0.01, 0.001, "supported"),
        (-0.015, 0.01, 0.001, "cannot be told"),  # nearer than the margin
        (-0.05, 0.06, 0.001, "cannot be told"),  # a further draw may come as far
        (-0.03, 0.01, 0.02, "cannot be told"),  # the interval of the difference reaches over the margin
        (0.05, 0.01, 0.001, "cannot be told"),  # random weights do it more
    ],
)
def test_further_than_random_weights(apart, spread, half, word):
    found = decide(BELOW, at(-0.1), chance(apart, spread, half))
    assert found.word == word
    assert decide(BELOW, at(-0.1), None).word == "cannot be told"
    assert decide(BELOW, at(-0.1), None, by_definition=True).word == "supported"
    assert decide(BELOW, at(0.1), None).word == "contradicted", "which needs no null"


def test_what_is_no_number_cannot_be_told():
    for values, why in (([], "takes 3"), ([0.1, 0.2], "takes 3"), ([0.1, 0.2, math.nan], "no numbers")):
        found = decide(BELOW, estimated(np.array(values)), chance(-1.0))
        assert found.word == "cannot be told"
        assert why in found.why


def test_all_parts_have_to_hold():
    yes, no, maybe, none = (
        Outcome(word, word) for word in ("supported", "contradicted", "cannot be told", "not applicable")
    )
    assert together([yes, yes]) == yes
    assert together([yes, maybe]) == maybe
    assert together([maybe, no, yes]) == no
    assert together([yes, none, no]) == none


def test_the_interval_is_students():
    values = np.random.default_rng(0).normal(0.3, 2.0, 17)
    found = estimated(values)
    low, high = stats.t.interval(0.95, 16, values.mean(), stats.sem(values))
    assert np.allclose([found.value, found.low, found.high], [values.mean(), low, high], atol=1e-12)
    alike = estimated(np.zeros(17), least=0.2)
    assert (alike.low, alike.high, alike.detectable) == (-0.2, 0.2, 0.2)


def test_what_is_detectable_is_detected_four_times_in_five():
    """A truth that is so far off the line is on the right side of it in about 80 % of samples."""
    rng, n = np.random.default_rng(0), 40
    far = float((stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) / np.sqrt(n))  # of normal data with sd 1
    typical = np.median([estimated(rng.normal(0, 1, n)).detectable for _ in range(200)])
    assert abs(typical - far) < 0.05 * far
    told = np.mean([estimated(rng.normal(far, 1, n)).low > 0 for _ in range(600)])
    assert 0.74 < told < 0.86


def test_a_further_draw_lies_in_the_spread_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(1500):
        *draws, other = rng.normal(0, 1, 4)
        made = beside_chance(np.full(5, other), [np.full(5, draw) for draw in draws])
        inside.append(abs(made.apart.value) <= made.spread)
    assert 0.93 < np.mean(inside) < 0.97


def test_fewer_than_three_draws_are_no_null():
    assert beside_chance(np.zeros(5), [np.zeros(5)] * 2) is None
    assert beside_chance(np.zeros(5), []) is None
