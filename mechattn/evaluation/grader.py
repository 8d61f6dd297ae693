r"""Reads the final answer of a text, and compares it with a reference.

The answer is what follows the strongest mark of a text: ``\boxed{…}``, "####", "answer is" or
"answer:", and without any of these the last "=". It is read to its end: "2 1/2" is 5/2, and "2 + 3"
is not a number. docs/concepts/evaluation has the rule as a table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Literal

from mechattn.errors import OptionError, check_choice

Grader = Literal["auto", "number", "math"]

# A model without an end token often continues with a problem of its own, which begins like this.
_NEXT_PROBLEM = re.compile(r"\n\s*(?:\*\*|#+ )?(?:Question|Problem|Q)\b[\w ]{0,4}:", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_HASHES = re.compile(r"####(?!#)[ \t]*\**(?=[-+−$€£]?\s*[\d\\.])([^\n]*)")
_PHRASE = re.compile(
    r"\banswer\b(?:(?:\s+to\s[^.\n]{0,60}?)?\s+is\b\s*:?|\s*[*_]*\s*:|\s*=|\s+(?=[-+−$€]?\d))",
    re.IGNORECASE,
)
_EQUALS = re.compile("(?<![<>!])=")
_STRONG_MARKS = (_BOX, _HASHES, _PHRASE)
# With one of these before an "=", what follows is one of several solutions: "3 or x", "3, x_2",
# "3; f(2)".
_ANOTHER_SOLUTION = re.compile(
    r"\d[\s})]*(?:\\q?quad\s*)?(?:[,;]|or\b|and\b)\s*(?:\\q?quad\s*)?\\?[a-zA-Z][\w(){}]*\s*$"
)
_SENTENCE_END = re.compile(r"(?<=[\w)}\]%$*])[.!?](?=\s|$|\*|\$)|\n")
_MARKDOWN = re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|__|`|\\[(\[\])]|(?<!\\)\$")

_BARE_ROOT = re.compile(r"(\\sqrt\[\w+\])\s*(\w)")  # math-verify reads it only with braces

# These may surround a number without changing it.
_SPACES = re.compile(r"\\[!,;: ]|~|\\left|\\right|\\displaystyle")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_BRACKETED = re.compile(r"^\(\s*([^(),]*?)\s*\)$")  # not "(1,000)", which may be a point
_CURRENCY = re.compile(r"^(?:\\\$|[$€£¥])\s*")
_UNIT = re.compile(r"^(\s*)(?:\\?%|\^\s*\{?\s*\\circ\s*\}?|°)")
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,100}(?!\d)|\d{1,400})"
_FRACTION = (
    r"\\[dt]?frac\s*(?:\{\s*(?P<numerator>-?\d{1,400})\s*\}|(?P<numerator_digit>\d))"
    r"\s*(?:\{\s*(?P<denominator>-?\d{1,400})\s*\}|(?P<denominator_digit>\d))"
)
_PLAIN = re.compile(
    rf"(?P<whole>{_DIGITS})?(?P<decimals>\.\d{{1,400}})?"
    rf"(?:\s+(?P<mixed_numerator>\d{{1,400}})\s*/\s*(?P<mixed_denominator>\d{{1,400}})"
    rf"|\s*/\s*(?P<divisor>{_DIGITS}(?:\.\d{{1,400}})?)|\s*{_FRACTION})?"
)
_POWER = re.compile(
    r"(?:[eE](?P<e>[-+]?\d{1,4})(?!\w)"
    r"|\s*(?:\\times|\\cdot|[×x*·])\s*10\s*\^\s*\{?(?P<of_ten>-?\d{1,4})\}?"
    r"|\s*(?:\^|\*\*)\s*\{?(?P<of_value>\d{1,4})\}?)"
)
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
# A number with one of these after it is only a part of something else.
_GOES_ON = re.compile(
    r"""
    [a-zA-Z](?![a-zA-Z])(?<![mghslL])            # a variable, "2x"; but a unit of one letter, "5m"
    | [({!√π²³]                                  # "3(4)", "5!"
    | \.\d                                       # "1.2.3"
    | \s*[-−:/]\s*[\d\\(]                        # "5-6", "8:30"
    | \s*[+*×÷·^=<>_]\s*[\w\\({]                 # "2 + x", "52_8"
    | \s*(?:\\|\d)                               # "3\sqrt{13}", "10 000"
    | \s*,\s*[-+−]?[\d\\]                        # a list, "3, 5"
    | \s+(?:or|and|to|plus|minus|times)\s+[\da]  # "3 or 4", "2 and a half"
    | \s*[a-zA-Z]+\s+\d                          # "5 feet 3"
    """,
    re.VERBOSE,
)
# A number with one of these before it is only a part of something else. A single letter is a
# variable, except "a", "A" and "I", which are words.
_BEGINS_EARLIER = re.compile(r"[\d\\({^_*/×+−<>=≤≥≠-]$|\\|√|\b(?:half|quarter)\b|\b[b-zB-HJ-Z]$")
_LARGEST_EXPONENT = 400  # beyond the range of floats; exact arithmetic with more would take long
_MOST_DIGITS = 4000  # of a power; Python by default converts integers of at most 4300 to text


@dataclass(frozen=True)
class Grade:
    """The final answer of a text, and whether it is right.

    Args:
        answer: The final answer; None if none could be read.
        right: Whether it equals the reference; False if no answer could be read.
    """

    answer: str | None
    right: bool


def check_grader(grader: str) -> None:
    """Refuse a grader that doesn't exist, or whose package is not installed.

    Raises:
        OptionError: It is such a grader.
    """
    check_choice(Grader, grader=grader)
    if grader == "math" and find_spec("math_verify") is None:
        raise OptionError(
            "these references are not plain numbers, and comparing expressions needs math-verify: "
            'pip install "mechattn[math]"'
        )


def grader_for(solution: str) -> Literal["number", "math"]:
    """The grader for a reference: "number" if it is or ends in a number, and "math" otherwise."""
    if _reference_number(solution) is None:
        return "math"
    return "number"


def grade(text: str, solution: str, grader: Grader = "auto", *, finished: bool = True) -> Grade:
    r"""Grade the final answer of a text against a reference.

    - "number" compares numbers exactly: "1,000" is 1000, "\frac{1}{2}" and "1/2" are 0.5, and
      "2 1/2" is 2.5. "$" and units don't matter.
    - "math" compares expressions with the package math-verify.
    - "auto" is "number" if the reference and the answer are numbers, and "math" otherwise. If the
      reference is a number, an answer without digits is wrong, as is any other that is not a number
      if math-verify is not installed.

    Args:
        text: The model's text.
        solution: The reference: the answer, or a worked solution that ends with it.
        grader: The grader.
        finished: Whether the model ended the text. A text that was cut off has no answer, unless
            the model had begun a further problem after it.

    Raises:
        OptionError: The grader is "number" and the reference does not end in a number, or
            math-verify is needed and not installed.

    Source:
        Marks: lm-evaluation-harness, tasks gsm8k and minerva_math; expressions: Math-Verify.
    """
    expected = _reference_number(solution)
    if grader == "number" and expected is None:
        raise OptionError(f'the reference {solution!r} does not end in a number; use grader="math"')

    answer = final_answer(text, finished)
    if answer is None:
        return Grade(None, False)

    value = number_in(answer)
    if grader != "math" and expected is not None:
        if value is not None:
            return Grade(str(value), value == expected)
        if grader == "number" or not re.search(r"\d", answer) or not find_spec("math_verify"):
            return Grade(None, False)

    return _compared_as_expressions(answer, _reference_answer(solution) or solution)


def final_answer(text: str, finished: bool = True) -> str | None:
    """What follows the strongest mark of a text, read to its end.

    The answer is None if there is no mark, if nothing can be read after it, or if the text was cut
    off before a further problem began.
    """
    # Before the first mark a model may repeat the problem that it was asked.
    matches = [mark.search(text) for mark in (*_STRONG_MARKS, _EQUALS)]
    first_start = min((match.start() for match in matches if match), default=0)
    next_problem = _NEXT_PROBLEM.search(text, first_start)
    if next_problem:
        text = text[: next_problem.start()]
    elif not finished:
        return None

    boxes = list(_BOX.finditer(text))
    if boxes:
        return _braced(text[boxes[-1].end() :]) or None

    hashes = _HASHES.search(text)
    if hashes:
        return hashes[1].strip()

    # The last of several statements is read, or the last with a digit if any has one.
    statements = [_statement(text[phrase.end() :]) for phrase in _PHRASE.finditer(text)]
    answers = [answer for answer in statements if answer]
    if answers:
        answers_with_digits = [answer for answer in answers if re.search(r"\d", answer)]
        return (answers_with_digits or answers)[-1]

    sides = _EQUALS.split(text)
    if len(sides) == 1:
        return None
    return _statement(sides[-1])


def number_in(answer: str) -> Fraction | None:
    """The value of an answer that is a number, with or without a unit.

    The value is None if the answer is anything else, such as several numbers.
    """
    answer = _without_formatting(_last_side(answer))
    start = re.search(r"[-+−]?\s*(?:\\\$|[$€£¥])?\s*(?:\d|\.\d|\\[dt]?frac)", answer)
    if start is None:
        return None

    prefix = answer[: start.start()].rstrip()
    if _BEGINS_EARLIER.search(prefix):
        return None

    value, rest = _number_at(answer[start.start() :])
    if value is None or _GOES_ON.match(rest):
        return None
    if prefix and re.search(r"\d", rest):
        return None  # it is one of several numbers in a sentence
    return value


def _reference_number(solution: str) -> Fraction | None:
    """The value of a reference that is a number, or of the number that ends a worked solution.

    The value is None if the reference, or the end of the solution, is anything but a number.
    """
    answer = _reference_answer(solution)
    if not answer:
        return None
    if _has_mark(solution):
        answer = _last_side(answer)

    value, rest = _number_at(_without_formatting(answer))
    if rest.strip() not in ("", ".", "%", "\\%"):
        return None
    return value


def _reference_answer(solution: str) -> str | None:
    """The answer at the end of a worked solution, or the whole reference if it has no mark."""
    if _has_mark(solution):
        return final_answer(solution)
    return solution


def _has_mark(text: str) -> bool:
    """Whether a text has a mark before its answer; a "=" is not enough."""
    return any(mark.search(text) for mark in _STRONG_MARKS)


def _braced(text: str) -> str | None:
    """The text up to the brace that closes one opened just before the text; None without one."""
    depth = 1
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return text[: brace.start()].strip()
    return None


def _statement(text: str) -> str | None:
    """The rest of the sentence, or the next line that is not empty; None if nothing follows."""
    text = _MARKDOWN.sub("", text).strip(" \t\n:*_#")
    return _SENTENCE_END.split(text, maxsplit=1)[0].strip() or None


def _last_side(answer: str) -> str:
    """What follows the last "="; empty if it is only the last of several solutions."""
    sides = _EQUALS.split(answer)
    if len(sides) > 1 and _ANOTHER_SOLUTION.search(_without_formatting(sides[-2])):
        return ""
    return sides[-1]


def _without_formatting(answer: str) -> str:
    """An answer without LaTeX's spaces, fonts and dollar signs, and without brackets around it."""
    answer = re.sub(r"\s*\{,\s*\}|,\s*\\!\s*", ",", answer)
    answer = _TEXT.sub(r" \1 ", _SPACES.sub(" ", answer))
    answer = re.sub(r"(?<!\\)\$(?!\s*[\d.])", "", answer)
    answer = answer.strip().strip("*`").strip()
    return _BRACKETED.sub(r"\1", answer)


def _number_at(text: str) -> tuple[Fraction | None, str]:
    """The value of the number at the start of a text, and the rest of the text.

    If the text does not start with a number, this is None with the whole text.
    """
    is_negative = text.startswith(("-", "−"))
    unsigned = re.sub("^[-+−]", "", text)
    rest = _CURRENCY.sub("", unsigned.lstrip())
    match = _PLAIN.match(rest)
    if match is None or not match[0].strip():
        return None, text

    value = _plain_value(match)
    rest = rest[match.end() :]

    power = _POWER.match(rest)
    if value is not None and power is not None:
        value = _with_power(value, power)
        rest = rest[power.end() :]
    if value is None:
        return None, text

    scale = _SCALE.match(rest)
    if scale is not None:
        value *= _SCALES[scale[1].lower()]
        rest = rest[scale.end() :]

    rest = _UNIT.sub(r"\1", rest)
    if is_negative:
        value = -value
    return value, rest


def _plain_value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of ``_PLAIN``; None for a division by zero."""
    whole = (match["whole"] or "0").replace(",", "")
    value = Fraction(whole + (match["decimals"] or ""))
    numerator = match["mixed_numerator"] or match["numerator"] or match["numerator_digit"]
    latex_denominator = match["denominator"] or match["denominator_digit"] or "1"
    denominator_text = match["mixed_denominator"] or match["divisor"] or latex_denominator
    denominator = Fraction(denominator_text.replace(",", ""))
    if denominator == 0:
        return None

    if numerator:
        return value + Fraction(numerator) / denominator
    return value / denominator


def _with_power(value: Fraction, power: re.Match[str]) -> Fraction | None:
    """The value of a number with "e3", "· 10^3" or "^3" after it; None if it is too large."""
    exponent = int(power["e"] or power["of_ten"] or power["of_value"])
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    if not power["of_value"]:
        return value * Fraction(10) ** exponent

    if exponent * len(str(value)) > _MOST_DIGITS:
        return None
    return value**exponent


def _compared_as_expressions(answer: str, reference: str) -> Grade:
    """The grade of an expression, which is right if it equals the reference as a text or for
    math-verify."""
    check_grader("math")
    from math_verify import parse, verify

    plain_answer = _normalised(answer)
    if plain_answer and plain_answer == _normalised(reference):
        return Grade(answer, True)

    expected = parse(_in_latex(reference))
    value = parse(_in_latex(answer))
    if not value:
        return Grade(None, False)
    return Grade(str(value[-1]), bool(verify(expected, value)))


def _in_latex(expression: str) -> str:
    """An expression in the form that math-verify reads: between dollar signs, without Markdown."""
    bare = _BARE_ROOT.sub(r"\1{\2}", _MARKDOWN.sub("", expression))
    return f"${bare}$"


def _normalised(expression: str) -> str:
    """An expression to be compared as text: without spaces, fonts, dollar signs and full stop."""
    bare = _MARKDOWN.sub("", _TEXT.sub(r"\1", _SPACES.sub("", expression)))
    return re.sub(r"\s+", "", bare.replace("dfrac", "frac").replace("tfrac", "frac")).rstrip(".")
