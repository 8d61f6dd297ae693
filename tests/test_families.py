"""The family table of the docs is what running all analyses over all families gives."""

from pathlib import Path

import pytest

from mechattn.analysis import ANALYSES
from tests.family_table import as_markdown, families
from tests.tiny_families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows():
    return list(families())


def test_the_page_shows_this_table(rows):
    assert as_markdown(rows) in PAGE.read_text(), (
        "run: python -m tests.family_table, and put its table into the page"
    )


def test_at_least_twenty_families_are_verified_and_have_every_analysis(rows):
    assert len(FAMILIES) >= 20
    sound = [row for row in rows if row.verified.startswith("yes")]
    assert len(sound) == len(FAMILIES)
    assert {name for row in rows for name in row.analyses} == {make().name for make in ANALYSES}


def test_refusals_have_a_reason(rows):
    by_name = {row.name: row for row in rows}
    assert all(
        "no layer with attention" in why
        for why in by_name["Mamba (no attention)"].analyses.values()
    )
    assert by_name["Qwen3-Next (hybrid)"].layers == "1 of 2"
    assert by_name["Falcon-RW (ALiBi)"].verified == "yes, mended"
    assert any("a gate of its query" in limit for limit in by_name["Qwen3-Next (hybrid)"].limits)
