"""The first token: what it held and holds is the mean of the patterns' columns, and a sink that moves is told."""

import numpy as np
import pytest
import xarray as xr

import mechattn as ma
from mechattn.contrast.question import first_token, first_token_words
from mechattn.contrast.table import DEFAULT_MARGINS, marked
from mechattn.errors import OptionError
from mechattn.results.result import Result

NAMES = ["baseline", "before", "after"]


def a_result(baseline, before, after):
    """A result with attention to the first token [prompt, layer, head] in three conditions; "before" precedes it."""
    masses = np.stack([baseline, before, after], axis=1)[..., None]
    dims = ("prompt", "condition", "layer", "head", "segment")
    coords = {"condition": NAMES, "segment": ["first"]}
    origin = np.zeros((len(baseline), 3, 2), dtype=int)
    origin[:, 1, 0] = -1
    texts = np.array([["Tom", "has"], ["/", "Tom"], ["Tom", "/"]], dtype=object)
    sequences = xr.Dataset(
        {
            "origin": (("prompt", "condition", "pos"), origin),
            "first_prompt_text": (("condition", "pos"), texts),
        },
        {"condition": NAMES},
    )
    data = xr.Dataset({"mass_by_segment": (dims, masses)}, coords)
    return Result({"received_attention": data, "sequences": sequences}, {"prompts": {"hash": "a"}})


@pytest.fixture
def masses():
    """Half of the heads have their sink in the first token."""
    generator = np.random.default_rng(0)
    means = np.repeat([0.6, 0.1], 4).reshape(2, 4)
    return means + generator.uniform(-0.05, 0.05, (5, 2, 4))


def test_a_sink_that_moves_is_told(masses):
    result = a_result(masses, masses / 50, masses)
    token = first_token(result, "before")
    assert token.baseline_attention == pytest.approx(masses.mean())
    assert token.attention == pytest.approx(masses.mean() / 50)
    assert (token.sink_heads, token.lost_heads, token.heads) == (4, 4, 8)
    assert token.moved
    assert token.preceded
    words = first_token_words(result, "before")
    assert f"held {100 * masses.mean():.1f} points" in words
    assert "“/” is first" in words
    assert "4 of the 4 heads" in words


def test_a_sink_that_stays_is_not_told(masses):
    """A loss of a tenth moves a head from .31 to .28, which is no sink that moved."""
    result = a_result(masses, masses / 50, 0.9 * masses)
    token = first_token(result, "after")
    assert not token.moved
    assert not token.preceded
    assert first_token_words(result, "after") == ""
    assert first_token(result, "baseline") is None


def test_a_displaced_first_token_is_reported_without_sinks(masses):
    words = first_token_words(a_result(masses / 3, masses / 3, masses), "before")
    assert "come before" in words
    assert "sink" not in words


def test_the_numbers_are_those_of_the_patterns(toy, prompts):
    conditions = {"start": ma.MeaninglessTokens("/", 4, place="start")}
    result = ma.run(
        toy, prompts[:3], conditions, [ma.ReceivedAttention(), ma.analyses.AttentionMap()]
    )
    token = first_token(result, "start")
    for condition, attention in ("baseline", token.baseline_attention), ("start", token.attention):
        by_prompt = []
        for prompt in range(3):
            origin = result["sequences"].origin.sel(condition=condition).values[prompt]
            pattern = result["attention_map"].pattern.sel(condition=condition).values[prompt]
            counted = np.flatnonzero(origin >= 0)
            by_prompt.append(pattern[:, :, counted, origin.tolist().index(0)].mean())
        assert attention == pytest.approx(np.mean(by_prompt), rel=1e-4)
    unmeasured = ma.run(toy, prompts[:3], conditions, ma.ReceivedAttention(skip_first=True))
    assert first_token(unmeasured, "start") is None


def test_a_mark_is_significant_and_large(result):
    table = result.compare("slash")
    significant = table.q_difference < 0.05
    np.testing.assert_array_equal(
        marked(table), significant & (abs(table.change) > DEFAULT_MARGINS["log-ratio"])
    )
    assert 0 < marked(table, 0.15).sum() < marked(table, 0.01).sum() <= significant.sum()
    points = result.compare("slash", quantity="mass", scale="difference", columns="all")
    larger = (points.q_difference < 0.05) & (abs(points.difference) > 0.005)
    np.testing.assert_array_equal(marked(points), larger)
    with pytest.raises(OptionError, match="margin=0: give the largest change"):
        marked(table, 0)
