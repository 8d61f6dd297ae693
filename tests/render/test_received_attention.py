"""The figure shows the numbers of the result, and only where enough prompts have them."""

import re

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.contrast.means import choose_heads
from mechattn.errors import OptionError
from mechattn.stats.units import halves_of
from tests.render.by_hand import t_interval


def lines(figure):
    return [trace for trace in figure.data if trace.hovertemplate]


def test_lines_are_the_means_over_prompts(slash_result):
    figure = ma.render.received_attention(slash_result, layer=1, heads=[2, 5, 7])
    dataset = slash_result["received_attention"].sel(layer=1, head=5)
    top = [t for t in lines(figure) if t.xaxis == "x2" and t.line.dash is None]
    assert [t.name for t in top] == ["without slash", "with slash"]
    for trace, condition in zip(top, ("baseline", "slash")):
        mean = dataset.received_by_origin.sel(condition=condition).values
        assert_allclose(trace.y, mean[np.asarray(trace.x)])

    assert len(lines(figure)) == (2 + 3) * 3, "each line, and the null of those with slash"


def dilution_by_loop(result, layer, head, prompts, whole):
    """By position: what the baseline's tokens receive, each times what dilution leaves of its segment."""
    received = result["received_attention"].sel(layer=layer, head=head)
    baseline = received.received_by_origin_per_prompt.sel(condition="baseline")
    line = baseline.isel(prompt=prompts).astype(np.float64).mean("prompt").values
    names = list(received.segment.values)
    by_position = {}
    for prompt in prompts:
        shares = {}
        for name in names:
            cell = received.isel(prompt=prompt).sel(segment=name)
            null = float(cell.received_by_segment_dilution.sel(condition="slash"))
            shares[name] = null / float(cell.received_by_segment.sel(condition="baseline"))
        codes = result["sequences"].segment_index.sel(condition="baseline").isel(prompt=prompt)
        origins = result["sequences"].origin.sel(condition="slash").isel(prompt=prompt).values
        for position, origin in enumerate(origins):
            if origin >= 0:
                value = line[origin] * shares[names[int(codes[origin])]]
                by_position.setdefault(position if whole else origin, []).append(value)

    return {
        position: np.mean([value for value in values if np.isfinite(value)] or [np.nan])
        for position, values in by_position.items()
    }


@pytest.mark.parametrize("options", [{"heads": [5]}, {"top": 1}])
def test_dilution_is_drawn_beside_the_line_with_inserted_tokens(slash_result, options):
    figure = ma.render.received_attention(slash_result, layer=0, **options)
    dotted = [trace for trace in figure.data if trace.line.dash == "dot"]
    assert [trace.name for trace in dotted] == ["dilution, with slash"] * 2
    assert "dotted: dilution" in figure.layout.title.text.replace("<br>", " ")
    assert "(dilution: −" in figure.layout.meta["says"]
    prompts = range(12)
    if "top" in options:
        _, prompts = halves_of(12)
    ((layer, head),) = drawn_heads(figure)
    for trace, whole in zip(dotted, (False, True), strict=True):
        expected = dilution_by_loop(slash_result, layer, head, prompts, whole)
        values = [expected.get(x, np.nan) for x in trace.x]  # an inserted token has none
        assert_allclose(trace.y, values, rtol=1e-5)
        assert np.isfinite(values).sum() > 10

    uniform = ma.render.received_attention(slash_result, 0, [head], null="uniform")
    lines_of_uniform = [trace for trace in uniform.data if trace.line.dash == "dot"]
    ratio = lines_of_uniform[1].y[3] / dotted[0].y[3]
    assert abs(ratio - 1) > 0.01, "the loop would notice the other null"


def test_lines_have_the_null_that_there_is(toy, prompts):
    every_query = ma.ReceivedAttention(queries="all")
    result = ma.run(toy, prompts[:3], {"slash": ma.MeaninglessTokens("/", 5)}, [every_query])
    figure = ma.render.received_attention(result, 0, [0])
    assert {t.name for t in figure.data if t.line.dash == "dot"} == {
        "uniform, without slash",
        "uniform, with slash",
    }
    with pytest.raises(OptionError, match=r"otherwise use null=.uniform"):
        ma.render.received_attention(result, 0, [0], null="dilution")
    with pytest.raises(OptionError, match=r'show "dilution" or "uniform"'):
        ma.render.received_attention(result, 0, [0], null="blind")


def test_bands_are_t_intervals(slash_result):
    figure = ma.render.received_attention(slash_result, layer=0, heads=[3])
    band, line = figure.data[:2]
    every = slash_result["received_attention"].received_by_origin_per_prompt
    values = every.sel(condition="baseline", layer=0, head=3).isel(original_key=20)
    _, *interval = t_interval(values)
    at = list(line.x).index(20)
    assert_allclose(line.customdata[at][1:], interval, rtol=1e-5)
    drawn = [y for x, y in zip(band.x, band.y, strict=True) if x == 20]
    assert_allclose(drawn[::-1], interval, rtol=1e-5)


def test_keys_of_few_prompts_are_hidden(slash_result):
    cell = slash_result["received_attention"].sel(condition="baseline", layer=0, head=0)
    n = cell.received_by_origin_n.values
    shown = lines(ma.render.received_attention(slash_result, layer=0, heads=[0]))[0].x
    assert len(shown) < (n > 0).sum()
    assert n[list(shown)].min() >= 10


def test_the_inserted_span_is_shaded_where_it_is(slash_result):
    figure = ma.render.received_attention(slash_result, layer=0, heads=[0])
    origin = slash_result["sequences"].origin.sel(condition="slash").isel(prompt=0).values
    inserted = np.flatnonzero(origin == -1)
    shape = figure.layout.shapes[0]
    assert (shape.x0, shape.x1) == (inserted[0] - 0.5, inserted[-1] + 0.5)
    assert "shaded: the inserted tokens" in figure.layout.title.text.replace("<br>", " ")


def drawn_heads(figure):
    titles = [a.text for a in figure.layout.annotations if a.text.startswith("Layer")]
    return [tuple(map(int, re.findall(r"\d+", title))) for title in titles]


def test_heads_chosen_over_layers_equal_the_table(slash_result):
    """`top` is one thing: figure and table rank on the same half."""
    table = slash_result.compare("slash", select="half", top=4, resamples=99)
    figure = ma.render.received_attention(slash_result, layer=None, top=4)
    chosen = sorted(zip(table.layer, table["head"], strict=True))
    assert drawn_heads(figure) == chosen
    by_null = ma.render.received_attention(slash_result, None, top=4, by="beyond")
    assert drawn_heads(by_null) != chosen, "negative control"
    names = [f"L{layer}H{head}" for layer, head in chosen]
    assert drawn_heads(ma.render.received_attention(slash_result, None, names)) == chosen
    one = chosen[0]
    assert drawn_heads(ma.render.received_attention(slash_result, one[0], [names[0]])) == [one]
    for layer, heads, message in (
        (one[0] + 1, [names[0]], "but layer . is shown"),
        (None, [3], "without a layer, give names"),
        (None, ["L0H99"], "head 99 is out of range"),
    ):
        with pytest.raises(OptionError, match=message):
            ma.render.received_attention(slash_result, layer, heads)


def test_heads_are_chosen_and_shown_on_different_halves(slash_result):
    figure = ma.render.received_attention(slash_result, layer=0, top=3)
    assert "mean over 6 prompts" in figure.layout.title.text
    chosen = choose_heads(slash_result, 0, 3, "slash", halves_of(12)[0])
    assert drawn_heads(figure) == chosen
    every = slash_result["received_attention"].received_by_origin_per_prompt
    of_head = every.sel(condition="baseline", layer=0, head=chosen[0][1])
    expected = of_head.isel(prompt=halves_of(12)[1]).mean("prompt").values
    first = lines(figure)[0]
    assert_allclose(first.y, expected[np.asarray(first.x)], rtol=1e-5)


def test_choosing_needs_the_prompts(toy, prompts):
    result = ma.run(toy, prompts[:6], {"slash": ma.MeaninglessTokens(count=5)})
    with pytest.raises(OptionError, match='keep="prompts"'):
        ma.render.received_attention(result, layer=0, top=3)
    with pytest.raises(OptionError, match="layer 9 was not measured"):
        ma.render.received_attention(result, layer=9)
    five = ma.run(toy, prompts[:5], keep="prompts")
    with pytest.raises(OptionError, match="there are 5 prompts; give at least 6 for two halves"):
        ma.render.received_attention(five, layer=0, top=1)


def test_no_span_is_shaded_where_there_is_none_in_common(toy, prompts):
    conditions = {
        "random": ma.MeaninglessTokens(count=5, place="random"),
        "arm": ma.Baseline().under(ma.interventions.ARM()),
    }
    result = ma.run(toy, prompts[:4], conditions)
    figure = ma.render.received_attention(result, layer=0, heads=[0])
    assert not figure.layout.shapes
    assert "not one span" in figure.layout.title.text.replace("<br>", " ")
    without_insertion = ma.render.received_attention(result, 0, [0], "arm")
    assert "inserted" not in without_insertion.layout.title.text


def test_the_baseline_alone_is_drawn_with_its_null(toy):
    """Plain strings, no condition: one row, the line of each head and what uniform attention would give."""
    texts = ["Tom has 3 apples.", "A farmer has 12 cows and sells 5.", "Each box holds 8 pens."]
    result = ma.run(toy, texts, keep="prompts")
    figure = ma.render.received_attention(result, 0, [0, 2])
    lines = {trace.name: trace for trace in figure.data if trace.name and trace.xaxis == "x2"}
    assert set(lines) == {"baseline", "uniform, baseline"}
    dataset = result["received_attention"].sel(condition="baseline", layer=0)
    where = list(lines["baseline"].x)
    assert_allclose(
        lines["baseline"].y, dataset.received_by_origin.sel(head=2).values[where], rtol=1e-6
    )
    dotted = [trace for trace in figure.data if trace.line.dash == "dot"]
    assert_allclose(
        dotted[0].y, dataset.received_uniform_by_origin.values[list(dotted[0].x)], rtol=1e-6
    )
    result["sequences"]["group"] = "prompt", list("aab")
    uniform = dataset.received_by_segment_uniform.sel(segment="question").values
    words = ma.render.received_attention(result, 0, [0]).layout.meta["says"]
    assert f"uniform attention would give {[0.25, 0.25, 0.5] @ uniform:.3g}" in words
    with pytest.raises(ma.MechattnError, match="only the baseline; run it with a condition"):
        ma.render.change_map(result)
    with_slash = ma.run(toy, texts, {"slash": ma.MeaninglessTokens("/", 5)})
    with pytest.raises(ma.MechattnError, match="the baseline is what others are compared with"):
        ma.render.change_map(with_slash, "baseline")


def test_heads_of_the_baseline_are_those_furthest_from_uniform_attention(toy, prompts):
    result = ma.run(toy, prompts, keep="prompts")
    figure = ma.render.received_attention(result, 1, top=2)
    at = result["received_attention"].sel(condition="baseline", layer=1, segment="question")
    at = at.isel(prompt=halves_of(len(prompts))[0])
    far = abs(np.log(at.received_by_segment / at.received_by_segment_uniform).mean("prompt")).values
    assert drawn_heads(figure) == [(1, head) for head in sorted(np.argsort(-far)[:2])]


def test_the_heads_of_a_selection_are_drawn_by_their_numbers(slash_result):
    some = slash_result.sel(head=[3, 5])
    drawn = ma.render.received_attention(some, 0, heads=[5])
    expected = ma.render.received_attention(slash_result, 0, heads=[5])
    assert_allclose(drawn.data[0].y, expected.data[0].y, rtol=0)
    assert drawn_heads(ma.render.received_attention(some, 0, top=2)) == [(0, 3), (0, 5)]
    with pytest.raises(OptionError, match="head 0 is out of range: heads are 3, 5"):
        ma.render.received_attention(some, 0, heads=[0])
