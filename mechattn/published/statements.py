"""The published statements: quotes with their places, the published values, and what is measured
to compare with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.functional.activations import Form
from mechattn.published.runs import ANSWERS, CONDITIONS, RUNS
from mechattn.published.values import UNITS, ValueSelection
from mechattn.toml_sections import Section, check_known, toml_values, validation_words

SHIPPED = Path(__file__).parent / "statements.toml"
LONGEST_QUOTE = 25  # words
Text = Annotated[str, Field(min_length=1)]


class Arm(Section):
    """The hyperparameters of ARM that were published for a model, which its whole family uses."""

    model: Text
    family: Text
    form: Form
    c: float
    p1: float


class Statement(ValueSelection):
    """What was published, and how the value to compare with it is measured.

    The word of a cell is "as published" if its whole interval lies beyond ``line`` in
    ``direction``, and "opposite" if it lies beyond ``opposite`` in the other direction.
    """

    key: Text
    title: Text
    quote: Text
    source: Text
    where: Text
    read: Literal["stated", "caption"]
    models: Text
    published: Text
    run: Text
    function: Text
    direction: Literal["above", "below"]
    line: float
    opposite: float
    differs: Text

    @field_validator("quote")
    @classmethod
    def _check_length(cls, quote: str) -> str:
        word_count = len(quote.split())
        if word_count > LONGEST_QUOTE:
            raise ValueError(f"it has {word_count} words; quote at most {LONGEST_QUOTE}")
        return quote

    @property
    def unit(self) -> str:
        """The unit of the values, of ``line`` and of ``opposite``: "change", "share" or
        "points"."""
        unit = UNITS[self.function]
        if unit == "share" and self.less_layers:
            return "points"  # a difference of shares
        return unit


class Statements(Section):
    """The content of the file of statements."""

    system: str
    sources: dict[str, Text]
    arms: list[Arm]
    statements: Annotated[list[Statement], Field(min_length=1)]


def read_statements(path: Path = SHIPPED) -> Statements:
    """Read the statements and check every name in them.

    Raises:
        OptionError: The file cannot be read, a key is missing, unknown or given twice, a value is
            not allowed, or a source, quantity, function, run or condition is unknown.
    """
    try:
        content = Statements.model_validate(toml_values(path, "file of statements"))
    except ValidationError as error:
        raise OptionError(f"{path}: {validation_words(error, Statements)}") from None

    counts = Counter(statement.key for statement in content.statements)
    for key, count in counts.items():
        if count > 1:
            raise OptionError(f"{path}: the key {key!r} is given {count} times; give each its own")

    conditions = [BASELINE, *CONDITIONS]
    known_names = {
        "source": content.sources,
        "function": UNITS,
        "run": [*RUNS, ANSWERS],
        "condition": conditions,
        "to": conditions,
    }
    for statement in content.statements:
        where = f"{path}: {statement.key}"
        for name, known in known_names.items():
            check_known(f"{where}.{name}", getattr(statement, name), known)
        if statement.run == ANSWERS and statement.quantities:
            raise OptionError(f"{where}.quantities: answers have no quantities; leave them out")
        for quantity in statement.quantities:
            check_known(f"{where}.quantities", quantity, RUNS[statement.run].quantities)
    return content
