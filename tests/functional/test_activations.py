"""Measures of activations at their ends; tests/parity/test_mlp_activations.py has them token by token."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from mechattn.functional import activations as fn


@pytest.fixture
def pre():
    return 2 * torch.randn(6, 151, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_gini_at_its_ends():
    assert float(fn.gini(torch.ones(7))) == pytest.approx(0, abs=1e-6)
    assert float(fn.gini(torch.tensor([0.0, 0, 0, 5]))) == pytest.approx(3 / 4)
    assert fn.gini(torch.zeros(4)).isnan()
    assert fn.kurtosis(torch.ones(4)).isnan()


def test_minimum_of_a_nonlinearity():
    silu = optimize.minimize_scalar(
        lambda x: x / (1 + np.exp(-x)), bounds=(-5, 0), method="bounded"
    ).x
    gelu = optimize.minimize_scalar(
        lambda x: x * stats.norm.cdf(x), bounds=(-5, 0), method="bounded"
    ).x
    assert fn.minimum_of(torch.nn.functional.silu) == pytest.approx(silu, abs=2e-4)
    assert fn.minimum_of(torch.nn.functional.gelu) == pytest.approx(gelu, abs=2e-4)
    assert fn.minimum_of(torch.nn.functional.relu) == 0
    assert fn.minimum_of(torch.tanh) < -15
    assert fn.minimum_of(torch.nn.functional.softplus) == -20


def test_two_near_zero_populations(pre):
    """Switched off: far to the left of the minimum. The others lie about 0; together they are all near-zeros."""
    x = torch.nn.functional.silu(pre)
    minimum = fn.minimum_of(torch.nn.functional.silu)
    off = fn.saturated_share(x, pre, 0.1, minimum)
    about_zero = ((x.abs() <= 0.1) & (pre.abs() < 0.5)).double().mean(-1)
    torch.testing.assert_close(off.double() + about_zero, fn.near_zero_share(x, 0.1).double())
    assert (off > 0).all()
    assert (about_zero > 0).all()


def test_counts_between_edges(pre):
    edges = torch.tensor([-0.5, -0.1, 0.0, 0.3, 1.0], dtype=torch.float64)
    pre[0, :3] = torch.tensor([-0.5, 0.0, 1.0])
    expected = [
        int(((pre >= a) & (pre < b)).sum())
        for a, b in zip([-np.inf, *edges], [*edges, np.inf], strict=True)
    ]
    assert fn.counts_between(pre, edges).tolist() == expected
    assert sum(expected) == pre.numel()
