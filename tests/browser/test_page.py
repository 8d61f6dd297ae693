"""The page in a real browser, the network cut: nothing is asked for, nothing fails, something is drawn."""

import csv

import numpy as np
import pytest

import mechattn as ma
from mechattn.pages.page import page as result_page
from mechattn.pages.page import results_page
from mechattn.render.words import percent

ALIGNED = "Layer 0 head 2, original token position"  # the panel by its title and its axis
STRANGE = "</script><script>document.title='broken'</script> 🙂 \u200b שלום & <b>bold</b>"


@pytest.fixture(scope="module")
def place(slash_result, tmp_path_factory):
    """A page with a figure of two heads, which no test changes."""
    return result_page(slash_result, tmp_path_factory.mktemp("page") / "index.html", 0, [2, 3])


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


def test_several_models_have_their_verdicts_in_a_table(
    opened, toy, prompts, slash_result, tmp_path
):
    few = ma.run(toy, prompts[:2], {"slash": ma.MeaninglessTokens()})
    place = results_page([slash_result, slash_result, few], tmp_path / "page.html", [])
    page = opened(place)
    page.locator(".numbers summary").click()
    rows = [row.split("\t") for row in page.locator(".numbers tbody").inner_text().splitlines()]
    assert rows[0] == rows[1]
    verdict = slash_result.verdict("slash")
    words = ma.render.verdict_words(slash_result)
    model, condition, change, null, heads, count = rows[0]
    assert (model, condition, count) == (
        "toy:llama (toy, 1.0 M parameters)",
        "slash",
        str(verdict.n),
    )
    assert f"received by the question changes by {change} over" in words
    assert null == f"{percent(verdict.null.estimate)} (dilution)"
    compared = slash_result.compare("slash")
    marked = (compared.q_difference < 0.05) & (compared.change.abs() > 0.05)
    falls, rises = ((marked & (sign * compared.change > 0)).sum() for sign in (-1, 1))
    assert heads == f"{falls} and {rises} of 32"
    assert rows[2][2].startswith("no verdict, since"), "two prompts have no interval"


def test_a_request_is_forbidden_by_the_page_itself(browser, place):
    """Whatever a script on it would ask for, the content policy refuses; this tab is not offline."""
    page = browser.new_page()
    page.goto(place.as_uri())
    refused = page.evaluate(
        "fetch('https://example.org/').then(() => 'answered', (error) => error.name)"
    )
    assert refused == "TypeError"
    assert page.evaluate(
        "new Promise((done) => { document.addEventListener('securitypolicyviolation', (e) => done(e.blockedURI));"
        " new Image().src = 'https://example.org/x.png'; })"
    ).startswith("https://example.org")
    page.close()


def test_the_numbers_behind_a_figure_are_a_hover_or_a_click_away(
    opened, place, slash_result, tmp_path
):
    page = opened(place)
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
    assert all(float(r["low"]) < float(r["y"]) < float(r["high"]) for r in line)
    assert len({(r["series"], r["panel"], r["x"]) for r in rows}) == len(rows), (
        "a band is no series"
    )
    with page.expect_download() as caught:
        figure.get_by_role("button", name="SVG").click()
    caught.value.save_as(tmp_path / "figure.svg")
    drawing = (tmp_path / "figure.svg").read_text()
    assert drawing.startswith("<svg")
    assert "original token position" in drawing
    figure.get_by_text("Cite", exact=True).click()
    assert "@software{mechattn" in figure.locator("pre").inner_text()
    figure.get_by_text("How it was made", exact=True).click()
    assert "MeaninglessTokens(text='/'" in figure.locator(".actions table").inner_text()


def test_strange_tokens_do_not_break_the_page(opened, toy, tmp_path):
    view = ma.pattern(toy, STRANGE, 0, [0])
    view.save(tmp_path / "view.html")
    page = opened(tmp_path / "view.html")
    assert page.title() == "Attention"
    page.locator(".view", has_text="L0H0").wait_for()
    result = ma.run(toy, [STRANGE + f" {i}" for i in range(4)], {"slash": ma.MeaninglessTokens()})
    page = opened(result_page(result, tmp_path / "index.html", 0, [0]))
    assert page.title().startswith("mechattn")
    assert page.locator("b").count() == 0
    ma.render.received_text(result_of_one(toy), 0).save(tmp_path / "text.html")
    page = opened(tmp_path / "text.html")
    assert page.title() == "Attention"
    assert page.locator("b").count() == 0


def result_of_one(toy):
    return ma.run(toy, STRANGE, {"slash": ma.MeaninglessTokens()})


def test_light_dark_and_a_phone(opened, place):
    page = opened(place, 390, 844, "dark")
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


def test_the_keyboard_reaches_everything(opened, place):
    page = opened(place)
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


def test_a_page_is_small_beside_its_scripts(toy, prompts, tmp_path):
    """A quarter of the 12 MB that four models may take, scripts not counted."""
    from mechattn.commands.figures import make_figures
    from mechattn.pages.embedded import packed_plotly
    from tests.figures_config import figures_config

    page = make_figures(figures_config(tmp_path, ["toy:llama"], "word-problems", 12, 0, [2, 3, 4]))
    text = page.read_text()
    script = packed_plotly()
    assert text.count(script) == 1
    assert len(script) < 3e6
    assert len(text.encode()) - len(script) < 3e6
    assert "(“slash” relative to “sentence”: " in text


def test_a_view_in_the_frame_of_a_notebook(opened, toy, tmp_path):
    """What ``_repr_html_`` gives, in a page as JupyterLab and VS Code put it into theirs."""
    view = ma.pattern(toy, "Tom has 3 apples.", 0, [0, 1])
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><body>{view._repr_html_()}</body>", encoding="utf-8"
    )
    page = opened(tmp_path / "notebook.html")
    inside = page.frame_locator("iframe")
    inside.get_by_text("L0H1").first.wait_for()
    assert "toy:llama" in inside.locator("figcaption").inner_text()


def test_tokens_of_other_scripts(opened, slash_result, tmp_path):
    """Emoji, right to left, zero width, and what would end a script, each as one token."""
    words = ["🙂", "שלום", "مرحبا", "\u200b", "</script>", "\u202e", "日本", "\n"]
    sequences = slash_result["sequences"].copy(deep=True)
    sequences["first_prompt_text"][:, : len(words)] = np.array(words, dtype=np.dtypes.StringDType())
    result = ma.Result(
        dict(slash_result.datasets) | {"sequences": sequences}, slash_result.provenance
    )
    page = opened(result_page(result, tmp_path / "index.html", 0, [1]))
    unfold(page)
    shown = page.locator("details.section .tokens").nth(1).locator("span").all_text_contents()
    assert shown[: len(words)] == ["🙂", "שלום", "مرحبا", "·", "</script>", "\u202e", "日本", "⏎"]
    ma.render.received_text(result, 0).save(tmp_path / "text.html")
    page = opened(tmp_path / "text.html")
    assert page.locator("figure").first.locator("span").all_text_contents()[:4] == [
        "🙂",
        "שלום",
        "مرحبا",
        "·",
    ]


def test_a_page_that_asks_the_network_would_be_noticed(opened, tab, tmp_path):
    path = tmp_path / "asks.html"
    path.write_text("<!doctype html><script src='https://cdn.example.org/plotly.js'></script>")
    with pytest.raises(AssertionError, match="asked for"):
        opened(path)
    tab[1].clear()
    tab[2].clear()
