"""One family over several tables: Benjamini-Hochberg by scipy, and what it refuses."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import mechattn as ma
from mechattn.errors import OptionError


@pytest.fixture(scope="module")
def tables(result):
    return [
        result.compare("slash", columns="all"),
        result.compare("sentence", segment=None, columns="all"),
        result.compare("slash", quantity="entropy", columns="all"),
        result.compare("sentence", select="half", columns="all"),
    ]


def test_q_is_over_all_tables(tables):
    made = ma.adjust(tables)
    # Entropy has no null.
    p = pd.concat([table.p_beyond.fillna(table.p_difference) for table in tables])
    q = made.q_beyond.fillna(made.q_difference)
    assert_allclose(q, stats.false_discovery_control(p))
    alone = pd.concat(tables)
    assert_array_equal(made.q_beyond_of_table, alone.q_beyond)
    assert not np.allclose(q, alone.q_beyond.fillna(alone.q_difference)), "negative control"
    known = made.q_beyond.notna()
    of_difference = stats.false_discovery_control(alone.p_difference)
    assert_allclose(made.q_difference[known], of_difference[known])
    assert not np.allclose(made.q_difference[known], made.q_beyond[known]), "negative control"
    sizes = [len(table) for table in tables]
    assert made.attrs["family"] == f"{sum(sizes)} tests in 4 tables ({' + '.join(map(str, sizes))})"
    assert made.attrs["smallest_q_alone"] == min(1, sum(sizes) * 2**-11)
    conditions = [about["condition"] for about in made.attrs["tables"]]
    assert conditions == ["slash", "sentence"] * 2


def test_every_row_says_where_it_is_from(tables):
    made = ma.adjust(tables)
    for number, table in enumerate(tables):
        rows = made[made.table == number].reset_index(drop=True)
        assert set(rows.condition) == {table.attrs["condition"]}
        assert set(rows.quantity) == {table.attrs["quantity"]}
        assert set(rows.models) == {"toy:llama"}
        columns = ["layer", "head", "difference"]
        assert_array_equal(rows[columns], table[columns])
    assert set(made[made.table == 1].segment) == set(tables[1].segment)


def test_one_table_keeps_its_q_and_none_is_changed(tables):
    before = tables[0].copy()
    assert_allclose(ma.adjust([tables[0]]).q_beyond, tables[0].q_beyond)
    assert tables[0].equals(before)
    assert tables[0].attrs["condition"] == "slash"


def test_what_it_refuses(tables):
    for given, message in (
        (tables[0], "give a list of tables"),
        ([tables[0].drop(columns="p_difference")], "table 0 has no column p_difference"),
        ([tables[0], tables[1], tables[0].copy()], "table 2 is the same as table 0"),
        ([ma.adjust(tables)], "is already adjusted"),
    ):
        with pytest.raises(OptionError, match=message):
            ma.adjust(given)
