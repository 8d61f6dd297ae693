"""A link or HTML in a name is text in every figure; ``tests/browser`` opens a page with such names."""

import html
import json
import re

import plotly.graph_objects as go
import pytest

import mechattn as ma
from mechattn.commands.stored_results import figures_of
from mechattn.render.figure_declaration import with_plain_names

LINK = '<a href="https://example.org/">here</a> <b>bold</b> <img src=x onerror=alert(1)>'
OURS = re.compile(r"</?(?:br|sup|extra)>")


@pytest.fixture(scope="module")
def hostile(toy):
    """A result whose condition, and whose quantities' units, are HTML."""
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.MlpActivations(),
        ma.analyses.AttentionBudget(),
        ma.analyses.AttentionFocus(per_query=True),
        ma.analyses.HeadUpdates(per_query=True),
    ]
    prompts = ma.load_prompts("word-problems", limit=6)
    conditions = {
        LINK: ma.MeaninglessTokens(count=5),
        "<i>two</i>": ma.MeaninglessTokens("/", count=6),
    }
    result = ma.run(toy, prompts, conditions, analyses, layers=[0, 1], keep="prompts")
    for dataset in result.datasets.values():
        for variable in dataset.data_vars.values():
            variable.attrs["units"] = f"{variable.attrs['units']} {LINK}"
    return result


def strings(value):
    """Every text in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in ("template", "meta"):
                yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def markup(figure):
    """What in a figure plotly would take for markup, but for our own."""
    found = (OURS.sub("", text) for text in strings(json.loads(figure.to_json())))
    return [text for text in found if "<" in text]


def test_every_figure_of_a_report_shows_names_as_text(hostile):
    drawn = [draw(hostile, **options) for draw, options in figures_of(hostile, 0)]
    assert len(drawn) >= 10
    assert [found for figure in drawn for found in markup(figure)] == []
    assert any(
        "&lt;a href=" in text for figure in drawn for text in strings(json.loads(figure.to_json()))
    )


def test_the_search_for_markup_finds_some():  # negative control
    figure = go.Figure(go.Scatter(x=[1], y=[1], name=LINK, customdata=[["<b>"]]))
    assert len(markup(figure)) == 2
    assert markup(with_plain_names(figure)) == []
    assert html.unescape(figure.data[0].name) == LINK


def test_our_own_markup_stays():
    title = "a<br><sup>b</sup>"
    figure = with_plain_names(
        go.Figure(layout={"title": {"text": title}, "annotations": [{"text": f"x<br>{LINK}"}]})
    )
    assert figure.layout.title.text == title
    assert figure.layout.annotations[0].text.startswith("x<br>&lt;a")
