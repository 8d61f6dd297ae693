"""The table of a comparison, layer by layer and head by head, some layers at a time where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scipy import stats

from mechattn.axes import BASELINE, by_head
from mechattn.contrast.beside_random import BesideRandom, check_random
from mechattn.contrast.differences import Differences, check_cells, differences, labels_of
from mechattn.contrast.quantities import layer_blocks, segment_of, variable_of
from mechattn.errors import OptionError
from mechattn.results.result import Result, alike_words, shared_units, units_of
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import Paired, PairedStream, false_discovery, without_rounding
from mechattn.stats.resolution import EXACT, enough, resolution
from mechattn.stats.units import Bags, Units, halves_of

if TYPE_CHECKING:
    from mechattn.contrast.contrast import Contrast

# In units: of measured values, centred, some q < 0.05 in 23 % of tables of 12, 10 % of 24, 7 % of 64.
FEWEST_TO_SELECT = 6  # prompts: of 2⁶ sign patterns, the two extreme ones give p = 0.03
_ENDS = [f"{end}{kind}" for kind in ("", "_bootstrap", "_simultaneous") for end in ("low", "high")]
_NAMES = {end: f"difference_{end}" for end in _ENDS} | {
    "p": "p_beyond",
    "q": "q_beyond",
}  # of a table's columns
_CHANGE = ["change", "change_low", "change_high", "change_null"]
_TESTS = ["q_beyond", "q_difference", "n"]
_LOGS = [
    "difference",
    "difference_low",
    "difference_high",
    "null",
    "beyond",
    "beyond_low",
    "beyond_high",
]
_COLUMNS = [name for name in Paired.__dataclass_fields__ if name != "n"]


@dataclass(frozen=True)
class _Cells:
    """What was found in all blocks: coordinates and means of the cells, their statistics, masks of blocks, the rest."""

    means: pd.DataFrame
    numbers: Paired
    masks: list[np.ndarray]
    left_out: list[str]
    last: Differences
    bags: Bags | None


Ranking = Literal["beyond", "difference"]


@dataclass(frozen=True)
class Selection:
    """Which cells one half of the prompts selects: those with q < 0.05, or the ``top`` furthest from 0 ``by`` a column.

    Raises:
        OptionError: An option is unknown, or ``top`` or ``by`` is given where nothing is selected.
    """

    select: Literal["half"] | None = None
    top: int | None = None
    by: Ranking | None = None

    def __post_init__(self) -> None:
        check_select(self.select)
        if self.top is not None and (
            isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1
        ):
            raise OptionError(
                f"top={self.top!r}: give a number of heads, at least 1, or None for those with q < 0.05"
            )
        if self.by not in (None, *get_args(Ranking)):
            raise OptionError(f'by={self.by!r}: give "difference" or "beyond" (the null)')
        if self.top is not None and self.select is None:
            raise OptionError(
                f'top={self.top}: say select="half" too, which ranks heads on one half of the prompts and reports them '
                "on the other; the largest of many, on the prompts that made them so, have too optimistic intervals"
            )
        if self.by is not None and self.top is None:
            raise OptionError(f"by={self.by!r} ranks heads, so say top=… too, how many of them")

    @property
    def fewest(self) -> tuple[int, str]:
        """The fewest units, and why."""
        if self.select is None or self.top is not None:
            return FEWEST * (1 if self.select is None else 2), ""
        return 2 * FEWEST_TO_SELECT, ", since fewer cannot give q < 0.05 on one half"

    def scores(self, found: Paired) -> np.ndarray:
        """What ranks the cells of one half; −inf for those that are not selected."""
        if self.top is None:
            return np.where(found.q_difference < 0.05, 0.0, -np.inf)
        from_null = self.by == "beyond" and not np.isnan(found.beyond).all()
        far = abs(found.beyond if from_null else found.difference)
        chosen = np.argsort(-far, kind="stable")[: self.top]
        scores = np.full(far.shape, -np.inf)
        scores[chosen] = far[chosen]
        return scores


def table(
    asked: Contrast,
    chosen: Selection | None = None,
    random: Seq[Result] | None = None,
    margin: float | None = None,
    bootstrap_ends: bool = True,
) -> pd.DataFrame:
    """See :meth:`mechattn.contrast.contrast.Contrast.table`; the ends of bootstrap intervals take most of the time."""
    check_alike(asked)
    chosen = chosen or Selection()
    if random is not None:
        check_random(random, asked)
    prompts = variable_of(asked.result, asked.quantity).sizes["prompt"]
    units = shared_units(asked.result, asked.reference, prompts, asked.unit)
    units.refuse_below(*chosen.fewest)
    every, masks, scores = np.arange(units.n), None, None
    finding, shown = (every, every) if chosen.select is None else halves_of(units.n)
    blocks = layers_of(asked, asked.resamples, asked.resamples)
    if chosen.select:
        first = _gone_through(asked, blocks, units, finding, bootstrap_ends=False)
        masks, scores = [mask.copy() for mask in first.masks], chosen.scores(first.numbers)
        ends = np.cumsum([mask.sum() for mask in masks])
        for mask, some in zip(masks, np.split(scores > -np.inf, ends[:-1]), strict=True):
            mask[mask] = some
    beside = None if random is None else BesideRandom(random, asked, units, shown)
    see = None if beside is None else beside.see
    found = _gone_through(asked, blocks, units, shown, masks, see, bootstrap_ends)
    check_cells(asked, found.last.scale, sum(mask.size for mask in found.masks), found.left_out)
    made = _columns(found)
    made.attrs = _about(asked, chosen, found, units)
    made = made.assign(**_named(asked, made))
    if margin is not None:
        made = with_equivalence(made, margin)
    if beside is not None:
        made = beside.table(made, np.concatenate(found.masks))
    if scores is not None and chosen.top is not None:
        made = made.iloc[np.argsort(-scores[scores > -np.inf], kind="stable")].reset_index(
            drop=True
        )
    return by_head(made)


def _columns(found: _Cells) -> pd.DataFrame:
    """The columns of a table in their order: fractions and tests first, then logarithms or differences."""
    labels = [str(name) for name in found.means if name not in ("value", "reference")]
    made = found.means.assign(
        **{_NAMES.get(n, n): getattr(found.numbers, n) for n in _COLUMNS}, n=found.numbers.n
    )
    order = [*labels, *_LOGS, *_TESTS]
    if found.last.expected is None:
        made = made.assign(p_beyond=np.nan, q_beyond=np.nan)
    if found.last.scale == "log-ratio":
        ratios = made[["difference", "difference_low", "difference_high", "null"]].to_numpy()
        made[_CHANGE], order = np.expm1(ratios), [*labels, *_CHANGE, *_TESTS, *_LOGS]
    return made[[*order, *made.columns.drop(order)]].assign(scale=found.last.scale)


def layers_of(
    asked: Contrast, bootstrap: int = 0, signs: int = 0
) -> Callable[[], Iterator[Differences]]:
    """A function that yields the differences of a comparison, some layers at a time."""
    some = layer_blocks(asked.result, asked.quantity, asked.segment, bootstrap, signs)
    cut = [asked.part("layer", each) for each in some]
    labels = labels_of(cut)
    return lambda: (differences(one, labels) for one in cut)


def check_select(select: str | None) -> None:
    """Refuse an unknown way to select."""
    if select not in (None, "half"):
        raise OptionError(
            f'select={select!r}: "half" finds heads on one half of the prompts and reports them on the other'
        )


def _gone_through(
    asked: Contrast,
    blocks: Callable[[], Iterator[Differences]],
    units: Units,
    some: np.ndarray,
    masks: Seq[np.ndarray] | None = None,
    see: Callable[[Differences], None] | None = None,
    bootstrap_ends: bool = True,
) -> _Cells:
    """The statistics of some units, over all cells with a difference or over chosen ones."""
    stream = PairedStream(len(some), asked.level, asked.resamples, asked.seed, bootstrap_ends)
    rows, cells, left_out = [], [], []
    for number, made in enumerate(blocks()):
        wanted = made.cells if masks is None else masks[number]
        expected = None if made.expected is None else units.means(made.expected)[some][:, wanted]
        stream.add(
            units.means(made.difference.values)[some][:, wanted],
            expected,
            made.rounding(units, some)[wanted],
        )
        sides = {"value": made.ours.values, "reference": made.theirs.values}
        means = {name: units.means(side)[some][:, wanted].mean(0) for name, side in sides.items()}
        rows.append(pd.DataFrame(_labels(made, wanted) | means))
        cells.append(wanted)
        left_out += made.left_out
        if see is not None:
            see(made)
    if not any(mask.any() for mask in cells) and masks is None:
        check_cells(asked, made.scale, len(left_out), left_out)
    return _Cells(
        pd.concat(rows, ignore_index=True), stream.made(), cells, left_out, made, stream.bags
    )


def _labels(made: Differences, cells: np.ndarray) -> dict[str, np.ndarray]:
    """The layer, head … of each of some cells."""
    index = np.argwhere(cells)
    return {
        str(dim): made.difference[dim].values[index[:, i]]
        for i, dim in enumerate(made.difference.dims[1:])
    }


def _about(asked: Contrast, chosen: Selection, found: _Cells, units: Units) -> dict[str, Any]:
    """What a table records about its question, its null and its tests."""
    tests, n = len(found.numbers.p), found.numbers.n
    can = resolution(n, max(1, tests), resamples=asked.resamples, unit=units.unit)
    names = sorted(
        {str(result.provenance["model"]["name"]) for result in (asked.result, asked.reference)}
    )
    made = {name: getattr(asked, name) for name in ("condition", "to", "quantity")}
    made |= {
        "segment": asked.segment or "all",
        "select": chosen.select or "none",
        "level": asked.level,
    }
    made |= {"resamples": asked.resamples, "seed": asked.seed, "models": ", ".join(names)}
    made |= {} if found.bags is None else {"resampled": found.bags.words}
    made |= {"null": found.last.null} | ({} if chosen.top is None else {"top": chosen.top})
    made |= {
        "tested": "difference" if found.last.expected is None else "beyond",
        "left_out": found.left_out,
    }
    made |= {
        "family": f"{tests} tests: {' × '.join(map(str, found.last.difference.dims[1:]))}",
        "unit": units.unit,
    }
    made |= {
        "smallest_q": can.smallest_p,
        "resolution": str(can),
    }  # the smallest if all tests reach it
    made |= {"patterns": None if n <= EXACT else enough(asked.resamples, tests)}
    return made | {"skewed": found.numbers.skewed, "alike": alike_words(asked.result)}


def _named(asked: Contrast, made: pd.DataFrame) -> dict[str, Any]:
    """The last columns, which say what the numbers are where a table is a file; a fraction is of the reference."""
    of = segment_of(variable_of(asked.result, asked.quantity), asked.segment)
    about = {name: getattr(asked, name) for name in ("quantity", "condition", "to")} | {
        "segment": of
    }
    about |= {"change_units": "fraction"} if "change" in made else {}
    about |= {"level": asked.level, "n_of": made.attrs["unit"]}
    return {name: value for name, value in about.items() if name not in made}


def with_equivalence(table: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Add q_same: whether the tested difference lies within ± margin, by two one-sided t tests (Schuirmann 1987)."""
    check_margin(margin)
    relative = len(table) and table.scale.iloc[0] == "log-ratio"
    low, high = (-np.log1p(margin), np.log1p(margin)) if relative else (-margin, margin)
    name = table.attrs["tested"]
    tested, far = table[name], stats.t.ppf((1 + table.attrs["level"]) / 2, table.n - 1)
    error = (table[f"{name}_high"] - table[f"{name}_low"]) / 2 / far
    p = np.maximum(
        stats.t.sf((tested - low) / error, table.n - 1),
        stats.t.cdf((tested - high) / error, table.n - 1),
    )
    p = np.where(error > 0, p, np.where((low < tested) & (tested < high), 0.0, 1.0))
    made = table.assign(q_same=false_discovery(p))
    made.attrs = table.attrs | {"margin": margin}
    return made


LARGER_THAN = {"log-ratio": 0.05, "difference": 0.005}  # 5 %, and half a point of 100


def marked(table: pd.DataFrame, margin: float | None = None) -> np.ndarray:
    """Which rows of a table change by more than a margin, and not by chance: what a map of heads marks.

    With hundreds of heads and tens of prompts even a change of 0.5 % passes q < 0.05, so significance alone marks all.

    Args:
        table: A table from ``Result.compare``.
        margin: The largest change that is not worth a mark, in the unit of ``change`` (0.05 is 5 %), or of
            ``difference`` for a quantity that is compared by differences. By default 0.05, or 0.005: half a point of
            100 of the attention.

    Returns:
        A mask of rows: ``q_difference < 0.05`` and ``|change| > margin``.

    Raises:
        OptionError: The margin is not a positive number.
    """
    if margin is not None:
        check_margin(margin)
    scale = "log-ratio" if "change" in table else "difference"
    size = table["change" if scale == "log-ratio" else "difference"].abs()
    larger = size > (LARGER_THAN[scale] if margin is None else margin)
    return np.asarray(larger & (table.q_difference < 0.05))


def check_margin(margin: object) -> None:
    """Refuse a margin that is not a positive number."""
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < np.inf:
        raise OptionError(
            f"margin={margin!r}: give the largest change that counts as none, such as 0.02 (2 %)"
        )


class Tested(NamedTuple):
    """The numbers of a table's test [unit, cell], NaN for missing cells; their units, their labels and the null."""

    values: np.ndarray
    units: Units
    labels: dict[str, np.ndarray]
    null: str


def what_is_tested(
    asked: Contrast, layer: int | None = None, bags: int | None = None, by: Ranking = "beyond"
) -> Tested:
    """What the table tests, of all layers or one: differences, by default minus those of the null.

    Args:
        asked: The comparison.
        layer: One layer; by default all.
        bags: The seed of bags of units, whose means are then returned.
        by: "beyond" subtracts the null where it is known; "difference" does not.
    """
    check_alike(asked)
    asked = asked.at_layer(layer)
    units = units_of(asked.result, asked.result["sequences"].sizes["prompt"], asked.unit)
    in_bags = None if bags is None else Bags.drawn(units.n, bags)
    found, left_out, labels = [], [], []
    for made in layers_of(asked, signs=0 if bags is None else 1)():
        tested = made.difference.values
        if by == "beyond" and made.expected is not None:
            tested = tested - made.expected
        d = units.means(tested)
        d = np.where(made.cells, without_rounding(d, made.rounding(units)), np.nan).reshape(
            units.n, -1
        )
        found.append(d if in_bags is None else in_bags.means(d))
        labels.append(_labels(made, np.ones_like(made.cells)))
        left_out += made.left_out
    check_cells(asked, made.scale, sum(d.shape[1] for d in found), left_out)
    named = {name: np.concatenate([part[name] for part in labels]) for name in labels[0]}
    return Tested(np.concatenate(found, axis=1), units, named, made.null)


def several_tested(
    asked: Contrast,
    names: Seq[str],
    layer: int | None = None,
    bags: int | None = None,
    by: Ranking = "beyond",
) -> tuple[list[Tested], np.ndarray]:
    """What the tables of several conditions test, and the cells that all have.

    Their labels must be the same, and their nulls where ``by`` is "beyond".
    """
    comparisons = [replace(asked, condition=name) for name in names]
    nulls = [comparison.null_used for comparison in comparisons]
    if by == "beyond" and len(set(nulls)) > 1:
        words = ", ".join(f"{name!r}: {null}" for name, null in zip(names, nulls, strict=True))
        raise OptionError(
            f"the conditions have different nulls by default ({words}), so what is beyond them cannot be taken together; "
            'give one for all, such as null="uniform"'
        )
    tested = [what_is_tested(comparison, layer, bags, by) for comparison in comparisons]
    first = tested[0].labels
    for one, name in zip(tested, names, strict=True):
        if any(not np.array_equal(one.labels[dim], first[dim]) for dim in first):
            raise OptionError(
                f"{name!r} has other cells than {names[0]!r} ({', '.join(first)}), so they cannot be taken together; "
                "compare each by itself"
            )
    return tested, np.all([np.isfinite(one.values).all(0) for one in tested], axis=0)


def check_alike(asked: Contrast) -> None:
    """Require the same prompts, and the same number of inserted tokens in each unless the baseline is compared."""
    one, other = asked.result, asked.reference
    read = [
        {**result.provenance["prompts"], "alike": None} for result in (one, other)
    ]  # parts say it of themselves
    if one is not other and read[0] != read[1]:
        raise OptionError(
            "the two results are of different prompts, and a paired comparison needs the same ones: run both with the "
            f"same load_prompts (hashes {read[0]['hash']} and {read[1]['hash']})"
        )
    elif one is other and asked.condition == asked.to:
        raise OptionError(
            f"{asked.condition!r} is compared with itself: name another condition to compare it with"
        )
    if not asked.matched or BASELINE in (asked.condition, asked.to):
        return
    counts = [
        (result["sequences"].origin.sel(condition=name) == -1).sum("pos").values
        for result, name in asked.sides
        if name in result.conditions
    ]
    if len(counts) == 2 and all(count.any() for count in counts) and (counts[0] != counts[1]).any():
        where = int(np.flatnonzero(counts[0] != counts[1])[0])
        raise OptionError(
            f"{asked.condition!r} inserts {int(counts[0][where])} tokens, {asked.to!r} {int(counts[1][where])} (prompt "
            f"{where}), so their difference would be one of length too. Give both the same count, or say matched=False"
        )
