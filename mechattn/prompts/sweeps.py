"""Makes conditions that differ in one or more options, and reads the options from their names.

A table of answers keeps only the names of a sweep's conditions, so figures read the values of the
options from the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from mechattn.errors import OptionError, plain
from mechattn.prompts.conditions import Condition, Variant


def sweep(condition: Condition, **options: Iterable[Any]) -> dict[str, Condition]:
    """Make conditions for ``run`` that differ in one or more options, which name them.

    ``sweep(MeaninglessTokens("/"), count=[0, 10, 25, 40, 55, 70])`` gives "count=10", "count=25" …
    A count of 0 is left out, since it is the baseline, which is always run. Several options give
    all combinations of their values.

    Args:
        condition: The condition to vary.
        options: The values of each option of the condition.

    Returns:
        The conditions by name.

    Raises:
        OptionError: The condition has no such option, a value is not allowed or given twice, or no
            option is given.
    """
    if not options:
        raise OptionError("give at least one option to vary, such as count=[10, 25]")
    if isinstance(condition, Variant):
        return {
            name: replace(condition, condition=inner_condition)
            for name, inner_condition in sweep(condition.condition, **options).items()
        }
    for name, values in options.items():
        if name not in getattr(condition, "__dataclass_fields__", {}):
            raise OptionError(f"{type(condition).__name__} has no option {name!r} to vary")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise OptionError(f"{name}={values!r}: give a list of values, such as count=[10, 25]")

    conditions = {}
    for combination in product(*options.values()):
        settings = dict(zip(options, combination, strict=True))
        if settings.get("count") == 0:
            continue
        phrases = [f"{option}={_printable(value)}" for option, value in settings.items()]
        name = ", ".join(phrases)
        if name in conditions:
            raise OptionError(f"there are two conditions {name!r}; give each value once")
        conditions[name] = replace(condition, **settings)  # type: ignore[type-var]

    return conditions


class SweptCondition(NamedTuple):
    """A condition of a sweep, and the value of one option in its name.

    Args:
        name: The name, such as "slash, count=5, place=start".
        value: The value of the option, such as "start". It is a number, such as 5.0, if the values
            of all conditions are numbers.
        without_option: The rest of the name, such as "slash, count=5".
    """

    name: str
    value: str | float
    without_option: str


def swept_conditions(names: Iterable[str], option: str) -> list[SweptCondition]:
    """The conditions in whose names :func:`sweep` wrote an option.

    They are sorted by its values if these are numbers, and otherwise keep their order.

    Args:
        names: Names of conditions, which may begin with words such as "slash, ".
        option: The option, such as "count".

    Raises:
        OptionError: No name contains the option.
    """
    # A value ends at the next option rather than at a comma, which it may contain.
    phrase = re.compile(rf"(?:^|, ){re.escape(option)}=(.*?)(?=, \w+=|$)")
    conditions = []
    for name in names:
        match = phrase.search(name)
        if match is not None:
            rest = phrase.sub("", name).removeprefix(", ")
            conditions.append(SweptCondition(name, match[1], rest))

    if not conditions:
        raise OptionError(
            f"no condition is named {option}=…; run or evaluate with conditions=ma.sweep(…)"
        )
    try:
        numeric = [condition._replace(value=float(condition.value)) for condition in conditions]
    except ValueError:  # a value that is not a number
        return conditions
    return sorted(numeric, key=lambda condition: condition.value)


def _printable(value: Any) -> str:
    """A value as a part of a name, with a newline as "\\n" and a tab as "\\t"."""
    return plain(str(value)).replace("\n", "\\n").replace("\t", "\\t")
