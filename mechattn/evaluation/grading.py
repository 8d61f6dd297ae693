"""Extracts the final answer from a model's text and compares it with the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from mechattn.errors import OptionError

Grader = Literal["auto", "number", "math"]
_MARK = re.compile(r"\\boxed|####|(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?", re.IGNORECASE)
_NUMBER = re.compile(r"[-+−]?\s*(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
_FRACTION = re.compile(r"([-+−]?)\s*\\[dt]?frac\s*\{\s*([-+−]?\d+)\s*\}\s*\{\s*(\d+)\s*\}")


@dataclass(frozen=True)
class Grade:
    """The final answer of a text, and whether it is right.

    Args:
        answer: The final answer; None if none was found.
        right: Whether it equals the reference; False if no answer was found.
    """

    answer: str | None
    right: bool


def check_grader(grader: str) -> None:
    """Refuse a grader that doesn't exist, or whose package is not installed."""
    if grader not in get_args(Grader):
        raise OptionError(f"grader={grader!r}: choose one of {', '.join(map(repr, get_args(Grader)))}")
    if grader == "math":
        _math_verify()


def grader_for(solution: str) -> Literal["number", "math"]:
    """ "number" for a reference that ends in a plain number, "math" for any other."""
    return "number" if final_number(solution, marked=False) is not None else "math"


def grade(text: str, solution: str, grader: Grader = "auto") -> Grade:
    """Grade the final answer of a text against a reference.

    - "number": the first number after the last mark ("Answer:", "####", "\\boxed{…}"), exactly: "1,000" is 1000,
      "\\frac{1}{2}" and "1/2" are 0.5, "$" and units don't matter. Without a mark no answer is read.
    - "math": the package math-verify, which compares expressions.
    - "auto": "number" if the reference is one.

    Args:
        text: The model's text.
        solution: The reference: the answer, or a worked solution that ends with it.
        grader: The grader.
    """
    if (grader_for(solution) if grader == "auto" else grader) == "math":
        return _grade_math(text, solution)
    expected, got = final_number(solution, marked=False), final_number(text)
    if expected is None:
        raise OptionError(f'the reference {solution!r} does not end in a number; use grader="math"')
    return Grade(None if got is None else str(got), got == expected)


def final_number(text: str, marked: bool = True) -> Fraction | None:
    """The number after the last mark of a text; with ``marked=False``, also a text that is only a number."""
    for mark in reversed(list(_MARK.finditer(text))):
        found = _first_number(text[mark.end() :].split("\n\n")[0])
        if found is not None:
            return found
    if marked:
        return None
    bare = text.strip().strip("$").strip()
    return _first_number(bare) if _NUMBER.fullmatch(bare.rstrip("%")) or _FRACTION.fullmatch(bare) else None


def _first_number(text: str) -> Fraction | None:
    fraction = _FRACTION.search(text)
    plain = next((m for m in _NUMBER.finditer(text) if any(c.isdigit() for c in m[0])), None)
    if fraction and (plain is None or fraction.start() <= plain.start()):
        value = Fraction(_ascii(fraction[2])) / int(fraction[3]) if int(fraction[3]) else None
        return None if value is None else -value if fraction[1] in ("-", "−") else value
    if plain is None:
        return None
    top, _, bottom = _ascii(plain[0]).replace(",", "").replace(" ", "").partition("/")
    if bottom and not Fraction(bottom):
        return None
    return Fraction(top) / Fraction(bottom) if bottom else Fraction(top)


def _ascii(number: str) -> str:
    return number.replace("−", "-").replace("+", "")


def _grade_math(text: str, solution: str) -> Grade:
    parse, verify = _math_verify()
    gold = parse(solution if "\\boxed" in solution or "$" in solution else f"${solution}$")
    got = parse(text)
    if not got:
        return Grade(None, False)
    return Grade(str(got[-1]), bool(verify(gold, got)))


def _math_verify() -> tuple:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise OptionError(
            "these references are not plain numbers, and comparing expressions needs math-verify: "
            'pip install "mechattn[math]"'
        ) from None
    return parse, verify
