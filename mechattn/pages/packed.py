"""Packs arrays into a page as base64 little-endian numbers with their shapes."""

from __future__ import annotations

import base64
import gzip
from typing import Any, Literal

import numpy as np

Kind = Literal["f4", "f2", "u2"]
Packed = dict[str, Any]
EXACT = 250_000  # numbers: more than these are halved
SCALE = 1024.0  # of halves: the smallest probability with all of their eleven bits is then 6e-8


def packed(values: np.ndarray, kind: Kind = "f4") -> Packed:
    """An array as JSON can hold it.

    Args:
        values: The numbers; NaN where there is none.
        kind: "f4" to 6e-8; "f2" to 0.05 %, for values from 0 to 60; "u2" whole numbers up to 65,535.
    """
    scaled = np.asarray(values, dtype=np.float64) * (SCALE if kind == "f2" else 1.0)
    if kind == "u2":
        scaled = np.nan_to_num(scaled)
    data = np.ascontiguousarray(scaled.astype(f"<{kind}")).tobytes()
    return {"shape": list(scaled.shape), "kind": kind, "data": base64.b64encode(data).decode()}


def unpacked(array: Packed) -> np.ndarray:
    """What the page's own script reads from a packed array."""
    kind = array["kind"]
    values = np.frombuffer(base64.b64decode(array["data"]), dtype=f"<{kind}").astype(np.float64)
    return values.reshape(array["shape"]) / (SCALE if kind == "f2" else 1.0)


def squeezed(text: str) -> str:
    """A text as gzip and base64, which a browser reads without asking anybody; always the same for the same text."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 6, mtime=0)).decode()


def kind_for(size: int) -> Kind:
    """Exact where there are few numbers; half as many bytes where there are many."""
    return "f4" if size <= EXACT else "f2"
