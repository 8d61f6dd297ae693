"""The table of a comparison, layer by layer and head by head, some layers at a time where memory is
short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from mechattn.contrast.differences import (
    Differences,
    cell_labels,
    check_cells,
    layers_of,
    refuse_without_cells,
)
from mechattn.contrast.further_columns import (
    check_margin,
    check_random,
    with_equivalence,
    with_random,
)
from mechattn.contrast.quantities import segment_of, variable_of
from mechattn.contrast.question import Question
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.results.result import Result, alike_words, by_head
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import Paired, PairedStream
from mechattn.stats.units import MOST_EXACT, Bags, Units, halves_of, patterns_needed, resolution

# The fewest units of a half that selects by q < 0.05. With 6, the two most extreme of 2⁶ sign
# patterns give p = 0.03, so that this can be reached at all. So few are lenient: where measured
# values were centred, so that nothing changes, a table had some q < 0.05 in 23 % of draws of 12
# units (24: 10 %, 64: 7 %).
FEWEST_TO_SELECT = 6

# The columns of a table whose names are not those of the fields of Paired.
_COLUMN_NAMES = {
    "low": "difference_low",
    "high": "difference_high",
    "low_bootstrap": "difference_low_bootstrap",
    "high_bootstrap": "difference_high_bootstrap",
    "low_simultaneous": "difference_low_simultaneous",
    "high_simultaneous": "difference_high_simultaneous",
    "p": "p_beyond",
    "q": "q_beyond",
}
CHANGE = ["change", "change_low", "change_high", "change_null"]
DEFAULT_MARGINS = {"log-ratio": 0.05, "difference": 0.005}  # 5 %, and half a point of 100
_TEST_COLUMNS = ["q_beyond", "q_difference", "n"]
_DIFFERENCE = ["difference", "difference_low", "difference_high", "null"]  # in the order of CHANGE
DIFFERENCE_COLUMNS = [*_DIFFERENCE, "beyond", "beyond_low", "beyond_high"]
_OPTION_COLUMNS = ["q_same", "q_random"]  # that margin=… and random=… add

Columns = Literal["main", "all"]
Ranking = Literal["beyond", "difference"]


@dataclass(frozen=True)
class Selection:
    """Which cells a table reports: all of them, or those that one half of the prompts selects, the
    ``top`` furthest from 0 ``by`` a column or those with q < 0.05.

    Args:
        select: "half" selects on one half of the units; None reports all cells on all units.
        top: The number of cells to select; None for those with q < 0.05.
        by: What ranks them: the difference (the default), or what is beyond the null. Where no null
            is known, it is the difference all the same.

    Raises:
        OptionError: An option is unknown, or ``top`` or ``by`` is given where nothing is selected.
    """

    select: Literal["half"] | None = None
    top: int | None = None
    by: Ranking | None = None

    def __post_init__(self) -> None:
        check_choice(("half", None), select=self.select)
        check_choice((*get_args(Ranking), None), by=self.by)
        if self.top is not None:
            check_counts(top=self.top)
        if self.top is not None and self.select is None:
            raise OptionError(
                f'top={self.top}: say select="half" too, which ranks heads on one half of the'
                " prompts and reports them on the other; the largest of many, on the prompts that"
                " made them so, have too optimistic intervals"
            )
        if self.by is not None and self.top is None:
            raise OptionError(f"by={self.by!r} ranks heads, so say top=… too, how many of them")

    @property
    def fewest(self) -> int:
        """The fewest units: both halves need as many as an interval, or a test."""
        if self.select is None:
            return FEWEST
        if self.top is not None:
            return 2 * FEWEST
        return 2 * FEWEST_TO_SELECT

    def distances(self, statistics: Paired) -> np.ndarray:
        """How far each cell is from 0, in what ranks it.

        Args:
            statistics: The statistics of the selecting half, of all cells.
        """
        has_null = not np.isnan(statistics.beyond).all()
        if self.by == "beyond" and has_null:
            return abs(statistics.beyond)
        return abs(statistics.difference)

    def selected(self, statistics: Paired) -> np.ndarray:
        """Which cells the selecting half selects.

        Args:
            statistics: The statistics of the selecting half, of all cells.
        """
        if self.top is None:
            return statistics.q_difference < 0.05

        distances = self.distances(statistics)
        return largest(distances, self.top) & ~np.isnan(distances)


ALL_CELLS = Selection()


def comparison_table(
    contrast: Question,
    selection: Selection = ALL_CELLS,
    random: Sequence[Result] | None = None,
    margin: float | None = None,
    bootstrap_ends: bool = True,
) -> pd.DataFrame:
    """All columns of :meth:`mechattn.contrast.contrast.Contrast.table`, which explains the options;
    the ends of bootstrap intervals take most of the time.
    """
    contrast.check_alike()
    if random is not None:
        check_random(random, contrast)
    units = contrast.units
    units.refuse_below(selection.fewest)

    # Cells are selected on one half of the units, and reported on the other.
    reported_units = np.arange(units.n)
    masks = None
    distances = None  # by which the rows are ordered
    if selection.select is not None:
        selecting_units, reported_units = halves_of(units.n)
        selecting = _cell_statistics(contrast, units, selecting_units, bootstrap_ends=False)
        is_selected = selection.selected(selecting.statistics)
        masks = _selected(selecting.masks, is_selected)
        if selection.top is not None:
            distances = selection.distances(selecting.statistics)[is_selected]

    cells = _cell_statistics(contrast, units, reported_units, masks, bootstrap_ends)
    count = sum(mask.size for mask in cells.masks)
    check_cells(contrast, count, cells.left_out)

    heads = _columns(cells)
    heads.attrs = _about(contrast, selection, cells, units)
    heads = heads.assign(**_labelling(contrast, heads))

    # Further columns, and the order of the ranking.
    if margin is not None:
        heads = with_equivalence(heads, margin)
    if random is not None:
        heads = with_random(heads, random, contrast, units, reported_units)
    if distances is not None:
        furthest_first = np.argsort(-distances, kind="stable")
        heads = heads.iloc[furthest_first].reset_index(drop=True)
    return by_head(heads)


def largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """Which of some numbers are the largest; of equal ones the earlier, and NaN last."""
    largest_first = np.argsort(-sizes, kind="stable")
    mask = np.zeros(sizes.shape, dtype=bool)
    mask[largest_first[:count]] = True
    return mask


def main_columns(heads: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that a paper prints: the change with its interval and its null, q and
    n.
    """
    effect = _DIFFERENCE
    if "change" in heads:
        effect = CHANGE
    labels = heads.columns[: heads.columns.get_loc(effect[0])]
    option_columns = heads.columns.intersection(_OPTION_COLUMNS)

    return heads[[*labels, *effect, *_TEST_COLUMNS, *option_columns]]


def marked(table: pd.DataFrame, margin: float | None = None) -> np.ndarray:
    """Which rows of a table change by more than a margin, and not by chance: those that a map of
    heads marks.

    With hundreds of heads and tens of prompts even a change of 0.5 % has q < 0.05, so significance
    alone would mark all.

    Args:
        table: A table from ``Result.compare``.
        margin: The largest change that is not worth a mark, in the unit of ``change`` (0.05 is 5
            %), or of ``difference`` for a quantity that is compared by differences. By default
            0.05, or 0.005: half a point of 100 of the attention.

    Returns:
        A mask of rows: ``q_difference < 0.05`` and ``|change| > margin``.

    Raises:
        OptionError: The margin is not a positive number.
    """
    effect = "difference"
    scale = "difference"
    if "change" in table:
        effect = "change"
        scale = "log-ratio"
    if margin is None:
        margin = DEFAULT_MARGINS[scale]
    else:
        check_margin(margin)
    is_large = table[effect].abs() > margin
    return np.asarray(is_large & (table.q_difference < 0.05))


# The cells, block by block.


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of all blocks of layers that a table reports, and their statistics."""

    means: pd.DataFrame  # a row for each cell: its layer, head …, value and reference
    statistics: Paired
    masks: list[np.ndarray]  # which cells of each block they are [*cells]
    left_out: list[str]  # the names of cells without a difference
    last_block: Differences  # its scale, null and dimensions are those of all
    bags: Bags | None  # which are resampled in place of units


def _cell_statistics(
    contrast: Question,
    units: Units,
    unit_indices: np.ndarray,
    masks: Sequence[np.ndarray] | None = None,
    bootstrap_ends: bool = True,
) -> _Cells:
    """The statistics of some units, over all cells with a difference or over those of the masks.

    Args:
        contrast: The comparison.
        units: The units of all prompts.
        unit_indices: Those that count.
        masks: The cells of each block [*cells]; by default those with a difference.
        bootstrap_ends: Whether to compute the ends of bootstrap intervals.

    Raises:
        OptionError: No cell has a difference.
    """
    stream = PairedStream(
        len(unit_indices), contrast.level, contrast.resamples, contrast.seed, bootstrap_ends
    )

    def unit_values(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The values of the units that count, in the mask's cells [unit, cell]."""
        counted_units = units.means(values)[unit_indices]
        return counted_units[:, mask]

    rows = []
    used_masks = []
    left_out: list[str] = []
    for number, block in enumerate(layers_of(contrast, contrast.resamples)):
        mask = block.cells
        if masks is not None:
            mask = masks[number]

        expected = None
        if block.expected is not None:
            expected = unit_values(block.expected, mask)
        rounding = block.rounding(units, unit_indices)[mask]
        stream.add(unit_values(block.difference.values, mask), expected, rounding)

        columns = cell_labels(block, mask)
        columns["value"] = unit_values(block.ours.values, mask).mean(0)
        columns["reference"] = unit_values(block.theirs.values, mask).mean(0)
        rows.append(pd.DataFrame(columns))
        used_masks.append(mask)
        left_out += block.left_out

    means = pd.concat(rows, ignore_index=True)
    if masks is None and not len(means):
        refuse_without_cells(contrast)
    return _Cells(
        means, stream.statistics(), used_masks, left_out, last_block=block, bags=stream.bags
    )


def _selected(masks: Sequence[np.ndarray], is_selected: np.ndarray) -> list[np.ndarray]:
    """The masks of blocks without the cells that are not selected.

    Args:
        masks: The cells with statistics, of each block [*cells].
        is_selected: Which of these, counted over all blocks, are selected [cell].
    """
    ends = np.cumsum([mask.sum() for mask in masks])
    selected_masks = []
    for mask, selected_in_block in zip(masks, np.split(is_selected, ends[:-1]), strict=True):
        selected = mask.copy()
        selected[mask] = selected_in_block
        selected_masks.append(selected)
    return selected_masks


# The columns and attributes of a table.


def _columns(cells: _Cells) -> pd.DataFrame:
    """The columns of a table in their order: fractions, where there are ratios, and tests come
    first, then differences with their intervals, and the rest.
    """
    statistics = {}
    for field in fields(Paired):
        name = _COLUMN_NAMES.get(field.name, field.name)
        statistics[name] = getattr(cells.statistics, field.name)
    heads = cells.means.assign(**statistics)
    if cells.last_block.expected is None:
        heads = heads.assign(p_beyond=np.nan, q_beyond=np.nan)

    labels = list(cells.means.columns.drop(["value", "reference"]))
    order = [*labels, *DIFFERENCE_COLUMNS, *_TEST_COLUMNS]
    if cells.last_block.scale == "log-ratio":
        log_ratios = heads[_DIFFERENCE].to_numpy()  # in the order of CHANGE
        heads[CHANGE] = np.expm1(log_ratios)
        order = [*labels, *CHANGE, *_TEST_COLUMNS, *DIFFERENCE_COLUMNS]
    rest = heads.columns.drop(order)
    return heads[[*order, *rest]].assign(scale=cells.last_block.scale)


def _about(contrast: Question, selection: Selection, cells: _Cells, units: Units) -> dict[str, Any]:
    """What a table records about its question, its null and its tests."""
    tests = len(cells.statistics.p)
    n = cells.statistics.n
    reachable = resolution(n, max(1, tests), resamples=contrast.resamples, unit=units.kind)

    models = {str(result.provenance["model"]["name"]) for result, _ in contrast.sides}
    dims = " × ".join(map(str, cells.last_block.difference.dims[1:]))
    tested = "beyond"
    if cells.last_block.expected is None:
        tested = "difference"

    patterns = None  # all were tried
    if n > MOST_EXACT:
        patterns = patterns_needed(contrast.resamples, tests)

    about: dict[str, Any] = {
        "condition": contrast.condition,
        "to": contrast.to,
        "quantity": contrast.quantity,
        "segment": contrast.segment_name,
        "scale": cells.last_block.scale,
        "select": selection.select,
        "level": contrast.level,
        "resamples": contrast.resamples,
        "seed": contrast.seed,
        "models": ", ".join(sorted(models)),
        "null": cells.last_block.null,
        "predicts_no_change": cells.last_block.predicts_no_change,
        "tested": tested,
        "left_out": cells.left_out,
        "family": f"{tests} tests: {dims}",
        "unit": units.unit,
        "unit_kind": units.kind,
        "smallest_p": reachable.smallest_p,
        "resolution": str(reachable),
        "patterns": patterns,
        "skewed": cells.statistics.skewed,
        "alike": alike_words(contrast.result),
    }
    if cells.bags is not None:
        about["resampled"] = cells.bags.words
    if selection.top is not None:
        about["top"] = selection.top
        about["ranked_by"] = tested if selection.by == "beyond" else "difference"
    return about


def _labelling(contrast: Question, heads: pd.DataFrame) -> dict[str, Any]:
    """The last columns, which say what the numbers are where a table is a file."""
    columns = {name: heads.attrs[name] for name in ("quantity", "condition", "to")}
    if "segment" not in heads:
        variable = variable_of(contrast.result, contrast.quantity)
        columns["segment"] = segment_of(variable, contrast.segment)
    if "change" in heads:
        columns["change_units"] = "fraction"  # of the reference
    return {**columns, "level": contrast.level, "n_of": heads.attrs["unit"]}
