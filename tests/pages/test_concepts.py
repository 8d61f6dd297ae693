"""What a page says of how it was made: the docs that explain what was measured exist."""

import re
from html import unescape
from pathlib import Path

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.pages.page import CONCEPTS, results_page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_names_the_docs_of_what_was_measured(toy, prompts, tmp_path):
    result = ma.run(toy, prompts[:4], None, [ma.ReceivedAttention(), ma.analyses.AttentionSinks()])
    text = unescape(results_page([result], tmp_path / "page.html", []).read_text(encoding="utf-8"))
    named = re.findall(r"<code>docs/([\w/-]+\.md)</code>", text)
    concepts = ["received-attention", "attention-sinks", "comparisons"]
    assert named == [*(f"concepts/{name}.md" for name in concepts), "how-to/pages-and-views.md"]
    assert all((DOCS / name).is_file() for name in named)


def test_the_docs_of_every_analysis_are_there():
    for name, analyses in CONCEPTS.items():
        assert (DOCS / "concepts" / f"{name}.md").is_file()
        assert set(analyses) <= {make().name for make in ANALYSES}
