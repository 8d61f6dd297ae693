"""The table of a comparison, with a row for each layer and head, computed some layers at a time if
memory is short.
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
# patterns give p = 0.03, so that q < 0.05 is possible. Such a small half selects too much: for
# measured values that were centred, so that nothing changes, a table had some q < 0.05 in 23 % of
# draws of 12 units (24: 10 %, 64: 7 %).
FEWEST_TO_SELECT = 6

# The columns of a table that are not named like the fields of Paired.
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
# The columns of changes as fractions, and those of the log-ratios from which they are computed.
_LOG_RATIOS = {
    "change": "difference",
    "change_low": "difference_low",
    "change_high": "difference_high",
    "change_null": "null",
}
CHANGE_COLUMNS = [*_LOG_RATIOS]
DEFAULT_MARGINS = {"log-ratio": 0.05, "difference": 0.005}  # 5 %, and half a point of 100
_TEST_COLUMNS = ["q_beyond", "q_difference", "n"]
_MAIN_DIFFERENCE_COLUMNS = [*_LOG_RATIOS.values()]
DIFFERENCE_COLUMNS = [*_MAIN_DIFFERENCE_COLUMNS, "beyond", "beyond_low", "beyond_high"]
_OPTION_COLUMNS = ["q_same", "q_random"]  # added by margin=… and random=…

Columns = Literal["main", "all"]
Ranking = Literal["beyond", "difference"]


@dataclass(frozen=True)
class Selection:
    """The cells that a table reports: all of them, or those that one half of the units selects.

    Args:
        select: "half" selects cells on one half of the units and reports them on the other. None
            reports all cells on all units.
        top: The number of cells to select. They are the furthest from 0, and the furthest is in
            the first row. None selects the cells with q_difference < 0.05 and keeps their order.
        by: The column that ranks the cells for ``top``: "difference" (the default), or "beyond",
            which is the difference too if no null is known.

    Raises:
        OptionError: An option is unknown, ``top`` is given without ``select``, or ``by`` without
            ``top``.
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
                f'top={self.top}: give select="half" too, which ranks heads on one half of the'
                " prompts and reports them on the other. On the prompts by which they were ranked,"
                " the largest of many have intervals that are too optimistic"
            )
        if self.by is not None and self.top is None:
            raise OptionError(f"by={self.by!r} ranks heads: give top=… too, the number of heads")

    @property
    def fewest(self) -> int:
        """The fewest units: each half needs enough for an interval or a test."""
        if self.select is None:
            return FEWEST
        if self.top is not None:
            return 2 * FEWEST
        return 2 * FEWEST_TO_SELECT

    def distances(self, statistics: Paired) -> np.ndarray:
        """The distance of each cell from 0 in the column that ranks it [cell].

        Args:
            statistics: The statistics of all cells on the selecting half.
        """
        has_null = not np.isnan(statistics.beyond).all()
        if self.by == "beyond" and has_null:
            return abs(statistics.beyond)
        return abs(statistics.difference)

    def selected(self, statistics: Paired) -> np.ndarray:
        """A mask of the cells that the selecting half selects [cell].

        Args:
            statistics: The statistics of all cells on the selecting half.
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
    """The table of a comparison, with all columns.

    Args:
        contrast: The question of the comparison.
        selection: The cells to report.
        random: As for :meth:`mechattn.Result.compare`.
        margin: As for :meth:`mechattn.Result.compare`.
        bootstrap_ends: Whether to compute the ends of bootstrap intervals and ``p_family``, which
            takes most of the time.

    Raises:
        OptionError: There is nothing to compare, there are too few units, or an option is refused.
    """
    contrast.check_alike()
    if random is not None:
        check_random(random, contrast)
    units = contrast.units
    units.refuse_below(selection.fewest)

    # Cells are selected on one half of the units, and reported on the other.
    reported_units = np.arange(units.n)
    masks_of_selected = None
    selecting_distances = None  # the rows are ordered by these
    if selection.select is not None:
        selecting_units, reported_units = halves_of(units.n)
        candidates = _cell_statistics(contrast, units, selecting_units, bootstrap_ends=False)
        is_selected = selection.selected(candidates.statistics)
        masks_of_selected = _selected(candidates.masks, is_selected)
        if selection.top is not None:
            selecting_distances = selection.distances(candidates.statistics)[is_selected]

    cells = _cell_statistics(
        contrast, units, reported_units, masks=masks_of_selected, bootstrap_ends=bootstrap_ends
    )
    cell_count = sum(mask.size for mask in cells.masks)
    check_cells(contrast, cell_count, cells.left_out)

    table = _columns(cells)
    table.attrs = _attributes(contrast, selection, cells, units)
    table = table.assign(**_question_columns(contrast, table))

    # Further columns, and the order of the ranking.
    if margin is not None:
        table = with_equivalence(table, margin)
    if random is not None:
        table = with_random(table, random, contrast, units, reported_units)
    if selecting_distances is not None:
        furthest_first = np.argsort(-selecting_distances, kind="stable")
        table = table.iloc[furthest_first].reset_index(drop=True)
    return by_head(table)


def largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """A mask of the ``count`` largest numbers; of equal numbers the earlier, and NaN last."""
    largest_first = np.argsort(-sizes, kind="stable")
    mask = np.zeros(sizes.shape, dtype=bool)
    mask[largest_first[:count]] = True
    return mask


def main_columns(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that a paper prints: the change with its interval and its null, q and
    n.
    """
    effect_columns = _MAIN_DIFFERENCE_COLUMNS
    if "change" in table:
        effect_columns = CHANGE_COLUMNS
    first_effect = table.columns.get_loc(effect_columns[0])  # labels stand before it
    label_columns = table.columns[:first_effect]
    option_columns = table.columns.intersection(_OPTION_COLUMNS)

    return table[[*label_columns, *effect_columns, *_TEST_COLUMNS, *option_columns]]


def marked(table: pd.DataFrame, margin: float | None = None) -> np.ndarray:
    """The rows of a table that a map of heads marks: those with a significant change of more than a
    margin.

    With hundreds of heads and tens of prompts, even a change of 0.5 % has q < 0.05, so that
    significance alone would mark nearly all.

    Args:
        table: A table from ``Result.compare``.
        margin: The largest change that is not marked, in the unit of ``change`` (0.05 is 5 %), or
            of ``difference`` in a table without ``change``. By default it is 0.05 or, for a
            difference, 0.005 (half a point of 100 of the attention).

    Returns:
        A mask of rows: ``q_difference < 0.05`` and ``|change| > margin``.

    Raises:
        OptionError: The margin is not a positive number.
    """
    effect_column = "difference"
    default_margin = DEFAULT_MARGINS["difference"]
    if "change" in table:
        effect_column = "change"
        default_margin = DEFAULT_MARGINS["log-ratio"]
    if margin is None:
        margin = default_margin
    else:
        check_margin(margin)
    is_large = table[effect_column].abs() > margin
    return np.asarray(is_large & (table.q_difference < 0.05))


# The cells, block by block.


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells that a table reports, of all blocks of layers, and their statistics."""

    means: pd.DataFrame  # a row for each cell, with its labels (layer, head …), value and reference
    statistics: Paired
    masks: list[np.ndarray]  # the cells of each block that are reported [*cells]
    left_out: list[str]  # the names of cells without a difference
    last_block: Differences  # its scale, null and dimensions are those of all blocks
    bags: Bags | None  # the bags that are resampled in place of units


def _cell_statistics(
    contrast: Question,
    units: Units,
    unit_indices: np.ndarray,
    masks: Sequence[np.ndarray] | None = None,
    bootstrap_ends: bool = True,
) -> _Cells:
    """The statistics of some units, in all cells with a difference or in those of the masks.

    Args:
        contrast: The question of the comparison.
        units: The units of all prompts.
        unit_indices: The units that count.
        masks: The cells of each block [*cells]; by default those with a difference.
        bootstrap_ends: Whether to compute the ends of bootstrap intervals and ``p_family``.
    """
    stream = PairedStream(
        len(unit_indices), contrast.level, contrast.resamples, contrast.seed, bootstrap_ends
    )

    def unit_values(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The values of the units that count, in the cells of the mask [unit, cell]."""
        counted_units = units.means(values)[unit_indices]
        return counted_units[:, mask]

    means_of_blocks = []
    used_masks = []
    left_out: list[str] = []
    for block_index, block in enumerate(layers_of(contrast, contrast.resamples)):
        mask = block.has_difference
        if masks is not None:
            mask = masks[block_index]

        expected = None
        if block.expected is not None:
            expected = unit_values(block.expected, mask)
        rounding = block.rounding(units, unit_indices)[mask]
        stream.add(unit_values(block.difference.values, mask), expected, rounding)

        columns = cell_labels(block, mask)
        columns["value"] = unit_values(block.ours.values, mask).mean(0)
        columns["reference"] = unit_values(block.theirs.values, mask).mean(0)
        means_of_blocks.append(pd.DataFrame(columns))
        used_masks.append(mask)
        left_out += block.left_out

    means = pd.concat(means_of_blocks, ignore_index=True)
    return _Cells(
        means=means,
        statistics=stream.statistics(),
        masks=used_masks,
        left_out=left_out,
        last_block=block,
        bags=stream.bags,
    )


def _selected(masks: Sequence[np.ndarray], is_selected: np.ndarray) -> list[np.ndarray]:
    """The masks of the selected cells of each block.

    Args:
        masks: The cells with statistics of each block [*cells].
        is_selected: A mask of the selected ones among these, over all blocks [cell].
    """
    selected_masks = []
    start = 0
    for mask in masks:
        stop = start + int(mask.sum())
        selected_mask = np.zeros_like(mask)
        selected_mask[mask] = is_selected[start:stop]
        selected_masks.append(selected_mask)
        start = stop
    return selected_masks


# The columns and attributes of a table.


def _columns(cells: _Cells) -> pd.DataFrame:
    """The columns of a table in their order.

    Labels come first. With ratios, the changes as fractions follow, then tests, then differences;
    without ratios, differences, then tests. The rest comes last.
    """
    statistics = {}
    for field in fields(Paired):
        name = _COLUMN_NAMES.get(field.name, field.name)
        statistics[name] = getattr(cells.statistics, field.name)
    table = cells.means.assign(**statistics)
    if cells.last_block.expected is None:
        table = table.assign(p_beyond=np.nan, q_beyond=np.nan)

    label_columns = cells.means.columns.drop(["value", "reference"])
    first_columns = [*label_columns, *DIFFERENCE_COLUMNS, *_TEST_COLUMNS]
    if cells.last_block.scale == "log-ratio":
        for change_column, log_ratio_column in _LOG_RATIOS.items():
            table[change_column] = np.expm1(table[log_ratio_column])
        first_columns = [*label_columns, *CHANGE_COLUMNS, *_TEST_COLUMNS, *DIFFERENCE_COLUMNS]
    other_columns = table.columns.drop(first_columns)
    return table[[*first_columns, *other_columns]].assign(scale=cells.last_block.scale)


def _attributes(
    contrast: Question, selection: Selection, cells: _Cells, units: Units
) -> dict[str, Any]:
    """The attributes of a table: its question, its null and its tests."""
    tests = len(cells.statistics.p)
    n = cells.statistics.n
    unit_resolution = resolution(n, max(1, tests), resamples=contrast.resamples, unit=units.kind)

    models = {str(result.provenance["model"]["name"]) for result, _ in contrast.sides}
    dims = " × ".join(map(str, cells.last_block.difference.dims[1:]))
    tested_column = "beyond"
    if cells.last_block.expected is None:
        tested_column = "difference"

    sign_patterns = None  # all patterns were tried
    if n > MOST_EXACT:
        sign_patterns = patterns_needed(contrast.resamples, tests)

    attributes: dict[str, Any] = {
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
        "tested": tested_column,
        "left_out": cells.left_out,
        "family": f"{tests} tests: {dims}",
        "unit": units.unit,
        "unit_kind": units.kind,
        "smallest_p": unit_resolution.smallest_p,
        "resolution": str(unit_resolution),
        "patterns": sign_patterns,
        "skewed": cells.statistics.skewed,
        "alike": alike_words(contrast.result),
    }
    if cells.bags is not None:
        attributes["resampled"] = cells.bags.words
    if selection.top is not None:
        attributes["top"] = selection.top
        attributes["ranked_by"] = "difference"
        if selection.by == "beyond":
            attributes["ranked_by"] = tested_column
    return attributes


def _question_columns(contrast: Question, table: pd.DataFrame) -> dict[str, Any]:
    """Columns with the same value in every row. They explain the numbers in a saved table, whose
    attributes are lost.
    """
    columns = {name: table.attrs[name] for name in ("quantity", "condition", "to")}
    if "segment" not in table:
        variable = variable_of(contrast.result, contrast.quantity)
        columns["segment"] = segment_of(variable, contrast.segment)
    if "change" in table:
        columns["change_units"] = "fraction"  # of the reference
    return {**columns, "level": contrast.level, "n_of": table.attrs["unit"]}
