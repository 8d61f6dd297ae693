"""The change of a quantity averaged over layers and heads, by prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.differences import aligned
from mechattn.results.layer_blocks import of_layers
from mechattn.results.prompt_blocks import prompt_blocks
from mechattn.results.quantities import check_layer, variable_of
from mechattn.results.units import units_of
from mechattn.stats.comparison import relative_change
from mechattn.stats.intervals import FEWEST, Interval
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    from mechattn.results.result import Result

Means = tuple[np.ndarray, ...]  # values, reference and the null of each [prompt]; empty without a null


def overall_change(
    result: Result,
    condition: str,
    quantity: str,
    segment: str | None = "question",
    layer: int | None = None,
    unit: Unit = "auto",
    memory: str = "2GiB",
) -> tuple[Interval, Interval | None]:
    """Relative change from the baseline of each prompt's mean over layers and heads, and the same under the null.

    Args:
        result: A result.
        condition: The condition to compare with the baseline.
        quantity: A positive quantity, such as "received".
        segment: The segment.
        layer: One layer; by default all.
        unit: As for :func:`compare`.
        memory: As for :func:`compare`.

    Raises:
        OptionError: A value is not positive, so there is no ratio, or :func:`compare` refuses the options.
    """
    variable = variable_of(result, quantity, "segment")
    if layer is not None:
        check_layer(layer, variable)
        at = variable.layer.values.tolist().index(layer)
        result = of_layers(result, slice(at, at + 1))
        variable = variable_of(result, quantity, "segment")
    sizes = [variable.sizes["prompt"]]
    sizes += [4 * size for dim, size in variable.sizes.items() if dim == "layer"]  # both conditions and nulls
    sizes += [size for dim, size in variable.sizes.items() if dim not in ("prompt", "condition", "layer")]
    found = [_means(result, some, condition, quantity, segment, layer) for some in prompt_blocks(sizes, memory)]
    if any(not np.array_equal(there, found[0][1]) for _, there in found):
        raise OptionError(
            f"some prompts have no {quantity!r} in the segment {segment!r}; choose one that all prompts have"
        )
    values, reference, null, null_reference = (np.concatenate(parts) for parts in zip(*(means for means, _ in found)))
    if variable.attrs.get("compared") == "difference":
        raise OptionError(f"{quantity!r} is 0 in the baseline by definition, so it has no relative change")
    if not ((values > 0).all() and (reference > 0).all()):
        raise OptionError(f"{quantity!r} is not positive in every prompt, so it has no relative change")
    units = units_of(result, len(values), unit)
    units.refuse_below(FEWEST)
    of_null = relative_change(null, null_reference, units) if null.size else None
    return relative_change(values, reference, units), of_null


def _means(
    result: Result, some: slice, condition: str, quantity: str, segment: str | None, layer: int | None
) -> tuple[Means, np.ndarray]:
    """Means over layers and heads for some prompts, and which cells are present."""
    cut = {n: one.isel(prompt=some) if "prompt" in one.dims else one for n, one in result.datasets.items()}
    here = result if some == slice(None) else replace(result, datasets=cut)
    parts = aligned(here, condition, here, BASELINE, quantity, "segment", segment, "uniform")
    if set(parts[0].dims) & {"segment", "to_segment"}:
        raise OptionError(f"{quantity!r} has more than one number per head, so a mean over heads has no meaning")
    chosen = [part if part is None or layer is None else part.sel(layer=layer) for part in parts]
    means = (np.empty(0) if p is None else p.mean([d for d in p.dims if d != "prompt"]).values for p in chosen)
    return tuple(means), parts[0].notnull().all("prompt").values
