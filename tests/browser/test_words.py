"""What the page says about its numbers: the table's cells, what it is sorted by, what stays when a choice changes."""

import re

import numpy as np
import pytest

import mechattn as ma
from mechattn.pages.page import results_page


@pytest.fixture(scope="module")
def result(toy, prompts):
    """Quantities with a null as a ratio, with one as a difference, and without one."""
    conditions = {"slash": ma.MeaninglessTokens("/", 10), "sentence": ma.RandomSentence(10)}
    return ma.run(
        toy, prompts[:7], conditions, [ma.ReceivedAttention(), ma.analyses.AttentionFocus()]
    )


@pytest.fixture(scope="module")
def place(result, tmp_path_factory):
    return results_page([result], tmp_path_factory.mktemp("words") / "page.html", [])


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


@pytest.mark.parametrize("quantity", ["received", "self_share"])
def test_a_cell_is_the_number_of_the_table_s_column(opened, place, result, quantity):
    """Each cell of the page against the column of the same name, for ratios and differences, with and without a null."""
    page = opened(place)
    page.locator("#quantity").select_option(quantity)
    page.locator("#more-rows").click()
    table = result.compare("slash", quantity=quantity, columns="all").set_index(["layer", "head"])
    expected = table.copy()
    for end in ("", "_low", "_high", "_null"):
        of = {"_null": "null"}.get(end, f"difference{end}")
        expected[f"change{end}"] = np.expm1(expected[of])

    ratio = table.scale.iloc[0] == "log-ratio"
    found = cells(page)
    assert len(found) == 32
    names = set(found[0][1])
    first = {"change"} if ratio else {"difference"}
    assert names == {"value", "reference", "q_difference"} | first
    for head, shown in found:
        row = expected.loc[tuple(map(int, re.findall(r"\d+", head)))]
        for name, (words, ends) in shown.items():
            near = dict(
                rel=0.05 if name.startswith("q_") else 0.006,
                abs=5.1e-4 if "%" in words else 5.1e-3 if "×" in words else 1e-6,
            )
            assert number(words) == pytest.approx(row[name], **near), (head, name)
            for end, part in zip(
                ("low", "high"), ends.strip("[]").split(", ") if ends else [], strict=False
            ):
                assert number(part) == pytest.approx(row[f"{name}_{end}"], **near), (
                    head,
                    name,
                    end,
                )

    assert any(ends for _, ends in found[0][1].values()), (
        "an interval stands in the cell of its number"
    )


def test_the_cell_of_another_column_would_be_noticed(result):  # negative control
    table = result.compare("slash", columns="all")
    assert abs(np.expm1(table.difference) - table.difference).max() > 5.1e-4


def test_the_table_is_sorted_by_what_it_says(opened, place, result):
    page = opened(place)

    def order():
        marked = page.locator(
            "#heads-table th[aria-sort=descending], #heads-table th[aria-sort=ascending]"
        )
        words = re.search(r"sorted by “([^”]+)”", page.locator("#table-note").inner_text())[1]
        assert marked.all_text_contents() == [words]
        return page.locator("#heads-table tbody button").all_text_contents()

    def heads(by):
        table = result.compare("slash", columns="all")
        return [
            f"L{row.layer}H{row['head']}"
            for _, row in table.iloc[np.argsort(-abs(by(table)).values)].iterrows()
        ]

    assert order() == heads(lambda table: np.expm1(table.difference))[:12]
    page.locator("#show").select_option("value")
    assert order() == heads(lambda table: table.value)[:12]
    assert (
        heads(lambda table: table.value)[:12]
        != heads(lambda table: np.expm1(table.difference))[:12]
    )  # control


def test_the_page_starts_with_the_head_that_differs_most(opened, place, result):
    page = opened(place)
    table = result.compare("slash", columns="all")
    most, least = (
        table.loc[getattr(table.difference.abs(), f"idx{end}")()] for end in ("max", "min")
    )
    assert (
        page.locator("#room h3").inner_text() == f"Layer {most.layer:.0f}, head {most['head']:.0f}"
    )
    assert (
        (most.layer, most["head"]) != (0, 0) != (least.layer, least["head"])
    )  # control: no head is first by chance


def test_a_quantity_without_a_null_does_not_change_what_is_asked_for(opened, place):
    page = opened(place)
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
    page.locator("#condition").select_option("sentence")
    assert show.input_value() == "beyond"
