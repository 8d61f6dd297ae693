"""Pages opened in Chromium with the network cut: one browser and one tab, as a new tab costs more than a page."""

import pytest

from tests.conftest import launched

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
    """Opens a file; fails the test if the page ever asks for anything else or reports an error."""
    page, asked, errors = tab
    page.goto("about:blank")
    page.mouse.move(0, 0)
    asked.clear()
    errors.clear()

    def nothing_else_happened():
        others = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        assert not others, f"the page asked for {others}"
        assert not errors, errors

    def open_file(path, width=1250, height=900, theme="light", hash=""):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="screen", color_scheme=theme)
        page.goto(f"{path.as_uri()}{hash and '#' + hash}")
        if page.locator("#main").count():  # a page of ours says when its figures are drawn
            page.wait_for_function("document.documentElement.dataset.ready")
        page.evaluate(PAINTED)
        nothing_else_happened()
        return page

    yield open_file
    nothing_else_happened()
