"""A table of how a quantity differs between two conditions, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.block_table import Blocks, BlockTable, as_table
from mechattn.results.differences import Differences, Scale, check_cells, differences, in_both
from mechattn.results.layer_blocks import layer_blocks, of_layers
from mechattn.results.quantities import Null, absent, check_layer, variable_of
from mechattn.results.random_null import BesideRandom, check_random
from mechattn.results.units import shared_units, units_of
from mechattn.stats.bags import Bags
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import EXACT, RESAMPLES, enough, without_rounding
from mechattn.stats.resolution import resolution
from mechattn.stats.units import Unit, Units

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.results.result import Result

FEWEST_TO_SELECT = 6  # prompts: of 2⁶ sign patterns, the two extreme ones give p = 0.03


def compare(
    result: Result,
    condition: str,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    other: Result | None,
    select: Literal["half"] | None,
    matched: bool,
    null: Null,
    scale: Scale | None,
    unit: Unit,
    level: float,
    resamples: int,
    seed: int,
    random: Seq[Result] | None = None,
    memory: str = "2GiB",
    bootstrap: bool = True,
) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.compare`, which explains the arguments.

    Without ``bootstrap`` its intervals are NaN; everything else is the same.
    """
    _check_options(select, level, null, scale)
    other = result if other is None else other
    _check_prompts(result, other)
    if random is not None:
        check_random(random, result, other, (condition, to))
    if matched:
        _check_lengths(result, condition, other, to)
    layers = layer_blocks(result, quantity, by, segment, memory, resamples if bootstrap else 0, resamples)
    differing = _differing(result, condition, other, to, quantity, by, segment, null, scale, layers)
    units = shared_units(result, other, variable_of(result, quantity, by).sizes["prompt"], unit)
    finding, shown = _halves(units, select)
    beside = None if random is None else BesideRandom(random, condition, to, quantity, by, segment, units, shown)
    blocks = Blocks(differing, layers, units, level, resamples, seed, bootstrap, None if beside is None else beside.see)
    found = blocks.table(quantity, finding, shown, select == "half")
    table = as_table(found.means, found.numbers, found.last.scale)
    asked = dict(condition=condition, to=to, quantity=quantity, segment=segment or "all", select=select or "none")
    models = ", ".join(sorted({_model(result), _model(other)}))
    table.attrs = {**asked, "level": level, "resamples": resamples, "seed": seed, "models": models}
    table.attrs |= _about(found, units, resamples)
    return table if beside is None else beside.table(table, np.concatenate(found.cells))


def t_changes(
    result: Result, condition: str, quantity: str, segment: str, memory: str, reference: Result | None = None
) -> pd.DataFrame:
    """The table of ``result.compare(condition, quantity=quantity, segment=segment)`` without bootstrap intervals.

    ``reference``: the result that contains the baseline; by default ``result`` itself.
    """
    return compare(
        result, condition, BASELINE, quantity, "segment", segment, reference, None, True, "uniform", None, "auto", 0.95,
        RESAMPLES, 0, None, memory, bootstrap=False,
    )  # fmt: skip


def _differing(
    result: Result,
    condition: str,
    other: Result,
    to: str,
    quantity: str,
    by: str,
    segment: str | None,
    null: Null,
    scale: Scale | None,
    layers: Seq[slice],
) -> Callable[[slice], Differences]:
    """Return a function that computes the differences for some layers."""
    if layers == [slice(None)]:
        return lambda _: differences(result, condition, other, to, quantity, by, segment, null, scale)

    def cut(some: slice) -> tuple[Result, Result]:
        ours = of_layers(result, some)
        return ours, ours if other is result else of_layers(other, some)

    part = in_both([cut(some) for some in layers], condition, to, quantity, by, segment, null)

    lacking = {"ours": condition, "theirs": to}

    def differing(some: slice) -> Differences:
        ours, theirs = cut(some)
        made = differences(ours, condition, theirs, to, quantity, by, segment, null, scale, part)
        for name in list(lacking):
            if made.cells.any() or not getattr(made, name).isnull().all():
                lacking.pop(name)
        if lacking and some == layers[-1]:  # for one block, reading the values raises this
            prompts = made.ours.sizes["prompt"]
            raise absent(prompts, prompts, quantity, segment, next(iter(lacking.values())))
        return made

    return differing


def _about(found: BlockTable, units: Units, resamples: int) -> dict[str, Any]:
    """What a table records about its null and its tests."""
    tests, n = len(found.numbers.p), found.numbers.n
    can = resolution(n, max(1, tests), resamples=resamples, unit=units.unit)
    bags = {} if found.bags is None else {"resampled": found.bags.words}
    return bags | {
        "null": found.last.null,
        "left_out": found.left_out,
        "family": f"{tests} tests: {' × '.join(found.last.dims)}",
        "unit": units.unit,
        "smallest_q": can.smallest_p,  # if all tests reach it
        "resolution": str(can),
        "patterns": None if n <= EXACT else enough(resamples, tests),
    }


def family_size(
    result: Result, condition: str, quantity: str, by: str, segment: str | None, select: str | None, memory: str
) -> tuple[int, int]:
    """The number of tests in a comparison with the baseline, and the number of prompts.

    Raises:
        OptionError: As for :func:`compare`.
    """
    _check_options(select, 0.95, "uniform", None)
    layers = layer_blocks(result, quantity, by, segment, memory)
    differing = _differing(result, condition, result, BASELINE, quantity, by, segment, "uniform", None, layers)
    cells, left_out = [], []
    for some in layers:
        made = differing(some)
        cells.append(made.cells)
        left_out += made.left_out
    check_cells(quantity, made.scale, sum(some.size for some in cells), left_out)
    return sum(int(some.sum()) for some in cells), made.ours.sizes["prompt"]


def what_is_tested(
    result: Result,
    condition: str,
    quantity: str,
    by: str,
    segment: str | None,
    unit: Unit,
    layer: int | None = None,
    memory: str = "2GiB",
    bags: int | None = None,
) -> tuple[np.ndarray, Units]:
    """What :func:`compare` with the baseline tests [unit, cell], differences minus those of the null; and the units.

    Cells that are left out are NaN. ``layer`` restricts this to one layer. ``bags`` is a seed for grouping units into
    bags if there are many; rows are then bags.

    Raises:
        OptionError: As for :func:`compare`.
    """
    layers = layer_blocks(result, quantity, by, segment, memory, signs=0 if bags is None else 1)
    if layer is not None:
        check_layer(layer, variable := variable_of(result, quantity, by))
        at = variable.layer.values.tolist().index(layer)
        layers = [slice(at, at + 1)]
    differing = _differing(result, condition, result, BASELINE, quantity, by, segment, "uniform", None, layers)
    found, left_out = [], []
    for some in layers:
        made = differing(some)
        units = units_of(result, made.ours.sizes["prompt"], unit)
        in_bags = None if bags is None else Bags.drawn(units.n, bags)
        d = units.means(made.difference.values - (0.0 if made.expected is None else made.expected))
        d = np.where(made.cells, without_rounding(d, made.rounding(units, np.arange(units.n))), np.nan)
        d = d.reshape(units.n, -1)
        found.append(d if in_bags is None else in_bags.means(d))
        left_out += made.left_out
    check_cells(quantity, made.scale, sum(d.shape[1] for d in found), left_out)
    return np.concatenate(found, axis=1), units


def _check_options(select: str | None, level: float, null: str, scale: str | None) -> None:
    if select not in (None, "half"):
        raise OptionError(
            f'select={select!r}: "half" finds heads on one half of the prompts and reports them on the other'
        )
    if not isinstance(level, (int, float)) or not 0.5 <= level < 1:
        raise OptionError(f"level={level!r}: give a probability such as 0.95")
    if null == "random-weights":
        raise OptionError(
            'null="random-weights": a result holds no model to draw weights for; make them with ma.run_random(model, '
            "prompts, conditions) and pass random=…, whose columns come with those of the uniform null"
        )
    for name, given, known in (("null", null, Null), ("scale", scale, Scale)):
        if given not in (*get_args(known), None):
            raise OptionError(f"{name}={given!r}: choose one of {', '.join(map(repr, get_args(known)))}")


def _halves(units: Units, select: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The units on which cells are found, and the units on which they are reported."""
    every = np.arange(units.n)
    if select is None:
        units.refuse_below(FEWEST)
    else:
        units.refuse_below(2 * FEWEST_TO_SELECT, ", since fewer cannot give q < 0.05 on one half")
    return (every, every) if select is None else (every[::2], every[1::2])


def _model(result: Result) -> str:
    return str(result.provenance["model"]["name"])


def _check_prompts(one: Result, other: Result) -> None:
    if one is not other and one.provenance["prompts"] != other.provenance["prompts"]:
        raise OptionError(
            "the two results are of different prompts, and a paired comparison needs the same ones: run both with the "
            f"same load_prompts (hashes {one.provenance['prompts']['hash']} and {other.provenance['prompts']['hash']})"
        )


def _check_lengths(one: Result, condition: str, other: Result, to: str) -> None:
    """Require both conditions to insert the same number of tokens into each prompt."""
    if BASELINE in (condition, to):
        return  # the baseline inserts nothing
    counts = [
        (result["sequences"].origin.sel(condition=name) == -1).sum("pos").values
        for result, name in ((one, condition), (other, to))
        if name in result.conditions
    ]
    if len(counts) == 2 and all(count.any() for count in counts) and (counts[0] != counts[1]).any():
        where = int(np.flatnonzero(counts[0] != counts[1])[0])
        raise OptionError(
            f"{condition!r} inserts {int(counts[0][where])} tokens, {to!r} {int(counts[1][where])} (prompt {where}), "
            "so their difference would be one of length too. Give both the same count, or say matched=False"
        )
