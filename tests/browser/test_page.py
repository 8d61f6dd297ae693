"""The page in a real browser, the network cut: nothing is asked for, nothing fails, something is drawn."""

import csv
import re
from itertools import pairwise

import numpy as np
import pytest

import mechattn as ma
from mechattn.pages.embedded import packed_plotly
from tests.browser.conftest import OTHER_SCRIPTS, drawn, unfold

ALIGNED = "Layer 0 head 2, original token position"  # the panel by its title and its axis
STRANGE = "</script><script>document.title='broken'</script> 🙂 \u200b שלום & <b>bold</b>"


@pytest.fixture
def page(opened, slash_page):
    """The page, with what was chosen on it undone."""
    return opened(slash_page, again=True)


def shown_share(words):
    return float(words.replace("−", "-").replace("\u00a0%", "")) / 100


def test_the_first_screen_draws_the_verdicts_numbers(page, slash_result):
    verdict = slash_result.verdict("slash")
    assert page.evaluate("document.querySelector('.picture').getBoundingClientRect().bottom") < 900
    ticks = page.locator(".axis .track i")
    ends = [
        (ticks.nth(i).inner_text(), ticks.nth(i).bounding_box()) for i in (0, ticks.count() - 1)
    ]
    (low, left), (high, right) = [
        (shown_share(words), box["x"] + box["width"] / 2) for words, box in ends
    ]

    def value(name):
        box = page.locator(f".row:not(.axis) i.{name}").bounding_box()
        return low + (high - low) * (box["x"] + box["width"] / 2 - left) / (right - left)

    assert value("measured") == pytest.approx(float(verdict.change.estimate), abs=0.002)
    words = page.locator(".row .words").first.inner_text().split(" [")[0]
    assert shown_share(words) == pytest.approx(float(verdict.change.estimate), abs=5.1e-4)


def test_tokens_of_other_scripts(page):
    """Emoji, right to left, zero width, and what would end a script, each as one token."""
    unfold(page)
    tokens = page.locator("details.section .tokens").nth(1).locator("span")
    shown = [{"\u200b": "·", "\n": "⏎"}.get(word, word) for word in OTHER_SCRIPTS]
    assert tokens.all_text_contents()[: len(shown)] == shown


def test_a_request_is_forbidden_by_the_page_itself(page, tab):
    """Whatever a script on it would ask for, the content policy refuses."""
    address = "https://example.org/x.png"
    blocked = page.evaluate(
        "(address) => new Promise((done) => { document.addEventListener('securitypolicyviolation',"
        " (event) => done(event.blockedURI)); new Image().src = address; })",
        address,
    )
    assert blocked == address
    _, asked, errors = tab
    assert all("Content Security Policy" in error for error in errors)
    asked.clear()
    errors.clear()


def test_the_curves_of_a_head_as_csv_and_svg(page, slash_result, tmp_path):
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


def test_figures_show_their_numbers_on_hover_and_click(page, slash_result, tmp_path):
    unfold(page)
    page.locator("#lead-1 .nsewdrag").first.scroll_into_view_if_needed()
    box = page.locator("#lead-1 .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#lead-1 .hoverlayer", has_text="n = 12").wait_for()
    figure = page.locator("#lead-1 > figure")
    with page.expect_download() as caught:
        figure.get_by_role("button", name="CSV").click()
    caught.value.save_as(tmp_path / "data.csv")
    rows = list(csv.DictReader((tmp_path / "data.csv").open()))
    line = [row for row in rows if row["series"] == "with slash" and row["panel"] == ALIGNED]
    at = slash_result["received_attention"].sel(condition="slash", layer=0, head=2)
    shown = [int(row["x"]) for row in line]
    np.testing.assert_allclose(
        [float(r["y"]) for r in line], at.received_by_origin.values[shown], rtol=1e-9
    )
    assert [r["more"] for r in line] == [
        f"n={int(n)}" for n in at.received_by_origin_n.values[shown]
    ]
    assert len({(r["series"], r["panel"], r["x"]) for r in rows}) == len(rows), (
        "a band is no series"
    )
    with page.expect_download() as caught:
        figure.get_by_role("button", name="SVG").click()
    caught.value.save_as(tmp_path / "figure.svg")
    assert "original token position" in (tmp_path / "figure.svg").read_text()
    figure.get_by_text("Cite", exact=True).click()
    assert "@software{mechattn" in figure.locator("pre").inner_text()
    figure.get_by_text("How it was made", exact=True).click()
    assert "MeaninglessTokens(text='/'" in figure.locator(".actions table").inner_text()


def test_printed_pages_keep_colours_and_names(page):
    page.emulate_media(media="print")
    for mark in (".picture i.measured", ".whisker", ".scale i"):
        exact = page.locator(mark).first.evaluate("(one) => getComputedStyle(one).printColorAdjust")
        assert exact == "exact", mark
    assert page.locator("#map text", has_text=re.compile("^layer$")).count() == 1
    assert page.locator("#map text", has_text=re.compile("^head$")).count() == 1
    assert page.locator("#map-title").is_visible()
    assert not page.locator("#condition").is_visible()


def test_paper_has_its_own_width_and_nothing_is_clipped(page):
    page.evaluate(
        "document.querySelectorAll('#scatter-part, #room details, .numbers').forEach((d) => { d.open = true; })"
    )
    page.locator("#scatter svg").wait_for()
    wide = "(svg) => [svg.viewBox.baseVal.width, svg.getBoundingClientRect().width]"
    before = page.locator("#scatter svg").evaluate(wide)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")

    for name in ("#map", "#scatter", "#room"):
        drawn, shown = page.locator(f"{name} svg").first.evaluate(wide)
        assert drawn == pytest.approx(shown, rel=0.01), f"{name}: words as large as on the screen"

    over = page.evaluate(
        "(() => { const { right } = document.body.getBoundingClientRect(); return [...document.querySelectorAll('main :not(.tokens span)')]"
        ".filter((one) => one.getBoundingClientRect().right > right + 1).map((one) => one.outerHTML.slice(0, 80)); })()"
    )
    assert not over
    assert page.evaluate("document.body.getBoundingClientRect().width") == 700, (
        "A4 and Letter with their margins"
    )
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("#scatter svg").evaluate(wide) == before


def test_the_keyboard_reaches_everything(opened, slash_page):
    page = opened(slash_page)
    reached = []
    unfold(page)

    for _ in range(100):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))

    for name in (
        "To the results",
        "◐",
        "CSV",
        "SVG",
        "Cite",
        "How it was made",
        "How this was made: v",
        "More figures and vie",
    ):
        assert name in reached, reached

    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_without_scripts_nothing_is_empty(browser, slash_page):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(slash_page.as_uri())
    assert page.locator(".verdict").is_visible()
    assert page.locator(".picture").is_visible()
    for gone in ("#condition", "#room", "#theme", "#loading", "#heads-csv"):
        assert not page.locator(gone).is_visible(), gone
    assert page.locator(
        "noscript p", has_text="drawn by scripts, which this browser does not run"
    ).is_visible()
    for empty in page.locator("select:visible").all():
        assert empty.locator("option").count(), "a choice with nothing to choose"
    context.close()


def test_light_dark_and_a_phone(opened, slash_page):
    page = opened(slash_page, 390, 844, "dark")
    page.evaluate("document.getElementById('map').scrollIntoView()")
    page.locator("#head-2").hover()
    tip = page.locator("#tip").bounding_box()
    heads = page.locator("#map").bounding_box()
    assert tip["height"] > 10
    assert tip["y"] >= heads["y"] + heads["height"], "a tip leaves the map visible"
    assert tip["y"] + tip["height"] <= 845

    unfold(page)
    ink = "getComputedStyle(document.querySelector('.js-plotly-plot .gtitle')).fill"
    line = "getComputedStyle(document.querySelector('.scatterlayer .js-line[style*=\"1.6px\"]')).stroke"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
    assert page.evaluate(ink) == "rgb(230, 230, 227)"
    assert page.evaluate(line) == "rgb(86, 180, 233)", "blue, lighter on the dark ground"
    assert page.evaluate("document.documentElement.scrollWidth") == 390, (
        "the page doesn't scroll sideways"
    )
    assert page.locator(".modebar").count() == 0, "plotly's bar would lie on the small print"
    page.locator("#theme").click()
    drawn(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(line) == "rgb(0, 114, 178)"


def test_figures_fit_a_phone(opened, slash_page):
    """Panels go below each other, and no words of a figure run over its edge."""
    page = opened(slash_page, 390, 844, again=True)
    unfold(page)
    for plot in page.locator(".plot").all():
        assert plot.evaluate(
            "(one) => one.parentElement.scrollWidth <= one.parentElement.clientWidth"
        )
        box = plot.bounding_box()
        edges = plot.locator(
            ".gtitle, .annotation-text, .legendtext, .xtitle, .ytitle"
        ).evaluate_all(
            "(all) => all.map((one) => { const box = one.getBoundingClientRect(); return [box.left, box.right]; })"
        )
        assert min(left for left, _ in edges) >= box["x"] - 1
        assert max(right for _, right in edges) <= box["x"] + box["width"] + 1

    first = page.locator(".plot").first
    domains = first.evaluate(
        "(one) => Object.keys(one.layout).filter((n) => /^xaxis/.test(n)).map((n) => one.layout[n].domain)"
    )
    assert domains == [[0, 1]] * 4
    heights = first.evaluate(
        "(one) => Object.keys(one.layout).filter((n) => /^yaxis/.test(n)).map((n) => one.layout[n].domain)"
    )
    ends = sorted(heights)
    assert all(a[1] < b[0] for a, b in pairwise(ends)), "no panel covers another"
    fills = first.locator(".gtitle .line").evaluate_all(
        "(all) => all.map((one) => getComputedStyle(one).fill)"
    )
    assert fills, "a title of several lines"
    assert "none" not in fills, "and its words are seen"


def test_a_page_is_small_beside_its_scripts(slash_page):
    """A quarter of the 12 MB that four models may take, scripts not counted."""
    text = slash_page.read_text(encoding="utf-8")
    script = packed_plotly()
    assert text.count(script) == 1
    assert len(script) < 3e6
    assert len(text.encode()) - len(script) < 3e6


def test_strange_tokens_do_not_break_the_page(opened, toy, tmp_path):
    view = ma.pattern(toy, STRANGE, 0, [0])
    view.save(tmp_path / "view.html")
    page = opened(tmp_path / "view.html")
    assert page.title() == "Attention"
    page.locator(".view", has_text="L0H0").wait_for()
    result = ma.run(toy, STRANGE, {"slash": ma.MeaninglessTokens()})
    ma.render.received_text(result, 0).save(tmp_path / "text.html")
    page = opened(tmp_path / "text.html")
    assert page.title() == "Attention"
    assert page.locator("b").count() == 0


def test_a_page_that_asks_the_network_would_be_noticed(opened, tab, tmp_path):
    path = tmp_path / "asks.html"
    path.write_text("<!doctype html><script src='https://cdn.example.org/plotly.js'></script>")
    with pytest.raises(AssertionError, match="asked for"):
        opened(path)
    tab[1].clear()
    tab[2].clear()
