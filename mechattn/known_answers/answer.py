"""A known answer, and the table of all known answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from mechattn.markup import table

Outcome = Literal["passed", "failed", "not tried"]
_COLUMNS = ("model", "what is known", "found", "outcome", "from")


@dataclass(frozen=True)
class KnownAnswer:
    """A known answer for a model, and what was found.

    Args:
        model: The model.
        known: The known answer, with the tolerance.
        found: What was found, or why it was not tried.
        outcome: "passed", "failed" or "not tried".
        source: The publication, or the reason that it must hold.
    """

    model: str
    known: str
    found: str
    outcome: Outcome
    source: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (self.model, self.known, self.found, self.outcome, self.source)


@dataclass(frozen=True)
class SelfTest:
    """The known answers of ``ma.selftest``; prints as a table.

    Args:
        answers: The known answers, one per row.
    """

    answers: tuple[KnownAnswer, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed and at least one answer was tried."""
        outcomes = {answer.outcome for answer in self.answers}
        return "failed" not in outcomes and "passed" in outcomes

    @property
    def summary(self) -> str:
        """The numbers of answers that passed, failed, and were not tried."""
        counts = Counter(answer.outcome for answer in self.answers)
        return ", ".join(
            f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "not tried")
        )

    def __str__(self) -> str:
        lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in one.cells) + " |"
            for one in self.answers
        ]
        return "\n".join([*lines, "", self.summary])

    def _repr_html_(self) -> str:
        return table([answer.cells for answer in self.answers], self.summary, _COLUMNS)


def tried(model: str, known: str, found: str, passed: bool, source: str) -> KnownAnswer:
    """A known answer that was compared with what was found."""
    return KnownAnswer(model, known, found, "passed" if passed else "failed", source)


def compared(
    model: str, known: str, difference: float, tolerance: float, source: str
) -> KnownAnswer:
    """A known answer that passes if a difference is within a tolerance."""
    return tried(
        model,
        f"{known}, to {tolerance:g}",
        f"{difference:.1e} apart",
        difference <= tolerance,
        source,
    )
