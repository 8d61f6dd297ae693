"""The page of claims: a click on a claim opens what stands behind it, and from there its figure."""

import pytest

import mechattn as ma
from mechattn.claims.judged import judged
from mechattn.claims.page import write
from mechattn.claims.protocol import ACTIVATIONS, ANALYSES, arm_conditions, attention_conditions
from mechattn.claims.register import CLAIMS
from mechattn.claims.verdicts import OfModel, Verdicts
from tests.claims import synthetic

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_of_claims(toy, prompts, tmp_path_factory):
    """Verdicts of made-up numbers above a real result of the toy."""
    slash = ma.MeaninglessTokens()
    some = attention_conditions(slash)
    attention = ma.run(toy, prompts[:6], some, ANALYSES, positions="prompts", progress=False)
    many = some | arm_conditions("LlamaForCausalLM")
    activations = ma.run(toy, prompts[:6], many, ACTIVATIONS, layers=0, progress=False)
    evidence = synthetic.evidence(8)
    of = OfModel("toy:llama", "toy:llama (toy, 1.0 M parameters)", tuple(judged(c, evidence) for c in CLAIMS), (), {})
    out = tmp_path_factory.mktemp("claims")
    return write(Verdicts((of,), {"plan": []}), [(attention, activations)], out, "", False)


def test_a_claim_opens_its_rule_and_its_figure(page_of_claims, opened):
    page = opened(page_of_claims)
    verdicts = page.locator("table.claims tbody tr:not(.group)")
    assert verdicts.count() == len(CLAIMS)
    box = page.locator("table.claims thead").bounding_box()
    assert box["y"] < 450, "verdicts begin on the first screen"
    behind = page.locator("#claim-arm_does_the_same")
    assert not behind.locator("table.found").is_visible()
    page.get_by_role("link", name="ARM does what the tokens do").click()
    assert behind.locator("table.found").is_visible()
    behind.get_by_role("link", name="figure").click()
    page.wait_for_function("document.querySelector('details.section[open] .plot .main-svg')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1250


def test_it_can_be_read_on_a_phone(page_of_claims, opened):
    page = opened(page_of_claims)
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375, "the table scrolls, not the page"
