"""How much a selection of heads depends on the prompts and on the filler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.contrast.quantities import check_names
from mechattn.contrast.question import Question
from mechattn.contrast.table import Ranking, Selection, largest
from mechattn.contrast.tested import several_tested
from mechattn.errors import OptionError, check_counts
from mechattn.stats.paired import paired
from mechattn.stats.units import Bags

_Halves = list[tuple[np.ndarray, np.ndarray]]  # the units of both halves, for each split
_Select = Callable[[np.ndarray], np.ndarray]  # from values [unit, cell] to a mask [cell]
_RANKED_WORDS = {"difference": "that change most", "beyond": "furthest from the null"}


def overlap_table(
    contrast: Question,
    *,
    top: int | None,
    by: Ranking | None,
    layer: int | None,
    conditions: Sequence[str] | None,
    splits: int,
    patterns: int,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.stability`, which explains the arguments.

    Raises:
        OptionError: ``conditions`` are fewer than two different ones, ``top`` includes all heads,
            or there are too few units for two halves.
    """
    names = [contrast.condition]
    if conditions is not None:
        check_names("conditions", conditions, 2)
        names = [contrast.result.condition(name) for name in conditions]
    check_counts(splits=splits, patterns=patterns)
    fewest = Selection("half", top, by).fewest
    ranked_by: Ranking = "difference"
    if by is not None:
        ranked_by = by

    # The values by which cells are selected, in the cells that all conditions have.
    units = contrast.units
    bags = Bags.drawn(units.n, contrast.seed)
    tested = several_tested(contrast, names, layer=layer, bags=bags, by=ranked_by)
    cell_count = len(tested.labels)
    if top is not None and top >= cell_count:
        raise OptionError(
            f"top={top!r}: give a number of heads below {cell_count}, or None for those with"
            " q < 0.05"
        )
    units.refuse_below(fewest)
    values = {name: tested.values[:, index] for index, name in enumerate(names)}

    # All conditions are split into the same halves of the units or bags.
    generator = np.random.default_rng(contrast.seed)
    halves = [random_halves(len(tested.values), generator) for _ in range(splits)]

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
        "of": cell_count,
        "unit": units.unit,
        "splits": splits,
        "seed": contrast.seed,
    }
    if bags is not None:
        table.attrs["resampled"] = bags.words
    return table


def jaccard(selected: np.ndarray, other: np.ndarray) -> float:
    """``|A ∩ B| / |A ∪ B|`` of two masks [cell]; NaN if both are empty."""
    union_size = int((selected | other).sum())
    if not union_size:
        return np.nan

    intersection_size = int((selected & other).sum())
    return intersection_size / union_size


@cache  # most splits select the same numbers of cells
def jaccard_by_chance(size: int, other_size: int, cells: int) -> float:
    """The expected Jaccard index of two random subsets of these sizes, out of all cells.

    ``Σ_i P(i) · i / (a + b − i)`` for sizes a and b, where i, the size of the intersection, is
    hypergeometric. It is NaN if both subsets are empty.

    Args:
        size: The number of cells in the first subset.
        other_size: The number of cells in the second subset.
        cells: The number of cells from which both are drawn.
    """
    if not size + other_size:
        return np.nan

    intersection_sizes = np.arange(min(size, other_size) + 1)
    probabilities = stats.hypergeom(cells, size, other_size).pmf(intersection_sizes)
    union_sizes = size + other_size - intersection_sizes
    expected = (probabilities * intersection_sizes / union_sizes).sum()
    return float(expected)


def largest_means(values: np.ndarray, count: int) -> np.ndarray:
    """A mask of the ``count`` columns of values [unit, cell] with the largest means, up to sign.

    Of equal means the earlier ones are taken.
    """
    return largest(abs(values.mean(0)), count)


def significant(values: np.ndarray, resamples: int) -> np.ndarray:
    """A mask of the columns of values [unit, cell] with q < 0.05 by the test of ``compare``."""
    statistics = paired(values, None, resamples=resamples, bootstrap_ends=False)
    return statistics.q < 0.05


def random_halves(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The indices of two random disjoint halves of n units; if n is odd, one unit is left out."""
    order = generator.permutation(n)
    half = n // 2
    return order[:half], order[half : 2 * half]


def _rows(
    values: dict[str, np.ndarray], halves: _Halves, select: _Select
) -> list[dict[str, object]]:
    """A row for each condition with itself and for each pair of conditions.

    The first condition selects cells on one half of the units, and the second on the other half.

    Args:
        values: The values by which each condition selects [unit, cell].
        halves: The units of both halves, for each split.
        select: The function that selects cells from the values of some units.
    """
    first_selections = {}
    second_selections = {}
    selection_on_all = {}
    for name, unit_values in values.items():
        first_selections[name] = [select(unit_values[first]) for first, _ in halves]
        second_selections[name] = [select(unit_values[second]) for _, second in halves]
        selection_on_all[name] = select(unit_values)

    # A condition with itself shows how much prompts matter, and a pair how much the filler does.
    rows: list[dict[str, object]] = []
    pairs = [(name, name) for name in values]
    pairs += combinations(values, 2)
    for name, other_name in pairs:
        jaccard_on_all = np.nan  # a condition with itself would always give 1
        if name != other_name:
            jaccard_on_all = jaccard(selection_on_all[name], selection_on_all[other_name])

        labels = {"condition": name, "other": other_name}
        overlap = _overlap(first_selections[name], second_selections[other_name])
        rows.append({**labels, **overlap, "on_all": jaccard_on_all})
    return rows


def _overlap(selections: list[np.ndarray], other_selections: list[np.ndarray]) -> dict[str, object]:
    """The overlap of the two selections of each split, and their sizes, over all splits."""
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

    # The index is NaN in a split in which neither half selects a cell. Means and quantiles leave it
    # out.
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
