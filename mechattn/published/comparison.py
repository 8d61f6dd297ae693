"""All cells of a comparison, as a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from mechattn.published.cells import NOT_MEASURABLE, WORDS, Cell
from mechattn.published.statements import Statement, Statements


@dataclass(frozen=True, repr=False)
class Comparison:
    """Published statements, and what each model shows beside them.

    Args:
        statements: The statements.
        cells: By the statement's key, then by model.
        about: How the numbers were made.
    """

    statements: Statements
    cells: Mapping[str, Mapping[str, Cell]]
    about: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """One row for each statement and model; values are in percent, or in points."""
        rows = []
        for statement in self.statements.statements:
            about = {"statement": statement.key, "published": statement.published}
            for model, cell in self.cells[statement.key].items():
                rows.append(about | {"model": model} | asdict(cell))
        return pd.DataFrame(rows)

    @property
    def summary(self) -> str:
        """How many cells have which word, and how many intervals miss their value by chance."""
        counts: Counter[str] = Counter()
        for cells in self.cells.values():
            counts.update(cell.word for cell in cells.values())
        counted = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])

        cell_count = counts.total()
        measured = cell_count - counts[NOT_MEASURABLE]
        missing = measured / 20  # one in twenty intervals of 95 %
        return (
            f"{cell_count} cells, of {len(self.cells)} published statements: {counted}. Of"
            f" {measured} intervals of 95 %, about {missing:.0f} miss the true value by"
            " chance."
        )

    def place_words(self, statement: Statement) -> str:
        """Where a statement stands, and how it was read.

        Such as "arXiv:2510.01032, section 2; stated".
        """
        source = self.statements.sources[statement.source]
        words = {
            "caption": "read off an automatic description",
            "stated": "stated",
        }
        return f"{source}, {statement.where}; {words[statement.read]}"

    def to_markdown(self) -> str:
        """A table with a row for each statement and a column for each model."""
        models = list(next(iter(self.cells.values())))
        header = ["statement", "published", *models]
        rule = ["---"] * len(header)

        rows = [header, rule]
        for statement in self.statements.statements:
            place = self.place_words(statement)
            quote = f"{statement.title}: “{statement.quote}” ({place})"
            published = f"{statement.published} [{statement.of}]"
            cells = map(str, self.cells[statement.key].values())
            rows.append([quote, published, *cells])

        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", self.summary])

    def to_json(self) -> str:
        """How the numbers were made, and the rows of the table; null where there is no number."""
        # Pandas writes NaN as null, which json does not.
        rows = json.loads(self.table().to_json(orient="records"))
        content = {"about": self.about, "rows": rows}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def __repr__(self) -> str:
        lines = []
        for statement in self.statements.statements:
            lines.append(f"{statement.title}. Published: {statement.published}")

            for model, cell in self.cells[statement.key].items():
                lines.append(f"  {model}: {cell}")
        return "\n".join([*lines, "", self.summary])
