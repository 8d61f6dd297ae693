"""Arrays inside a page: what is read is what was packed, to the precision that is promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_allclose, assert_array_equal

from mechattn.pages.embedded import packed
from tests.pages.read import unpacked

PROBABILITIES = arrays(
    np.float64,
    array_shapes(max_dims=4, max_side=5),
    elements=st.floats(0, 1, allow_subnormal=False),
)


@given(PROBABILITIES)
def test_single_numbers_are_kept(values):
    assert_allclose(unpacked(packed(values)), values, rtol=6e-8, atol=1e-30)


@given(PROBABILITIES)
def test_halves_are_kept_to_half_a_thousandth(values):
    assert_allclose(unpacked(packed(values, "f2")), values, rtol=5e-4, atol=6e-11)


def test_halves_are_not_exact():  # negative control
    assert unpacked(packed(np.array([1 / 3]), "f2"))[0] != pytest.approx(1 / 3, rel=1e-6)


def test_what_is_not_there_stays_so():
    values = np.array([[np.nan, 0.5], [0.0, 1.0]])
    for kind in ("f4", "f2"):
        assert_array_equal(np.isnan(unpacked(packed(values, kind))), np.isnan(values))
    assert unpacked(packed(values[1], "u2")).tolist() == [0, 1]
