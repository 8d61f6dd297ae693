"""What can be detected with a result's number of prompts, before anything is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mechattn.results.compare import family_size
from mechattn.results.units import units_of
from mechattn.stats.resolution import Resolution, resolution
from mechattn.stats.units import Unit

if TYPE_CHECKING:
    from mechattn.results.result import Result


def resolution_of(
    result: Result,
    condition: str | None,
    quantity: str,
    by: str,
    segment: str | None,
    select: Literal["half"] | None,
    unit: Unit,
    level: float,
    resamples: int,
    memory: str,
) -> Resolution:
    """See :meth:`mechattn.results.result.Result.resolution`, which explains the arguments."""
    tests, prompts = family_size(result, result.condition(condition), quantity, by, segment, select, memory)
    units = units_of(result, prompts, unit)
    n = units.n if select is None else (units.n + 1) // 2
    return resolution(n, tests, level, resamples, units.unit)
