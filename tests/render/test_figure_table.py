"""The table of a figure has the numbers that it draws, under the words of its axes and legend."""

import numpy as np
from scipy import stats

import mechattn as ma


def test_the_rows_are_what_is_drawn(slash_result):
    figure = ma.render.verdicts([slash_result, slash_result])
    table = ma.render.figure_table(figure).set_index("series")
    measured, change = (
        table.loc["measured, with 95 % interval"],
        100 * np.array(slash_result.verdict().change),
    )
    np.testing.assert_allclose(measured[["x", "low", "high"]].astype(float), [change, change])
    assert measured.y.str.endswith(("1", "2")).all(), "rows by their words"
    assert set(measured.x_is) == {"change of attention received (%)"}
    assert set(table.index[2:]) == {"dilution of the baseline's attention"}


def test_panels_and_maps_are_told_apart(slash_result):
    figure = ma.render.received_attention(slash_result, 0, heads=[2])
    table = ma.render.figure_table(figure)
    line = table[(table.series == "with slash") & (table.x_is == "original token position")]
    at = slash_result["received_attention"].sel(condition="slash", layer=0, head=2)
    np.testing.assert_allclose(
        line.y.astype(float), at.received_by_origin.values[line.x.astype(int)]
    )
    assert set(line.panel) == {"Layer 0 head 2"}
    each = at.received_by_origin_per_prompt.values[:, line.x.astype(int)].astype(np.float64)
    n = (~np.isnan(each)).sum(0)
    half = stats.t.ppf(0.975, n - 1) * np.nanstd(each, axis=0, ddof=1) / n**0.5
    np.testing.assert_allclose(line.high - line.y, half, atol=1e-6)
    np.testing.assert_allclose(line.low, (line.y - half).clip(lower=0), atol=1e-6)
    series = {"with slash", "without slash", "dilution, with slash"}
    assert set(table.series) == series, "a band is no series"
    table, compared = (
        ma.render.figure_table(ma.render.change_map(slash_result)),
        slash_result.compare("slash", columns="all"),
    )
    cells = table[table.z.notna()]
    np.testing.assert_allclose(cells.z.astype(float), compared.beyond)
    assert cells.z_is.iloc[0].startswith("change of attention received by the question")
