"""The table of a comparison, for all cells at once or for a few layers at a time if memory is short."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mechattn.results.differences import Differences, Scale, check_cells, refuse_no_cells
from mechattn.stats.bags import ALONE, Bags
from mechattn.stats.paired import Paired, PairedStream
from mechattn.stats.units import Units

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = [name for name in Paired.__dataclass_fields__ if name != "n"]


@dataclass(frozen=True)
class Blocks:
    """A comparison, a few layers at a time.

    Args:
        made: A function that returns the differences of a block.
        layers: The blocks.
        units: The units: prompts or their groups.
        level: The level of the intervals.
        resamples: As for ``Result.compare``.
        seed: As for ``Result.compare``.
        bootstrap: Whether to compute bootstrap intervals.
        seen: A function called with each reported block and its layers.
    """

    made: Callable[[slice], Differences]
    layers: Seq[slice]
    units: Units
    level: float
    resamples: int
    seed: int
    bootstrap: bool = True
    seen: Callable[[Differences, slice], None] | None = None

    def table(self, quantity: str, finding: np.ndarray, shown: np.ndarray, halves: bool) -> BlockTable:
        """Compute the table for the reported units; with ``halves``, only for cells found on the other units.

        Raises:
            OptionError: No cell can be compared.
        """
        masks = None
        if halves:
            found = replace(self, bootstrap=False, seen=None)._gone_through(quantity, finding, None)
            masks = _taken_apart(found.numbers.q < 0.05, found.cells)
        made = self._gone_through(quantity, shown, masks)
        check_cells(quantity, made.last.scale, sum(mask.size for mask in made.cells), made.left_out)
        return made

    def _gone_through(self, quantity: str, some: np.ndarray, masks: Seq[np.ndarray] | None) -> BlockTable:
        """Go through all blocks and compute statistics for some units, over all or chosen cells."""
        import pandas as pd

        stream = PairedStream(len(some), self.level, self.resamples, self.seed, self.bootstrap)
        rows, cells, left_out = [], [], []
        for number, layers in enumerate(self.layers):
            made = self.made(layers)
            wanted = made.cells if masks is None else masks[number]
            stream.add(*tested(made, self.units, wanted, some))
            rows.append(means_of(made, self.units, wanted, some, len(self.layers) > 1))
            cells.append(wanted)
            left_out += made.left_out
            if self.seen is not None:
                self.seen(made, layers)
        refuse_no_cells(quantity, made.scale, sum(mask.size for mask in cells), left_out)
        means = rows[0] if len(rows) == 1 else pd.concat(rows, ignore_index=True)
        return BlockTable(means, stream.made(), cells, left_out, light(made), stream.bags)


@dataclass(frozen=True)
class BlockTable:
    """The results from all blocks.

    Args:
        means: One row per cell: its coordinates and means.
        numbers: All statistics of the cells.
        cells: Which cells of each block are included.
        left_out: The names of cells without a difference.
        last: The last block, without its numbers.
        bags: The bags that were resampled instead of units, if there are many units.
    """

    means: pd.DataFrame
    numbers: Paired
    cells: list[np.ndarray]
    left_out: list[str]
    last: Light
    bags: Bags | None


@dataclass(frozen=True)
class Light:
    """What all blocks have in common."""

    null: str
    scale: Scale
    dims: tuple[str, ...]


def light(made: Differences) -> Light:
    return Light(made.null, made.scale, tuple(map(str, made.difference.dims[1:])))


def _taken_apart(every: np.ndarray, cells: Seq[np.ndarray]) -> list[np.ndarray]:
    """Split a mask over all included cells into one mask per block."""
    made, start = [], 0
    for mask in cells:
        some = mask.copy()
        some[some] = every[start : start + int(mask.sum())]
        start += int(mask.sum())
        made.append(some)
    return made


def tested(
    made: Differences, units: Units, cells: np.ndarray, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Differences of some cells over some units, with their null values and the rounding error that counts as 0."""
    each = chosen(units.means(made.difference.values), some, cells)
    expected = None if made.expected is None else chosen(units.means(made.expected), some, cells)
    return each, expected, made.rounding(units, some)[cells]


def chosen(values: np.ndarray, some: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Select units and cells [unit, cell] from values [unit, *cells]; not copied if units are many and all selected."""
    if len(some) == len(values) > ALONE and cells.all():
        return np.ascontiguousarray(values).reshape(len(values), -1)
    return values[some][:, cells]


def means_of(made: Differences, units: Units, cells: np.ndarray, shown: np.ndarray, part: bool) -> pd.DataFrame:
    """One row per cell: its coordinates and means; ``part`` means that only the given cells are computed."""
    import pandas as pd

    index = np.argwhere(cells)
    labels = {dim: made.difference[dim].values[index[:, i]] for i, dim in enumerate(made.difference.dims[1:])}
    means = {}
    for name, of in (("value", made.ours), ("reference", made.theirs)):
        each = chosen(units.means(of.values), shown, cells)
        alone = part and each.shape[1] == 1  # numpy sums a single column in another order
        means[name] = (np.repeat(each, 2, axis=1) if alone else each).mean(0)[: each.shape[1]]
    return pd.DataFrame(labels | means)


def as_table(means: pd.DataFrame, numbers: Paired, scale: str) -> pd.DataFrame:
    """Combine the means with everything that ``paired`` computed."""
    labels = [str(name) for name in means if name not in ("value", "reference")]
    table = means.assign(**{name: getattr(numbers, name) for name in _COLUMNS}, n=numbers.n)
    # The columns that a truncated table should still show.
    first = [*labels, "difference", "null", "beyond", "beyond_low", "beyond_high", "q", "n", "low", "high"]
    return table[[*first, *(name for name in table if name not in first)]].assign(scale=scale)
