"""What a page says without its scripts: the numbers of heads as compare gives them, and docs that exist."""

import re
from html import unescape
from pathlib import Path

import numpy as np

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.pages import plain_table
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import CONCEPTS, results_page
from mechattn.pages.page_data import named_data
from mechattn.pages.plain_table import plain_tables


def table_of(result):
    (made,) = plain_tables(named_data([ShownModel(result)]))
    return made


def numbers(cell):
    """The numbers of a cell; percent as fractions."""
    found = [
        float(part.replace("−", "-")) for part in re.findall(r"[+−]?\d[\d.]*(?:e[+-]?\d+)?", cell)
    ]
    return [value / 100 for value in found] if "%" in cell else found


def test_the_rows_are_what_compare_gives(slash_result):
    made, compared = table_of(slash_result), slash_result.compare("slash", columns="all")
    expected = compared.reindex(compared.difference.abs().sort_values(ascending=False).index)
    names = [
        "head",
        "baseline",
        "slash",
        "change",
        "q, against no change",
    ]
    assert list(made.columns) == names
    assert [row[0] for row in made.rows] == [
        f"L{one.layer}H{one.head}" for one in expected.itertuples()
    ]
    of = {
        name: np.array([numbers(row[i]) for row in made.rows]) for i, name in enumerate(names) if i
    }
    np.testing.assert_allclose(of["baseline"][:, 0], expected.reference, rtol=0.006)
    np.testing.assert_allclose(of["slash"][:, 0], expected.value, rtol=0.006)
    change = expected[["difference", "difference_low", "difference_high"]]
    np.testing.assert_allclose(of["change"], np.expm1(change), atol=5.1e-4)
    np.testing.assert_allclose(of["q, against no change"][:, 0], expected.q_difference, rtol=0.06)
    assert made.caption.endswith(
        "attention received by the question, condition “slash”, 32 heads, ranked by “change”"
    )


def test_of_the_baseline_alone_its_values(toy, prompts):
    result = ma.run(toy, prompts[:4], layers=[1, 3])
    made, expected = (
        table_of(result),
        result.heads("received", None).sort_values("received", ascending=False),
    )
    assert list(made.columns) == ["head", "baseline"]
    assert made.rows[0][0] == f"L{expected.layer.iloc[0]}H{expected['head'].iloc[0]}"
    np.testing.assert_allclose(
        [numbers(row[1])[0] for row in made.rows], expected.received, rtol=0.006
    )


def test_of_many_heads_the_first_and_it_says_so(slash_result, monkeypatch):
    whole = table_of(slash_result)
    monkeypatch.setattr(plain_table, "HEADS", 5)
    made = table_of(slash_result)
    assert made.rows == whole.rows[:5]
    assert "the first 5 of 32 heads" in made.caption


def test_too_few_prompts_have_no_table(toy, prompts):
    result = ma.run(toy, prompts[:2], {"slash": ma.MeaninglessTokens()})
    assert plain_tables(named_data([ShownModel(result)])) == []


def test_the_page_names_the_docs_of_what_was_measured(toy, prompts, tmp_path):
    result = ma.run(toy, prompts[:4], None, [ma.ReceivedAttention(), ma.analyses.AttentionSinks()])
    text = unescape(results_page([result], tmp_path / "page.html", []).read_text(encoding="utf-8"))
    named = re.findall(r"<code>(docs/[\w/-]+\.md)</code>", text)
    concepts = ["received-attention", "attention-sinks", "comparisons"]
    assert named == [
        *(f"docs/concepts/{name}.md" for name in concepts),
        "docs/how-to/pages-and-views.md",
    ]


def test_the_docs_that_pages_name_are_there():
    root = Path(__file__).parents[2]
    for name in (
        *(f"concepts/{one}" for one in (*CONCEPTS, "comparisons")),
        "how-to/pages-and-views",
    ):
        assert (root / "docs" / f"{name}.md").is_file()
    assert {name for names in CONCEPTS.values() for name in names} <= {
        make().name for make in ANALYSES
    }
