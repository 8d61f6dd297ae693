"""The page of claims: a click on a claim opens what stands behind it, and from there its figure."""

from pathlib import Path

import pytest

import mechattn as ma

REGISTER = Path(__file__).parents[1] / "claims" / "small.toml"


@pytest.fixture(scope="module")
def page_of_claims(tmp_path_factory):
    """Verdicts of the toy on a small register, without its answers."""
    out = tmp_path_factory.mktemp("claims")
    ma.judge(REGISTER, "toy:llama", out, ma.ClaimSettings(limit=6, without=("answers", "samples")))
    return out / "index.html"


def test_a_claim_opens_its_rule_and_its_figure(page_of_claims, opened):
    page = opened(page_of_claims)
    assert page.locator("table.claims tbody tr:not(.group)").count() == 6
    box = page.locator("table.claims thead").bounding_box()
    assert box["y"] < 450, "verdicts begin on the first screen"
    assert "toy:llama" in page.locator("p.note", has_text="Exploratory").inner_text()
    behind = page.locator("#claim-falls")
    assert not behind.locator("table.found").is_visible()
    page.get_by_role("link", name="Attention falls").click()
    assert behind.locator("table.found").is_visible()
    assert "“it falls” (A. Author, 2020, section 1)" in behind.inner_text()
    behind.get_by_role("link", name="figure").click()
    page.wait_for_function("document.querySelector('details.section[open] .plot .main-svg')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1250


def test_it_can_be_read_on_a_phone(page_of_claims, opened):
    page = opened(page_of_claims)
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375, (
        "the table scrolls, not the page"
    )
