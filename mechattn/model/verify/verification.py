"""The outcome of a verification: one line per check, with both figures, the tolerance and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mechattn.errors import ModelError, OptionError
from mechattn.markup import table

Outcome = Literal["passed", "failed", "limited", "not checked"]
_COLUMNS = ("check", "outcome", "layer", "hooked", "expected", "difference", "tolerance", "compared")


@dataclass(frozen=True)
class Check:
    """One check of a verification, with both figures.

    A failed check shows the figures at the place of the largest difference. For a passed check that place depends on
    rounding, and so on the CPU. A passed check therefore shows the largest figure of the last layer or position, and
    prints its difference as "within" the tolerance.

    Args:
        name: The name of the check.
        outcome: The outcome; "failed" makes the model unusable, "limited" only the analyses that need this identity.
        layer: The layer of the figures; None for the model as a whole.
        hooked: The figure of the hooked model.
        expected: The expected figure.
        difference: The largest difference over everything compared, in units of the tolerance's scale.
        tolerance: The largest allowed difference.
        detail: What was compared, or why nothing could be.
        remedy: What to do about it.
    """

    name: str
    outcome: Outcome
    layer: int | None = None
    hooked: float | None = None
    expected: float | None = None
    difference: float | None = None
    tolerance: float | None = None
    detail: str = ""
    remedy: str = ""

    @property
    def apart(self) -> str:
        """The difference as printed: "within" the tolerance, or the number (exact if the tolerance is 0)."""
        return "within" if self.outcome == "passed" and self.tolerance else _number(self.difference)

    def __str__(self) -> str:
        place = "" if self.layer is None else f" in layer {self.layer}"
        figures = ""
        if self.hooked is not None and self.expected is not None:
            figures = f": {self.hooked:.5g} where {self.expected:.5g} is expected, "
            within = self.apart == "within"
            figures += (
                f"within {self.tolerance:.2g}" if within else f"{self.apart} apart (tolerance {self.tolerance:.2g})"
            )
        return f"{self.name} {self.outcome}{place}{figures}. {self.detail}" + (
            f". {self.remedy}" if self.remedy else ""
        )


@dataclass(frozen=True)
class Report:
    """The report of a verification of a hooked model; prints as a table."""

    model: str
    architecture: str
    dtype: str
    versions: str
    checks: tuple[Check, ...]
    mended: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed; limited and unmade checks don't count as failed."""
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def not_checked(self) -> list[str]:
        """The checks that could not be made."""
        return [check.name for check in self.checks if check.outcome == "not checked"]

    @property
    def limited(self) -> dict[str, str]:
        """The checks that limit analyses of this model, with reasons."""
        return {check.name: check.detail for check in self.checks if check.outcome == "limited"}

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise OptionError(f"the report has no check {name!r}; it has {', '.join(check.name for check in self.checks)}")

    def require(self) -> None:
        """Refuse a model with a failed check.

        Raises:
            ModelError: Lists each failed check with its layer, both figures, tolerance and remedy.
        """
        failed = [check for check in self.checks if check.outcome == "failed"]
        if failed:
            said = "\n  ".join(map(str, failed))
            raise ModelError(
                f"{self.model} as hooked is not the model itself:\n  {said}\n"
                "load_model(…, verify=False) loads it anyway; every result then records verified: false"
            )

    @property
    def _rows(self) -> list[list[str]]:
        rows = []
        for check in self.checks:
            layer = "" if check.layer is None else str(check.layer)
            figures = (_number(check.hooked), _number(check.expected), check.apart, _number(check.tolerance))
            rows.append([check.name, check.outcome, layer, *figures, check.detail])
        return rows

    @property
    def _head(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.model} ({self.architecture}, {self.dtype}; {self.versions}): {verdict}"

    def _repr_html_(self) -> str:
        caption = "; ".join([self._head, *(f"mended: {text}" for text in self.mended)])
        remedies = [[check.name, "what to do", *[""] * 5, check.remedy] for check in self.checks if check.remedy]
        return table([*self._rows, *remedies], caption, _COLUMNS)

    def __str__(self) -> str:
        rows = [list(_COLUMNS), *self._rows]
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
        remedies = [f"{check.name}: {check.remedy}" for check in self.checks if check.remedy]
        return "\n".join([self._head, *(f"mended: {text}" for text in self.mended), *lines, *remedies])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
