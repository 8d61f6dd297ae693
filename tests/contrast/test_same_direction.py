"""Agreement of changes against cosines of vectors that are known."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from mechattn.errors import OptionError
from mechattn.results.result import Result

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
    table = made(changes).agreement("a", "b")
    ours, other = cosine(changes[:, 1], changes[:, 2]), cosine(changes[:, 1], changes[:, 3])
    for layer in (0, 1):
        first = table[(table.other == "b") & (table.layer == layer)].iloc[0]
        assert first.cosine == pytest.approx(ours[:, layer].mean())
        low, high = stats.t.interval(0.95, 8, ours[:, layer].mean(), stats.sem(ours[:, layer]))
        assert (first.cosine_low, first.cosine_high) == (pytest.approx(low), pytest.approx(high))
        control = table[(table.other == "c") & (table.layer == layer)].iloc[0]
        apart = (ours - other)[:, layer]
        assert control.beyond == pytest.approx(apart.mean())
        assert control.beyond_low == pytest.approx(
            stats.t.interval(0.95, 8, apart.mean(), stats.sem(apart))[0]
        )
    assert table[table.other == "none"].cosine.isna().all()
    assert (table[table.other == "none"].n == 0).all()
    assert table.cosine[0] > 0.5
    assert abs(table[table.other == "c"].cosine).max() < 0.3


def test_over_another_condition(changes):
    table = made(changes).agreement("a", "b", over="c", controls=[])
    expected = cosine(changes[:, 1] - changes[:, 3], changes[:, 2] - changes[:, 3])
    np.testing.assert_allclose(table.cosine, expected.mean(0), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("a", "x"), "no condition 'x'"),
        (("a", "b", "a"), "is one of the two"),
        (("a", "b", "baseline", "weights"), "choose one of 'activations'"),
    ],
)
def test_bad_input(changes, options, message):
    with pytest.raises(OptionError, match=message):
        made(changes).agreement(*options)
    with pytest.raises(OptionError, match="give at least 3"):
        made(changes[:2]).agreement("a", "b")
