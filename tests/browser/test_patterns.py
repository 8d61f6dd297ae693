"""The attention patterns of a page: every head's at a glance, and what the token at the mouse attends to."""

import re

import numpy as np
import pytest

import mechattn as ma
from mechattn.pages.page import results_page

PAINTED = """async (image) => { const i = new Image(); i.src = image.getAttribute('href'); await i.decode();
    const c = document.createElement('canvas'); [c.width, c.height] = [i.width, i.height];
    const p = c.getContext('2d'); p.drawImage(i, 0, 0);
    return [i.width, i.height, [...p.getImageData(0, 0, i.width, i.height).data].filter((_, at) => at % 4 === 3)]; }"""


@pytest.fixture(scope="module")
def result(toy):
    texts = [
        f"Tom has {i} apples and {name} has one more. How many apples do they have?"
        for i, name in enumerate("ABC")
    ]
    conditions = {"slash": ma.MeaninglessTokens("/", 6)}
    return ma.run(
        toy,
        texts,
        conditions,
        [ma.ReceivedAttention(), ma.analyses.AttentionMap()],
        keep="prompts",
    )


@pytest.fixture(scope="module")
def place(result, tmp_path_factory):
    return results_page([result], tmp_path_factory.mktemp("page") / "page.html", [])


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
        np.testing.assert_allclose(drawn[layer, :, head], known, atol=0.01)

    page.locator("#thumb-head-21").click()
    assert page.locator("#room h3").inner_text() == "Layer 2, head 5"
    assert page.locator("#room svg.pattern").first.is_visible(), "with its large pattern"
    assert "layer=2&head=5" in page.url
    page.keyboard.press("ArrowRight")
    assert page.locator("#room h3").inner_text() == "Layer 2, head 6"
    page.locator("svg.pattern[data-prompt='1']").first.click()
    assert page.locator("#thumbs-note").inner_text().startswith("prompt 1, slash: ")
    page.locator("#condition").select_option("baseline")
    known = weights(result, "baseline", 1, 3, 1)
    drawn = pictures(page, len(known))
    assert len(known) < 24, "a pixel for each pair"
    np.testing.assert_allclose(drawn[1, :, 3], np.nan_to_num(known), atol=0.01)


def pictures(page, side):
    """The weights that the pictures of all heads show, [layer, query, head, key]."""
    wide, high, alpha = page.locator("#thumbs image").evaluate(PAINTED)
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


def test_a_token_at_the_mouse_or_the_keys_shades_what_it_attends_to(opened, place, result):
    page = opened(place, hash="head=L1H4")
    page.locator("[data-part=pattern] summary").click()
    page.locator(".tokens.asked").nth(1).wait_for()
    line = page.locator(".tokens.asked").nth(1)
    said = page.locator(".said-of-it").nth(1)
    pattern = weights(result, "slash", 1, 4)
    tokens = line.locator("span").all_text_contents()

    def holds(query):
        row = pattern[query]
        most = int(pattern[query].argmax())
        np.testing.assert_allclose(shades(line), 0.75 * np.sqrt(np.nan_to_num(row)), atol=0.006)
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
