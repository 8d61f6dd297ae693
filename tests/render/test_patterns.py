"""Views of one prompt: what is drawn is what the result holds, and no token's text becomes HTML."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import mechattn as ma
from mechattn.analysis.received_attention import AttentionMap
from mechattn.errors import OptionError

STRANGE = "</script><img src=x onerror=alert(1)> 🙂 \u200b שלום & <b>bold</b>"


@pytest.fixture(scope="module")
def mapped(toy):
    slash = {"slash": ma.MeaninglessTokens("/", 5)}
    return ma.run(toy, "Tom has 3 apples.", slash, [AttentionMap(), ma.ReceivedAttention()])


def drawn(view):
    """The properties that circuitsvis gets."""
    return json.loads(
        re.search(r"CircuitsVis\.AttentionHeads, (.*)\)</script>", view.body, re.DOTALL)[1]
    )


def test_a_difference_is_of_the_same_two_tokens(mapped):
    properties = drawn(ma.render.pattern(mapped, 1, [0, 3], difference=True))
    maps = mapped["attention_map"].pattern.isel(prompt=0).sel(layer=1)
    origin = mapped["sequences"].origin.isel(prompt=0).sel(condition="slash").values
    length = int((origin >= 0).sum())
    shown = np.array(properties["attention"])
    places = [list(origin).index(token) for token in range(length)]
    for drawn_head, head in zip(shown, (0, 3), strict=True):
        there, before = (
            maps.sel(condition=name, head=head).values for name in ("slash", "baseline")
        )
        expected = there[np.ix_(places, places)] - before[:length, :length]
        seen = np.tril_indices(length)
        np.testing.assert_allclose(drawn_head[seen], expected[seen], atol=6e-4)
    assert len(properties["tokens"]) == length
    assert properties["maxValue"] == -properties["minValue"]
    assert properties["maxValue"] == pytest.approx(abs(shown).max(), abs=6e-4)
    assert shown[0].min() < -0.01, "the inserted tokens take something"


def test_text_is_coloured_by_received_attention(mapped):
    view = ma.render.received_text(mapped, 0, [2, 3])
    received = mapped["received_attention"].received.sel(layer=0).isel(head=[2, 3]).mean("head")
    figures = view.body.split("</figure>")[:2]
    for figure, condition in zip(figures, ("baseline", "slash"), strict=True):
        shown = re.findall(
            r'title="([^"]*)" style="background:rgba\(213, 94, 0, ([\d.]+)\)', figure
        )
        origin = mapped["sequences"].origin.isel(prompt=0).sel(condition=condition)
        assert len(shown) == int((origin >= -1).sum())
        expected = received.sel(condition=condition).values[: len(shown)]
        for (number, _), value in zip(shown, expected, strict=True):
            assert (number == "no counted query comes after it") == np.isnan(value)
            assert np.isnan(value) or float(number) == pytest.approx(value, abs=6e-5)
        strengths = [float(strength) for _, strength in shown]
        assert strengths[np.nanargmax(expected)] == max(strengths)
    assert "<script" not in view.page()


def test_a_text_that_receives_nothing_is_shown(mapped):
    nothing = {"received_attention": 0 * mapped["received_attention"]}
    view = ma.render.received_text(replace(mapped, datasets=mapped.datasets | nothing), 0)
    assert 'title="0.0000"' in view.body


def test_tokens_are_escaped(toy):
    result = ma.run(toy, STRANGE, {"slash": ma.MeaninglessTokens("/", 2)}, keep="prompts")
    body = ma.render.received_text(result, 0).body
    assert "<img" not in body
    assert "<b>" not in body
    assert "&lt;" in body
    assert "<bos>" not in body, "a special token isn't taken for HTML"


def test_what_is_not_there(mapped, toy, prompts):
    for heads, prompt, message in (
        ([99], 0, "head 99 is out of range"),
        (1.5, 0, "heads holds 1.5; give whole numbers"),
        (0, 0.0, "prompt=0.0: the result has prompts 0 to 0"),
    ):
        with pytest.raises(OptionError, match=message):
            ma.render.pattern(mapped, 0, heads, prompt=prompt)
    several = ma.run(toy, prompts[:3], {"slash": ma.MeaninglessTokens()})
    with pytest.raises(OptionError, match='run with keep="prompts"'):
        ma.render.received_text(several, 0)
