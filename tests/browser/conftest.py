"""Pages opened in Chromium with the network cut."""

import pytest


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
        if page.locator("#main").count():  # a page of ours says when its figures are drawn
            page.wait_for_function("document.documentElement.dataset.ready")
        page.wait_for_timeout(300 if page.locator("#main").count() else 1500)
        others = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        assert not others, f"the page asked for {others}"
        assert not errors, errors
        return page

    yield open_file
    context.close()
