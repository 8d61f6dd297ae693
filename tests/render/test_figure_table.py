"""The table of a figure has the numbers that it draws, under the words of its axes and legend."""

import numpy as np
from numpy.testing import assert_allclose

import mechattn as ma


def test_the_rows_are_what_is_drawn(slash_result):
    figure = ma.render.verdicts([slash_result, slash_result])
    table = ma.render.figure_table(figure).set_index("series")
    measured = table.loc["measured, with 95 % interval"]
    change = 100 * np.array(slash_result.verdict().change)
    assert_allclose(measured[["x", "low", "high"]].astype(float), [change, change])
    assert measured.y.str.endswith(("1", "2")).all(), "rows by their words"
    assert set(measured.x_is) == {"change of attention received (%)"}
    assert set(table.index[2:]) == {"dilution of the baseline's attention"}


def test_panels_and_maps_are_told_apart(slash_result):
    figure = ma.render.received_attention(slash_result, 0, heads=[2])
    table = ma.render.figure_table(figure)
    assert set(table.series) == {"with slash", "without slash", "dilution, with slash"}, (
        "a band is no series"
    )
    line = table[(table.series == "with slash") & (table.x_is == "original token position")]
    assert set(line.panel) == {"Layer 0 head 2"}
    (drawn,) = (trace for trace in figure.data if trace.name == "with slash" and trace.xaxis == "x")
    assert_allclose(line.y.astype(float), drawn.y)
    assert_allclose(line[["low", "high"]].astype(float), drawn.customdata[:, 1:])

    table = ma.render.figure_table(ma.render.change_map(slash_result))
    cells = table[table.z.notna()]
    compared = slash_result.compare("slash", columns="all")
    drawn = compared[["beyond", "beyond_low", "beyond_high"]]
    assert_allclose(cells[["z", "low", "high"]].astype(float), drawn)
    assert cells.z_is.iloc[0].startswith("change of attention received by the question")
