"""A comparison: cells with a measured value, its interval, the same untrained and one of four
words; all of them as a table, Markdown and JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import expm1, nan
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from mechattn.evaluation.evaluation import Evaluation
from mechattn.published.statements import Statement, Statements
from mechattn.stats.intervals import t_interval

AS_PUBLISHED = "as published"
OPPOSITE = "opposite"
UNCLEAR = "no clear difference"
NOT_MEASURABLE = "not measurable here"
WORDS = (AS_PUBLISHED, OPPOSITE, UNCLEAR, NOT_MEASURABLE)


@dataclass(frozen=True)
class Cell:
    """A statement in one model, in percent or in points.

    Args:
        word: One of ``WORDS``.
        unit: As of the statement: "change", "share" or "points".
        value: The measured value; NaN where there is none.
        low: The lower end of its 95 % interval.
        high: The upper end.
        n: The number of prompts, or of problems.
        untrained: The value of each draw of untrained weights.
        note: Why it cannot be measured; of an accuracy, both levels, the exact test and its power.
    """

    word: str
    unit: str = "share"
    value: float = nan
    low: float = nan
    high: float = nan
    n: int = 0
    untrained: tuple[float, ...] = ()
    note: str = ""

    @property
    def value_words(self) -> str:
        """The value and its interval, such as "−18.2 % [−19.0, −17.4]"; empty where there is
        none."""
        if self.word == NOT_MEASURABLE:
            return ""
        low, high = (number_words(end, self.unit) for end in (self.low, self.high))
        return f"{with_unit(self.value, self.unit)} [{low}, {high}]"

    @property
    def untrained_words(self) -> str:
        """The range of the draws, such as "untrained −12.1 to −9.3 %"; empty where there are
        none."""
        if not self.untrained:
            return ""
        lowest = number_words(min(self.untrained), self.unit)
        return f"untrained {lowest} to {with_unit(max(self.untrained), self.unit)}"

    @property
    def n_words(self) -> str:
        """Such as "n = 64"; empty where nothing was measured."""
        return f"n = {self.n}" if self.n else ""

    def __str__(self) -> str:
        details = (self.value_words, self.untrained_words, self.n_words, self.note)
        return f"{self.word}: {', '.join(filter(None, details))}"


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

    @property
    def models(self) -> list[str]:
        """The names of the models, in the order in which they are shown."""
        first_statement = next(iter(self.cells.values()))
        return list(first_statement)

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
        header = ["statement", "published", *self.models]
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


def measured_cell(
    statement: Statement, values: Sequence[float], untrained: Sequence[float] = ()
) -> Cell:
    """The cell of one value a prompt, with Student's interval.

    Args:
        statement: The statement.
        values: One value a prompt, as ``value_of`` gives them.
        untrained: The mean over prompts of the same values, for each draw of untrained weights.
    """
    unit = statement.unit
    value, low, high = (written(float(end), unit) for end in t_interval(np.asarray(values)))
    draws = tuple(written(draw, unit) for draw in untrained)
    word = word_of(statement, low, high)
    return Cell(word, unit, value, low, high, len(values), draws)


def accuracy_cell(statement: Statement, evaluation: Evaluation) -> Cell:
    """The cell of an accuracy: Newcombe's interval of the difference, and the exact McNemar
    test."""
    compared = evaluation.compare(statement.condition, statement.to, unit="prompt")
    value, low, high, detectable = (
        100 * float(compared[name]) for name in ("difference", "low", "high", "detectable")
    )
    gained, lost = (int(compared[name]) for name in ("only_first", "only_second"))
    p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    before = 100 * evaluation.right(statement.to).mean()
    after = 100 * evaluation.right(statement.condition).mean()
    note = (
        f"{before:.1f} → {after:.1f} %; {gained} problems gained, {lost} lost, exact McNemar "
        f"p = {p:.2g}; 80 % power for a difference of {detectable:.1f} points"
    )
    word = word_of(statement, low, high)
    return Cell(word, statement.unit, value, low, high, int(compared["n"]), note=note)


def word_of(statement: Statement, low: float, high: float) -> str:
    """The word for an interval: which of the two lines does all of it lie beyond?"""
    if statement.direction == "below":
        is_published = high < statement.line
        is_opposite = low > statement.opposite
    else:
        is_published = low > statement.line
        is_opposite = high < statement.opposite
    if is_published:
        return AS_PUBLISHED
    return OPPOSITE if is_opposite else UNCLEAR


def rule_words(statement: Statement) -> str:
    """The rule of a statement, such as "as published below −2.0 %, opposite above +2.0 %"."""
    line, opposite = (
        with_unit(end, statement.unit) for end in (statement.line, statement.opposite)
    )
    against = {"below": "above", "above": "below"}[statement.direction]
    return f"{AS_PUBLISHED} {statement.direction} {line}, {OPPOSITE} {against} {opposite}"


def written(value: float, unit: str) -> float:
    """A value as it is written: a log-ratio as a change in percent, a share in percent."""
    return 100 * (expm1(value) if unit == "change" else value)


def number_words(value: float, unit: str) -> str:
    """A number without its unit; changes and differences have a sign."""
    rounded = round(value, 1) + 0.0  # no minus zero
    return (f"{rounded:.1f}" if unit == "share" else f"{rounded:+.1f}").replace("-", "−")


def with_unit(value: float, unit: str) -> str:
    """Such as "−18.2 %" or "+1.5 points"."""
    return f"{number_words(value, unit)} {'points' if unit == 'points' else '%'}"
