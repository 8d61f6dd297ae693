"""The data for the map of heads: each quantity with one number per head, by condition and as a change."""

from __future__ import annotations

from typing import Any

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.blocks import kept, layer_blocks
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import NULLS, variable_of
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.packed_arrays import packed
from mechattn.render.theme import quantity_words
from mechattn.results.result import Result
from mechattn.stats.paired import RESAMPLES

_A_HEAD = {"prompt", "condition", "layer", "head"}
_NOT_SHOWN = (*(f"_{kind}" for kind in NULLS), "_per_prompt")
# A t interval is symmetric, so half of it is enough.
_CHANGES = ("difference", "half", "null", "beyond", "beyond_half", "q")


def head_quantities(result: Result) -> list[str]:
    """The quantities with one number per head and prompt, named as in ``result.compare``."""
    found = {
        str(name).removesuffix("_by_segment"): None
        for at, dataset in result.datasets.items()
        for name, variable in dataset.data_vars.items()
        if at != "sequences"
        and _A_HEAD <= set(variable.dims) <= _A_HEAD | {"segment"}
        and not str(name).endswith(_NOT_SHOWN)
    }
    return sorted(found, key=lambda name: name != "received")


def check_memory(result: Result) -> None:
    """Check whether a page fits in memory before anything is read."""
    for name in head_quantities(result):
        layer_blocks(result, name, "segment", "question", signs=RESAMPLES)


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> dict[str, Any]:
    """One quantity in the page's form: the numbers of ``result.heads`` and ``result.compare``, each [layer, head]."""
    variable = variable_of(result, quantity, "segment")
    of_segment = "segment" in variable.dims
    words = quantity_words(quantity, "question") if of_segment else quantity
    made: dict[str, Any] = {
        "name": quantity,
        "words": words.replace("_", " "),
        "units": str(variable.attrs.get("units", "")),
        "about": str(variable.attrs.get("description", "")),
        "values": {},
        "changes": {},
        "missing": {},
    }
    reference = kept(result, quantity, BASELINE, "question")
    for condition in result.conditions:
        of = reference if condition == BASELINE else kept(result, quantity, condition, "question")
        try:
            made["values"][condition] = _values(of, quantity, condition, layers, heads)
            if condition != BASELINE:
                made["changes"][condition] = _changes(of, reference, quantity, condition, layers, heads)
        except MemoryOptionError:
            raise
        except OptionError as error:
            made["missing"][condition] = str(error)
    return made


def _values(of: Result, quantity: str, condition: str, layers: list[int], heads: int) -> dict[str, Any]:
    """Means over prompts with their intervals, and those under uniform attention."""
    table = of.heads(quantity, None, condition=condition)
    table = table.assign(half=table.high - table[quantity])
    columns = {"mean": quantity, "half": "half", "null": "uniform"}
    found = {name: _square(table, of, layers, heads) for name, of in columns.items()}
    return found | {"n": int(table.n.iloc[0]), "unit": table.attrs["unit"]}


def _changes(
    of: Result, reference: Result, quantity: str, condition: str, layers: list[int], heads: int
) -> dict[str, Any]:
    """Changes from the baseline with their intervals, the null's change, and the change beyond it."""
    table = Contrast(of, condition, quantity=quantity, other=reference).table(bootstrap=False)
    table = table.assign(half=table.high - table.difference, beyond_half=table.beyond_high - table.beyond)
    found = {name: _square(table, name, layers, heads) for name in _CHANGES}
    about = {"scale": str(table.scale.iloc[0]), "against": table.attrs["null"], "n": int(table.n.iloc[0])}
    tested = f", tested by {table.attrs['resampled']}" if "resampled" in table.attrs else ""
    return found | about | {"unit": table.attrs["unit"] + tested, "known": bool(table.null.notna().any())}


def _square(table: Any, column: str, layers: list[int], heads: int) -> dict[str, Any] | None:
    """A column of a table as [layer, head], or [layer, 1] if all heads share one number; None if it is empty."""
    square = np.full((len(layers), heads), np.nan)
    rows = [layers.index(layer) for layer in table.layer]
    square[rows, table["head"].values] = table[column].values
    if np.isnan(square).all():
        return None
    alike = np.array_equal(square, np.broadcast_to(square[:, :1], square.shape), equal_nan=True)
    return packed(square[:, :1] if alike else square)
