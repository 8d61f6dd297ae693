"""Groups of prompts as units: means by a loop, halves that no group spans, and what is lost without them."""

import numpy as np
import pytest

from mechattn.errors import OptionError
from mechattn.stats.intervals import t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units, halves_of

GROUPS = ["b", "a", "b", "c", "a", "b"]


def drawn(groups, size, cells, seed):
    """Differences with mean 0 [prompt, cell], half of whose variance is that of their group; and the units."""
    generator = np.random.default_rng(seed)
    of = np.repeat(np.arange(groups), size)
    of_groups = generator.normal(size=(groups, cells))[of]
    d = np.sqrt(0.5) * (of_groups + generator.normal(size=(len(of), cells)))
    return d, Units.grouped([str(group) for group in of])


def test_means_by_group_are_those_of_a_loop():
    values = np.random.default_rng(0).normal(size=(6, 2, 3))
    values[2, 0, 1] = np.nan
    values[3] = np.nan
    got = Units.grouped(GROUPS).means(values)
    for place, members in enumerate([[0, 2, 5], [1, 4], [3]]):
        for cell in np.ndindex(2, 3):
            have = [values[i][cell] for i in members if not np.isnan(values[i][cell])]
            expected = sum(have) / len(have) if have else np.nan
            np.testing.assert_allclose(got[(place, *cell)], expected, rtol=1e-14)


def test_each_prompt_by_itself_changes_no_bit():
    values = np.random.default_rng(0).normal(size=(6, 2))
    for units in (Units(6), Units.grouped(list("fedcba"))):
        assert units.means(values) is values
        assert (units.n, units.unit, units.words) == (6, "prompts", "6 prompts")
        np.testing.assert_array_equal(units.halves(), halves_of(6))


def test_the_inflation_is_the_variance_of_a_mean_of_copies():
    """Prompts that are copies of their group's: the variance of their mean over that of independent ones."""
    units = Units.grouped(GROUPS)
    own = np.random.default_rng(0).normal(size=(200_000, 3))
    assert units.inflation == pytest.approx((9 + 4 + 1) / 6)
    assert own[:, units.group_of_prompt].mean(1).var() == pytest.approx(
        units.inflation / 6, rel=0.02
    )
    assert Units(6).inflation == 1


def test_what_units_say_and_how_they_are_halved():
    units = Units.grouped(GROUPS)
    words = (units.n, units.unit, units.words)
    assert words == (3, "groups (3 of 6 prompts)", "3 groups of 6 prompts")
    assert [half.tolist() for half in units.halves()] == [[1, 3, 4], [0, 2, 5]], "a and c; b"


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (Units(2), "there are 2 prompts; give at least 3"),
        (
            Units.grouped(["a", "b", "a"]),
            r'2 groups of 3 prompts; give prompts of at least 3 groups, or unit="prompt"',
        ),
    ],
)
def test_too_few_units(units, message):
    with pytest.raises(OptionError, match=message):
        units.refuse_below(3)


def test_only_intervals_over_groups_cover():
    """1,500 cells as so many experiments with 24 groups of 5; the binomial error of coverage is 0.6 points."""
    d, units = drawn(24, 5, 1500, seed=5)
    made = paired(units.means(d), resamples=199)
    assert 0.93 < np.mean((made.low < 0) & (made.high > 0)) < 0.97
    assert 0.93 < np.mean((made.low_bootstrap < 0) & (made.high_bootstrap > 0)) < 0.97
    ignored = t_interval(d)
    assert np.mean((ignored.low < 0) & (ignored.high > 0)) < 0.85, "negative control"


@pytest.mark.parametrize("n", [7, 24])
def test_halves_are_disjoint_and_reproducible(n):
    first, other = halves_of(n)
    assert sorted([*first, *other]) == list(range(n))
    assert len(first) == (n + 1) // 2
    assert first.tolist() == halves_of(n)[0].tolist()
    assert 0 < (first % 2).sum() < len(first), "a file in which two classes alternate"
