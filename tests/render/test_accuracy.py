"""The figures of accuracy show the numbers of the table."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.errors import OptionError


def table(names, values):
    values = np.array(values)
    return pd.DataFrame(
        {
            "condition": names,
            "accuracy": values,
            "low": values - 0.1,
            "high": values + 0.05,
            "n": 40,
        }
    )


def test_by_condition():
    tables = {
        "a (toy)": table(["baseline", "slash"], [0.9, 0.7]),
        "b (toy)": table(["baseline", "slash"], [0.8, 0.6]),
    }
    figure = ma.render.accuracy(tables)
    one = figure.data[0]
    assert_allclose(one.y, [90, 70])
    assert_allclose(one.error_y.array, [5, 5])
    assert_allclose(one.error_y.arrayminus, [10, 10])
    assert list(figure.layout.xaxis.ticktext) == ["baseline", "slash"]
    assert sorted(shape.y0 for shape in figure.layout.shapes) == [80, 90]
    assert "n = 40 problems" in figure.layout.title.text


def test_a_sweep_begins_at_the_baseline():
    figure = ma.render.accuracy(
        {"a": table(["baseline", "count=10", "count=55"], [0.9, 0.8, 0.7])}, "count"
    )
    assert list(figure.data[0].x) == [0, 10, 55]
    assert_allclose(figure.data[0].y, [90, 80, 70])
    backwards = table(["count=55", "count=10", "baseline"], [0.7, 0.8, 0.9])
    assert_allclose(ma.render.accuracy({"a": backwards}, "count").data[0].y, [90, 80, 70])
    both = table(["slash, count=4", "dots, count=4"], [0.8, 0.7])
    lines = ma.render.accuracy({"a": both}, "count").data
    assert [line.name for line in lines] == ["a, slash", "a, dots"]
    texts = table(["baseline", "text=Wait, then answer."], [0.9, 0.8])
    assert list(ma.render.accuracy({"a": texts}, over="text").data[0].x) == ["Wait, then answer."]


def test_what_cannot_be_shown():
    for tables in ({}, table(["baseline"], [0.9])):
        with pytest.raises(OptionError, match="no tables by name"):
            ma.render.accuracy(tables)
