"""How much a selection of heads depends on the prompts, or on the filler, with which it was
made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.contrast.question import Question
from mechattn.contrast.table import Ranking, Selection, largest
from mechattn.contrast.tested import several_tested
from mechattn.errors import OptionError, check_counts
from mechattn.stats.paired import paired
from mechattn.stats.units import Bags

_Halves = list[tuple[np.ndarray, np.ndarray]]  # the units of both halves, of each split
_Select = Callable[[np.ndarray], np.ndarray]  # from values [unit, cell] to a mask of cells
_RANKED_WORDS = {"difference": "that change most", "beyond": "furthest from the null"}


def overlap_table(
    contrast: Question,
    top: int | None,
    by: Ranking | None,
    layer: int | None,
    over: Sequence[str] | None,
    splits: int,
    patterns: int,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.stability`, which explains the arguments.

    Raises:
        OptionError: Fewer than two different conditions are named in ``over``, ``top`` leaves no
            head out, or there are too few units for two halves.
    """
    names = [contrast.condition]
    if over is not None:
        names = _different_conditions(contrast, over)
    check_counts(splits=splits, patterns=patterns)
    fewest = Selection("half", top, by).fewest
    ranked_by: Ranking = by or "difference"

    # What cells are selected by, in those that all conditions have.
    units = contrast.units
    bags = Bags.drawn(units.n, contrast.seed)
    tested, present = several_tested(contrast, names, layer, bags, ranked_by)
    cells = int(present.sum())
    if top is not None and top >= cells:
        raise OptionError(
            f"top={top!r}: give a number of heads below {cells}, or None for those with q < 0.05"
        )
    units.refuse_below(fewest)
    values = {}
    for name, of_condition in zip(names, tested, strict=True):
        values[name] = of_condition.values[:, present]

    # All conditions are split into the same halves of the units, or of the bags of them.
    n = len(tested[0].values)
    generator = np.random.default_rng(contrast.seed)
    halves = [random_halves(n, generator) for _ in range(splits)]

    if top is None:
        select: _Select = partial(significant, resamples=patterns)
        selection_words = "q < 0.05"
    else:
        select = partial(largest_means, count=top)
        selection_words = f"the {top} {_RANKED_WORDS[ranked_by]}"

    table = pd.DataFrame(_rows(values, halves, select))
    table.attrs = {
        "quantity": contrast.quantity,
        "segment": contrast.segment_name,
        "selection": selection_words,
        "of": cells,
        "unit": units.unit,
        "splits": splits,
        "seed": contrast.seed,
    }
    if bags is not None:
        table.attrs["resampled"] = bags.words
    return table


def jaccard(selected: np.ndarray, other: np.ndarray) -> float:
    """``|A ∩ B| / |A ∪ B|`` of two masks [cell]; NaN if both are empty."""
    union = int((selected | other).sum())
    if not union:
        return np.nan

    intersection = int((selected & other).sum())
    return intersection / union


@cache  # most splits select as many cells
def jaccard_by_chance(size: int, other_size: int, cells: int) -> float:
    """The expected Jaccard index of two random subsets of these sizes, out of all cells.

    ``Σ_i P(i) · i / (a + b − i)`` for sizes a and b, with i, the size of the intersection,
    hypergeometric. NaN if both are empty.

    Args:
        size: The number of cells in the first subset.
        other_size: The number in the second.
        cells: The number of cells that both are drawn from.
    """
    if not size + other_size:
        return np.nan

    shared = np.arange(min(size, other_size) + 1)
    probability = stats.hypergeom(cells, size, other_size).pmf(shared)
    union = size + other_size - shared
    expected = (probability * shared / union).sum()
    return float(expected)


def largest_means(values: np.ndarray, count: int) -> np.ndarray:
    """Which columns of values [unit, cell] have the largest means, up to sign; of equal ones, the
    earlier.
    """
    return largest(abs(values.mean(0)), count)


def significant(values: np.ndarray, resamples: int) -> np.ndarray:
    """Which columns of values [unit, cell] have q < 0.05 by the test of ``compare``."""
    statistics = paired(values, None, resamples=resamples, bootstrap_ends=False)
    return statistics.q < 0.05


def random_halves(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two random disjoint halves of n; if n is odd, one is left out."""
    order = generator.permutation(n)
    half = n // 2
    return order[:half], order[half : 2 * half]


def _different_conditions(contrast: Question, over: Sequence[str]) -> list[str]:
    """The names of conditions that are compared with each other."""
    are_different = len(set(over)) == len(over) >= 2
    if isinstance(over, str) or not are_different:
        raise OptionError(f"over={over!r}: name at least two different conditions")
    return [contrast.result.condition(name) for name in over]


def _rows(
    values: dict[str, np.ndarray], halves: _Halves, select: _Select
) -> list[dict[str, object]]:
    """One row per pair of conditions: the first selects on one half of the units, the second on the
    other.

    Args:
        values: What each condition is selected by [unit, cell].
        halves: The units of both halves, of each split.
        select: The selection of cells from some units.
    """
    on_first = {}
    on_second = {}
    on_all = {}
    for name, unit_values in values.items():
        on_first[name] = [select(unit_values[first]) for first, _ in halves]
        on_second[name] = [select(unit_values[second]) for _, second in halves]
        on_all[name] = select(unit_values)

    # Each condition with itself tells how far the prompts matter; pairs, how far the filler does.
    rows: list[dict[str, object]] = []
    pairs = [(name, name) for name in values]
    pairs += combinations(values, 2)
    for name, other_name in pairs:
        on_all_prompts = np.nan  # for a condition with itself it would be 1, whatever is selected
        if name != other_name:
            on_all_prompts = jaccard(on_all[name], on_all[other_name])

        labels = {"condition": name, "other": other_name}
        overlap = _overlap(on_first[name], on_second[other_name])
        rows.append({**labels, **overlap, "on_all": on_all_prompts})
    return rows


def _overlap(selections: list[np.ndarray], other_selections: list[np.ndarray]) -> dict[str, object]:
    """How much the two selections of each split overlap, and how many cells they have."""
    rows = []
    for selected, other_selected in zip(selections, other_selections, strict=True):
        size = int(selected.sum())
        other_size = int(other_selected.sum())
        row = {
            "jaccard": jaccard(selected, other_selected),
            "by_chance": jaccard_by_chance(size, other_size, len(selected)),
            "selected": (size + other_size) / 2,
        }
        rows.append(row)

    # A split in which nothing is selected has no index: NaN, which means and quantiles leave out.
    splits = pd.DataFrame(rows)
    means = splits.mean()
    return {
        "jaccard": means.jaccard,
        "low": splits.jaccard.quantile(0.025),
        "high": splits.jaccard.quantile(0.975),
        "by_chance": means.by_chance,
        "selected": means.selected,
        "none_selected": splits.jaccard.isna().mean(),
    }
