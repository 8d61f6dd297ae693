"""A link or HTML in a name is text in every figure and on the page, tried in a browser."""

import html
import json
import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest

import mechattn as ma
from mechattn.commands.pages import figures_of
from mechattn.commands.run_config import FIGURES
from mechattn.pages.page import results_page
from mechattn.render.figure_declaration import with_plain_names

LINK = '<a href="https://example.org/">here</a> <b>bold</b> <img src=x onerror=alert(1)>'
OPTIONS = {
    "agreement": {"condition": LINK},
    "by_layer": {"quantity": "distance"},
    "heads_by_layer": {"quantity": "distance"},
    "received_attention": {"layer": 0, "heads": [0]},
    "received_by_model": {"conditions": [LINK]},
}
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


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_of_a_config_shows_names_as_text(hostile, name):
    drawn = FIGURES[name](hostile, **OPTIONS.get(name, {}))
    assert markup(drawn) == []


@pytest.mark.parametrize("escaped", [True, False])
def test_no_link_on_the_page(browser, hostile, tmp_path, monkeypatch, escaped):
    if not escaped:  # negative control
        monkeypatch.setattr(
            "mechattn.render.figure_declaration.with_plain_names", lambda figure: figure
        )
    figures = [(FIGURES["received_attention"], {"layer": 0, "heads": [0], "condition": LINK})]
    few = {name: hostile.datasets[name] for name in ("sequences", "received_attention")}
    shown = replace(hostile, datasets=few)
    place = results_page([shown], tmp_path / "p.html", figures)
    page = browser.new_page()
    page.goto(place.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_function(
        "[...document.querySelectorAll('details.section > figure')].every((one) => one.dataset.drawn)"
    )
    links = page.locator("svg a").count() + page.locator('a[href*="example.org"]').count()
    assert (links == 0) == escaped
    assert page.locator("b, img[src=x]").count() == 0
    if escaped:
        assert (
            "<a href="
            in page.locator("#more .section summary", has_text="received attention").inner_text()
        )
        assert "<a href=" in page.locator("#map-title").inner_text()
    page.close()
