"""Prompts crossed with conditions: against restricted maximum likelihood written out, and coverage for new conditions."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize

from mechattn.stats.intervals import t_interval
from mechattn.stats.random_effects import crossed


def drawn(units, conditions, cells, generator, mean=0.0, unit=1.0, condition=0.5, rest=1.0):
    """d [unit, condition, cell] with known standard deviations."""
    of_units = generator.normal(mean, unit, (units, 1, cells))
    of_conditions = generator.normal(0, condition, (1, conditions, cells))
    return of_units + of_conditions + generator.normal(0, rest, (units, conditions, cells))


def restricted_likelihood(logs, d):
    """Minus the restricted log-likelihood of the three variances, with the whole covariance matrix."""
    units, conditions = d.shape
    unit, condition, rest = np.exp(logs)
    same_unit = np.kron(np.eye(units), np.ones((conditions, conditions)))
    same_condition = np.kron(np.ones((units, units)), np.eye(conditions))
    covariance = unit * same_unit + condition * same_condition + rest * np.eye(d.size)
    inverse = np.linalg.inv(covariance)
    y = d.ravel()
    information = inverse.sum()
    away = y - (inverse @ y).sum() / information
    return (np.linalg.slogdet(covariance)[1] + np.log(information) + away @ inverse @ away) / 2


def test_variances_and_mean_are_those_of_restricted_maximum_likelihood():
    d = drawn(10, 7, 1, np.random.default_rng(0), mean=0.3)
    made = crossed(d)
    best = optimize.minimize(restricted_likelihood, np.zeros(3), args=(d[..., 0],), tol=1e-10).x
    got = np.ravel([made.unit_sd, made.condition_sd, made.rest_sd])
    assert_allclose(got**2, np.exp(best), rtol=1e-3)
    assert made.mean[0] == pytest.approx(d.mean())


def test_intervals_cover_for_new_prompts_and_new_conditions():
    """A t interval over prompts takes the conditions as the only ones there are, and covers far less."""
    d = drawn(24, 6, 2000, np.random.default_rng(1), condition=0.8)
    made = crossed(d)
    fixed = t_interval(d.mean(1))
    assert 0.93 < np.mean((made.low < 0) & (made.high > 0)) < 0.985
    assert np.mean((fixed.low < 0) & (fixed.high > 0)) < 0.85, "negative control"
    new = drawn(1, 1, 2000, np.random.default_rng(2), condition=0.8)[0, 0]
    assert 0.92 < np.mean((made.new_low < new) & (made.new_high > new)) < 0.99
    assert np.mean(made.p < 0.05) < 0.07


def test_no_variation():
    made = crossed(np.full((5, 6, 2), [0.25, np.nan]))
    assert_array_equal((made.low, made.high, made.p), [[0.25, np.nan]] * 2 + [[0.0, np.nan]])
