"""The page in a real browser, the network cut: nothing is asked for, nothing fails, something is drawn."""

import shutil

import pytest

import mechattn as ma
from mechattn.page import result_page, result_sections, view_section, write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]

STRANGE = "</script><script>document.title='broken'</script> 🙂 \u200b שלום & <b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """Opens a file; fails the test if the page asks for anything else or reports an error."""
    asked, errors = [], []
    context = browser.new_context(offline=True, viewport={"width": 1250, "height": 900})
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)

    def open_file(path):
        page.goto(path.as_uri())
        page.wait_for_timeout(1500)
        others = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        assert not others, f"the page asked for {others}"
        assert not errors, errors
        return page

    yield open_file
    context.close()


def test_the_page_opens_offline(opened, toy, slash_result, tmp_path):
    view = ma.pattern(toy, "Tom has 3 apples.", 0, [0, 1], ma.MeaninglessTokens(count=5))
    sections = [*result_sections(slash_result, 0, 3), view_section(view, "One prompt", "A note.")]
    page = opened(
        write_page(tmp_path / "index.html", "A title", "A subtitle", [slash_result], sections, "mechattn test")
    )
    assert page.locator(".verdict").inner_text().startswith("toy:llama (toy, 1.0 M parameters): Question attention")
    assert page.locator(".tokens .inserted").count() == 55 + 1  # the key names the segment too
    assert page.locator(".js-plotly-plot .scatterlayer path.js-line").count() >= 9
    assert "L0H1" in page.locator(".view").inner_text()
    assert len(set(page.screenshot())) > 50


def test_hovering_tells_the_number(opened, slash_result, tmp_path):
    page = opened(result_page(slash_result, tmp_path / "index.html", 0, [1, 2, 3]))
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(500)
    assert "n = 12" in page.locator(".hoverlayer").text_content()


def test_strange_tokens_do_not_break_the_page(opened, toy, tmp_path):
    view = ma.pattern(toy, STRANGE, 0, [0])
    view.save(tmp_path / "view.html")
    page = opened(tmp_path / "view.html")
    assert page.title() == "Attention"
    assert "L0H0" in page.locator(".view").inner_text()
    result = ma.run(toy, [STRANGE + f" {i}" for i in range(4)], {"slash": ma.MeaninglessTokens()}, progress=False)
    page = opened(result_page(result, tmp_path / "index.html", 0, [0]))
    assert page.title().startswith("mechattn")
    assert page.locator("b").count() == 0


def test_a_page_that_asks_the_network_would_be_noticed(opened, tmp_path):
    path = tmp_path / "asks.html"
    path.write_text("<!doctype html><script src='https://cdn.example.org/plotly.js'></script>")
    with pytest.raises(AssertionError, match="asked for"):
        opened(path)


def test_the_explorer_of_one_prompt(opened, tmp_path):
    """Figures 1 and 2: tokens are escaped, a slider changes the layer, hovering shows the numbers."""
    falcon = ma.load_model("toy:falcon")
    view = ma.explore(falcon, "Tom has <b>3</b> apples & 2 pears. How many?")
    view.save(tmp_path / "explore.html")
    page = opened(tmp_path / "explore.html")
    assert page.title() == "Attention"
    title = page.locator("[data-part=map] .gtitle")
    assert title.text_content() == "Figure 1: attention map, layer 0, head 0"
    before = page.evaluate("document.querySelector('[data-part=map]').data[0].z[9][3]")
    page.locator("[data-part=layer]").fill("2")
    page.locator("[data-part=head]").select_option(value="3")
    shows(page, "[data-part=map] .gtitle", "Figure 1: attention map, layer 2, head 3")
    assert page.evaluate("document.querySelector('[data-part=map]').data[0].z[9][3]") != before
    hover(page, "[data-part=map]")
    words = page.locator("[data-part=map] .hoverlayer").text_content()
    assert "p = " in words
    assert "ALiBi" in words
    page.locator("[data-part=rank]").select_option(index=1)
    shows(page, "[data-part=parts] .gtitle", "target of rank 2")
    count = page.evaluate("document.querySelector('[data-part=parts]').data[0].a.length")
    tokens = page.evaluate("document.querySelector('[data-part=course]').data[0].x.length")
    assert count == tokens - 1
    shares = page.evaluate(
        "(() => { const d = document.querySelector('[data-part=parts]').data[0];"
        " return d.a.map((x, i) => x + d.b[i] + d.c[i]); })()"
    )
    assert all(abs(share - 1) < 1e-6 for share in shares)


def test_figures_of_layers_and_updates(opened, toy, prompts, tmp_path):
    """Figures 4 and 9: a tooltip that names the head, a slider that shows another layer."""
    from mechattn.page import results_page

    slash = {"slash": ma.MeaninglessTokens("/", 10)}
    result = ma.run(toy, prompts[:4], slash, [ma.AttentionFocus(), ma.HeadUpdates()], progress=False)
    drawn = [(ma.render.heads_by_layer, {}), (ma.render.update_map, {"condition": "slash"})]
    page = opened(results_page([result], tmp_path / "index.html", drawn))
    plots = page.locator(".js-plotly-plot")
    assert plots.count() == 2
    point = plots.nth(0).locator(".scatterlayer .point").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(500)
    assert "head" in plots.nth(0).locator(".hoverlayer").text_content()
    step = plots.nth(1).locator(".slider-rail-touch-rect")
    step.scroll_into_view_if_needed()
    box = step.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    last = result["head_updates"].sizes["layer"] - 1
    shows(page, ".js-plotly-plot:has(.slider-container) .gtitle", f"layer {last}")
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot')[1].data.map(t => t.visible)").index(True) == last


def shows(page, selector, words):
    """Wait until an element holds these words; fail if it never does."""
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector).textContent.includes(words)", arg=[selector, words]
    )


def hover(page, selector):
    """Move the mouse to a point in the lower left of a plot, where the map is."""
    place = page.locator(f"{selector} .nsewdrag").first
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    for part in (0.2, 0.22):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + 0.7 * box["height"])
        page.wait_for_timeout(400)
