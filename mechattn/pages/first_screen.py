"""The first screen of a page: the verdicts on its models as a picture, in words and in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
from mechattn.contrast.question import first_token_words
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.render.budget_figures import budget_sentences, own_attention_words
from mechattn.render.words import (
    UNSURE,
    OtherCondition,
    largest_layer_words,
    model_caption,
    numbered,
    percent,
    percent_number,
    percent_words,
    verdict_in_words,
)
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

SENTENCES = {
    "one model": (
        "With “{condition}”, the attention that a token of the question receives from all tokens"
        " after it changes on average by {amount}{unsure}."
    ),
    # Of several models, by the direction in all of them.
    "rises": (
        "With “{condition}”, each token of the question receives on average {amount} more attention"
        " than without it, in {models} models."
    ),
    "falls": (
        "With “{condition}”, each token of the question receives on average {amount} less attention"
        " than without it, in {models} models."
    ),
    "unclear": (
        "With “{condition}”, the attention that each token of the question receives on average"
        " changes by {amount}, in {models} models{unsure}."
    ),
    "control": (
        "Comparing “{condition}” with “{control}”, which is as long, instead of with no insertion:"
        " {amount}."
    ),
}
Direction = Literal["rises", "falls", "unclear"]
DIRECTION_WORDS: dict[Direction, str] = {
    "rises": "more",
    "falls": "less",
    "unclear": "no clear difference",
}
TICK_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_TICKS = 6


@dataclass(frozen=True)
class Change:
    """A row of the picture: a model, a condition, and the verdict or why there is none."""

    model: str
    condition: str
    verdict: Verdict | None
    problem: str = ""

    @property
    def words(self) -> str:
        """The change with its interval, or why there is none."""
        if self.verdict is None:
            return self.problem
        return percent_words(self.verdict.change)


@dataclass(frozen=True)
class ShownModel:
    """What a page shows of one model.

    Args:
        result: The result of the model.
        maps: A result with attention maps of a few prompts; ``result`` itself by default.
        start: The layer and head that are selected when the page opens.
    """

    result: Result
    maps: Result | None = None
    start: tuple[int, int] | None = None

    @cached_property
    def changes(self) -> list[Change]:
        """The change with each condition, or why there is none; empty without received
        attention."""
        rows: list[Change] = []
        if "received_attention" not in self.result.datasets:
            return rows

        name = model_caption(self.result)
        for condition in self.result.conditions[1:]:
            try:
                rows.append(Change(name, condition, self.result.verdict(condition)))
            except MemoryOptionError:
                raise
            # Too few prompts for an interval, or a prompt without a question.
            except OptionError as error:
                rows.append(Change(name, condition, None, f"no verdict, since {error}"))
        return rows

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each condition that has one."""
        return {row.condition: row.verdict for row in self.changes if row.verdict is not None}

    @property
    def problems(self) -> dict[str, list[str]]:
        """Each reason why there is no verdict, with the conditions that have none for it."""
        conditions: dict[str, list[str]] = {}
        for row in self.changes:
            if row.verdict is None:
                conditions.setdefault(row.problem, []).append(row.condition)
        return conditions

    def control_of(self, condition: str) -> OtherCondition | None:
        """The matched control of a condition, and the change from it; None if one of the two has no
        verdict."""
        verdicts = self.verdicts
        control = matched_control(self.result, condition)
        if control is None or not {condition, control} <= set(verdicts):
            return None
        change, _ = Contrast(self.result, condition, to=control).overall()
        return OtherCondition(control, verdicts[control], change)


@dataclass(frozen=True)
class Picture:
    """Points with whiskers on one axis.

    Args:
        rows: A point for each, if it has a verdict.
        start: Where the axis starts, as a relative change.
        end: Where it ends.
        step: From one label to the next; 0 has one.
    """

    rows: Sequence[Change]
    start: float
    end: float
    step: float

    def place(self, value: float | np.ndarray) -> float:
        """Where a change stands, in percent of the axis."""
        share = float(value - self.start) / (self.end - self.start)
        return round(100 * share, 3)

    def length(self, interval: Interval) -> float:
        """The length of a whisker, in percent of the axis."""
        return round(self.place(interval.high) - self.place(interval.low), 3)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The places of the labels, and their words."""
        ticks = []
        for value in np.arange(self.start, self.end + self.step / 2, self.step):
            is_zero = abs(value) <= self.step / 2
            label = "0"
            if not is_zero:
                label = f"{percent_number(value, '+.4g')}\u00a0%"
            ticks.append((self.place(value), label))
        return ticks

    @property
    def description(self) -> str:
        """All of it in words."""
        return "; ".join(
            f"{row.model}, {row.condition}: {row.words}" for row in self.rows if row.verdict
        )


def changes(models: Sequence[ShownModel]) -> list[Change]:
    """The change of the question's attention for each model and condition."""
    rows = []
    names = captions([model.result for model in models])
    for name, model in zip(names, models, strict=True):
        rows += [replace(row, model=name) for row in model.changes]
    return rows


def captions(results: Sequence[Result]) -> list[str]:
    """The caption of each result: its model, numbered if several results have the same model."""
    return numbered([model_caption(result) for result in results])


def picture(rows: Sequence[Change]) -> Picture | None:
    """Draw the rows on one axis; None if there is nothing to draw."""
    intervals = [row.verdict.change for row in rows if row.verdict is not None]
    if not intervals:
        return None

    lowest = min(0.0, *(float(interval.low) for interval in intervals))
    highest = max(0.0, *(float(interval.high) for interval in intervals))
    fitting_steps = [step for step in TICK_STEPS if (highest - lowest) / step <= MOST_TICKS]
    step = min(fitting_steps, default=TICK_STEPS[-1])
    start = float(np.floor(lowest / step) * step)
    end = float(np.ceil(highest / step) * step)
    return Picture(rows, start, max(end, start + step), step)


def change_sentence(rows: Sequence[Change]) -> str:
    """The picture in words: how attention changes with the first condition."""
    if not rows:
        return ""
    conditions = [row.condition for row in rows if row.verdict is not None]
    if not conditions:
        return f"{rows[0].model}: {rows[0].problem}."

    condition = conditions[0]
    intervals = [
        row.verdict.change for row in rows if row.verdict is not None and row.condition == condition
    ]
    unsure_count = sum(_direction([change]) == "unclear" for change in intervals)
    unsure = UNSURE if unsure_count else ""
    if len(intervals) == 1:
        amount = percent_words(intervals[0])
        return SENTENCES["one model"].format(condition=condition, amount=amount, unsure=unsure)

    if unsure_count:
        unsure += f" in {unsure_count} of them"
    direction = _direction(intervals)
    estimates = np.array([change.estimate for change in intervals])
    amount = _range_words(estimates, "+.1f")
    if direction != "unclear":
        amount = _range_words(abs(estimates), ".1f")  # the sentence says "more" or "less"
    return SENTENCES[direction].format(
        condition=condition, amount=amount, models=len(intervals), unsure=unsure
    )


def _direction(intervals: Sequence[Interval]) -> Direction:
    """On which side of 0 all of the intervals are."""
    if all(change.high < 0 for change in intervals):
        return "falls"
    if all(change.low > 0 for change in intervals):
        return "rises"
    return "unclear"


def _range_words(changes: np.ndarray, form: str) -> str:
    """The smallest relative change and the largest, whatever their signs, in percent."""
    by_size = sorted(changes, key=abs)
    smallest = percent_number(by_size[0], form)
    largest = percent_number(by_size[-1], form)
    if smallest == largest:
        return f"{smallest}\u00a0%"
    return f"{smallest} to {largest}\u00a0%"


def control_sentence(models: Sequence[ShownModel]) -> str:
    """How the first condition differs from its matched control, in the models that have both; empty
    if no model has a control."""
    differences: dict[tuple[str, str], list[Interval]] = {}  # by condition and control
    for model in models:
        condition = model.result.shown_condition()
        control = model.control_of(condition)
        if control is not None:
            differences.setdefault((condition, control.name), []).append(control.difference)

    sentences = []
    for (condition, name), intervals in differences.items():
        amount = percent_words(intervals[0])
        if len(intervals) > 1:
            amount = _counted_directions(intervals)
        words = SENTENCES["control"].format(condition=condition, control=name, amount=amount)
        sentences.append(words)
    return " ".join(sentences)


def _counted_directions(intervals: Sequence[Interval]) -> str:
    """The range of changes, and in how many models they are clear."""
    counts = Counter(_direction([change]) for change in intervals)
    count_words = ", ".join(
        f"{words} in {counts[direction]}"
        for direction, words in DIRECTION_WORDS.items()
        if direction in counts
    )
    estimates = [change.estimate for change in intervals]
    low = percent(min(estimates))
    high = percent(max(estimates))
    return f"{low} to {high} ({count_words} of {len(intervals)} models)"


def layer_sentence(model: ShownModel) -> str:
    """In which layer attention changes most with the first condition; empty without a verdict."""
    condition = model.result.shown_condition()
    if condition not in model.verdicts:
        return ""
    words = largest_layer_words(model.result, condition, "question")
    return f"{words}." if words else ""


def answer_sentences(models: Sequence[ShownModel]) -> list[str]:
    """The answer of a page, the most important sentence first; of several models, what is said of
    each alone is left out."""
    budget: list[str] = []
    received_sentences = [change_sentence(changes(models))]
    if len(models) == 1:
        budget = budget_answer(models[0].result)
        received_sentences.append(layer_sentence(models[0]))
    received_sentences.append(control_sentence(models))

    received = " ".join(filter(None, received_sentences))
    if budget and received:
        received = f"Received attention is another measure. {received}"

    results = [model.result for model in models]
    first_tokens = [first_token_words(result, result.shown_condition()) for result in results]
    return list(filter(None, [*budget, *first_tokens, received]))


def shown_conditions(result: Result) -> list[str]:
    """The first condition that isn't the baseline, and its matched control, as far as there are
    any."""
    condition = result.shown_condition()
    if condition == BASELINE:
        return []
    control = matched_control(result, condition)
    if control is None:
        return [condition]
    return [condition, control]


def budget_answer(result: Result) -> list[str]:
    """How the question's attention to itself changes with the first condition, and what its tokens
    and those of its control take; empty without a budget."""
    conditions = shown_conditions(result)
    if not conditions or "attention_budget" not in result.datasets:
        return []

    sentences = [own_attention_sentence(result, conditions[0])]
    for name in conditions:
        taken = budget_sentences(result, name)[:2]
        sentences.append(" ".join(taken))
    return sentences


def own_attention_sentence(result: Result, condition: str) -> str:
    """How the question's attention to itself changes with a condition and with its control."""
    words = f"With “{condition}”, the question attends {own_attention_words(result, condition)}."
    control = matched_control(result, condition)
    if control is not None:
        beside = own_attention_words(result, control)
        words += f" With the control “{control}”, which is as long, it attends {beside}."
    return words


def verdict_sentences(model: ShownModel) -> list[str]:
    """The verdict on each condition in words, beside its control, or why there is none."""
    result = model.result
    caption = model_caption(result)
    sentences = []
    for problem, conditions in model.problems.items():
        sentences.append(f"{caption}, {', '.join(conditions)}: {problem}.")
    for condition, verdict in model.verdicts.items():
        control = model.control_of(condition)
        words = verdict_in_words(result, condition, verdict, other=control)
        sentences.append(f"{caption}: {words}")

    return sentences
