"""The change of a quantity averaged over layers and heads, by prompt, beside that of its null."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mechattn.contrast.blocks import of, slices
from mechattn.contrast.differences import Four, aligned, labels_of
from mechattn.contrast.quantities import check_layer, variable_of
from mechattn.errors import OptionError
from mechattn.results.result import units_of
from mechattn.stats.comparison import Verdict, relative_change
from mechattn.stats.intervals import FEWEST, Interval

if TYPE_CHECKING:
    import xarray as xr

    from mechattn.contrast.contrast import Contrast


def overall(asked: Contrast, layer: int | None) -> tuple[Interval, Interval | None]:
    """See :meth:`mechattn.contrast.contrast.Contrast.overall`."""
    quantity, variable = asked.quantity, variable_of(asked.result, asked.quantity, asked.by)
    if layer is not None:
        check_layer(layer, variable)
        at = variable.layer.values.tolist().index(layer)
        some = slice(at, at + 1)
        asked = asked.with_results(of(asked.result, "layer", some), of(asked.reference, "layer", some))
    if variable.attrs.get("compared") == "difference":
        raise OptionError(f"{quantity!r} is 0 in the baseline by definition, so it has no relative change")
    each = 4 * 8 * 6 * int(np.prod([n for dim, n in variable.sizes.items() if dim not in ("prompt", "condition")]))
    blocks = slices(variable.sizes["prompt"], each, asked.result.memory, "a prompt")
    found = [_means(asked, some) for some in blocks]
    if any(not np.array_equal(there, found[0][1]) for _, there in found):
        raise OptionError(
            f"some prompts have no {quantity!r} in the segment {asked.segment!r}; choose one that all prompts have"
        )
    values, reference, null, null_reference = (np.concatenate(parts) for parts in zip(*(means for means, _ in found)))
    if not ((values > 0).all() and (reference > 0).all()):
        raise OptionError(f"{quantity!r} is not positive in every prompt, so it has no relative change")
    units = units_of(asked.result, len(values), asked.unit)
    units.refuse_below(FEWEST)
    of_null = relative_change(null, null_reference, units) if null.size else None
    return relative_change(values, reference, units), of_null


def _means(asked: Contrast, some: slice) -> tuple[list[np.ndarray], np.ndarray]:
    """Each prompt's means over layers and heads of values, reference and their nulls; and which cells are present."""
    here = asked.with_results(of(asked.result, "prompt", some), of(asked.reference, "prompt", some))
    parts: Four = aligned(here, labels_of([here]))
    if set(parts[0].dims) & {"segment", "to_segment"}:
        raise OptionError(f"{asked.quantity!r} has more than one number per head, so a mean over heads has no meaning")

    def mean(part: xr.DataArray | None) -> np.ndarray:
        return np.empty(0) if part is None else part.mean([dim for dim in part.dims if dim != "prompt"]).values

    return [mean(part) for part in parts], parts[0].notnull().all("prompt").values


def verdict(asked: Contrast) -> Verdict:
    """See :meth:`mechattn.contrast.contrast.Contrast.verdict`; its heads are those that the table marks."""
    change, null = overall(asked, None)
    if null is None:
        raise OptionError(f"{asked.quantity!r} has no null in this result, and a verdict compares with it")
    made = asked.table()
    variable = variable_of(asked.result, asked.quantity, asked.by)
    layers, heads = ({label: at for at, label in enumerate(variable[dim].values.tolist())} for dim in ("layer", "head"))
    signs = np.zeros((len(layers), len(heads)), dtype=int)
    found = made[made.q < 0.05]
    signs[[layers[at] for at in found.layer], [heads[at] for at in found["head"]]] = np.sign(found.beyond)
    return Verdict(
        change=change,
        null=null,
        beyond=signs < 0,
        above=signs > 0,
        n=int(made.n.iloc[0]),
        unit=made.attrs["unit"],
    )
