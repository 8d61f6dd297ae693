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
from mechattn.contrast.table import Ranking, Selection
from mechattn.contrast.tested import several_tested
from mechattn.errors import OptionError, check_counts
from mechattn.stats.paired import paired
from mechattn.stats.units import Bags

Halves = list[tuple[np.ndarray, np.ndarray]]


def stability(
    contrast: Question,
    top: int | None,
    by: Ranking | None,
    layer: int | None,
    over: Sequence[str] | None,
    splits: int,
    patterns: int,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.stability`, which explains the arguments."""
    names = [contrast.condition]
    if over is not None:
        if isinstance(over, str) or len(set(over)) < 2 or len(set(over)) < len(list(over)):
            raise OptionError(f"over={over!r}: name at least two different conditions")
        names = [contrast.result.condition(name) for name in over]
    check_counts(splits=splits, patterns=patterns)
    selection = Selection("half", top, by)
    tested, present = several_tested(
        contrast, names, layer, bags=contrast.seed, by=by or "difference"
    )
    units = tested[0].units
    cells = int(present.sum())
    if top is not None and not (
        isinstance(top, int) and not isinstance(top, bool) and 1 <= top < cells
    ):
        raise OptionError(
            f"top={top!r}: give a number of heads below {cells}, or None for those with q < 0.05"
        )
    units.refuse_below(*selection.fewest)

    values = {name: numbers.values[:, present] for name, numbers in zip(names, tested)}
    bags = Bags.drawn(units.n, contrast.seed)
    count = units.n if bags is None else bags.n
    generator = np.random.default_rng(contrast.seed)
    halves = [random_halves(count, generator) for _ in range(splits)]
    if top is None:
        rows = _rows(values, halves, partial(significant, resamples=patterns))
        words = "q < 0.05"
    else:
        rows = _rows(values, halves, partial(largest, count=top))
        words = f"the {top} that change most"
        if by == "beyond":
            words = f"the {top} furthest from the null"
    table = pd.DataFrame(rows)
    table.attrs = {
        "quantity": contrast.quantity,
        "segment": contrast.segment or "all",
        "selection": words,
        "of": cells,
        "unit": units.unit,
        "splits": splits,
        "seed": contrast.seed,
    }
    if bags is not None:
        table.attrs["resampled"] = bags.words
    return table


def _rows(
    values: dict[str, np.ndarray], halves: Halves, select: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, object]]:
    """One row per pair of conditions: the first selects on one half of the units, the second on the
    other.
    """
    on_halves = {
        name: [(select(d[first]), select(d[second])) for first, second in halves]
        for name, d in values.items()
    }
    on_all = {name: select(d) for name, d in values.items()}
    rows = []
    for one, other in [*((name, name) for name in values), *combinations(values, 2)]:
        overlaps = []
        chances = []
        sizes = []
        for (selected, _), (_, other_selected) in zip(
            on_halves[one], on_halves[other], strict=True
        ):
            size = int(selected.sum())
            other_size = int(other_selected.sum())
            overlaps.append(jaccard(selected, other_selected))
            chances.append(jaccard_by_chance(size, other_size, len(selected)))
            sizes.append((size + other_size) / 2)
        overlap = np.array(overlaps)
        overlap = overlap[~np.isnan(overlap)]
        chance = np.array(chances)
        mean = low = high = by_chance = np.nan
        if overlap.size:
            mean = overlap.mean()
            low, high = np.quantile(overlap, [0.025, 0.975])
            by_chance = chance[~np.isnan(chance)].mean()
        rows.append(
            {
                "condition": one,
                "other": other,
                "jaccard": mean,
                "low": low,
                "high": high,
                "by_chance": by_chance,
                "selected": np.mean(sizes),
                "none_selected": 1 - overlap.size / len(overlaps),
                "on_all": np.nan if one == other else jaccard(on_all[one], on_all[other]),
            }
        )
    return rows


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """``|A ∩ B| / |A ∪ B|`` of two masks; NaN if both are empty."""
    union = int((one | other).sum())
    return int((one & other).sum()) / union if union else float("nan")


@cache
def jaccard_by_chance(one: int, other: int, of: int) -> float:
    """The expected Jaccard index of two random subsets of these sizes, out of ``of`` elements.

    ``Σ_i P(i) · i / (a + b − i)``, with hypergeometric i, the size of the intersection. NaN if both
    sets are empty.
    """
    if not one + other:
        return float("nan")
    shared = np.arange(min(one, other) + 1)
    probability = stats.hypergeom(of, one, other).pmf(shared)
    return float((probability * shared / (one + other - shared)).sum())


def largest(d: np.ndarray, count: int) -> np.ndarray:
    """The columns of d [unit, cell] with the largest means, up to sign; ties go to the earlier
    column.
    """
    order = np.argsort(-abs(d.mean(0)), kind="stable")
    mask = np.zeros(d.shape[1], dtype=bool)
    mask[order[:count]] = True
    return mask


def significant(d: np.ndarray, resamples: int) -> np.ndarray:
    """The columns of d [unit, cell] with q < 0.05 by the test of ``compare``."""
    return paired(d, None, resamples=resamples, bootstrap_ends=False).q < 0.05


def random_halves(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two random disjoint halves of n; if n is odd, one is left out."""
    order = generator.permutation(n)
    return order[: n // 2], order[n // 2 : 2 * (n // 2)]
