"""Links into the page: what they show, what they refuse, the steps back, and a page before and without its scripts."""

import re
from itertools import pairwise

import pytest

import mechattn as ma
from mechattn.pages.page import page as result_page
from mechattn.pages.page import results_page


@pytest.fixture(scope="module")
def place(toy, prompts, tmp_path_factory):
    conditions = {"slash": ma.MeaninglessTokens("/", 10), "sentence": ma.RandomSentence(10)}
    result = ma.run(
        toy, prompts[:6], conditions, [ma.ReceivedAttention(), ma.analyses.AttentionFocus()]
    )
    return result_page(result, tmp_path_factory.mktemp("links") / "page.html", 0, [2])


def follow(page, place, hash):
    page.goto("about:blank")
    page.goto(f"{place.as_uri()}#{hash}")
    page.wait_for_function("document.documentElement.dataset.ready")


def seen(page, selector):
    box = page.locator(selector).bounding_box()
    return -1 <= box["y"] < 800


def test_a_link_to_a_head_goes_to_its_room(opened, place):
    page = opened(place, 390, 844)
    follow(page, place, "layer=3&head=7")
    assert seen(page, "#room h3")
    assert page.locator("#room h3").inner_text() == "Layer 3, head 7"
    assert page.locator("#refused").inner_text() == ""
    follow(page, place, "head=L2H5")
    assert page.locator("#room h3").inner_text() == "Layer 2, head 5"
    follow(page, place, "")
    assert not seen(page, "#room h3"), (
        "where nothing is asked for, the page starts at its top (control)"
    )


@pytest.mark.parametrize(
    ("hash", "words"),
    [
        ("layer=9&head=1", "layer 9, head 1 (it has layers 0, 1, 2, 3 and 8 heads)"),
        ("condition=slashes&head=1&layer=1", "condition “slashes”"),
        ("section-99", "no part “section-99”"),
    ],
)
def test_a_wrong_link_is_refused_aloud(opened, place, hash, words):
    page = opened(place, hash=hash)
    alert = page.get_by_role("alert")
    assert words in alert.inner_text()
    assert page.locator("#room h3").is_visible(), "and the page shows what it has"
    page.locator("#condition").select_option("sentence")
    assert alert.inner_text() == "", "until something is chosen"


def test_choices_are_steps_of_the_history(opened, place):
    page = opened(place)
    room = page.locator("#room h3")
    start = page.locator("#room h3").inner_text()
    page.locator("#head-9").click()
    page.locator("#quantity").select_option("entropy")
    page.locator("#map svg").focus()

    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert room.inner_text() == "Layer 1, head 4"
    page.go_back()
    assert room.inner_text() == "Layer 1, head 1", "a walk with the arrow keys is one step"
    assert page.locator("#quantity").input_value() == "entropy"
    page.go_back()
    assert page.locator("#quantity").input_value() == "received"
    page.go_back()
    assert room.inner_text() == start
    page.go_forward()
    assert room.inner_text() == "Layer 1, head 1"


def test_the_link_that_is_copied_shows_the_view(opened, place):
    page = opened(place)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#head-13").click()
    page.locator("#condition").select_option("sentence")
    page.locator("#show").select_option("change")
    title = page.locator("#map-title").inner_text()
    page.get_by_role("button", name="copy link").click()
    page.get_by_role("button", name="copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    follow(page, place, link.partition("#")[2])
    assert page.locator("#map-title").inner_text() == title
    assert page.locator("#room h3").inner_text() == "Layer 1, head 5"


def test_without_scripts_nothing_is_empty(browser, place):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(place.as_uri())
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


def test_before_its_numbers_are_unpacked_the_page_says_so(browser, place):
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.add_init_script("const real = Response.prototype.text; window.go = new Promise((done) => { window.let_go = done; });"
                         "Response.prototype.text = async function () { await window.go; return real.call(this); };")  # fmt: skip
    page.goto(place.as_uri())
    assert page.locator("#loading").is_visible()
    assert not page.locator("#condition").is_visible()
    page.evaluate("window.let_go()")
    page.wait_for_function("document.documentElement.dataset.ready")
    assert not page.locator("#loading").is_visible()
    assert page.locator("#condition").is_visible()
    context.close()


def test_a_tip_leaves_the_map_visible_on_a_phone(browser, place):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, offline=True
    )
    page = context.new_page()
    page.goto(place.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    page.locator("#map").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('map').scrollIntoView()")
    page.locator("#head-2").hover()
    tip = page.locator("#tip").bounding_box()
    drawn = page.locator("#map").bounding_box()
    assert tip["height"] > 10
    assert tip["y"] >= drawn["y"] + drawn["height"]
    assert tip["y"] + tip["height"] <= 845
    context.close()


def test_on_paper_marks_keep_their_colours_and_the_map_its_names(opened, place):
    page = opened(place)
    page.emulate_media(media="print")
    for mark in (".picture i.measured", ".whisker", ".scale i"):
        exact = page.locator(mark).first.evaluate("(one) => getComputedStyle(one).printColorAdjust")
        assert exact == "exact", mark
    assert page.locator("#map text", has_text=re.compile("^layer$")).count() == 1
    assert page.locator("#map text", has_text=re.compile("^head$")).count() == 1
    assert page.locator("#map-title").is_visible()
    assert not page.locator("#condition").is_visible()


def test_paper_has_its_own_width_and_nothing_is_clipped(opened, place):
    page = opened(place)
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
        "(() => { const { right } = document.body.getBoundingClientRect(); return [...document.querySelectorAll('main *')]"
        ".filter((one) => one.getBoundingClientRect().right > right + 1).map((one) => one.outerHTML.slice(0, 80)); })()"
    )
    assert not over
    assert page.evaluate("document.body.getBoundingClientRect().width") == 700, (
        "A4 and Letter with their margins"
    )
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("#scatter svg").evaluate(wide) == before


def test_figures_fit_a_phone(opened, toy, prompts, tmp_path):
    """Panels go below each other, and no words of a figure run over its edge."""
    result = ma.run(toy, prompts[:6], {"slash": ma.MeaninglessTokens("/", 10)}, keep="prompts")
    figures = [
        (ma.render.received_attention, {"layer": 0, "heads": [1, 2, 3]}),
        (ma.render.change_map, {}),
    ]
    page = opened(results_page([result], tmp_path / "page.html", figures), 390, 844)
    page.evaluate(
        "document.querySelectorAll('#more, .section').forEach((one) => { one.open = true; })"
    )
    page.wait_for_function(
        "[...document.querySelectorAll('.section > figure')].every((one) => one.dataset.drawn)"
    )

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
    assert domains == [[0, 1]] * 6
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
