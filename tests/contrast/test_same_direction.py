"""Agreement of changes against cosines of vectors that are known."""

import numpy as np
import pytest
import xarray as xr

from mechattn.errors import OptionError
from mechattn.results.result import Result
from tests.render.by_hand import t_interval

NAMES = ["baseline", "a", "b", "c", "none"]


def made(changes):
    """A result whose products are those of changes [prompt, condition, layer, entry]."""
    product = np.einsum("pcle,pdle->pcld", changes, changes)
    dims = ("prompt", "condition", "layer", "other_condition")
    coords = {"condition": NAMES, "other_condition": NAMES, "layer": [0, 1]}
    data = xr.Dataset({"change_product": (dims, product)}, coords=coords)
    sequences = xr.Dataset(coords={"condition": NAMES, "prompt": np.arange(len(changes))})
    return Result({"mlp_activations": data, "sequences": sequences}, {"model": {"name": "made"}})


@pytest.fixture
def changes():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(9, 5, 2, 30))
    values[:, 0] = values[:, 4] = 0
    values[:, 2] += values[:, 1]
    return values


def cosine(a, b):
    return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


@pytest.mark.filterwarnings("error")
def test_agreement(changes):
    table = made(changes).agreement("a", "b").set_index(["other", "layer"])
    ours = cosine(changes[:, 1], changes[:, 2])
    control = cosine(changes[:, 1], changes[:, 3])
    for layer in (0, 1):
        row = table.loc[("b", layer)]
        expected = t_interval(ours[:, layer])
        assert (row.cosine, row.cosine_low, row.cosine_high) == pytest.approx(expected)
        row = table.loc[("c", layer)]
        expected = t_interval((ours - control)[:, layer])
        assert (row.beyond, row.beyond_low, row.beyond_high) == pytest.approx(expected)
    assert table.loc["none"].cosine.isna().all()
    assert (table.loc["none"].n == 0).all()
    assert table.loc[("b", 0)].cosine > 0.5
    assert abs(table.loc["c"].cosine).max() < 0.3


def test_from_another_condition(changes):
    table = made(changes).agreement("a", "b", to="c", controls=[])
    expected = cosine(changes[:, 1] - changes[:, 3], changes[:, 2] - changes[:, 3])
    np.testing.assert_allclose(table.cosine, expected.mean(0), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("a", "x"), "no condition 'x'"),
        (("a", "b", "a"), "is one of the two"),
    ],
)
def test_bad_input(changes, options, message):
    with pytest.raises(OptionError, match=message):
        made(changes).agreement(*options)
    with pytest.raises(OptionError, match="give at least 3"):
        made(changes[:2]).agreement("a", "b")
