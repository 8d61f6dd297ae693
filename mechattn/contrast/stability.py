"""How much a selection of heads depends on the prompts, or on the filler, with which it was made."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.contrast.table import Ranking, Selection, several_tested
from mechattn.errors import OptionError, check_counts
from mechattn.stats.paired import paired
from mechattn.stats.units import Bags

if TYPE_CHECKING:
    from mechattn.contrast.contrast import Contrast

Halves = list[tuple[np.ndarray, np.ndarray]]


def stability(
    asked: Contrast,
    top: int | None,
    by: Ranking | None,
    layer: int | None,
    over: Seq[str] | None,
    splits: int,
    patterns: int,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.stability`, which explains the arguments."""
    names, seed = [asked.condition], asked.seed
    if over is not None:
        if isinstance(over, str) or len(set(over)) < 2 or len(set(over)) < len(list(over)):
            raise OptionError(f"over={over!r}: name at least two different conditions")
        names = [asked.result.condition(name) for name in over]
    check_counts(splits=splits, patterns=patterns)
    selection = Selection("half", top, by)
    made, there = several_tested(asked, names, layer, bags=seed, by=by or "difference")
    units = made[0].units
    bags = Bags.drawn(units.n, seed)
    cells = int(there.sum())
    if top is not None and (
        isinstance(top, bool) or not isinstance(top, int) or not 1 <= top < cells
    ):
        raise OptionError(
            f"top={top!r}: give a number of heads below {cells}, or None for those with q < 0.05"
        )
    units.refuse_below(*selection.fewest)
    values = {name: one.values[:, there] for name, one in zip(names, made)}
    generator = np.random.default_rng(seed)
    halves = [random_halves(bags.n if bags else units.n, generator) for _ in range(splits)]
    table = pd.DataFrame(
        _rows(
            values, halves, lambda d: significant(d, patterns) if top is None else largest(d, top)
        )
    )
    words = "q < 0.05"
    if top is not None:
        words = f"the {top} furthest from the null"
    if top is not None and by != "beyond":
        words = f"the {top} that change most"
    table.attrs = {
        "quantity": asked.quantity,
        "segment": asked.segment or "all",
        "selection": words,
    }
    table.attrs |= {"of": cells, "unit": units.unit, "splits": splits, "seed": seed}
    table.attrs |= {} if bags is None else {"resampled": bags.words}
    return table


def _rows(
    values: dict[str, np.ndarray], halves: Halves, select: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, object]]:
    """One row per pair of conditions: the first selects on one half of the units, the second on the other."""
    chosen = {name: [(select(d[a]), select(d[b])) for a, b in halves] for name, d in values.items()}
    whole = {name: select(d) for name, d in values.items()}
    rows = []
    for one, other in [*((name, name) for name in values), *combinations(values, 2)]:
        some = [
            (first[0], second[1]) for first, second in zip(chosen[one], chosen[other], strict=True)
        ]
        found = np.array([jaccard(a, b) for a, b in some])
        chance = np.array([jaccard_by_chance(int(a.sum()), int(b.sum()), len(a)) for a, b in some])
        known = found[~np.isnan(found)]
        row: dict[str, object] = dict.fromkeys(("jaccard", "low", "high", "by_chance"), np.nan)
        if known.size:
            low, high = np.quantile(known, [0.025, 0.975])
            row = {
                "jaccard": known.mean(),
                "low": low,
                "high": high,
                "by_chance": chance[~np.isnan(chance)].mean(),
            }
        row |= {"selected": np.mean([(a.sum() + b.sum()) / 2 for a, b in some])}
        row |= {"none_selected": 1 - known.size / len(found)}
        row |= {"on_all": np.nan if one == other else jaccard(whole[one], whole[other])}
        rows.append({"condition": one, "other": other, **row})
    return rows


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """``|A ∩ B| / |A ∪ B|`` of two masks; NaN if both are empty."""
    union = int((one | other).sum())
    return int((one & other).sum()) / union if union else float("nan")


@cache
def jaccard_by_chance(one: int, other: int, of: int) -> float:
    """The expected Jaccard index of two random subsets of these sizes, out of ``of`` elements.

    ``Σ_i P(i) · i / (a + b − i)``, with hypergeometric i, the size of the intersection. NaN if both sets are empty.
    """
    if not one + other:
        return float("nan")
    shared = np.arange(min(one, other) + 1)
    return float(
        (stats.hypergeom(of, one, other).pmf(shared) * shared / (one + other - shared)).sum()
    )


def largest(d: np.ndarray, count: int) -> np.ndarray:
    """The columns of d [unit, cell] with the largest means, up to sign; ties go to the earlier column."""
    chosen = np.zeros(d.shape[1], dtype=bool)
    chosen[np.argsort(-abs(d.mean(0)), kind="stable")[:count]] = True
    return chosen


def significant(d: np.ndarray, resamples: int) -> np.ndarray:
    """The columns of d [unit, cell] with q < 0.05 by the test of ``compare``."""
    return paired(d, None, resamples=resamples, bootstrap_ends=False).q < 0.05


def random_halves(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two random disjoint halves of n; if n is odd, one is left out."""
    order = generator.permutation(n)
    return order[: n // 2], order[n // 2 : 2 * (n // 2)]
