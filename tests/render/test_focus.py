"""What the figures of focus, updates and sinks show is what the result holds; what is not there is said."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.errors import OptionError


@pytest.fixture(scope="module")
def result(measured):
    return measured.sel(condition=["baseline", "slash"])


def test_points_are_sorted_within_each_layer_and_name_their_head(result):
    figure = ma.render.heads_by_layer(result, "first_mass")
    strip, null = figure.data[2:]  # of the second condition
    focus = result["attention_focus"].sel(segment="question", condition="slash")
    expected_null = focus.first_mass_uniform.mean("prompt")
    assert_allclose(null.y, expected_null, rtol=1e-6)
    assert null.line.dash == "dot"
    assert "dotted: uniform attention" in ma.render.caption(figure)
    without_null = ma.render.caption(ma.render.heads_by_layer(result))
    assert "no null: uniform attention has no largest" in without_null

    data = focus.first_mass.mean("prompt")
    by_layer = np.reshape(strip.y, data.shape)
    assert (np.diff(by_layer, axis=1) <= 0).all(), "the largest head is on the left"
    for x, value, (layer, head, *_) in zip(strip.x, strip.y, strip.customdata, strict=True):
        expected = float(data.sel(layer=int(layer), head=int(head)))
        assert value == pytest.approx(expected, rel=1e-5)
        assert abs(x - layer) < 0.5, "no strip reaches into the next layer's"


def test_the_mean_over_heads_and_its_null(result):
    figure = ma.render.by_layer(result, "span_mass")
    sinks = result["attention_sinks"].sel(condition="slash").mean("prompt")
    null = next(trace for trace in figure.data if trace.line.dash == "dot")
    assert_allclose(null.y, sinks.span_mass_uniform, rtol=1e-6)
    drawn = next(trace for trace in figure.data if trace.name == "slash")
    assert_allclose(drawn.y, sinks.span_mass.mean("head"), rtol=1e-5)
    blocks = ma.render.by_layer(result, "block_magnitude")
    assert [a.text for a in blocks.layout.annotations] == ["attention", "mlp"]


@pytest.mark.parametrize("reading", ["mixed", "top_target"])
def test_histograms_hold_every_token_and_the_slider_every_layer(result, reading):
    prefix = "top_target_" if reading == "top_target" else ""
    dataset = result["head_updates" if reading == "mixed" else "top_target_updates"]
    layers = dataset.sizes["layer"]
    for draw in (ma.render.update_histogram, ma.render.update_map):
        figure = draw(result, condition="slash", reading=reading)
        assert [trace.visible for trace in figure.data] == [n == 0 for n in range(layers)]
        steps = figure.layout.sliders[0].steps
        assert steps[2].args[0]["visible"].index(True) == 2
        assert "layer 2" in steps[2].args[1]["title.text"]

    histogram = ma.render.update_histogram(result, condition="slash", reading=reading)
    assert_allclose(np.nansum(histogram.data[0].z, axis=1), 100, atol=0.5)
    of_layer = figure.data[1].z
    counts = dataset[f"{prefix}joint_counts"].sel(condition="slash", layer=1).sum("prompt")
    largest = np.unravel_index(np.nanargmax(of_layer), of_layer.shape)
    assert int(counts.values.T[1:, 1:-1][largest]) == counts.max()


def test_updates_by_position(result):
    figure = ma.render.update_by_position(result)
    data = result["head_updates"].magnitude_at.sel(condition="baseline", layer=0)
    trace = figure.data[0]
    for x, y, color in list(zip(trace.x, trace.y, trace.marker.color, strict=True))[::17]:
        assert y == pytest.approx(float(data.isel(head=color, key=x)), rel=1e-4)


def test_what_cannot_be_shown_is_said(result, toy, prompts):
    for call, message in (
        (lambda: ma.render.heads_by_layer(result, "block_norm"), "has no heads; use by_layer"),
        (lambda: ma.render.by_layer(result, "magnitude_counts"), "more than one number for each"),
        (
            lambda: ma.render.heads_by_layer(result, segment="inserted", conditions=["baseline"]),
            "no prompt has 'self_share' in the segment 'inserted' with 'baseline'; choose another segment",
        ),
        (
            lambda: ma.render.scale_by_layer(result, segment="inserted"),
            "segment='inserted': no query there is in the baseline and in 'slash', so the affine",
        ),
        (lambda: ma.render.update_map(result, reading="all"), "reading='all': choose one of"),
        (lambda: ma.render.update_by_position(result, reading="top_target"), "were not kept"),
        (lambda: ma.pattern(toy, prompts[0], 0, max_tokens=10), "a map shows at most 10"),
    ):
        with pytest.raises(ma.MechattnError, match=message):
            call()

    few = ma.run(toy, prompts[:1], analyses=ma.analyses.AttentionFocus())
    with pytest.raises(OptionError, match="this result has no 'head_updates'"):
        ma.render.update_map(few)
