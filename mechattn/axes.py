"""The names of dimensions and of a sequence's segments; dimension names follow TransformerLens.

``batch`` sequences in a forward pass, ``pos`` positions, ``query`` and ``key`` positions in their
two roles, ``head``, ``segment`` one of SEGMENTS. All positions, layers and heads count from 0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "baseline"  # the condition that every other is compared with
# "first" is the first token of the baseline by itself, whatever text it belongs to: in most models
# it is the sink, and holds a third of all attention.
SEGMENTS = ("first", "template", "system", "inserted", "question", "answer", "changed")
_NAMED = re.compile(r"L(\d{1,6})H(\d{1,6})")


def head_name(layer: int, head: int) -> str:
    """A head as it is written, such as "L1H2"."""
    return f"L{int(layer)}H{int(head)}"


def head_named(name: object) -> tuple[int, int] | None:
    """The layer and head of a name such as "L1H2"; None if it is not one."""
    if not isinstance(name, str):
        return None
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Name the rows of a table by their heads, so that ``table.loc["L1H2"]`` finds one."""
    if {"layer", "head"} <= set(table.columns):
        table.index = [
            head_name(layer, head)
            for layer, head in zip(table["layer"], table["head"], strict=True)
        ]
    return table
