"""Conditions that differ in one option or more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from mechattn.errors import OptionError, plain
from mechattn.prompts.conditions import Condition, Variant


def sweep(condition: Condition, **options: Iterable[Any]) -> dict[str, Condition]:
    """Make conditions that differ in one or more options, named after their values, for ``run``.

    ``sweep(MeaninglessTokens("/"), count=[0, 10, 25, 40, 55, 70])`` gives "count=10", "count=25" …;
    a count of 0 is the baseline, which is always run. Several options give all combinations.

    Args:
        condition: The condition to vary.
        options: The values of each option of the condition.

    Raises:
        OptionError: The condition has no such option, a value is not allowed or given twice, or no
            option is given.
    """
    if not options:
        raise OptionError("give at least one option to vary, such as count=[10, 25]")
    if isinstance(condition, Variant):
        inner = sweep(condition.condition, **options)
        return {name: replace(condition, condition=varied) for name, varied in inner.items()}
    for name, values in options.items():
        if name not in getattr(condition, "__dataclass_fields__", {}):
            raise OptionError(f"{type(condition).__name__} has no option {name!r} to vary")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise OptionError(f"{name}={values!r}: give a list of values, such as count=[10, 25]")

    conditions = {}
    for values in product(*options.values()):
        varied = dict(zip(options, values, strict=True))
        if varied.get("count") != 0:
            name = ", ".join(f"{option}={_printable(value)}" for option, value in varied.items())
            if name in conditions:
                raise OptionError(f"there are two conditions {name!r}; give each value once")
            conditions[name] = replace(condition, **varied)  # type: ignore[type-var]

    return conditions


def _printable(value: Any) -> str:
    """A value as a part of a name: a newline as "\\n"."""
    return plain(str(value)).replace("\n", "\\n").replace("\t", "\\t")
