"""Pages opened in Chromium with the network cut: one browser and one tab, as a new tab costs more than a page."""

from dataclasses import replace

import numpy as np
import pytest

import mechattn as ma
from mechattn.pages.page import results_page
from mechattn.pages.sections import HeadChoice
from tests.conftest import launched

OTHER_SCRIPTS = ["🙂", "שלום", "مرحبا", "\u200b", "</script>", "\u202e", "日本", "\n"]
PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="package")
def browser(chromium):
    with launched(chromium) as opened:
        yield opened


@pytest.fixture(scope="package")
def tab(browser):
    """A tab that tests use one after another, what it asks for, and the errors that it reports."""
    asked = []
    errors = []
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    yield page, asked, errors
    context.close()


@pytest.fixture
def opened(tab):
    """Opens a file; fails the test if the page ever asks for anything else or reports an error.

    With ``again``, a page that is open already is not loaded anew: what was chosen on it is undone. That is for tests
    that leave nothing else behind.
    """
    page, asked, errors = tab
    page.mouse.move(0, 0)
    asked.clear()
    errors.clear()

    def nothing_else_happened():
        others = [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
        assert not others, f"the page asked for {others}"
        assert not errors, errors

    def open_file(path, width=1250, height=900, theme="light", hash="", again=False):
        address = path.as_uri()
        page.emulate_media(media="screen", color_scheme=theme)
        is_open = page.url.partition("#")[0] == address
        if not (again and is_open and page.viewport_size["width"] == width):
            page.goto("about:blank")
            page.set_viewport_size({"width": width, "height": height})
            if hash:
                address += f"#{hash}"
            page.goto(address)
        else:
            page.goto(f"{address}#{hash}")
        if page.locator("#main").count():  # a page of ours says when its figures are drawn
            page.wait_for_function("document.documentElement.dataset.ready")
        page.evaluate(PAINTED)
        nothing_else_happened()
        return page

    yield open_file
    nothing_else_happened()


@pytest.fixture(scope="package")
def slash_page(slash_result, tmp_path_factory):
    """A page with the curves of two heads, a map and strange tokens, which no test changes."""
    sequences = slash_result["sequences"].copy(deep=True)
    words = np.array(OTHER_SCRIPTS, dtype=np.dtypes.StringDType())
    sequences["first_prompt_text"][:, : len(words)] = words
    shown = replace(slash_result, datasets=slash_result.datasets | {"sequences": sequences})
    path = tmp_path_factory.mktemp("slash") / "page.html"
    figures = [(ma.render.change_map, {})]
    return results_page([shown], path, figures, choice=HeadChoice(0, [2, 3]))


def unfold(page, title=""):
    """Open the figures that are folded, and wait until they are drawn in this light."""
    page.evaluate(
        "(title) => { document.getElementById('more').open = true; document.querySelectorAll('details.section').forEach("
        "(one) => { one.open = one.querySelector('summary').textContent.includes(title); }); }",
        title,
    )
    drawn(page)


def drawn(page):
    page.wait_for_function(
        "[...document.querySelectorAll('details.section[open] > figure')].every("
        "(one) => one.dataset.drawn === document.documentElement.dataset.theme)"
    )
