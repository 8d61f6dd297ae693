"""How much a selection of heads depends on the prompts, or on the filler, with which it was made."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from mechattn.contrast.table import FEWEST_TO_SELECT, check_same_cells, what_is_tested
from mechattn.errors import OptionError
from mechattn.stats.bags import Bags
from mechattn.stats.intervals import FEWEST
from mechattn.stats.selection_overlap import jaccard, jaccard_by_chance, largest, random_halves, significant

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.contrast.contrast import Contrast

Select = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Splits:
    """How many random splits, and how many sign patterns for q in each; their seed."""

    splits: int
    patterns: int
    seed: int


def stability(
    asked: Contrast, choose: int | None, layer: int | None, over: Seq[str] | None, splits: Splits
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.stability`, which explains the arguments."""
    import pandas as pd

    names = _names(asked, over)
    seed, count, patterns = splits.seed, splits.splits, splits.patterns
    for name, value in (("splits", count), ("patterns", patterns)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}: give a whole number, at least 1")
    made = {name: what_is_tested(replace(asked, condition=name), layer, bags=seed) for name in names}
    check_same_cells(list(made.values()), names)
    units = made[names[0]].units
    bags = Bags.drawn(units.n, seed)
    if choose is None:
        units.refuse_below(2 * FEWEST_TO_SELECT, ", since fewer cannot give q < 0.05 on one half")
    else:
        units.refuse_below(2 * FEWEST)
    there = np.all([np.isfinite(one.values).all(0) for one in made.values()], axis=0)
    cells = int(there.sum())
    if choose is not None and (isinstance(choose, bool) or not isinstance(choose, int) or not 1 <= choose < cells):
        raise OptionError(f"choose={choose!r}: give a number of heads below {cells}, or None for those with q < 0.05")
    values = {name: one.values[:, there] for name, one in made.items()}
    select: Select = (lambda d: significant(d, patterns)) if choose is None else (lambda d: largest(d, choose))
    pairs = [(name, name) for name in names] + list(combinations(names, 2))
    table = pd.DataFrame(_rows(values, pairs, select, bags.n if bags else units.n, count, seed))
    table.attrs = {
        "quantity": asked.quantity,
        "segment": asked.segment or "all",
        "selection": "q < 0.05" if choose is None else f"the {choose} furthest from the null",
        "of": cells,
        "unit": units.unit,
        "splits": count,
        "seed": seed,
    } | ({} if bags is None else {"resampled": bags.words})
    return table


def _names(asked: Contrast, over: Seq[str] | None) -> list[str]:
    """The conditions whose selections are compared."""
    if over is None:
        return [asked.condition]
    if isinstance(over, str) or len(set(over)) < 2 or len(set(over)) < len(list(over)):
        raise OptionError(f"over={over!r}: name at least two different conditions")
    return [asked.result.condition(name) for name in over]


def _rows(
    values: dict[str, np.ndarray], pairs: list[tuple[str, str]], select: Select, n: int, splits: int, seed: int
) -> list[dict[str, object]]:
    """One row per pair of conditions: the first selects on one half of the units, the second on the other."""
    generator = np.random.default_rng(seed)
    halves = [random_halves(n, generator) for _ in range(splits)]
    chosen = {name: [(select(d[a]), select(d[b])) for a, b in halves] for name, d in values.items()}
    whole = {name: select(d) for name, d in values.items()}
    rows = []
    for one, other in pairs:
        some = [(first[0], second[1]) for first, second in zip(chosen[one], chosen[other], strict=True)]
        found = np.array([jaccard(a, b) for a, b in some])
        chance = np.array([jaccard_by_chance(int(a.sum()), int(b.sum()), len(a)) for a, b in some])
        known = found[~np.isnan(found)]
        low, high = np.quantile(known, [0.025, 0.975]) if known.size else (np.nan, np.nan)
        rows.append(
            {
                "condition": one,
                "other": other,
                "jaccard": known.mean() if known.size else np.nan,
                "low": low,
                "high": high,
                "by_chance": chance[~np.isnan(chance)].mean() if known.size else np.nan,
                "selected": np.mean([(a.sum() + b.sum()) / 2 for a, b in some]),
                "none_selected": 1 - known.size / len(found),
                "on_all": np.nan if one == other else jaccard(whole[one], whole[other]),
            }
        )
    return rows
