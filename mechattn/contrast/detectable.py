"""What can be detected with a result's number of prompts, before anything is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mechattn.contrast.differences import check_cells
from mechattn.contrast.table import check_select, layers_of
from mechattn.results.result import units_of
from mechattn.stats.resolution import Resolution
from mechattn.stats.resolution import resolution as resolution_of

if TYPE_CHECKING:
    from mechattn.contrast.contrast import Contrast


def resolution(asked: Contrast, select: Literal["half"] | None, q: float) -> Resolution:
    """See :meth:`mechattn.contrast.contrast.Contrast.resolution`."""
    check_select(select)
    cells, left_out = [], []
    for made in layers_of(asked)():
        cells.append(made.cells)
        left_out += made.left_out
    check_cells(asked, made.scale, sum(some.size for some in cells), left_out)
    units = units_of(asked.result, made.ours.sizes["prompt"], asked.unit)
    n = units.n if select is None else (units.n + 1) // 2
    return resolution_of(n, sum(int(some.sum()) for some in cells), q, asked.resamples, units.unit)
