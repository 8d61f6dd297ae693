"""Whether an analysis gives what its quantities promise, asked of the first values of every batch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from mechattn.analysis.analysis import Analysis
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.prompts.sequences import Batch


def check_values(analysis: Analysis, values: Mapping[str, Tensor], batch: Batch, heads: int) -> None:
    """Every quantity is there, none beside them, and each has the shape that its dims promise.

    Args:
        analysis: What was measured.
        values: What it gave for one layer.
        batch: Of this batch.
        heads: Of the layer.

    Raises:
        OptionError: Naming the analysis, the quantity, and both shapes.
    """
    promised = analysis.quantities
    if lacking := [name for name in promised if name not in values]:
        raise OptionError(f"{analysis.name}: values() gives no {lacking[0]!r}, which its quantities promise")
    if more := [name for name in values if name not in promised]:
        have = ", ".join(map(repr, promised))
        raise OptionError(f"{analysis.name}: values() gives {more[0]!r}, which is none of its quantities ({have})")
    sizes = _sizes(analysis, batch, heads)
    for name, quantity in promised.items():
        value = values[name]
        if not isinstance(value, Tensor):
            raise OptionError(f"{analysis.name}: {name!r} is a {type(value).__name__}; values() gives tensors")
        wanted = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        if value.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, value.shape)):
            dims = ", ".join(_dim(dim, sizes.get(dim)) for dim in quantity.dims)
            raise OptionError(
                f"{analysis.name}: {name!r} has the shape {list(value.shape)}; its dims {quantity.dims} promise "
                f"[batch {len(batch.rows)}{', ' * bool(dims)}{dims}]"
            )


def _sizes(analysis: Analysis, batch: Batch, heads: int) -> dict[str, int]:
    """What is known of the sizes of dimensions; others are as large as they are."""
    labels: Mapping[str, Seq] = getattr(analysis, "coords", {})
    known = {"head": heads, "key": batch.tokens.shape[1], "segment": len(SEGMENTS), "to_segment": len(SEGMENTS)}
    return known | {dim: len(label) for dim, label in labels.items()}


def _dim(name: str, size: int | None) -> str:
    return name if size is None else f"{name} {size}"
