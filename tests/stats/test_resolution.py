"""What prompts can find: the smallest p and q against enumeration, and simulated effects at the number that is named."""

import numpy as np
import pytest
from scipy import stats

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.stats.paired import paired
from mechattn.stats.random_effects import against_draws
from mechattn.stats.resampling import drawn_signs, flipped
from mechattn.stats.units import MOST_EXACT, patterns_needed, random_words, resolution


def alone(n, tests):
    """The q of one test whose differences are all alike, beside tests that find nothing."""
    d = np.zeros((n, tests))
    d[:, 0] = 5 + np.random.default_rng(0).normal(size=n) * 0.1
    return paired(d).q[0]


@pytest.mark.parametrize("tests", [1, 8, 32])
def test_large_effects_need_exactly_the_fewest_prompts(tests):
    fewest = resolution(8, tests).fewest
    assert fewest <= MOST_EXACT, "all patterns are tried"
    for n in (fewest - 1, fewest):
        made = resolution(n, tests)
        assert made.smallest_q == pytest.approx(alone(n, tests))
        assert made.chance == float(n == fewest) == float(made.smallest_q < 0.05)


@pytest.mark.parametrize("n", [14, 16])
def test_with_drawn_signs_the_chance_is_that_of_draws(n):
    """784 tests: a single drawn pattern that is that of the data is one too many."""
    made = resolution(n, 784)
    patterns = patterns_needed(9999, 784)
    column = np.ones((n, 1))
    signs = (drawn_signs(n, patterns, np.random.default_rng(seed)) for seed in range(100))
    p = np.array([flipped(column, drawn)[0] for drawn in signs])
    assert np.mean(784 * p < 0.05) == pytest.approx(made.chance, abs=0.12)
    assert p.min() >= made.smallest_p
    assert (made.chance >= 0.9) == (n >= made.fewest)


def test_how_many_tests_have_to_pass_together():
    made = resolution(12, 784)
    assert made.together == 8
    for many, passes in ((8, True), (7, False)):
        p = np.ones(784)
        p[:many] = made.smallest_p
        assert (stats.false_discovery_control(p)[0] < 0.05) == passes
    assert resolution(5, 784).together is None, "2 of 32 patterns are 0.0625 of all"
    assert stats.false_discovery_control(np.full(784, resolution(5, 784).smallest_p)).min() > 0.05


@pytest.mark.parametrize("draws", [3, 19, 20])
def test_random_draws_resolve_a_far_head_as_promised(draws):
    weights = np.random.default_rng(0).normal(size=(draws + 1, 4, 8))
    weights[0] = 0.0
    weights[0, 0, 0] = 1e3
    q = stats.false_discovery_control(against_draws(weights[0], weights[1:], 1).p.ravel()).min()
    words = random_words(draws, 32, 32 * draws)
    assert f"with {draws} draws the smallest q_random of one head alone is {q:.2g}" in words
    assert ("; 20 draws would do" in words) == (q >= 0.05) == (draws < 20)


@pytest.mark.parametrize(
    ("n", "tests", "words"),
    [
        (12, 784, "with 12 prompts and 784 tests no p can pass q < 0.05 alone (smallest p 0.00049): 8 tests must reach it "
         "together, or use 19 prompts"),
        (5, 784, "with 5 prompts and 784 tests no p can pass q < 0.05 (smallest p 0.062); one test alone can with 19 prompts or more"),
        (16, 784, "with 16 prompts and 784 tests a test whose neighbours show nothing passes q < 0.05 in at most 62 % of draws of "
         "the signs, and several that show something pass together; one test "
             "alone can with 19 prompts or more"),
        (64, 32, "with 64 prompts and 32 tests one test alone can pass q < 0.05 (smallest p 0.0001); the smallest effect "
         "that q finds in one test alone, with 80 % power, is d_z = 0.52"),
    ],
)  # fmt: skip
def test_what_it_says(n, tests, words):
    assert str(resolution(n, tests)) == words


def test_a_result_says_what_it_can_show(slash_result):
    made = slash_result.resolution()
    assert (made.n, made.tests, made.unit, made.fewest) == (12, 32, "prompts", 11)
    table = slash_result.compare("slash")
    assert table.attrs["resolution"] == str(made)
    assert table.attrs["smallest_p"] == made.smallest_p == 2**-11
    half = slash_result.resolution("slash", select="half")
    assert (half.n, half.tests, half.together) == (6, 32, 21)
    with_draws = slash_result.resolution(draws=3)
    assert str(with_draws) == f"{made}; {random_words(3, 32, 96)}"
    with pytest.raises(OptionError, match="draws=2: give a whole number, at least 3"):
        slash_result.resolution(draws=2)


def test_a_comparison_is_planned_by_leaving_out_one_number():
    assert ma.power(784, effect=1.0, prompts=19) == pytest.approx(0.271, abs=1e-3)
    assert ma.power(784, effect=4.0, prompts=12) == 0, "twelve prompts have no p as small as that"
    assert np.isnan(ma.power(784, prompts=12))
    prompts = ma.power(784, effect=0.5)
    enough_prompts, one_less = (ma.power(784, effect=0.5, prompts=prompts - n) for n in (0, 1))
    assert enough_prompts >= 0.8 > one_less
    assert ma.power(784, effect=-0.5) == prompts
    assert ma.power(784, effect=ma.power(784, prompts=64), prompts=64) == pytest.approx(0.8)
    for wrong in (dict(), dict(effect=0.0), dict(effect=np.nan), dict(effect=0.5, prompts=2)):
        with pytest.raises(OptionError, match="give"):
            ma.power(784, **wrong)
