"""The map of heads, its rooms, scatter and table, in a real browser with the network cut."""

import csv
import math
import re

import numpy as np
import pandas as pd
import pytest

import mechattn as ma
from mechattn.pages.page import page as result_page
from mechattn.pages.page import results_page

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"


@pytest.fixture(scope="module")
def result(toy):
    """Two conditions, two analyses, short prompts with their attention maps; the first prompt and a name are HTML."""
    texts = [f"{HOSTILE} Tom has {i} apples." for i in range(2, 8)]
    conditions = {
        "slash": ma.MeaninglessTokens("/", 6),
        "<b>word</b>": ma.conditions.RandomTokens(6),
    }
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionFocus(), ma.analyses.AttentionMap()]
    return ma.run(toy, texts, conditions, analyses, keep="prompts")


@pytest.fixture(scope="module")
def place(result, tmp_path_factory):
    return results_page([result], tmp_path_factory.mktemp("page") / "page.html", [])


@pytest.fixture(scope="module")
def of_slash(slash_result, tmp_path_factory):
    return result_page(slash_result, tmp_path_factory.mktemp("slash") / "page.html", 0, [2])


def percent(text):
    return float(text.replace("−", "-").replace("\u00a0%", "")) / 100


def rgb(fill):
    return [int(part) for part in re.findall(r"\d+", fill)]


def at(page, layer, head, heads=8):
    return page.locator(f"#head-{layer * heads + head}")


def test_the_first_screen_is_drawn_at_the_numbers_of_the_verdict(opened, of_slash, slash_result):
    page = opened(of_slash)
    verdict = slash_result.verdict("slash")
    assert page.evaluate("document.querySelector('.picture').getBoundingClientRect().bottom") < 900
    ticks = page.locator(".axis .track i")
    ends = [
        (ticks.nth(i).inner_text(), ticks.nth(i).bounding_box()) for i in (0, ticks.count() - 1)
    ]
    (low, left), (high, right) = [
        (percent(words), box["x"] + box["width"] / 2) for words, box in ends
    ]

    def value(name):
        box = page.locator(f".row:not(.axis) i.{name}").bounding_box()
        return low + (high - low) * (box["x"] + box["width"] / 2 - left) / (right - left)

    assert value("measured") == pytest.approx(float(verdict.change.estimate), abs=0.002)
    assert percent(page.locator(".row .words").first.inner_text().split(" [")[0]) == pytest.approx(
        float(verdict.change.estimate), abs=5.1e-4
    )


def test_hover_says_what_compare_says(opened, place, result):
    page = opened(place)
    at(page, 2, 5).hover()
    words = page.locator("#tip").inner_text()
    table = result.compare("slash", columns="all").set_index(["layer", "head"]).loc[(2, 5)]
    shown = [percent(part) for part in re.findall(r"[+−]?[\d.]+\u00a0%", words)]
    np.testing.assert_allclose(
        shown,
        np.expm1([table.difference, table.difference_low, table.difference_high]),
        atol=5.1e-4,
    )
    assert "layer 2 head 5" in words
    tested = re.search(r"q = ([\d.e-]+) against no change", words)
    assert float(tested[1]) == pytest.approx(table.q_difference, rel=0.05)
    assert f"{result['sequences'].sizes['prompt']} prompts" in words
    compared = result.compare("slash")
    sure = int(((compared.q_difference < 0.05) & (compared.change.abs() > 0.05)).sum())
    assert page.locator("#map .mark").count() == sure
    about = result["received_attention"].received_by_segment.attrs
    assert (
        page.locator("#about")
        .inner_text()
        .startswith(f"{about['description']} ({about['units']}).")
    )
    assert (
        f"{sure} of 32 heads differ from no change by more than 5.0\u00a0% (q < 0.05)"
        in page.locator("#said").inner_text()
    )
    assert (
        "○ differs from no change, by more than 5.0\u00a0%, q < 0.05"
        in page.locator("#scale").inner_text()
    )


def test_a_click_opens_the_room_of_a_head(opened, place, result):
    page = opened(place)
    at(page, 3, 6).click()
    room = page.locator("#room")
    assert room.locator("h3").inner_text() == "Layer 3, head 6"
    assert room.locator(".curves path.line").count() == 2
    assert room.locator(".curves path.null").count() == 1, "dilution, beside the line with slash"
    assert "dilution, slash" in room.locator(".legend").inner_text()
    assert "question" in room.locator(".curves").text_content()
    assert "layer=3&head=6" in page.url
    for name in ("quantities", "text", "pattern"):
        room.locator(f"[data-part={name}] summary").click()
    table = room.locator("[data-part=quantities] tr", has_text="entropy of the question").first
    entropy = result["attention_focus"].entropy.sel(layer=3, head=6, segment="question")
    assert float(table.locator("td").nth(1).inner_text()) == pytest.approx(
        float(entropy.sel(condition="baseline").mean()), rel=0.006
    )
    tokens = room.locator("[data-part=text] .tokens")
    assert tokens.count() == 2
    assert room.locator("[data-part=text] b").count() == 0
    assert "".join(tokens.first.locator("span").all_text_contents()).count("<b>") == 1, (
        "a token is text, not HTML"
    )
    assert room.locator("svg.pattern").count() == 6, "three prompts, without and with the tokens"
    assert (
        "6 of them inserted" in room.locator("[data-part=pattern] .whole .note").nth(1).inner_text()
    )
    at(page, 1, 1).click()
    assert room.locator("svg.pattern").count() == 6, "what is open stays open"
    assert page.title().startswith("mechattn")


def test_a_pattern_says_its_numbers(opened, place, result):
    page = opened(place)
    at(page, 1, 4).click()
    page.locator("[data-part=pattern] summary").click()
    shown = page.locator("svg.pattern").first
    shown.scroll_into_view_if_needed()
    box = shown.locator("image").bounding_box()
    n = int((result["sequences"].origin.sel(condition="baseline")[0] >= 0).sum())
    page.mouse.move(box["x"] + box["width"] * 2.5 / n, box["y"] + box["height"] * 7.5 / n)
    words = page.locator("#tip").inner_text()
    weight = (
        result["attention_map"]
        .pattern.sel(condition="baseline", layer=1, head=4)
        .isel(prompt=0)
        .values[7, 2]
    )

    assert words.startswith("7 “")
    assert float(words.rpartition(": ")[2].replace("−", "-")) == pytest.approx(
        float(weight), abs=2e-5, rel=0.006
    )
    tokens = [
        str(token)
        for token in result["sequences"].first_prompt_text.sel(condition="baseline").values[:n]
    ]
    labels = shown.locator("text").all_text_contents()
    assert labels[0] == labels[1] == tokens[0].strip()
    assert len(labels) >= 2 * n / 3
    colours = page.locator(".weights i").evaluate_all(
        "(all) => all.map((one) => Number(getComputedStyle(one).opacity))"
    )
    weights = [float(words) for words in page.locator(".weights span").all_text_contents()]
    np.testing.assert_allclose(np.square(colours), weights, atol=1e-3)
    paint = """(image) => { const c = document.createElement('canvas'); c.width = c.height = SIZE;
        const p = c.getContext('2d'), i = new Image(); i.src = image.getAttribute('href');
        return i.decode().then(() => { p.drawImage(i, 0, 0); return p.getImageData(2, 7, 1, 1).data[3] / 255; }); }"""
    opaque = shown.locator("image").evaluate(paint.replace("SIZE", str(n)))
    assert opaque**2 == pytest.approx(float(weight), abs=0.01), (
        "the map has the colours of its scale"
    )


def test_arrows_walk_over_heads(opened, place):
    page = opened(place)
    at(page, 0, 0).click()
    page.locator("#map svg").focus()

    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#room h3").inner_text() == "Layer 1, head 1"
    assert page.evaluate("document.activeElement.getAttribute('aria-activedescendant')") == "head-9"
    assert page.locator("#said").inner_text().startswith("layer 1 head 1")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert page.locator("#room h3").inner_text() == "Layer 3, head 7", (
        "there is no head beyond the last"
    )


def test_tabs_are_models(opened, result, slash_result, tmp_path):
    page = opened(results_page([result, slash_result], tmp_path / "page.html", []))
    tabs = page.get_by_role("tab")
    quantities = page.locator("#quantity option")
    assert tabs.count() == 2
    assert quantities.count() > 5
    tabs.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert quantities.count() == 2
    tabs.nth(0).click()
    assert quantities.count() > 5

    page.locator("#beside").select_option(index=1)
    page.locator("#beside-head-12").hover()
    other = slash_result.compare("slash", columns="all").set_index(["layer", "head"]).loc[(1, 4)]
    shown = re.search(r"change ([+−][\d.]+\u00a0%)", page.locator("#tip").inner_text())[1]
    assert percent(shown) == pytest.approx(np.expm1(other.difference), abs=5.1e-4)
    fills = {}
    for prefix, shown_result in (("head-", result), ("beside-head-", slash_result)):
        table = shown_result.compare("slash").sort_values(["layer", "head"])
        for number, value in enumerate(np.log1p(table.change)):
            fills[value] = rgb(page.locator(f"#{prefix}{number}").get_attribute("fill"))

    # 98 of 100 heads of both maps have less than the strongest colour.
    most = sorted(fills, key=abs)[math.ceil(0.98 * len(fills)) - 1]
    full = distance_from_neutral(fills[most])
    for value, fill in fills.items():
        if value * most > 0:
            share = distance_from_neutral(fill) / full
            assert share == pytest.approx(min(1, value / most), abs=0.02), "one scale for both maps"

    page.locator("#beside-head-12").click()
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert page.locator("#room h3").inner_text() == "Layer 1, head 4"


def distance_from_neutral(colour):
    return np.abs(np.array(colour) - (244, 244, 242)).max()


def test_the_table_ranks_and_saves_what_compare_gives(opened, place, result, tmp_path):
    page = opened(place)
    table = result.compare("slash", columns="all")  # the change beyond which the file has
    first = page.locator("#heads-table tbody tr").first.locator("button")
    largest = table.loc[table.change.abs().idxmax()]
    assert first.inner_text() == f"L{largest.layer}H{largest['head']}"
    page.locator("#heads-table thead").get_by_role("button", name="baseline").click()
    top = table.loc[table.reference.idxmax()]
    assert first.inner_text() == f"L{top.layer}H{top['head']}"
    first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == f"L{top.layer}H{top['head']}"
    assert page.locator("#room h3").inner_text() == f"Layer {top.layer}, head {top['head']}"

    with page.expect_download() as caught:
        page.locator("#heads-csv").click()
    caught.value.save_as(tmp_path / "heads.csv")
    saved = pd.read_csv(tmp_path / "heads.csv")
    same = ["layer", "head", "value", "reference", "null", "q_beyond"]
    same += ["difference", "difference_low", "difference_high"]
    same += ["beyond", "beyond_low", "beyond_high"]
    np.testing.assert_allclose(saved[same], table[same], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(saved.change_low, np.expm1(table.difference_low), rtol=1e-6)
    np.testing.assert_allclose(saved.change_null, np.expm1(table.null), rtol=1e-6, atol=1e-7)
    about = saved[["scale", "segment", "units", "change_units", "level", "n_of"]].drop_duplicates()
    expected = ["log-ratio", "question", "probability", "fraction", 0.95, "prompts"]
    assert about.values.tolist() == [expected]


def test_the_curves_of_a_head_as_csv_and_svg(opened, of_slash, slash_result, tmp_path):
    page = opened(of_slash)
    room = page.locator("#room")
    with page.expect_download() as caught:
        room.get_by_role("button", name="CSV").click()
    caught.value.save_as(tmp_path / "curves.csv")
    rows = [
        row
        for row in csv.DictReader((tmp_path / "curves.csv").open())
        if row["condition"] == "slash"
    ]
    data = slash_result["received_attention"].sel(condition="slash", layer=0, head=2)
    known = [row for row in rows if row["received"]]
    positions = [int(row["position"]) for row in known]
    inserted = slash_result["sequences"].origin.sel(condition="slash").values[0] == -1
    assert set(np.flatnonzero(inserted)) <= set(positions)
    np.testing.assert_allclose(
        [float(row["received"]) for row in known], data.received.values[positions], rtol=1e-6
    )
    assert [int(row["n"]) for row in known] == data.received_n.values[positions].tolist()
    with page.expect_download() as caught:
        room.get_by_role("button", name="SVG").click()
    caught.value.save_as(tmp_path / "curves.svg")
    drawing = (tmp_path / "curves.svg").read_text()
    assert drawing.startswith("<svg")
    assert "var(--" not in drawing, "it stands alone"


def test_a_brush_chooses_heads_on_the_map(opened, place):
    page = opened(place)
    page.locator("#scatter-part summary").click()
    page.locator("#scatter svg").scroll_into_view_if_needed()
    box = page.locator("#scatter svg").bounding_box()
    points = page.locator("#scatter circle").count()
    assert points == 32
    page.mouse.move(box["x"] + 66, box["y"] + 12)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 45, steps=3)
    page.mouse.up()
    out = page.locator("#map .cell.out").count()
    assert 0 < out < 32
    assert page.locator("#table-note").inner_text().startswith(f"{32 - out} brushed heads")
    kept = page.locator("#map .cell:not(.out), #map .small").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('fill'))"
    )
    page.locator("#clear").click()
    assert page.locator("#map .cell.out").count() == 0
    before = page.locator("#map .cell").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('fill'))"
    )
    assert sorted(kept) == sorted(before), (
        "what is left out keeps its colour, as the neutral one would say no effect"
    )


def test_colours_of_words_are_readable_in_both_lights(opened, place):
    """WCAG AA: 4.5 to 1 for words, 3 to 1 for marks, by the page's own colours."""
    page = opened(place)
    for theme in ("light", "dark"):
        colours = page.evaluate(
            "(theme) => { if (document.documentElement.dataset.theme !== theme) document.getElementById('theme').click(); const s = getComputedStyle(document.documentElement);"
            " return Object.fromEntries(['ink','quiet','link','with','without','ground','panel'].map("
            " (n) => [n, s.getPropertyValue('--' + n).trim()])); }",
            theme,
        )
        for ground in ("ground", "panel"):
            assert all(
                contrast(colours[name], colours[ground]) >= 4.5 for name in ("ink", "quiet", "link")
            ), colours
            assert all(
                contrast(colours[name], colours[ground]) >= 3 for name in ("with", "without")
            ), colours
        page.locator("[data-part=text]").evaluate("(part) => { part.open = true; }")
        grounds = page.evaluate(
            "() => { const of = (css) => { const c = document.createElement('canvas').getContext('2d'); c.fillStyle = css;"
            " c.fillRect(0, 0, 1, 1); return c.getImageData(0, 0, 1, 1).data; }; const s = getComputedStyle(document.body);"
            " return [...document.querySelectorAll('[data-part=text] .tokens span')].map((one) => {"
            " const [r, g, b, a] = of(getComputedStyle(one).backgroundColor), under = of(s.backgroundColor);"
            " return '#' + [r, g, b].map((v, i) => Math.round(v * a / 255 + under[i] * (1 - a / 255)))"
            ".map((v) => v.toString(16).padStart(2, '0')).join(''); }); }"
        )
        assert len(set(grounds)) > 3
        assert min(contrast(colours["ink"], one) for one in grounds) >= 4.5, (
            "words on the strongest ground"
        )

    assert contrast("#777", "#fff") < 4.5 < contrast("#767676", "#fff"), "the limit that is known"


def contrast(one, other):
    def light(colour):
        text = colour.lstrip("#")
        text = "".join(2 * letter for letter in text) if len(text) == 3 else text
        parts = [int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        return np.dot(
            [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts],
            [0.2126, 0.7152, 0.0722],
        )

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_names_and_roles_for_a_screen_reader(opened, place):
    page = opened(place)
    assert page.get_by_role("grid").count() == 1
    assert page.get_by_role("gridcell").count() == 32
    assert (
        page.get_by_role("gridcell").first.get_attribute("aria-label").startswith("layer 0 head 0")
    )
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, [role=img], [role=tab], [role=region], canvas')].filter((e) =>"
        " !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length"
    )
    assert unnamed == 0


def test_a_result_of_the_baseline_alone(opened, toy, prompts, tmp_path):
    result = ma.run(toy, prompts[:4])
    page = opened(results_page([result], tmp_path / "page.html", []))
    assert page.locator(".picture").count() == 0
    assert page.locator("#show option").all_text_contents() == ["value in the condition"]
    at(page, 0, 1).hover()
    expected = result.heads("received", None).set_index(["layer", "head"]).received.loc[(0, 1)]
    assert float(
        re.search(r": ([\d.]+) \[", page.locator("#tip").inner_text())[1]
    ) == pytest.approx(expected, rel=0.006)


def test_in_a_notebook_every_head_is_a_click_away(opened, result, tmp_path):
    view = ma.browse(result)
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><body>{view._repr_html_()}</body>", encoding="utf-8"
    )
    inside = opened(tmp_path / "notebook.html").frame_locator("iframe")
    inside.locator("#head-11").click()
    assert inside.locator("#room h3").inner_text() == "Layer 1, head 3"
