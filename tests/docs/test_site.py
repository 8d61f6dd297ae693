"""The built site: every link leads somewhere, nothing is asked of the network, pages are small and draw what they hold.

``make docs`` builds it. Without it these tests are skipped with the reason, but fail in CI (CI=true).
"""

import inspect
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

MIB = 2**20


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given.get("href", ""))
        elif given.get("src"):
            self.loads.append(given["src"])
        if given.get("srcdoc"):
            self.loads += Page(given["srcdoc"]).loads


@cache
def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def broken(site: Path) -> tuple[list[str], set[str]]:
    """Links and loaded files that lead nowhere, and the external links, which are not followed."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    faults, external = [], set()
    for path, page in pages.items():
        if path.name == "404.html":  # served from any folder, so its links begin at the root
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                external.add(link)
                continue
            if parts.scheme in ("data", "javascript", "blob"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                faults.append(f"{path.relative_to(site)}: {link}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                faults.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    return faults, external


def test_every_link_leads_somewhere(site):
    faults, external = broken(site)
    assert not faults, "\n".join(faults)
    assert external
    print(*sorted(external), sep="\n")


def test_a_link_to_nowhere_is_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<h2 id="here">x</h2><a href="other.html#there">a</a><a href="#here">b</a>'
    )
    (tmp_path / "other.html").write_text(
        '<a href="gone.html">c</a><img src="gone.png"><a href="index.html#here">d</a>'
    )
    assert broken(tmp_path)[0] == [
        "index.html: other.html#there (no such anchor)",
        "other.html: gone.html",
        "other.html: gone.png",
    ]


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        elsewhere = [url for url in read(path).loads if re.match(r"(https?:)?//", url)]
        assert not elsewhere, (path, elsewhere)
    for path in [*site.rglob("*.css"), *(site / "assets" / "javascripts").rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import\s+['\"]?(https?:)?//", text), path
        assert not re.search(r"unpkg\.com|cdnjs|jsdelivr|cdn\.plot|fonts\.g", text), path


def test_no_page_names_a_path_of_its_machine(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/tmp/|/home/\w|/root/|ipykernel_", text), path


def test_pages_are_small(site):
    for path in site.rglob("*.html"):
        assert path.stat().st_size < 3 * MIB, path
    assert sum(path.stat().st_size for path in (site / "assets" / "katex").rglob("*")) < 1.5 * MIB
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 40 * MIB


@pytest.fixture
def opened(browser, site):
    """Opens a page of the site, the network cut; fails if it asks for anything else or reports an error."""
    asked, errors = [], []
    context = browser.new_context(offline=True, viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )

    def open_page(name):
        page.goto((site / name).as_uri())
        page.wait_for_function("document.readyState === 'complete'")
        return page

    yield open_page
    context.close()
    elsewhere = [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not elsewhere, elsewhere
    assert not errors, errors


def test_home(opened):
    page = opened("index.html")
    assert page.locator("h1").first.inner_text().startswith("mechattn")
    assert page.locator("nav a").count() > 50


def test_formulas_are_set(opened):
    page = opened("concepts/affine-shift.html")
    page.wait_for_function("document.querySelectorAll('.katex').length >= 10")
    assert page.locator(".katex-error").count() == 0
    shown = page.locator("article").inner_text()
    assert "\\(" not in shown
    assert "$" not in shown
    page.wait_for_function(
        "[...document.fonts].some(font => font.status == 'loaded' && font.family.includes('KaTeX'))"
    )


TUTORIALS = {
    "redistribution": 2,
    "controls": 1,
    "arm": 2,
    "focus": 3,
    "your-model": 0,
    "cluster": 0,
}


def test_tutorials_were_run_and_drew_their_figures(opened):
    warnings = '[data-mime-type="application/vnd.jupyter.stderr"]'
    for name, figures in TUTORIALS.items():
        page = opened(f"tutorials/{name}.html")
        drawn = "document.querySelectorAll('.js-plotly-plot .main-svg').length"
        page.wait_for_function(f"{drawn} >= {figures}")
        assert page.locator(".js-plotly-plot").count() == figures, name
        assert page.locator(".jp-OutputArea-output pre").count() > 0, name
        assert "What it says" in page.locator("article").inner_text(), name
        assert page.locator(".katex-error").count() == 0, name
        assert page.locator(warnings).count() == 0, f"{name}: a warning or a traceback"


def test_the_gallery_draws_every_figure(opened):
    page = opened("gallery.html")
    page.wait_for_function(
        "document.querySelectorAll('.js-plotly-plot .main-svg').length >= 29", timeout=60_000
    )
    assert page.locator(".js-plotly-plot").count() == 29
    assert page.locator("iframe").count() == 7
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300


@pytest.mark.parametrize(
    ("scheme", "ink"), [("light", "rgb(51, 58, 68)"), ("dark", "rgb(217, 220, 227)")]
)
def test_a_picture_has_ink_that_can_be_seen(browser, site, scheme, ink):
    """As the file is opened; on a page the scheme of the page decides (assets/site.css)."""
    context = browser.new_context(offline=True, color_scheme=scheme)
    page = context.new_page()
    page.goto((site / "images" / "concepts" / "received-attention.svg").as_uri())
    assert page.evaluate("getComputedStyle(document.querySelector('text')).fill") == ink
    context.close()


def test_the_view_in_a_tutorial_draws(opened):
    """An attention map of circuitsvis, in a frame of its own."""
    frame = opened("tutorials/focus.html").frame_locator("iframe").first
    frame.locator("img, svg, canvas").first.wait_for(state="attached")
    assert frame.locator("body").inner_text().strip()


def test_the_api_has_signatures(opened):
    page = opened("api/models-and-prompts.html")
    assert page.locator(".doc-object").count() > 10
    assert "load_model" in page.locator("article").inner_text()


def headings(path: Path) -> set[str]:
    """The labels of a page's table of contents."""
    text = path.read_text(encoding="utf-8")
    nav = re.search(r'md-nav--secondary.*?(?=<div class="md-content")', text, re.DOTALL)[0]
    link = r'href="#[^"]*" class="md-nav__link">\s*<span[^>]*>(.*?)</span>'
    return {re.sub(r"<.*?>|&nbsp;|\s+", "", label) for label in re.findall(link, nav, re.DOTALL)}


def test_the_api_is_headed_by_names_that_users_type(site):
    import mechattn as ma

    plumbing = {
        "name",
        "options",
        "quantities",
        "problem",
        "start",
        "add",
        "values",
        "check",
        "acting",
    }
    labels = {path.stem: headings(path) for path in (site / "api").glob("*.html")}
    shown = set().union(*labels.values())
    assert not plumbing & shown
    assert {f"ma.{name}" for name in ma.__all__ if not inspect.ismodule(getattr(ma, name))} <= shown
    assert {"ma.analyses.HeadUpdates", "ma.interventions.ARM", "ma.render.changes"} <= shown
    assert {"compare", "verdict", "save"} <= labels["results"]


def test_an_analysis_is_described_with_its_shapes_first(opened):
    first = opened("api/analyses.html").locator("article .doc-class table").first.inner_text()
    assert "mass_by_segment" in first
    assert "prompt, condition, layer, head, segment" in first


def test_search_works_without_a_server(opened):
    page = opened("index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type("uniform attention", delay=20)
    found = "document.querySelectorAll('.md-search-result__item').length"
    page.wait_for_function(f"{found} > 3")


def test_a_phone_scrolls_down_only(browser, site):
    context = browser.new_context(
        offline=True, viewport={"width": 390, "height": 800}, color_scheme="dark"
    )
    page = context.new_page()
    for name in (
        "index.html",
        "concepts/affine-shift.html",
        "tutorials/arm.html",
        "families.html",
        "comparison.html",
    ):
        page.goto((site / name).as_uri())
        page.wait_for_function("document.readyState === 'complete'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    context.close()
