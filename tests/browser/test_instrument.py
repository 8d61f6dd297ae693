"""The map of heads, its rooms, patterns, scatter and table, in a real browser with the network cut."""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.pages.page import results_page
from mechattn.render.words import percent as percent_words
from tests.browser.conftest import unfold

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
LINK = '<a href="https://example.org/">here</a> <b>bold</b>'
PIXELS = """async (image) => { const i = new Image(); i.src = image.getAttribute('href'); await i.decode();
    const c = document.createElement('canvas'); [c.width, c.height] = [i.width, i.height];
    const p = c.getContext('2d'); p.drawImage(i, 0, 0);
    return [i.width, i.height, [...p.getImageData(0, 0, i.width, i.height).data].filter((_, at) => at % 4 === 3)]; }"""
OWN_FIGURE = (ma.render.received_attention, {"layer": 0, "heads": [0], "condition": LINK})


@pytest.fixture(scope="module")
def result(toy):
    """Two conditions, quantities with a null as a ratio, as a difference and without, attention maps; the first prompt,
    a condition's name and a unit are HTML.
    """
    texts = [f"{HOSTILE} Tom has 2 apples."] + [
        f"Tom has {i} apples and {name} has one more. How many apples do they have?"
        for i, name in enumerate("ABCDE")
    ]
    conditions = {"slash": ma.MeaninglessTokens("/", 6), LINK: ma.conditions.RandomTokens(6)}
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionFocus(), ma.analyses.AttentionMap()]
    measured = ma.run(toy, texts, conditions, analyses, keep="prompts")
    focus = measured["attention_focus"]
    names = [name for name in focus if name.startswith(("entropy", "self_share"))]
    focus.entropy.attrs["units"] += f" {LINK}"
    return replace(measured, datasets=measured.datasets | {"attention_focus": focus[names]})


@pytest.fixture(scope="module")
def place(result, tmp_path_factory):
    return results_page([result], tmp_path_factory.mktemp("page") / "page.html", [OWN_FIGURE])


@pytest.fixture(scope="module")
def compared(result):
    """The comparison of “slash” by layer and head."""
    return result.compare("slash", columns="all").set_index(["layer", "head"])


def chosen(page):
    """The head whose room is shown."""
    return page.locator("#room h3").inner_text()


@pytest.fixture
def page(opened, place):
    """The page, with what was chosen on it undone."""
    return opened(place, again=True)


def percent(text):
    return float(text.replace("−", "-").replace("\u00a0%", "")) / 100


def rgb(fill):
    return [int(part) for part in re.findall(r"\d+", fill)]


def at(page, layer, head, heads=8):
    return page.locator(f"#head-{layer * heads + head}")


def part(page, name):
    """A part of a head's room, opened."""
    folded = page.locator(f"[data-part={name}]")
    folded.evaluate("(part) => { part.open = true; }")
    return folded


def test_hover_says_what_compare_says(page, result, compared):
    most = compared.difference.abs().idxmax()
    assert chosen(page) == "Layer {}, head {}".format(*most), "the page starts with it"
    assert most != (0, 0), "no head is first by chance"
    at(page, 2, 5).hover()
    words = page.locator("#tip").inner_text()
    row = compared.loc[2, 5]
    shown = [percent(part) for part in re.findall(r"[+−]?[\d.]+\u00a0%", words)]
    expected = np.expm1([row.difference, row.difference_low, row.difference_high])
    assert_allclose(shown, expected, atol=5.1e-4)
    assert "layer 2 head 5" in words
    assert f"{result['sequences'].sizes['prompt']} prompts" in words
    tested = re.search(r"q = ([\d.e-]+) against no change", words)
    assert float(tested[1]) == pytest.approx(row.q_difference, rel=0.05)
    sure = int(((compared.q_difference < 0.05) & (compared.change.abs() > 0.05)).sum())
    assert page.locator("#map .mark").count() == sure
    about = result["received_attention"].received_by_segment.attrs
    description = page.locator("#about").inner_text()
    assert description.startswith(f"{about['description']} ({about['units']}).")
    said = f"{sure} of 32 heads differ from no change by more than 5.0\u00a0% (q < 0.05)"
    assert said in page.locator("#said").inner_text()
    scale = page.locator("#scale").inner_text()
    assert "○ differs from no change, by more than 5.0\u00a0%, q < 0.05" in scale


def test_a_click_opens_the_room_of_a_head(page, result):
    at(page, 3, 6).click()
    room = page.locator("#room")
    assert chosen(page) == "Layer 3, head 6"
    assert room.locator(".curves path.line").count() == 2
    assert room.locator(".curves path.null").count() == 1, "dilution, beside the line with slash"
    assert "dilution, slash" in room.locator(".legend").inner_text()
    assert "question" in room.locator(".curves").text_content()
    assert "layer=3&head=6" in page.url
    for name in ("quantities", "text", "pattern"):
        part(page, name)
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


def test_a_pattern_says_its_numbers(page, result):
    at(page, 1, 4).click()
    shown = part(page, "pattern").locator("svg.pattern").first
    shown.scroll_into_view_if_needed()
    box = shown.locator("image").bounding_box()
    pattern = weights(result, "baseline", 1, 4)
    n = len(pattern)
    page.mouse.move(box["x"] + box["width"] * 2.5 / n, box["y"] + box["height"] * 7.5 / n)
    words = page.locator("#tip").inner_text()
    assert words.startswith("7 “")
    told = float(words.rpartition(": ")[2].replace("−", "-"))
    assert told == pytest.approx(pattern[7, 2], abs=2e-5, rel=0.006)

    tokens = result["sequences"].first_prompt_text.sel(condition="baseline").values[:n]
    labels = shown.locator("text").all_text_contents()
    assert labels[0] == labels[1] == tokens[0].strip()
    assert len(labels) >= 2 * n / 3

    colours = page.locator(".weights i").evaluate_all(
        "(all) => all.map((one) => Number(getComputedStyle(one).opacity))"
    )
    scale = [float(words) for words in page.locator(".weights span").all_text_contents()]
    assert_allclose(np.square(colours), scale, atol=1e-3)
    *_, alpha = shown.locator("image").evaluate(PIXELS)
    drawn = np.square(np.reshape(alpha, (n, n)) / 255)
    assert_allclose(drawn, np.nan_to_num(pattern), atol=0.01)


def test_arrows_walk_over_heads(page):
    at(page, 0, 0).click()
    page.locator("#map svg").focus()

    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert chosen(page) == "Layer 1, head 1"
    assert page.evaluate("document.activeElement.getAttribute('aria-activedescendant')") == "head-9"
    assert page.locator("#said").inner_text().startswith("layer 1 head 1")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert chosen(page) == "Layer 3, head 7", "there is no head beyond the last"


def test_a_brush_chooses_heads_on_the_map(page):
    page.locator("#scatter-part").evaluate("(part) => { part.open = true; }")
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


def test_colours_of_words_are_readable_in_both_lights(page):
    """WCAG AA: 4.5 to 1 for words, 3 to 1 for marks, by the page's own colours."""
    for theme in ("dark", "light"):
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
        part(page, "text")
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


def test_names_and_roles_for_a_screen_reader(page):
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


def test_choices_are_steps_of_the_history(page):
    start = chosen(page)
    page.locator("#head-9").click()
    page.locator("#quantity").select_option("entropy")
    page.locator("#map svg").focus()

    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert chosen(page) == "Layer 1, head 4"
    page.go_back()
    assert chosen(page) == "Layer 1, head 1", "a walk with the arrow keys is one step"
    assert page.locator("#quantity").input_value() == "entropy"
    page.go_back()
    assert page.locator("#quantity").input_value() == "received"
    page.go_back()
    assert chosen(page) == start
    page.go_forward()
    assert chosen(page) == "Layer 1, head 1"


def test_a_quantity_without_null_keeps_the_choice(page):
    show = page.locator("#show")
    assert show.input_value() == "change"
    assert "change from the baseline" in page.locator("#map-title").inner_text()
    show.select_option("beyond")
    assert "relative to dilution" in page.locator("#map-title").inner_text()
    page.locator("#quantity").select_option("self_share")
    assert show.input_value() == "change"
    assert "against no change" in page.locator("#said").inner_text()
    assert "differs from no change, by more than" in page.locator("#scale").inner_text()
    page.locator("#quantity").select_option("entropy")
    assert show.input_value() == "beyond", "what the reader saw before"
    page.locator("#condition").select_option("baseline")
    assert show.input_value() == "value"
    page.locator("#condition").select_option(LINK)
    assert show.input_value() == "beyond"


def number(words):
    """What a cell says, its own scale undone: a fraction for percent."""
    value = float(re.sub(r"[^\d.e+-]", "", words.replace("−", "-")))
    return value / 100 if "%" in words else value


def cells(page):
    """The table as it stands: the head, and each column's number and interval by its name."""
    script = """(rows) => rows.map((row) => [row.querySelector('button').textContent, Object.fromEntries(
        [...row.querySelectorAll('td[data-column]')].map((one) => [one.dataset.column,
        [one.firstChild.textContent, one.querySelector('.ends')?.textContent ?? '']]))])"""
    return page.locator("#heads-table tbody tr").evaluate_all(script)


def test_a_cell_is_the_number_of_the_table_s_column(opened, place, result):
    """Each cell against the column of the same name, for ratios and differences, with and without a null."""
    page = opened(place)
    page.locator("#more-rows").click()
    for quantity, change in (("received", "change"), ("self_share", "difference")):
        page.locator("#quantity").select_option(quantity)
        table = result.compare("slash", quantity=quantity, columns="all")
        table = table.set_index(["layer", "head"])
        for end in ("", "_low", "_high"):
            table[f"change{end}"] = np.expm1(table[f"difference{end}"])

        shown = cells(page)
        assert len(shown) == 32
        intervals = 0
        for label, columns in shown:
            row = table.loc[tuple(map(int, re.findall(r"\d+", label)))]
            assert set(columns) == {"value", "reference", "q_difference", change}
            for name, (words, ends) in columns.items():
                assert number(words) == pytest.approx(row[name], **as_near_as(name, words))
                if ends:
                    intervals += 1
                    low, high = map(number, ends.strip("[]").split(", "))
                    expected = [row[f"{name}_low"], row[f"{name}_high"]]
                    assert [low, high] == pytest.approx(expected, **as_near_as(name, words))
        assert intervals >= 32, "an interval stands in the cell of its number"


def as_near_as(name, words):
    """To the digits that a cell has."""
    if "%" in words:
        return {"abs": 5.1e-4}
    if "×" in words:
        return {"abs": 5.1e-3}
    return {"rel": 0.05 if name.startswith("q_") else 0.006}


def test_the_cell_of_another_column_would_be_noticed(compared):  # negative control
    assert abs(np.expm1(compared.difference) - compared.difference).max() > 5.1e-4


def test_the_table_ranks_and_saves_what_compare_gives(opened, place, compared, tmp_path):
    page = opened(place)
    first = page.locator("#heads-table tbody tr").first.locator("button")

    def largest(column):
        assert f"sorted by “{column}”" in page.locator("#table-note").inner_text()
        return first.inner_text()

    table = compared.reset_index()
    names = [f"L{layer}H{head}" for layer, head in compared.index]
    assert largest("change") == names[table.change.abs().argmax()]
    page.locator("#show").select_option("value")
    assert largest("slash") == names[table.value.argmax()]
    page.locator("#heads-table thead").get_by_role("button", name="baseline").click()
    top = names[table.reference.argmax()]
    assert largest("baseline") == top
    first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == top
    assert chosen(page) == f"Layer {top[1]}, head {top[3]}"

    with page.expect_download() as caught:
        page.locator("#heads-csv").click()
    saved = pd.read_csv(caught.value.path())
    same = ["layer", "head", "value", "reference", "null", "q_beyond"]
    same += ["difference", "difference_low", "difference_high"]
    same += ["beyond", "beyond_low", "beyond_high"]
    assert_allclose(saved[same], table[same], rtol=1e-6, atol=1e-7)
    assert_allclose(saved.change_low, np.expm1(table.difference_low), rtol=1e-6)
    assert_allclose(saved.change_null, np.expm1(table.null), rtol=1e-6, atol=1e-7)
    about = saved[["scale", "segment", "units", "change_units", "level", "n_of"]].drop_duplicates()
    expected = ["log-ratio", "question", "probability", "fraction", 0.95, "prompts"]
    assert about.values.tolist() == [expected]


def weights(result, condition, layer, head, prompt=0):
    """The pattern of a head, without what stands beyond the prompt's tokens."""
    n = int((result["sequences"].origin.sel(condition=condition).isel(prompt=prompt) >= -1).sum())
    maps = result["attention_map"].pattern.sel(condition=condition, layer=layer, head=head)
    return maps.isel(prompt=prompt).transpose("query", "target").values[:n, :n]


def strongest(pattern, side):
    """The pattern on fewer pixels, each the largest of those that fall on it."""
    at = np.arange(len(pattern)) * side // len(pattern)
    made = np.zeros((side, side))
    np.maximum.at(made, np.ix_(at, at), np.nan_to_num(pattern))
    return made


def test_the_patterns_of_all_heads_are_small_pictures_that_choose(opened, place, result):
    page = opened(place)
    assert page.locator("#thumbs image").count() == 0, "drawn when it is opened"
    page.locator("#thumbs-part summary").click()
    page.locator("#thumbs image").wait_for()
    assert page.locator("#thumbs-note").inner_text().startswith("prompt 0, slash: ")
    drawn = pictures(page, 24)
    for layer, head in ((0, 0), (2, 5), (3, 7)):
        known = strongest(weights(result, "slash", layer, head), 24)
        assert_allclose(drawn[layer, :, head], known, atol=0.01)

    page.locator("#thumb-head-21").click()
    assert chosen(page) == "Layer 2, head 5"
    assert page.locator("#room svg.pattern").first.is_visible(), "with its large pattern"
    assert "layer=2&head=5" in page.url
    page.keyboard.press("ArrowRight")
    assert chosen(page) == "Layer 2, head 6"
    page.locator("svg.pattern[data-prompt='1']").first.click()
    assert page.locator("#thumbs-note").inner_text().startswith("prompt 1, slash: ")
    page.locator("#condition").select_option("baseline")
    known = weights(result, "baseline", 1, 3, 1)
    drawn = pictures(page, len(known))
    assert len(known) < 24, "a pixel for each pair"
    assert_allclose(drawn[1, :, 3], np.nan_to_num(known), atol=0.01)


def pictures(page, side):
    """The weights that the pictures of all heads show, [layer, query, head, key]."""
    wide, high, alpha = page.locator("#thumbs image").evaluate(PIXELS)
    assert (wide, high) == (8 * side, 4 * side)
    return np.square(np.reshape(alpha, (4, side, 8, side)) / 255)


def shades(line):
    """How strong the ground of each token is, from 0 to 1."""
    grounds = line.locator("span").evaluate_all(
        "(all) => all.map((one) => getComputedStyle(one).backgroundColor)"
    )
    return np.array(
        [float(re.search(r"/ ([\d.]+)\)|, ([\d.]+)\)", one)[1] or 0) for one in grounds]
    )


def test_a_chosen_token_shades_what_it_attends_to(opened, place, result):
    page = opened(place, hash="head=L1H4", again=True)
    part(page, "pattern")
    page.locator(".tokens.asked").nth(1).wait_for()
    line = page.locator(".tokens.asked").nth(1)
    said = page.locator(".said-of-it").nth(1)
    pattern = weights(result, "slash", 1, 4)
    tokens = line.locator("span").all_text_contents()

    def holds(query):
        row = pattern[query]
        most = int(pattern[query].argmax())
        assert_allclose(shades(line), 0.75 * np.sqrt(np.nan_to_num(row)), atol=0.006)
        assert said.inner_text().startswith(
            f"{query} “{tokens[query]}” attends most to {most} “{tokens[most]}”: "
        )
        assert float(said.inner_text().rpartition(": ")[2]) == pytest.approx(
            float(row[most]), rel=0.006
        )
        assert line.locator(".asking").all_text_contents() == [tokens[query]]

    line.locator("span").nth(12).hover()
    holds(12)
    line.focus()
    page.keyboard.press("ArrowRight")
    holds(13)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    holds(11)
    assert page.locator(".said-of-it").first.inner_text() == "", "the other texts stay as they are"
    page.emulate_media(media="print")
    assert not line.is_visible(), "on paper there is no mouse"
    whole = page.locator(".whole").first
    assert whole.evaluate("(one) => getComputedStyle(one).breakInside") == "avoid"
    assert whole.locator(".note").is_visible()


def test_a_wrong_link_is_refused_aloud(opened, place):
    layer = "layer 9, head 1 (it has layers 0, 1, 2, 3 and 8 heads)"
    for wrong, words in (
        ("layer=9&head=1", layer),
        ("condition=slashes&head=1&layer=1", "condition “slashes”"),
        ("section-99", "no part “section-99”"),
    ):
        page = opened(place, hash=wrong, again=True)
        alert = page.get_by_role("alert")
        assert words in alert.inner_text()
        assert page.locator("#room h3").is_visible(), "and the page shows what it has"
        page.locator("#condition").select_option(LINK)
        assert alert.inner_text() == "", "until something is chosen"


def test_the_link_that_is_copied_shows_the_view(page, opened, place):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#head-13").click()
    page.locator("#condition").select_option(LINK)
    page.locator("#show").select_option("change")
    title = page.locator("#map-title").inner_text()
    page.get_by_role("button", name="copy link").click()
    page.get_by_role("button", name="copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")

    page = opened(place, 390, 844, hash=link.partition("#")[2])
    assert page.locator("#map-title").inner_text() == title
    assert chosen(page) == "Layer 1, head 5"
    assert page.locator("#refused").inner_text() == ""
    assert is_seen(page, "#room h3")
    page = opened(place, 390, 844, hash="head=L2H5", again=True)
    assert chosen(page) == "Layer 2, head 5"
    page = opened(place, 390, 844)
    assert not is_seen(page, "#room h3"), "the top, where nothing is asked for (control)"


def is_seen(page, selector):
    return -1 <= page.locator(selector).bounding_box()["y"] < 800


def test_no_name_becomes_a_link(page, opened, result, tmp_path, monkeypatch):
    page.locator("#condition").select_option(LINK)
    page.locator("#quantity").select_option("entropy")
    unfold(page)
    assert links(page) == 0
    assert page.locator("b, img[src=x]").count() == 0
    assert page.title().startswith("mechattn")
    assert "<a href=" in page.locator("#map-title").inner_text()
    assert "<a href=" in page.locator("#more .section summary", has_text="href").inner_text()

    plain_names = "mechattn.render.figure_declaration.with_plain_names"
    monkeypatch.setattr(plain_names, lambda figure: figure)  # negative control
    received = replace(
        result,
        datasets={name: result.datasets[name] for name in ("sequences", "received_attention")},
    )
    page = opened(results_page([received], tmp_path / "page.html", [OWN_FIGURE]))
    unfold(page)
    assert links(page) > 0


def links(page):
    return page.locator("svg a").count() + page.locator('a[href*="example.org"]').count()


@pytest.fixture(scope="module")
def page_of_two(result, slash_result, tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "page.html"
    return results_page([result, slash_result], path, [])


def test_several_models_have_their_verdicts_in_a_table(opened, page_of_two, slash_result):
    page = opened(page_of_two)
    page.locator(".numbers summary").click()
    *_, row = page.locator(".numbers tbody").inner_text().splitlines()
    verdict = slash_result.verdict("slash")
    model, condition, change, null, heads, count = row.split("\t")
    assert model == "toy:llama (toy, 1.0 M parameters), result 2"
    assert (condition, count) == ("slash", str(verdict.n))
    words = ma.render.verdict_words(slash_result)
    assert f"received by the question changes by {change} over" in words
    assert null == f"{percent_words(verdict.null.estimate)} (dilution)"
    compared = slash_result.compare("slash")
    marked = (compared.q_difference < 0.05) & (compared.change.abs() > 0.05)
    falls, rises = ((marked & (sign * compared.change > 0)).sum() for sign in (-1, 1))
    assert heads == f"{falls} and {rises} of 32"


def test_tabs_are_models(opened, page_of_two, result, slash_result):
    page = opened(page_of_two, again=True)
    tabs = page.get_by_role("tab")
    quantities = page.locator("#quantity option")
    assert tabs.count() == 2
    assert quantities.count() == 5
    tabs.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert quantities.count() == 2
    tabs.nth(0).click()
    assert quantities.count() == 5

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
    assert chosen(page) == "Layer 1, head 4"


def distance_from_neutral(colour):
    return np.abs(np.array(colour) - (244, 244, 242)).max()


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
