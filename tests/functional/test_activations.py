"""Measures of activations at their ends; tests/analysis/test_mlp_activations_parity.py has them token by token."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from mechattn.functional import activations as fn


def test_what_has_no_gini_coefficient_or_kurtosis():
    assert fn.gini(torch.zeros(4)).isnan()
    assert fn.kurtosis(torch.ones(4)).isnan()


def test_minimum_of_a_nonlinearity():
    for activation, by_hand in (
        (torch.nn.functional.silu, lambda x: x / (1 + np.exp(-x))),
        (torch.nn.functional.gelu, lambda x: x * stats.norm.cdf(x)),
    ):
        expected = optimize.minimize_scalar(by_hand, bounds=(-5, 0), method="bounded").x
        assert fn.minimum_of(activation) == pytest.approx(expected, abs=2e-4)
    assert fn.minimum_of(torch.nn.functional.relu) == 0
    assert fn.minimum_of(torch.tanh) < -15
