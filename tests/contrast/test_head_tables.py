"""The ranked table of heads: the right heads, means and intervals; and what it refuses."""

import pytest
from scipy import stats

from mechattn.errors import OptionError
from mechattn.stats.units import halves_of


def largest(data, count):
    """The layers and heads with the largest means."""
    means = data.mean("prompt").stack(cell=("layer", "head"))
    return [tuple(map(int, cell)) for cell in means.sortby(-means).cell.values[:count]]


def test_the_table_is_that_of_a_loop(result):
    table = result.heads("previous_mass", top=5, condition="slash")
    data = (
        result["attention_focus"]
        .previous_mass.sel(segment="question", condition="slash")
        .astype(float)
    )
    assert [tuple(row) for row in table[["layer", "head"]].values] == largest(data, 5)
    null = result["attention_focus"].previous_mass_uniform.sel(
        segment="question", condition="slash"
    )
    for row in table.itertuples():
        values = data.sel(layer=row.layer, head=row.head).values
        interval = stats.ttest_1samp(values, 0).confidence_interval()
        assert (row.previous_mass, row.low, row.high) == pytest.approx((values.mean(), *interval))
        assert row.uniform == pytest.approx(float(null.sel(layer=row.layer).mean()), rel=1e-6)
        assert row.n == 12
    assert len(result.heads("magnitude", top=None)) == 32
    assert result.heads("magnitude").uniform.isna().all(), "how large an update is has no such null"


def test_halves_rank_on_one_and_show_the_other(result):
    table = result.heads("entropy", top=3, select="half")
    data = (
        result["attention_focus"]
        .entropy.sel(segment="question", condition="baseline")
        .astype(float)
    )
    best = largest(data.isel(prompt=halves_of(12)[0]), 3)
    assert [tuple(row) for row in table[["layer", "head"]].values] == best
    second = data.isel(prompt=halves_of(12)[1]).sel(layer=best[0][0], head=best[0][1])
    assert table.entropy.iloc[0] == pytest.approx(float(second.mean()))
    assert (table.n == 6).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quantity="previous"), "has 'previous' for each prompt; there are"),
        (
            dict(quantity="sinks"),
            r"name one with quantity=…, or run it with ma.analyses.AttentionSinks\(\)$",
        ),
        (
            dict(quantity="flow"),
            "does not have one number per head, but one for each layer, head, to_segment",
        ),
        (dict(quantity="entropy", top=0), "top=0: give a whole number, at least 1"),
        (dict(quantity="entropy", condition="x"), "there is no condition 'x'"),
    ],
)
def test_what_it_refuses(result, options, message):
    with pytest.raises(OptionError, match=message):
        result.heads(**options)


def test_rows_are_named_by_their_heads(result):
    table = result.compare("slash", columns="all")
    assert table.loc["L1H2"].equals(table[(table.layer == 1) & (table["head"] == 2)].iloc[0])
