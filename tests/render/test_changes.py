"""The figures of conditions show the numbers of the result, their nulls, and the right words."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.contrast.contrast import Contrast
from mechattn.errors import OptionError
from mechattn.render.draw import THIRD, WITH, WITHOUT, head_map
from mechattn.render.words import sentence_of
from tests.render.by_hand import percent_change


@pytest.fixture(scope="module")
def swept(toy, prompts):
    conditions = ma.sweep(ma.MeaninglessTokens("/"), count=[0, 10, 25]) | {
        f"there, {name}": c
        for name, c in ma.sweep(ma.MeaninglessTokens("/", 5), place=["start", "random"]).items()
    }
    return ma.run(toy, prompts[:5], conditions)


def lines(figure):
    return {trace.name: trace for trace in figure.data if trace.name}


def test_received_by_model(measured):
    figure = ma.render.received_by_model(
        [measured, measured], layer=1, heads=["L1H0", 3], null="uniform"
    )
    shown = lines(figure)
    # One line for what is the same under both.
    colours = {"slash": WITH, "sentence": THIRD, "uniform attention": WITHOUT}
    assert {name: trace.line.color for name, trace in shown.items()} == colours
    inserted = np.flatnonzero(measured["sequences"].origin.sel(condition="slash")[0] == -1)
    spans = [(shape.x0, shape.x1) for shape in figure.layout.shapes]
    assert spans == [(inserted[0] - 0.5, inserted[-1] + 0.5)] * 2, "one in each panel"
    at = measured["received_attention"].sel(condition="sentence", layer=1)
    second_panel = shown["sentence"]
    assert_allclose(second_panel.y, at.received.sel(head=3).values[second_panel.x])
    null = shown["uniform attention"]
    assert_allclose(null.y, at.received_uniform.values[null.x])
    by_default = lines(ma.render.received_by_model(measured, layer=1, heads=np.int64(3)))
    assert set(by_default) == {"slash", "sentence", "dilution, slash", "dilution, sentence"}
    with pytest.raises(OptionError, match="one head per model"):
        ma.render.received_by_model([measured, measured], heads=[1])
    with pytest.raises(OptionError, match="give two, such as"):
        ma.render.received_by_model(measured, conditions=["slash", "sentence", "masked"])


def test_a_first_token_is_named_beyond_the_axis(measured):
    dataset = measured["received_attention"].copy(deep=True)
    dataset["received_by_origin"][{"original_key": 0}] = 0.9
    sink = replace(measured, datasets=measured.datasets | {"received_attention": dataset})
    figure = ma.render.received_attention(sink, 0, heads=[5])
    _, high = figure.layout.yaxis.range
    others = [trace.y[1:].max() for trace in figure.data if trace.name == "without slash"]
    assert max(others) < high < 0.9
    (note,) = (note for note in figure.layout.annotations if "first token" in note.text)
    assert note.text == "↑ first token:<br>0.9 without slash<br>0.9 with slash"
    assert (note.x, note.y) == (0, high)


def test_change_map_marks_what_is_significant(measured):
    figure = ma.render.change_map(measured, "sentence", quantity="scale")
    table = measured.compare("sentence", quantity="scale", columns="all")
    heat, dots, faded, key = figure.data
    assert heat.z[2][5] == pytest.approx(table.set_index(["layer", "head"]).beyond[2, 5])
    marked = set(zip(dots.y, dots.x, strict=True))
    least = 0.05 * table.beyond.abs().max()
    sure = table[table.q_beyond < 0.05]
    large = sure[sure.beyond.abs() >= least]
    assert marked == {(row.layer, row.head) for row in large.itertuples()}
    assert len(marked) > 0
    q = table.pivot(index="layer", columns="head", values="q_beyond").values
    assert_array_equal(np.isfinite(np.array(faded.z, dtype=float)), q >= 0.05)
    assert 0 < (q >= 0.05).sum() < q.size, "the test would notice either alone"
    with pytest.raises(OptionError, match="has no heads, which a map needs"):
        ma.render.change_map(measured, "sentence", quantity="block_magnitude")
    assert key.name == "faded: q ≥ 0.05"
    said = heat.colorbar.title.text.replace("<br>", " ")
    assert said.endswith("the original keys (λ) beyond uniform attention (log-ratio)")


def test_sweeps(swept):
    figure = ma.render.changes(swept, over="count")
    shown = lines(figure)
    measured = shown["received"]
    assert list(measured.x) == [0, 10, 25]
    change, null = Contrast(swept, "count=25").overall()
    assert measured.y[2] == pytest.approx(100 * float(change.estimate))
    assert shown["dilution"].y[2] == pytest.approx(100 * float(null.estimate))
    uniform = lines(ma.render.changes(swept, over="count", null="uniform"))["uniform attention"]
    assert abs(uniform.y[2] - shown["dilution"].y[2]) > 1, "negative control"
    assert measured.y[0] == 0
    backwards = ma.render.changes(swept, ["count=25", "count=10"], over="count")
    np.testing.assert_array_equal(lines(backwards)["received"].y, measured.y)
    places = lines(ma.render.changes(swept, over="place"))["there"]
    assert list(places.x) == ["start", "random"]
    with pytest.raises(OptionError, match="named text="):
        ma.render.changes(swept, over="text")
    with pytest.raises(OptionError, match="give a list"):
        ma.render.changes(swept, "count=10")


def test_a_null_of_no_change_is_said_once(measured):
    figure = ma.render.change_map(measured, "slash", "output_norm", to="sentence")
    small_print = figure.layout.title.text.replace("<br>", " ")
    assert small_print.count("no difference") == 1
    assert "predicts" not in small_print
    figure = ma.render.change_map(measured, "slash", "value_drain")
    assert "value_drain, change" in figure.layout.title.text, "it has no segments"


def test_changes_by_condition(measured):
    shown = lines(ma.render.changes(measured, ["slash", "masked", "unshifted"], layer=0))
    assert list(shown["measured"].x) == ["slash", "masked", "unshifted"]
    received = measured["received_attention"].received_by_segment
    means = received.sel(layer=0, segment="question").mean("head")
    ratios = means.sel(condition="masked") / means.sel(condition="baseline")
    assert shown["measured"].y[1] == pytest.approx(percent_change(ratios)[0], abs=1e-3)
    axis = ma.render.changes(measured, ["slash"], "mass").layout.yaxis.title.text
    assert axis == "change of attention to all of the question (%)"
    assert abs(shown["dilution"].y[1]) < 1e-4, "masked tokens take nothing"
    assert shown["dilution"].y[0] < -1, "negative control"


def test_changes_from_a_control(measured):
    turned = measured.sel(condition=["slash", "baseline", "sentence", "masked"])
    figure = ma.render.changes(turned, to="sentence")
    drawn = lines(figure)["measured"]
    assert list(drawn.x) == ["slash", "masked"], "the baseline need not be the first"
    received = measured["received_attention"].received_by_segment.sel(segment="question")
    means = received.mean(["layer", "head"])
    change, _, high = percent_change(means.sel(condition="slash") / means.sel(condition="sentence"))
    assert drawn.y[0] == pytest.approx(change, abs=1e-3)
    assert drawn.error_y.array[0] == pytest.approx(high - change, abs=1e-3)
    assert figure.layout.yaxis.title.text.endswith("relative to “sentence” (%)")


def test_a_map_of_changes_from_a_control(measured):
    figure = ma.render.change_map(measured, "slash", to="sentence")
    table = measured.compare("slash", to="sentence", columns="all")
    assert_allclose(np.ravel(figure.data[0].z).astype(float), table.beyond)
    title = figure.layout.title.text.replace("<br>", " ")
    assert "change relative to “sentence” beyond dilution" in title
    changed = int((table.q_difference < 0.05).sum())
    by_uniform = ma.render.change_map(measured, "slash", to="sentence", null="uniform")
    said = f"{changed} of 32 heads changed relative to “sentence” at q"
    assert said in sentence_of(by_uniform)


def test_scale_and_rank(measured):
    shown = lines(ma.render.scale_by_layer(measured, "slash"))
    dataset = measured["affine_shift"].sel(condition="slash", segment="question")
    assert_allclose(
        shown["λ, mean of the heads"].y, dataset.scale.mean(("prompt", "head")), rtol=1e-6
    )
    assert_allclose(
        shown["λ, uniform attention"].y, dataset.scale_uniform.mean("prompt"), rtol=1e-6
    )
    ranks = lines(ma.render.by_layer(measured, "shift_rank_one_share"))
    assert set(ranks) == {"slash", "sentence", "unshifted"}, "masked has no shift"


def test_one_figure_of_several_models(slash_result, toy, prompts):
    """A row a model: the numbers of each one's verdict, beside those of dilution."""
    other = ma.run(toy, prompts[:6], {"dots": ma.MeaninglessTokens(".", 5)})
    figure = ma.render.verdicts([slash_result, other])
    found = [slash_result.verdict("slash"), other.verdict("dots")]
    drawn = lines(figure)
    measured = drawn["measured, with 95 % interval"]
    null = drawn["dilution of the baseline's attention"]
    assert_allclose(measured.x, [100 * v.change.estimate for v in found])
    assert_allclose(null.x, [100 * v.null.estimate for v in found])
    high = measured.x + measured.error_x.array
    assert_allclose(high, [100 * v.change.high for v in found])
    assert not np.allclose(measured.x[0], measured.x[1]), "negative control"
    assert list(figure.layout.yaxis.ticktext) == [
        f"toy:llama<br>(toy, 1.0 M parameters), {n} tokens inserted"
        for n in ("slash, 55", "dots, 5")
    ]
    assert len(figure.layout.annotations) == 4, "two numbers a row"
    twice = ma.render.verdicts([slash_result, slash_result], "slash")
    assert "inserted" not in twice.layout.yaxis.ticktext[0]
    assert [row.partition(", result ")[2] for row in twice.layout.yaxis.ticktext] == ["1", "2"]
    assert "“slash”" in twice.layout.title.text


def test_a_tiny_change_has_no_dot_however_sure_it_is():
    values = [1.0, -0.06, 0.04, 0.5]
    table = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "value": values})
    table["q"] = [0.01, 0.01, 0.01, 0.2]
    figure = head_map(table, "value", "q", {"q": "q"}, "", "value", "points")
    dots = figure.data[1]
    assert set(zip(dots.y, dots.x, strict=True)) == {(0, 0), (0, 1)}
