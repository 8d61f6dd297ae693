"""The first screen of a page: the change of the question's attention and of uniform attention."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.verdict_words import Verdicts, captions, explained
from mechattn.render.words import percent, percent_words
from mechattn.results.result import Result
from mechattn.stats.comparison import Verdict
from mechattn.stats.intervals import Interval


@dataclass(frozen=True)
class Change:
    """A row of the picture: a model and a condition.

    Args:
        model: The model's caption.
        condition: The user's name for the condition.
        verdict: The change and that under uniform attention; None if there is none.
        problem: The reason if there is none.
    """

    model: str
    condition: str
    verdict: Verdict | None
    problem: str = ""


@dataclass(frozen=True)
class Mark:
    """A row as drawn; lengths are in percent of the axis.

    Args:
        model: The model's caption; empty if the row above has the same model.
        condition: The condition's name.
        low: The start of the interval.
        length: The length of the interval.
        point: The position of the measured change.
        null: The position of the change under uniform attention.
        words: The change with its interval.
        null_words: The change under uniform attention.
        problem: The reason if there is nothing to draw.
    """

    model: str
    condition: str
    low: float = 0.0
    length: float = 0.0
    point: float = 0.0
    null: float = 0.0
    words: str = ""
    null_words: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Picture:
    """Points with whiskers on one axis.

    Args:
        rows: One row per model and condition.
        ticks: The positions of the axis marks, in percent of its length, and their labels.
        zero: The position of zero change.
        says: The whole picture in one sentence, for readers who cannot see it.
    """

    rows: Seq[Mark]
    ticks: Seq[tuple[float, str]]
    zero: float
    says: str


def changes(results: Seq[Result], known: Seq[Verdicts] = ()) -> list[Change]:
    """The change of the question's attention for each model and condition, by ``result.verdict``."""
    found = []
    known = known or [Verdicts(result) for result in results]
    for model, result, verdicts in zip(captions(results), results, known, strict=True):
        if "received_attention" not in result.datasets:
            continue
        for name in result.conditions[1:]:
            try:
                with explained([result]):
                    found.append(Change(model, name, verdicts.of(name)))
            except MemoryOptionError:
                raise
            except OptionError as error:  # too few prompts for an interval, or a prompt without a question
                found.append(Change(model, name, None, f"no verdict, since {error}"))
    return found


def picture(rows: Seq[Change]) -> Picture | None:
    """Draw the rows on one axis; None if there is nothing to draw."""
    drawn = [row.verdict for row in rows if row.verdict is not None]
    if not drawn:
        return None
    ends = np.array([(v.change.low, v.change.high, v.null.estimate, 0.0) for v in drawn], dtype=float)
    step = _step(float(ends.max() - ends.min()))
    start, end = np.floor(ends.min() / step) * step, np.ceil(ends.max() / step) * step
    end = max(end, start + step)

    def at(value: float | np.ndarray) -> float:
        return round(float(100 * (value - start) / (end - start)), 3)

    marks, before = [], ""
    for row in rows:
        model, before = "" if row.model == before else row.model, row.model
        v = row.verdict
        if v is None:
            marks.append(Mark(model, row.condition, problem=row.problem))
            continue
        low, high = at(v.change.low), at(v.change.high)
        words = (percent_words(v.change), percent(v.null.estimate))
        place = (low, round(high - low, 3), at(v.change.estimate), at(v.null.estimate))
        marks.append(Mark(model, row.condition, *place, *words))
    places = np.arange(start, end + step / 2, step)
    ticks = [(at(value), percent(value).replace(".0", "") if abs(value) > step / 2 else "0") for value in places]
    says = "; ".join(
        f"{row.model}, {row.condition}: {percent_words(row.verdict.change)}, uniform attention "
        f"{percent(row.verdict.null.estimate)}"
        for row in rows
        if row.verdict is not None
    )
    return Picture(marks, ticks, at(0.0), says)


def _step(reach: float) -> float:
    """A round distance between marks, so that at most six cover the axis."""
    steps = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    return next((step for step in steps if reach / step <= 6), 10.0)


def sentence(rows: Seq[Change]) -> str:
    """Describe the picture in one sentence: the first condition, a second one for comparison, uniform attention."""
    drawn = [row for row in rows if row.verdict is not None]
    if not drawn:
        return next((f"{row.model}: {row.problem}." for row in rows), "")
    found: dict[str, list[Verdict]] = {}
    for row in drawn:
        found.setdefault(row.condition, []).extend([row.verdict] if row.verdict is not None else [])
    name, *others = found
    here, control = found[name], found[others[0]] if len(others) == 1 else []
    amount, who = _amount([v.change for v in here]), "" if len(here) == 1 else f", in {len(here)} models"
    first = f"the attention that each token of the question receives changes by {amount}{who}{_unsure(here)}"
    if amount.endswith(("less", "more")):
        first = f"each token of the question receives {amount} attention than without it{who}"
    null = _amount([v.null for v in here])
    would = "be" if null.endswith(("less", "more")) else "change by"
    beside = f" With “{others[0]}”: {_amount([v.change for v in control])}." if control else ""
    return f"With “{name}”, {first}. If heads attended uniformly, it would {would} {null}; {_beside(here)}.{beside}"


def _amount(found: Seq[Interval]) -> str:
    """How much more or less; with signs if the direction differs or an interval holds 0."""
    words = _range([float(change.estimate) for change in found])
    if all(change.high < 0 for change in found):
        return f"{words.replace('−', '')} less"
    if all(change.low > 0 for change in found):
        return f"{words.replace('+', '')} more"
    return words


def _unsure(found: Seq[Verdict]) -> str:
    """Whether, or in how many models, no change can be told."""
    count = sum(bool(v.change.low <= 0 <= v.change.high) for v in found)
    of = f" in {count} of them" if len(found) > 1 else ""
    return f", which cannot be distinguished from 0{of}" if count else ""


def _range(values: Seq[float]) -> str:
    """Percentages from the closest to 0 to the farthest."""
    shown = list(dict.fromkeys(percent(v) for v in sorted(values, key=abs)))
    return shown[0] if len(shown) == 1 else f"{shown[0].removesuffix(chr(0xA0) + '%')} to {shown[-1]}"


def _beside(found: Seq[Verdict]) -> str:
    """On which side of uniform attention the intervals are; no word of rising or falling, as each may do either."""
    above = sum(bool(v.change.low > v.null.estimate) for v in found)
    below = sum(bool(v.change.high < v.null.estimate) for v in found)
    sides = {"it receives more than that": above, "it receives less than that": below}
    sides["the two cannot be distinguished"] = len(found) - above - below
    said = {words: f"in {count} of {len(found)} models " for words, count in sides.items() if count}
    return ", ".join((where if len(found) > 1 else "") + words for words, where in said.items())
