"""Views of one prompt: what is drawn is what the result holds, and no token's text becomes HTML."""

import json
import re

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
    for i, head in enumerate((0, 3)):
        for query in range(length):
            for key in range(query + 1):
                there = maps.sel(condition="slash", head=head).values[
                    list(origin).index(query), list(origin).index(key)
                ]
                before = maps.sel(condition="baseline", head=head).values[query, key]
                assert properties["attention"][i][query][key] == pytest.approx(
                    there - before, abs=6e-4
                )

    assert len(properties["tokens"]) == length
    assert (
        properties["maxValue"]
        == -properties["minValue"]
        == pytest.approx(
            max(abs(v) for head in properties["attention"] for row in head for v in row), abs=6e-4
        )
    )

    assert any(v < -0.01 for row in properties["attention"][0] for v in row), (
        "the inserted tokens take something"
    )


def test_text_is_coloured_by_received_attention(mapped):
    view = ma.render.received_text(mapped, 0, [2, 3])
    received = mapped["received_attention"].received.sel(layer=0).isel(head=[2, 3]).mean("head")
    figures = view.body.split("</figure>")[:2]
    for figure, condition in zip(figures, ("baseline", "slash"), strict=True):
        shown = re.findall(
            r'title="([^"]*)" style="background:rgba\(213, 94, 0, ([\d.]+)\)', figure
        )
        expected = received.sel(condition=condition).values[: len(shown)]
        assert len(shown) == int(
            (mapped["sequences"].origin.isel(prompt=0).sel(condition=condition) >= -1).sum()
        )
        for (number, _), value in zip(shown, expected, strict=True):
            assert (number == "no counted query comes after it") == np.isnan(value)
            assert np.isnan(value) or float(number) == pytest.approx(value, abs=6e-5)
        order = np.argsort([float(s) for _, s in shown])
        assert np.nanmax(expected) == expected[order[-1]] or float(shown[order[-1]][1]) == 1.0

    assert view.script is None
    assert "<script" not in view.page()


def test_tokens_are_escaped(toy):
    result = ma.run(toy, STRANGE, {"slash": ma.MeaninglessTokens("/", 2)}, keep="prompts")
    body = ma.render.received_text(result, 0).body
    assert "<img" not in body
    assert "<b>" not in body
    assert "&lt;" in body
    assert "<bos>" not in body, "a special token isn't taken for HTML"


def test_what_is_not_there(mapped, toy, prompts):
    with pytest.raises(OptionError, match="head 99 is out of range"):
        ma.render.received_text(mapped, 0, [99])
    several = ma.run(toy, prompts[:3], {"slash": ma.MeaninglessTokens()})
    with pytest.raises(OptionError, match='run with keep="prompts"'):
        ma.render.received_text(several, 0)
