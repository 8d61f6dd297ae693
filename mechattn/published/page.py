"""The page: the table of statements and models, the line of each, and the paper's figures beside
ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import About, write_page
from mechattn.published.cells import AS_PUBLISHED, NOT_MEASURABLE, OPPOSITE, UNCLEAR, rule_words
from mechattn.published.comparison import Comparison
from mechattn.published.figures import figure_sections
from mechattn.results.result import Result

# The word of a cell as a class of the style sheet.
STYLES = {
    AS_PUBLISHED: "agrees",
    OPPOSITE: "opposes",
    UNCLEAR: "unclear",
    NOT_MEASURABLE: "absent",
}


def write_comparison(
    comparison: Comparison, results: Sequence[Result], path: Path, force: bool = False
) -> Path:
    """Write the page of a comparison.

    Args:
        comparison: The comparison.
        results: The result of each model whose figures are shown.
        path: The page.
        force: Replace a page that mechattn did not write.
    """
    models = comparison.about["seconds"]
    filled = {"comparison": comparison, "models": models, "rule": rule_words, "styles": STYLES}
    about = About(
        title="What was published, and what other models show",
        subtitle=(
            f"{'; '.join(comparison.statements.sources.values())}, beside {', '.join(models)}."
        ),
        command=comparison.about["command"],
        lead=("paper.html.j2", filled),
    )
    shown = [ShownModel(result) for result in results]
    return write_page(path, about, shown, figure_sections(results), force)
