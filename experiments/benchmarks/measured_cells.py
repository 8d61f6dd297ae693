"""A table that is written after each cell, so that what is cut short leaves what it has measured and goes on there."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

NOT_MEASURED = "not measured"


class Cells:
    """The cells of one part's table, by row and column, in a file; texts, as they are shown."""

    def __init__(self, path: Path, where: str, seconds: float = 0) -> None:
        self.path, self.where, self.end = path, where, time.monotonic() + seconds
        known = json.loads(path.read_text()) if path.exists() else {}
        if (
            known.get("where") != where
        ):  # measured on another machine, or with other code: not to be mixed
            known = {}
        self.table: dict[str, dict[str, str]] = known.get("table", {})
        self.notes: list[str] = known.get("notes", [])
        self.ended: str = known.get("ended", "not run")

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure."""
        return self.ended.startswith("complete")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def missing(self, row: str, column: str) -> bool:
        """Whether a cell has not been measured, or has failed for another reason than memory."""
        return self.table.get(row, {}).get(column, NOT_MEASURED).startswith(("fails", NOT_MEASURED))

    def put(self, row: str, column: str, text: str) -> None:
        """Write a cell."""
        self.table.setdefault(row, {})[column] = text
        self._write()
        print(f"{row:60} {column:20} {text}", flush=True)

    def note(self, text: str) -> None:
        """Write a sentence below the table, once."""
        if text not in self.notes:
            self.notes.append(text)
        self._write()

    def end_with(self, text: str) -> None:
        """Write how the part ended."""
        self.ended = text
        self._write()

    def lacking(self) -> bool:
        """Whether a cell is missing."""
        return any(
            self.missing(row, column) for row, cells in self.table.items() for column in cells
        )

    def tried(self, row: str, column: str, measure: Callable[[], str], seconds: float = 0) -> None:
        """Measure a cell that is missing, unless it is known to take longer than what is left."""
        if not self.missing(row, column):
            return
        if seconds > self.left():
            self.put(row, column, f"{NOT_MEASURED}: no time left")
            return
        try:
            self.put(row, column, measure())
            return
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
                :160
            ]
            full = (
                isinstance(error, (torch.OutOfMemoryError, MemoryError))
                or "out of memory" in str(error).lower()
            )
        emptied()  # outside the except block, where the error no longer keeps tensors alive
        self.put(row, column, "out of memory" if full else f"fails: {text}")

    def markdown(self) -> str:
        """The table, with an empty cell for what was not reached, and the notes."""
        columns = list(dict.fromkeys(column for cells in self.table.values() for column in cells))
        lines = ["| " + " | ".join(["", *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
        for row, cells in self.table.items():
            shown = [cells.get(column, NOT_MEASURED).replace("|", "/") for column in columns]
            lines.append("| " + " | ".join([row, *shown]) + " |")
        return (
            "\n".join(
                [*(lines if columns else ["Nothing was measured."]), "", *self.notes]
            ).rstrip()
            + "\n"
        )

    def _write(self) -> None:
        text = json.dumps(
            {"where": self.where, "table": self.table, "notes": self.notes, "ended": self.ended},
            indent=1,
        )
        self.path.write_text(text, encoding="utf-8")


def emptied() -> None:
    """Give cached memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
