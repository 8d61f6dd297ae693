"""What two selections share, against python's sets, and by chance against enumeration."""

from itertools import combinations

import numpy as np
import pytest

from mechattn.contrast.stability import (
    jaccard,
    jaccard_by_chance,
    largest,
    random_halves,
    significant,
)


def index(one, other):
    return len(one & other) / len(one | other)


def test_the_jaccard_index_is_that_of_sets():
    generator = np.random.default_rng(0)
    for _ in range(20):
        one, other = generator.random((2, 12)) < 0.4
        expected = index(set(np.flatnonzero(one)), set(np.flatnonzero(other)))
        assert jaccard(one, other) == pytest.approx(expected)
    assert np.isnan(jaccard(np.zeros(3, bool), np.zeros(3, bool)))


@pytest.mark.parametrize(
    ("one", "other", "of"), [(2, 2, 5), (3, 1, 6), (4, 3, 7), (2, 0, 4), (5, 5, 5)]
)
def test_chance_is_the_mean_over_all_pairs_of_sets(one, other, of):
    pairs = [
        index(set(a), set(b))
        for a in combinations(range(of), one)
        for b in combinations(range(of), other)
    ]
    assert jaccard_by_chance(one, other, of) == pytest.approx(np.mean(pairs))


def test_nothing_selected_twice_has_no_index():
    assert np.isnan(jaccard_by_chance(0, 0, 9))


def test_selections_and_halves():
    d = np.array([[1.0, -5.0, 2.0, 0.0], [1.0, -5.0, 2.2, 0.0]])
    assert largest(d, 2).tolist() == [False, True, True, False]
    noise = np.random.default_rng(0).normal(size=(16, 6)) * 0.1 + [0, 1, 0, -1, 0, 0]
    assert significant(noise, 999).tolist() == [False, True, False, True, False, False]
    for n in (8, 9):
        one, other = random_halves(n, np.random.default_rng(0))
        assert len(one) == len(other) == 4
        assert not set(one) & set(other)
