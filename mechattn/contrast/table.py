"""The table of a comparison, layer by layer and head by head, some layers at a time where memory is
short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.axes import BASELINE, by_head
from mechattn.contrast.beside_random import BesideRandom, check_random
from mechattn.contrast.differences import Differences, check_cells, differences, labels_of, no_cells
from mechattn.contrast.quantities import layer_blocks, segment_of, variable_of
from mechattn.contrast.question import Question
from mechattn.errors import OptionError, check_counts
from mechattn.results.result import Result, alike_words, shared_units
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import Paired, PairedStream, false_discovery
from mechattn.stats.resolution import EXACT, enough, resolution
from mechattn.stats.units import Bags, Units, halves_of

# The fewest units of one half. With 6, the two most extreme of 2⁶ sign patterns give p = 0.03, so
# that q < 0.05 can be reached at all. So few are lenient: where measured values were centred, so
# that nothing changes, a table had some q < 0.05 in 23 % of draws of 12 units (24: 10 %, 64: 7 %).
FEWEST_TO_SELECT = 6

# The columns of a table that have other names than the fields of Paired.
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
_TESTS = ["q_beyond", "q_difference", "n"]
LOGS = [
    "difference",
    "difference_low",
    "difference_high",
    "null",
    "beyond",
    "beyond_low",
    "beyond_high",
]
_COLUMNS = [name for name in Paired.__dataclass_fields__ if name != "n"]
_OF_OPTIONS = ["q_same", "q_random"]  # columns that margin=… and random=… add

Columns = Literal["main", "all"]


@dataclass(frozen=True)
class _Cells:
    """The cells of all blocks: their coordinates and means, their statistics, and which cells of
    each block they are.
    """

    means: pd.DataFrame
    statistics: Paired
    masks: list[np.ndarray]
    left_out: list[str]
    any_block: Differences  # its scale, null and dimensions are those of all
    bags: Bags | None


Ranking = Literal["beyond", "difference"]


@dataclass(frozen=True)
class Selection:
    """Which cells one half of the prompts selects: those with q < 0.05, or the ``top`` furthest
    from 0 ``by`` a column.

    Raises:
        OptionError: An option is unknown, or ``top`` or ``by`` is given where nothing is selected.
    """

    select: Literal["half"] | None = None
    top: int | None = None
    by: Ranking | None = None

    def __post_init__(self) -> None:
        check_select(self.select)
        if self.top is not None:
            check_counts(top=self.top)
        if self.by not in (None, *get_args(Ranking)):
            raise OptionError(f'by={self.by!r}: give "difference" or "beyond" (the null)')
        if self.top is not None and self.select is None:
            raise OptionError(
                f'top={self.top}: say select="half" too, which ranks heads on one half of the'
                " prompts and reports them on the other; the largest of many, on the prompts that"
                " made them so, have too optimistic intervals"
            )
        if self.by is not None and self.top is None:
            raise OptionError(f"by={self.by!r} ranks heads, so say top=… too, how many of them")

    @property
    def fewest(self) -> tuple[int, str]:
        """The fewest units, and why."""
        if self.select is None:
            return FEWEST, ""
        if self.top is not None:
            return 2 * FEWEST, ""
        return 2 * FEWEST_TO_SELECT, ", since fewer cannot give q < 0.05 on one half"

    def scores(self, statistics: Paired) -> np.ndarray:
        """What ranks the cells of one half; −inf for those that are not selected."""
        if self.top is None:
            return np.where(statistics.q_difference < 0.05, 0.0, -np.inf)
        sizes = abs(statistics.difference)
        if self.by == "beyond" and not np.isnan(statistics.beyond).all():
            sizes = abs(statistics.beyond)
        largest = np.argsort(-sizes, kind="stable")[: self.top]
        scores = np.full(sizes.shape, -np.inf)
        scores[largest] = sizes[largest]
        return scores


def table(
    contrast: Question,
    selection: Selection | None = None,
    random: Sequence[Result] | None = None,
    margin: float | None = None,
    bootstrap_ends: bool = True,
) -> pd.DataFrame:
    """See :meth:`mechattn.contrast.contrast.Contrast.table`; the ends of bootstrap intervals take
    most of the time.
    """
    check_alike(contrast)
    if selection is None:
        selection = Selection()
    if random is not None:
        check_random(random, contrast)
    prompts = variable_of(contrast.result, contrast.quantity).sizes["prompt"]
    units = shared_units(contrast.result, contrast.reference, prompts, contrast.unit)
    units.refuse_below(*selection.fewest)
    blocks = layers_of(contrast, contrast.resamples, contrast.resamples)

    reported_units = np.arange(units.n)
    masks = None
    scores = None
    if selection.select:
        selecting_units, reported_units = halves_of(units.n)
        selecting = _gone_through(contrast, blocks, units, selecting_units, bootstrap_ends=False)
        scores = selection.scores(selecting.statistics)
        masks = _selected(selecting.masks, scores > -np.inf)

    beside = None
    see = None
    if random is not None:
        beside = BesideRandom(random, contrast, units, reported_units)
        see = beside.see
    cells = _gone_through(contrast, blocks, units, reported_units, masks, see, bootstrap_ends)
    count = sum(mask.size for mask in cells.masks)
    check_cells(contrast, cells.any_block.scale, count, cells.left_out)

    heads = _columns(cells)
    heads.attrs = _about(contrast, selection, cells, units)
    heads = heads.assign(**_labelling(contrast, heads))
    if margin is not None:
        heads = with_equivalence(heads, margin)
    if beside is not None:
        heads = beside.table(heads, np.concatenate(cells.masks))
    if scores is not None and selection.top is not None:
        order = np.argsort(-scores[scores > -np.inf], kind="stable")
        heads = heads.iloc[order].reset_index(drop=True)
    return by_head(heads)


def main_columns(heads: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that a paper prints: the change with its interval and its null, q and
    n.
    """
    effect = CHANGE if "change" in heads else LOGS[:4]
    labels = heads.columns[: heads.columns.get_loc(effect[0])]
    names = [*labels, *effect, *_TESTS, *heads.columns.intersection(_OF_OPTIONS)]
    return heads[names]


def _selected(masks: Sequence[np.ndarray], is_selected: np.ndarray) -> list[np.ndarray]:
    """The masks of blocks without the cells that are not selected; these are counted over all
    blocks.
    """
    ends = np.cumsum([mask.sum() for mask in masks])
    selected_masks = []
    for mask, of_block in zip(masks, np.split(is_selected, ends[:-1]), strict=True):
        selected = mask.copy()
        selected[mask] = of_block
        selected_masks.append(selected)
    return selected_masks


def _columns(cells: _Cells) -> pd.DataFrame:
    """The columns of a table in their order: fractions and tests first, then logarithms or
    differences.
    """
    labels = [str(name) for name in cells.means if name not in ("value", "reference")]
    statistics = {
        _COLUMN_NAMES.get(name, name): getattr(cells.statistics, name) for name in _COLUMNS
    }
    heads = cells.means.assign(**statistics, n=cells.statistics.n)
    if cells.any_block.expected is None:
        heads = heads.assign(p_beyond=np.nan, q_beyond=np.nan)
    order = [*labels, *LOGS, *_TESTS]
    if cells.any_block.scale == "log-ratio":
        ratios = heads[["difference", "difference_low", "difference_high", "null"]].to_numpy()
        heads[CHANGE] = np.expm1(ratios)
        order = [*labels, *CHANGE, *_TESTS, *LOGS]
    rest = heads.columns.drop(order)
    return heads[[*order, *rest]].assign(scale=cells.any_block.scale)


def layers_of(
    contrast: Question, bootstrap: int = 0, signs: int = 0
) -> Callable[[], Iterator[Differences]]:
    """A function that yields the differences of a comparison, some layers at a time."""
    blocks = layer_blocks(contrast.result, contrast.quantity, contrast.segment, bootstrap, signs)
    contrasts = [contrast.part("layer", block) for block in blocks]
    labels = labels_of(contrasts)
    return lambda: (differences(block_contrast, labels) for block_contrast in contrasts)


def check_select(select: str | None) -> None:
    """Refuse an unknown way to select."""
    if select not in (None, "half"):
        raise OptionError(
            f'select={select!r}: "half" finds heads on one half of the prompts and reports them on'
            " the other"
        )


def _gone_through(
    contrast: Question,
    blocks: Callable[[], Iterator[Differences]],
    units: Units,
    unit_indices: np.ndarray,
    masks: Sequence[np.ndarray] | None = None,
    see: Callable[[Differences], None] | None = None,
    bootstrap_ends: bool = True,
) -> _Cells:
    """The statistics of some units, over all cells with a difference or over those of the masks."""
    stream = PairedStream(
        len(unit_indices), contrast.level, contrast.resamples, contrast.seed, bootstrap_ends
    )
    rows = []
    used_masks = []
    left_out: list[str] = []

    def of_units(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return units.means(values)[unit_indices][:, mask]

    for number, block in enumerate(blocks()):
        mask = block.cells if masks is None else masks[number]
        expected = None
        if block.expected is not None:
            expected = of_units(block.expected, mask)
        rounding = block.rounding(units, unit_indices)[mask]
        stream.add(of_units(block.difference.values, mask), expected, rounding)
        columns = cell_labels(block, mask)
        columns["value"] = of_units(block.ours.values, mask).mean(0)
        columns["reference"] = of_units(block.theirs.values, mask).mean(0)
        rows.append(pd.DataFrame(columns))
        used_masks.append(mask)
        left_out += block.left_out
        if see is not None:
            see(block)
    if masks is None and not any(mask.any() for mask in used_masks):
        raise no_cells(contrast, block.scale)
    means = pd.concat(rows, ignore_index=True)
    return _Cells(means, stream.statistics(), used_masks, left_out, block, stream.bags)


def cell_labels(block: Differences, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The layer, head … of each cell of a mask."""
    index = np.argwhere(mask)
    labels = {}
    for number, dim in enumerate(block.difference.dims[1:]):
        labels[str(dim)] = block.difference[dim].values[index[:, number]]
    return labels


def _about(contrast: Question, selection: Selection, cells: _Cells, units: Units) -> dict[str, Any]:
    """What a table records about its question, its null and its tests."""
    tests = len(cells.statistics.p)
    n = cells.statistics.n
    can = resolution(n, max(1, tests), resamples=contrast.resamples, unit=units.unit)
    results = (contrast.result, contrast.reference)
    models = sorted({str(result.provenance["model"]["name"]) for result in results})
    dims = " × ".join(map(str, cells.any_block.difference.dims[1:]))
    about: dict[str, Any] = {
        "condition": contrast.condition,
        "to": contrast.to,
        "quantity": contrast.quantity,
        "segment": contrast.segment or "all",
        "scale": cells.any_block.scale,
        "select": selection.select or "none",
        "level": contrast.level,
        "resamples": contrast.resamples,
        "seed": contrast.seed,
        "models": ", ".join(models),
    }
    if cells.bags is not None:
        about["resampled"] = cells.bags.words
    about["null"] = cells.any_block.null
    if selection.top is not None:
        about["top"] = selection.top
    about |= {
        "tested": "difference" if cells.any_block.expected is None else "beyond",
        "left_out": cells.left_out,
        "family": f"{tests} tests: {dims}",
        "unit": units.unit,
        "smallest_q": can.smallest_p,  # the smallest if all tests reach it
        "resolution": str(can),
        "patterns": None if n <= EXACT else enough(contrast.resamples, tests),
        "skewed": cells.statistics.skewed,
        "alike": alike_words(contrast.result),
    }
    return about


def _labelling(contrast: Question, heads: pd.DataFrame) -> dict[str, Any]:
    """The last columns, which say what the numbers are where a table is a file; a fraction is of
    the reference.
    """
    variable = variable_of(contrast.result, contrast.quantity)
    columns: dict[str, Any] = {
        "quantity": contrast.quantity,
        "condition": contrast.condition,
        "to": contrast.to,
        "segment": segment_of(variable, contrast.segment),
    }
    if "change" in heads:
        columns["change_units"] = "fraction"
    columns["level"] = contrast.level
    columns["n_of"] = heads.attrs["unit"]
    return {name: value for name, value in columns.items() if name not in heads}


def with_equivalence(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Add q_same: whether the tested difference lies within ± margin, by two one-sided t tests
    (Schuirmann 1987).

    The bounds of a log-ratio are ``±log(1 + margin)``, so that a change and its reverse count
    alike, as is usual for ratios: 5 % allows −4.8 % to +5 %.
    """
    check_margin(margin)
    low, high = -margin, margin
    if len(table) and table.scale.iloc[0] == "log-ratio":
        high = np.log1p(margin)
        low = -high
    name = table.attrs["tested"]
    difference = table[name]
    freedom = table.n - 1
    half = (table[f"{name}_high"] - table[f"{name}_low"]) / 2
    error = half / stats.t.ppf((1 + table.attrs["level"]) / 2, freedom)
    p_low = stats.t.sf((difference - low) / error, freedom)
    p_high = stats.t.cdf((difference - high) / error, freedom)
    without_error = np.where((low < difference) & (difference < high), 0.0, 1.0)
    p = np.where(error > 0, np.maximum(p_low, p_high), without_error)
    with_q = table.assign(q_same=false_discovery(p))
    with_q.attrs = table.attrs | {"margin": margin}
    return with_q


LARGER_THAN = {"log-ratio": 0.05, "difference": 0.005}  # 5 %, and half a point of 100


def marked(table: pd.DataFrame, margin: float | None = None) -> np.ndarray:
    """Which rows of a table change by more than a margin, and not by chance: what a map of heads
    marks.

    With hundreds of heads and tens of prompts even a change of 0.5 % passes q < 0.05, so
    significance alone marks all.

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
    if margin is not None:
        check_margin(margin)
    effect = "difference"
    scale = "difference"
    if "change" in table:
        effect = "change"
        scale = "log-ratio"
    if margin is None:
        margin = LARGER_THAN[scale]
    return np.asarray((table[effect].abs() > margin) & (table.q_difference < 0.05))


def check_margin(margin: object) -> None:
    """Refuse a margin that is not a positive number."""
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < np.inf:
        raise OptionError(
            f"margin={margin!r}: give the largest change that counts as none, such as 0.02 (2 %)"
        )


def check_alike(contrast: Question) -> None:
    """Require the same prompts, and the same number of inserted tokens in each unless the baseline
    is compared.
    """
    result = contrast.result
    reference = contrast.reference
    # Parts of a result say by themselves whether their prompts are alike.
    prompts = {**result.provenance["prompts"], "alike": None}
    reference_prompts = {**reference.provenance["prompts"], "alike": None}
    if result is not reference and prompts != reference_prompts:
        hashes = f"{prompts['hash']} and {reference_prompts['hash']}"
        raise OptionError(
            "the two results are of different prompts, and a paired comparison needs the same"
            f" ones: run both with the same load_prompts (hashes {hashes})"
        )
    if result is reference and contrast.condition == contrast.to:
        raise OptionError(
            f"{contrast.condition!r} is compared with itself: name another condition to compare it"
            " with"
        )
    if not contrast.matched or BASELINE in (contrast.condition, contrast.to):
        return
    if any(name not in side.conditions for side, name in contrast.sides):
        return  # refused later, in its own words

    is_inserted = [
        side["sequences"].origin.sel(condition=name) == -1 for side, name in contrast.sides
    ]
    count, reference_count = (inserted.sum("pos").values for inserted in is_inserted)
    if not count.any() or not reference_count.any():
        return
    differing = np.flatnonzero(count != reference_count)
    if len(differing):
        prompt = int(differing[0])
        raise OptionError(
            f"{contrast.condition!r} inserts {int(count[prompt])} tokens, {contrast.to!r}"
            f" {int(reference_count[prompt])} (prompt {prompt}), so their difference would be one"
            " of length too. Give both the same count, or say matched=False"
        )
