"""Packs arrays into a page as base64 little-endian numbers with their shapes."""

from __future__ import annotations

import base64
import gzip
from typing import Any, Literal

import numpy as np

Kind = Literal["f4", "f2", "u2"]
Packed = dict[str, Any]
EXACT = 250_000  # numbers: larger arrays are stored in half precision
SCALE = 1024.0  # factor for half precision, which keeps all eleven bits for probabilities down to 6e-8


def packed(values: np.ndarray, kind: Kind = "f4") -> Packed:
    """Pack an array for JSON."""
    scaled = np.asarray(values, dtype=np.float64) * (SCALE if kind == "f2" else 1.0)
    if kind == "u2":
        scaled = np.nan_to_num(scaled)
    data = np.ascontiguousarray(scaled.astype(f"<{kind}")).tobytes()
    return {"shape": list(scaled.shape), "kind": kind, "data": base64.b64encode(data).decode()}


def unpacked(array: Packed) -> np.ndarray:
    """Unpack an array as the page's script does."""
    kind = array["kind"]
    values = np.frombuffer(base64.b64decode(array["data"]), dtype=f"<{kind}").astype(np.float64)
    return values.reshape(array["shape"]) / (SCALE if kind == "f2" else 1.0)


def squeezed(text: str) -> str:
    """Compress text with gzip and base64, which a browser reads offline; the same text always gives the same output."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 6, mtime=0)).decode()


def kind_for(size: int) -> Kind:
    """Single precision for small arrays, half precision for large ones."""
    return "f4" if size <= EXACT else "f2"
