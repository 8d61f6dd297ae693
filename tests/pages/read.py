"""What a page holds, as text: also the numbers and names that stand in it squeezed."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from mechattn.pages.embedded import SCALE

_DATA = re.compile(r'<script type="text/plain" data-packed="data">([^<]*)</script>')


def data_of(path: Path) -> dict[str, Any]:
    """The data of the map of heads."""
    squeezed = _DATA.search(Path(path).read_text(encoding="utf-8"))
    assert squeezed, f"{path} holds no data"
    return json.loads(gzip.decompress(base64.b64decode(squeezed[1])))


def unpacked(array: dict[str, Any]) -> np.ndarray:
    """An array of the page, unpacked as the page's script does."""
    kind = array["kind"]
    values = np.frombuffer(base64.b64decode(array["data"]), dtype=f"<{kind}").astype(np.float64)
    return values.reshape(array["shape"]) / (SCALE if kind == "f2" else 1.0)


def whole(path: Path) -> str:
    """The text of a page and of its data."""
    return Path(path).read_text(encoding="utf-8") + json.dumps(data_of(path), ensure_ascii=False)
