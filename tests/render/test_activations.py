"""The figures of MLP activations show the numbers of the result."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.stats.intervals import t_interval


@pytest.fixture(scope="module")
def result(toy, prompts):
    arm = ma.interventions.ARM(form="released_llama", p1=95.0)
    conditions = {
        "slash": ma.MeaninglessTokens("/", 20),
        "arm": ma.Baseline(intervention=arm),
        "channels": ma.Baseline(intervention=replace(arm, control="random_channels")),
    }
    return ma.run(toy, prompts[:4], conditions, [ma.analyses.MlpActivations()])


def traces(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_histogram(result):
    figure = ma.render.activation_histogram([result, result], layer=1)
    (one, other) = traces(figure, "arm")
    data = result["mlp_activations"].histogram.sel(condition="arm", layer=1)
    expected = data.mean("prompt").values[1:-1]
    assert_allclose(np.nan_to_num(one.y[::2]), expected, rtol=1e-6)
    assert_array_equal(one.x[::2], data.bin.values[1:-1])
    assert_array_equal(one.x[1::2], data.bin.values[2:])  # the last bin has a width too
    assert (one.showlegend, other.showlegend) == (True, False)
    threshold = result.provenance["analyses"]["mlp_activations"]["thresholds"]["1"]
    assert {abs(shape.x0) for shape in figure.layout.shapes} == {threshold}
    assert {"baseline", "slash", "arm", "channels"} <= {t.name for t in figure.data}


def test_metrics_are_changes_from_the_baseline(result):
    figure = ma.render.activation_metrics(result, layer=0)
    panels = [trace for trace in figure.data if trace.mode == "markers"]
    for panel, metric in zip(panels, ("near_zero", "l1", "l2", "gini"), strict=True):
        data = result["mlp_activations"][f"{metric}_by_segment"].sel(segment="question", layer=0)
        ratio = np.log(data.sel(condition="arm") / data.sel(condition="baseline"))
        change, _, high = 100 * np.expm1(np.array(t_interval(ratio.values)))
        assert panel.y[1] == pytest.approx(change, rel=1e-5)
        assert panel.y[1] + panel.error_y.array[1] == pytest.approx(high, rel=1e-5)


def test_near_zero_by_class(result):
    figure = ma.render.near_zero_by_class(result, layer=0)
    data = result["mlp_activations"].near_zero_by_token_class.sel(layer=0, condition="slash")
    classes = [label.split("<br>")[0] for label in figure.layout.xaxis.ticktext]
    shown = traces(figure, "slash")[0]
    assert_allclose(shown.y, data.sel(token_class=classes).mean("prompt"), rtol=1e-5)
    assert "digit" in classes
    assert list(shown.customdata) == classes


def test_only_the_conditions_that_are_drawn_hide_a_class(result):
    shares = result["mlp_activations"].near_zero_by_token_class
    lost = (shares.condition == "arm") & (shares.token_class == "digit")
    partly = (shares.condition == "slash") & (shares.prompt == shares.prompt[0])
    datasets = {"mlp_activations": result["mlp_activations"].copy()}
    changed = replace(result, datasets=dict(result.datasets) | datasets)
    changed["mlp_activations"]["near_zero_by_token_class"] = shares.where(~lost & ~partly)
    axis = ma.render.near_zero_by_class(changed, ["slash"]).layout.xaxis
    assert "digit<br>n = 3" in axis.ticktext
    axis = ma.render.near_zero_by_class(changed).layout.xaxis
    assert not any("digit" in label for label in axis.ticktext)


def test_agreement(result):
    figure = ma.render.agreement(result, "slash", layer=0)
    table = result.agreement("slash", "arm")
    table = table[table.layer == 0]
    assert_allclose(figure.data[0].y, table.cosine)
    assert list(figure.layout.xaxis.ticktext) == ["arm", "channels"]


def test_what_cannot_be_shown(result):
    two = result.sel(prompt=result["sequences"].prompt.values[:2])
    with pytest.raises(OptionError, match="no class of token occurs in the questions of 3 prompts"):
        ma.render.near_zero_by_class(two)
    with pytest.raises(OptionError, match="name another condition"):
        ma.render.agreement(result, "baseline")
    with pytest.raises(OptionError, match="no condition to compare with"):
        ma.render.agreement(result, "slash", ["slash"])
