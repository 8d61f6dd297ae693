"""The unpacked size of a stored result, compared with its stored size: a few hundred bytes can declare any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mechattn.errors import OutputError

ALWAYS = 256 * 2**20  # bytes, which any machine that runs a model has
TIMES = 1000  # times the stored size; results of all analyses, with padding, unpack to 20 to 60 times
TEXT = 64  # bytes of a text in memory, in addition to its letters
# Bytes of one number of each dtype that a result may contain.
BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass
class Size:
    """The memory that the variables of a result take, added up before any is read.

    Args:
        where: The result.
        stored: The size of its files in bytes.
        most: The bytes that the user allows; by default 256 MiB or 1,000 times the stored size, whichever is more.
    """

    where: object
    stored: int
    most: int | None = None
    variables: dict[str, int] = field(default_factory=dict, init=False)

    def check(self) -> None:
        """Refuse a result that is too large; called when all variables are counted."""
        allowed = max(ALWAYS, TIMES * self.stored) if self.most is None else self.most
        needed = sum(self.variables.values())
        if needed > allowed:
            largest = max(self.variables, key=lambda name: self.variables[name])
            raise OutputError(
                f"the result at {self.where} would take {_mebibytes(needed)} of memory ({largest} alone "
                f"{_mebibytes(self.variables[largest])}), {_mebibytes(allowed)} are allowed, and {self.stored:,} bytes "
                "are stored: it is damaged, or made to fill a machine. If you trust its source: "
                f"load_result(…, most={needed})"
            )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
