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
        words = [cell.word for cells in self.cells.values() for cell in cells.values()]
        counts = Counter(words)
        counted = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
        measured = len(words) - counts[NOT_MEASURABLE]
        return (
            f"{len(words)} cells, of {len(self.cells)} published statements: {counted}. Of"
            f" {measured} intervals of 95 %, about {measured / 20:.0f} miss the true value by"
            " chance."
        )

    def place_words(self, statement: Statement) -> str:
        """Where a statement stands, and how it was read."""
        read = {"caption": "read off an automatic description", "stated": "stated"}[statement.read]
        return f"{self.statements.sources[statement.source]}, {statement.where}; {read}"

    def to_markdown(self) -> str:
        """A table with a row for each statement and a column for each model."""
        models = list(next(iter(self.cells.values())))
        header = ["statement", "published", *models]
        rows = [header, ["---"] * len(header)]
        for statement in self.statements.statements:
            quote = f"{statement.title}: “{statement.quote}” ({self.place_words(statement)})"
            published = f"{statement.published} [{statement.of}]"
            cells = map(str, self.cells[statement.key].values())
            rows.append([quote, published, *cells])
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", self.summary])

    def to_json(self) -> str:
        """How the numbers were made, and the rows of the table; null where there is no number."""
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
