"""A comparison of published statements with models: cells with a measured value, its interval, the
values of untrained weights and one of four words; as a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from mechattn.evaluation.evaluation import Evaluation
from mechattn.markup import markdown_table
from mechattn.published.statements import Statement, Statements
from mechattn.render.words import in_digits
from mechattn.stats.intervals import t_interval

AS_PUBLISHED = "as published"
OPPOSITE = "opposite"
UNCLEAR = "no clear difference"
NOT_MEASURABLE = "not measurable here"
WORDS = (AS_PUBLISHED, OPPOSITE, UNCLEAR, NOT_MEASURABLE)

READ_WORDS = {"caption": "read off an automatic description", "stated": "stated"}
UNIT_SYMBOLS = {"change": "%", "share": "%", "points": "points"}


@dataclass(frozen=True)
class Cell:
    """What one model shows for a statement, in percent or in points.

    Args:
        word: One of ``WORDS``.
        unit: The unit of the statement: "change", "share" or "points".
        value: The measured value; NaN if it cannot be measured.
        low: The lower end of its 95 % interval.
        high: The upper end of its 95 % interval.
        n: The number of prompts, or of problems; 0 if the value cannot be measured.
        untrained: The value in each draw of untrained weights.
        note: Why the value cannot be measured. For an accuracy: both accuracies, the exact test and
            its power. Otherwise empty.
    """

    word: str
    unit: str
    value: float = nan
    low: float = nan
    high: float = nan
    n: int = 0
    untrained: tuple[float, ...] = ()
    note: str = ""

    @property
    def value_words(self) -> str:
        """The value and its interval, such as "−18.2 % [−19.0, −17.4]"; empty if it cannot be
        measured."""
        if self.word == NOT_MEASURABLE:
            return ""
        low = signed_number(self.low, self.unit)
        high = signed_number(self.high, self.unit)
        return f"{with_unit(self.value, self.unit)} [{low}, {high}]"

    @property
    def untrained_words(self) -> str:
        """The range of the draws, such as "untrained −12.1 to −9.3 %"; empty without draws."""
        if not self.untrained:
            return ""
        lowest = signed_number(min(self.untrained), self.unit)
        return f"untrained {lowest} to {with_unit(max(self.untrained), self.unit)}"

    @property
    def n_words(self) -> str:
        """The number of prompts or problems, such as "n = 64"; empty if nothing was measured."""
        if not self.n:
            return ""
        return f"n = {self.n}"

    def __str__(self) -> str:
        details = (self.value_words, self.untrained_words, self.n_words, self.note)
        return f"{self.word}: {', '.join(filter(None, details))}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Published statements, and what each model shows.

    Args:
        statements: The statements.
        cells: The cells by the statement's key, then by model.
        about: How the numbers were measured.
    """

    statements: Statements
    cells: Mapping[str, Mapping[str, Cell]]
    about: Mapping[str, Any]

    @property
    def models(self) -> list[str]:
        """The names of the models, in the order of the columns."""
        cells_of_models = next(iter(self.cells.values()))
        return list(cells_of_models)

    def table(self) -> pd.DataFrame:
        """One row for each statement and model; values are in percent, or in points."""
        rows = []
        for statement in self.statements.statements:
            for model, cell in self.cells[statement.key].items():
                row = {
                    "statement": statement.key,
                    "published": statement.published,
                    "model": model,
                }
                rows.append(row | asdict(cell))
        return pd.DataFrame(rows)

    @property
    def summary(self) -> str:
        """The number of cells with each word, and the number of intervals that are expected to miss
        the true value by chance."""
        counts = Counter(cell.word for cells in self.cells.values() for cell in cells.values())
        counts_in_words = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])

        interval_count = counts.total() - counts[NOT_MEASURABLE]
        expected_misses = interval_count / 20  # of 95 % intervals, one in twenty misses
        return (
            f"{counts.total()} cells, of {len(self.cells)} published statements: {counts_in_words}."
            f" Of {interval_count} intervals of 95 %, about {expected_misses:.0f} miss the true"
            " value by chance."
        )

    def place_words(self, statement: Statement) -> str:
        """Where a statement was published and how it was read, such as "arXiv:2510.01032, section
        2; stated"."""
        source = self.statements.sources[statement.source]
        return f"{source}, {statement.where}; {READ_WORDS[statement.read]}"

    def to_markdown(self) -> str:
        """The comparison as a Markdown table, with a row for each statement and a column for each
        model, and the summary."""
        rows = []
        for statement in self.statements.statements:
            place = self.place_words(statement)
            quote = f"{statement.title}: “{statement.quote}” ({place})"
            published = f"{statement.published} [{statement.models}]"
            rows.append([quote, published, *self.cells[statement.key].values()])

        table = markdown_table(["statement", "published", *self.models], rows)
        return f"{table}\n\n{self.summary}"

    def to_json(self) -> str:
        """How the numbers were measured and the rows of the table, as JSON; NaN becomes null."""
        # Pandas writes NaN as null; ``json.dumps`` would write NaN, which is not JSON.
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
    """The cell of a statement with one value per prompt, and Student's interval of their mean.

    Args:
        statement: The statement.
        values: One value per prompt, as from ``value_of``.
        untrained: The mean of the same values over prompts, for each draw of untrained weights.
    """
    unit = statement.unit
    interval = np.array(t_interval(np.asarray(values)))
    value, low, high = in_unit(interval, unit).tolist()
    untrained_means = in_unit(np.asarray(untrained), unit).tolist()
    word = word_of(statement, low, high)
    return Cell(word, unit, value, low, high, n=len(values), untrained=tuple(untrained_means))


def accuracy_cell(statement: Statement, evaluation: Evaluation) -> Cell:
    """The cell of a statement about accuracy, with Newcombe's interval of the difference and the
    exact McNemar test."""
    change = evaluation.compare(statement.condition, statement.to, unit="prompt")
    value = 100 * change["difference"]  # in points, as are the ends of the interval
    low = 100 * change["low"]
    high = 100 * change["high"]
    gained = int(change["only_first"])
    lost = int(change["only_second"])
    p = binomtest(gained, max(1, gained + lost)).pvalue  # 1 if none is gained or lost

    reference_accuracy = 100 * evaluation.right(statement.to).mean()
    accuracy = 100 * evaluation.right(statement.condition).mean()
    note = (
        f"{reference_accuracy:.1f} → {accuracy:.1f} %; {gained} problems gained, {lost} lost, exact"
        f" McNemar p = {p:.2g}; 80 % power for a difference of"
        f" {100 * change['detectable']:.1f} points"
    )
    word = word_of(statement, low, high)
    return Cell(word, statement.unit, value, low, high, n=int(change["n"]), note=note)


def word_of(statement: Statement, low: float, high: float) -> str:
    """The word for a statement whose interval has these ends.

    It is "as published" or "opposite" if the whole interval lies beyond the line of that word.
    """
    if statement.direction == "above":
        is_as_published = low > statement.line
        is_opposite = high < statement.opposite
    else:
        is_as_published = high < statement.line
        is_opposite = low > statement.opposite

    if is_as_published:
        return AS_PUBLISHED
    if is_opposite:
        return OPPOSITE
    return UNCLEAR


def rule_words(statement: Statement) -> str:
    """The rule of a statement, such as "as published below −2.0 %, opposite above +2.0 %"."""
    line = with_unit(statement.line, statement.unit)
    opposite_line = with_unit(statement.opposite, statement.unit)
    opposite_direction = "below" if statement.direction == "above" else "above"
    return (
        f"{AS_PUBLISHED} {statement.direction} {line}, {OPPOSITE} {opposite_direction}"
        f" {opposite_line}"
    )


def in_unit(values: np.ndarray, unit: str) -> np.ndarray:
    """Values in the unit of their cell: log-ratios as changes in percent, shares and differences of
    shares times 100."""
    if unit == "change":
        return 100 * np.expm1(values)
    return 100 * values


def signed_number(value: float, unit: str) -> str:
    """A number without its unit; changes and points have a sign."""
    digits = ".1f" if unit == "share" else "+.1f"
    return in_digits(round(value, 1), digits)


def with_unit(value: float, unit: str) -> str:
    """A number with its unit, such as "−18.2 %" or "+1.5 points"."""
    return f"{signed_number(value, unit)} {UNIT_SYMBOLS[unit]}"
