"""Fillers as a sample: against the differences of single comparisons, and what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.stats.random_effects import crossed

FILLERS = ["/", "-", "?", "*", "+", "="]


@pytest.fixture(scope="module")
def result(toy, prompts):
    conditions = {text: ma.MeaninglessTokens(text, count=12) for text in FILLERS}
    return ma.run(toy, prompts[:8], conditions, layers=1)


def test_the_differences_are_those_of_single_comparisons(result):
    table = result.across(FILLERS, null="uniform")
    received = (
        result["received_attention"]
        .sel(segment="question")
        .transpose("prompt", "condition", "layer", "head", ...)
    )
    change = [
        np.log(received[name].astype(float))
        for name in ("received_by_segment", "received_by_segment_uniform")
    ]
    moved = [log.sel(condition=FILLERS) - log.sel(condition="baseline") for log in change]
    beyond = (
        (moved[0] - moved[1])
        .transpose("prompt", "condition", "layer", "head")
        .values.reshape(len(received.prompt), 6, -1)
    )
    expected = crossed(beyond)
    np.testing.assert_allclose(table["mean"], expected.mean, atol=1e-6)
    np.testing.assert_allclose(table.low, expected.low, atol=1e-5)
    assert table.attrs["null"] == "uniform attention"
    alone = result.compare("/", null="uniform", columns="all").set_index(["layer", "head"])
    wider = (table.high - table.low).values > (alone.beyond_high - alone.beyond_low).values
    assert wider.mean() > 0.5, "other fillers may differ"


def test_few_conditions_are_refused(result):
    for wrong in (FILLERS[:5], "/", [*FILLERS, "/"], 5):
        with pytest.raises(OptionError, match="6 or more different"):
            result.across(wrong)
    with pytest.raises(OptionError, match="no condition 'dots'"):
        result.across([*FILLERS, "dots"])


def test_conditions_with_different_nulls_are_refused(result):
    dataset = result["received_attention"]
    name = "received_by_segment_dilution"
    without = dataset.assign({name: dataset[name].where(dataset.condition != "=")})
    other = replace(result, datasets=result.datasets | {"received_attention": without})
    with pytest.raises(OptionError, match=r"'=': uniform.*give one null for all"):
        other.across(FILLERS)
    table = other.across(FILLERS, null="uniform")
    pd.testing.assert_frame_equal(table, result.across(FILLERS, null="uniform"))


def test_a_change_within_a_margin_is_the_same(result):
    """Two one-sided tests by hand: within 50 % all heads are, within 0.001 % none."""
    table = result.compare("/", margin=0.5, columns="all")
    assert (table.q_same < 0.05).all()
    assert (result.compare("/", margin=1e-5, columns="all").q_same > 0.5).all()
    words = ma.render.verdict_words(result, "/", margin=0.5)
    assert "In 8 of 8 heads the change is that of the null to within ± 50\u00a0%" in words
    assert "that of the null" not in ma.render.verdict_words(result, "/")
    for wrong in (0, "2 %", True):
        with pytest.raises(OptionError, match="margin="):
            result.compare("/", margin=wrong, columns="all")


def test_without_a_condition_the_first_other_one_is_compared(result):
    assert repr(result.verdict(to="/")) == repr(result.verdict("-", to="/"))
    assert repr(result.verdict()) == repr(result.verdict("/")) != repr(result.verdict("-"))
