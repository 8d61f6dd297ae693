"""The first screen of a page: the verdicts on its models as a picture and in sentences."""

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
    # For several models: the attention rises in all of them, falls in all, or neither is clear.
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
    "several changes": "{lowest} to {highest} ({directions} of {models} models)",
    "unsure in some": UNSURE + " in {count} of them",
    "another measure": "Received attention is another measure. {received}",
    "own attention": "With “{condition}”, the question attends {words}.",
    "own attention with control": (
        "With the control “{control}”, which is as long, it attends {words}."
    ),
    "no verdict": "no verdict, since {reason}",
}
Direction = Literal["rises", "falls", "unclear"]
DIRECTION_WORDS: dict[Direction, str] = {
    "rises": "more",
    "falls": "less",
    "unclear": "no clear difference",
}
# The distances that two labels of the axis may have, as relative changes.
TICK_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_TICKS = 6  # labels, which then keep their distance on a phone too


@dataclass(frozen=True)
class PictureRow:
    """A row of the picture: a model, a condition, and the verdict on it.

    Args:
        model: The caption of the model.
        condition: The condition.
        verdict: The verdict; None if it could not be computed.
        problem: Why there is no verdict; empty if there is one.
    """

    model: str
    condition: str
    verdict: Verdict | None
    problem: str = ""


@dataclass(frozen=True)
class ShownModel:
    """What a page shows of one model.

    Args:
        result: The result of the model.
        maps: A result with attention maps of a few prompts; by default ``result`` itself.
        start: The layer and head that are selected when the page opens.
    """

    result: Result
    maps: Result | None = None
    start: tuple[int, int] | None = None

    @cached_property
    def rows(self) -> list[PictureRow]:
        """A row of the picture for each condition but the baseline; no rows if the result has no
        received attention."""
        rows: list[PictureRow] = []
        if "received_attention" not in self.result.datasets:
            return rows

        name = model_caption(self.result)
        for condition in self.result.conditions:
            if condition == BASELINE:
                continue
            try:
                rows.append(PictureRow(name, condition, self.result.verdict(condition)))
            except MemoryOptionError:
                raise
            except OptionError as error:  # such as too few prompts for an interval
                problem = SENTENCES["no verdict"].format(reason=error)
                rows.append(PictureRow(name, condition, None, problem))
        return rows

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each condition that has one."""
        return {row.condition: row.verdict for row in self.rows if row.verdict is not None}

    @property
    def problems(self) -> dict[str, list[str]]:
        """The conditions that have no verdict, by the reason."""
        conditions_by_problem: dict[str, list[str]] = {}
        for row in self.rows:
            if row.verdict is None:
                conditions_by_problem.setdefault(row.problem, []).append(row.condition)
        return conditions_by_problem

    def control_of(self, condition: str) -> OtherCondition | None:
        """The matched control of a condition, with its verdict and the change from it.

        None if the condition has no such control, or if one of the two has no verdict.
        """
        verdicts = self.verdicts
        control_name = matched_control(self.result, condition)
        if control_name is None or not {condition, control_name} <= set(verdicts):
            return None
        difference, _ = Contrast(self.result, condition, to=control_name).overall()
        return OtherCondition(control_name, verdicts[control_name], difference)


@dataclass(frozen=True)
class Picture:
    """The changes of all rows as points with whiskers on one axis.

    Args:
        rows: The rows. Each row with a verdict gets a point.
        start: The relative change at which the axis starts; a multiple of ``step``, at most 0.
        end: The relative change at which it ends; a multiple of ``step``, at least 0.
        step: The distance between two labels.
    """

    rows: Sequence[PictureRow]
    start: float
    end: float
    step: float

    def place(self, value: float | np.ndarray) -> float:
        """The place of a relative change, from 0 at the start of the axis to 100 at its end."""
        fraction = float(value - self.start) / (self.end - self.start)
        return round(100 * fraction, 3)

    def length(self, interval: Interval) -> float:
        """The length of an interval's whisker, in percent of the axis."""
        return round(self.place(interval.high) - self.place(interval.low), 3)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The place and the text of each label."""
        ticks = []
        # The end is half a step further, so that rounding cannot remove the last label.
        for value in np.arange(self.start, self.end + self.step / 2, self.step):
            is_zero = abs(value) <= self.step / 2
            label = "0" if is_zero else f"{percent_number(value, '+.4g')}\u00a0%"
            ticks.append((self.place(value), label))
        return ticks

    @property
    def description(self) -> str:
        """The points in words, for readers who cannot see the picture."""
        return "; ".join(
            f"{row.model}, {row.condition}: {percent_words(row.verdict.change)}"
            for row in self.rows
            if row.verdict is not None
        )


def picture_rows(models: Sequence[ShownModel]) -> list[PictureRow]:
    """The rows of all models, each with the caption of its model."""
    rows = []
    for caption, model in captioned(models):
        rows += [replace(row, model=caption) for row in model.rows]
    return rows


def captioned(models: Sequence[ShownModel]) -> list[tuple[str, ShownModel]]:
    """Each model with its caption before it. Captions of the same model are numbered."""
    captions = numbered([model_caption(model.result) for model in models])
    return list(zip(captions, models, strict=True))


def picture(rows: Sequence[PictureRow]) -> Picture | None:
    """The rows on an axis that contains 0 and all intervals; None if no row has a verdict.

    The labels are as close as ``TICK_STEPS`` and ``MOST_TICKS`` allow. The largest step may give
    more labels.
    """
    intervals = [row.verdict.change for row in rows if row.verdict is not None]
    if not intervals:
        return None

    lowest = min(0.0, *(float(interval.low) for interval in intervals))
    highest = max(0.0, *(float(interval.high) for interval in intervals))
    for step in TICK_STEPS:
        first = np.floor(lowest / step)
        last = np.ceil(highest / step)
        if last - first < MOST_TICKS:  # one label more than steps
            break
    start = float(first * step)
    end = float(last * step)
    return Picture(rows, start, max(end, start + step), step)  # at least one step


def change_sentence(rows: Sequence[PictureRow]) -> str:
    """The picture in a sentence: how attention changes with the first condition that has a verdict.

    If no row has a verdict, the sentence is the problem of the first. Without rows it is empty.
    """
    if not rows:
        return ""
    intervals_by_condition: dict[str, list[Interval]] = {}
    for row in rows:
        if row.verdict is not None:
            intervals_by_condition.setdefault(row.condition, []).append(row.verdict.change)
    if not intervals_by_condition:
        return f"{rows[0].model}: {rows[0].problem}."

    condition, intervals = next(iter(intervals_by_condition.items()))
    unsure_count = sum(_direction([interval]) == "unclear" for interval in intervals)
    unsure_words = ""
    if len(intervals) == 1:
        if unsure_count:
            unsure_words = UNSURE
        return SENTENCES["one model"].format(
            condition=condition, amount=percent_words(intervals[0]), unsure=unsure_words
        )

    if unsure_count:
        unsure_words = SENTENCES["unsure in some"].format(count=unsure_count)
    direction = _direction(intervals)
    estimates = np.array([interval.estimate for interval in intervals])
    if direction == "unclear":
        amount = _range_words(estimates, "+.1f")
    else:
        amount = _range_words(abs(estimates), ".1f")  # the sentence says "more" or "less"
    return SENTENCES[direction].format(
        condition=condition, amount=amount, models=len(intervals), unsure=unsure_words
    )


def control_sentence(models: Sequence[ShownModel]) -> str:
    """How each model's first condition differs from its matched control.

    There is a sentence for each pair of a condition and a control. Models without a control, or
    without a verdict on one of the two, are left out.
    """
    differences: dict[tuple[str, str], list[Interval]] = {}  # by condition and control
    for model in models:
        condition = model.result.shown_condition()
        control = model.control_of(condition)
        if control is not None:
            differences.setdefault((condition, control.name), []).append(control.difference)

    sentences = []
    for (condition, control_name), intervals in differences.items():
        amount = percent_words(intervals[0])
        if len(intervals) > 1:
            amount = _counted_directions(intervals)
        sentences.append(
            SENTENCES["control"].format(condition=condition, control=control_name, amount=amount)
        )
    return " ".join(sentences)


def layer_sentence(model: ShownModel) -> str:
    """The layer in which attention changes most with the first condition.

    Empty if that condition has no verdict, or if the result has one layer.
    """
    condition = model.result.shown_condition()
    if condition not in model.verdicts:
        return ""
    words = largest_layer_words(model.result, condition, "question")
    return f"{words}." if words else ""


def answer_sentences(models: Sequence[ShownModel]) -> list[str]:
    """The answer of a page, the most important sentence first.

    For several models, the budget and the layer of the largest change are left out.
    """
    budget: list[str] = []
    layer_words = ""
    if len(models) == 1:
        budget = budget_answer(models[0].result)
        layer_words = layer_sentence(models[0])

    received_sentences = [
        change_sentence(picture_rows(models)),
        layer_words,
        control_sentence(models),
    ]
    received = " ".join(filter(None, received_sentences))
    if budget and received:
        received = SENTENCES["another measure"].format(received=received)

    first_tokens = []
    for caption, model in captioned(models):
        words = first_token_words(model.result, model.result.shown_condition())
        if words and len(models) > 1:
            words = f"{caption}: {words}"
        first_tokens.append(words)
    return list(filter(None, [*budget, *first_tokens, received]))


def shown_conditions(result: Result) -> list[str]:
    """The first condition that isn't the baseline, and its matched control if it has one.

    Empty if the result has only the baseline.
    """
    condition = result.shown_condition()
    if condition == BASELINE:
        return []
    control_name = matched_control(result, condition)
    if control_name is None:
        return [condition]
    return [condition, control_name]


def budget_answer(result: Result) -> list[str]:
    """How the question's attention to itself changes with the first condition and its control, and
    what the inserted tokens take with each.

    Empty if the result has no attention budget, or only the baseline.
    """
    conditions = shown_conditions(result)
    if not conditions or "attention_budget" not in result.datasets:
        return []

    sentences = [own_attention_sentence(result, conditions[0])]
    for name in conditions:
        # A third sentence, on the causes, is left to the figure below.
        sentences.append(" ".join(budget_sentences(result, name)[:2]))
    return sentences


def own_attention_sentence(result: Result, condition: str) -> str:
    """How the question's attention to itself changes with a condition, and with its control if it
    has one."""
    words = own_attention_words(result, condition)
    sentence = SENTENCES["own attention"].format(condition=condition, words=words)
    control_name = matched_control(result, condition)
    if control_name is None:
        return sentence
    control_words = own_attention_words(result, control_name)
    sentence_on_control = SENTENCES["own attention with control"].format(
        control=control_name, words=control_words
    )
    return f"{sentence} {sentence_on_control}"


def verdict_sentences(models: Sequence[ShownModel]) -> list[str]:
    """The verdict on each condition of each model in words, with its control if it has one.

    The conditions of a model that have no verdict come first, with the reason.
    """
    sentences = []
    for caption, model in captioned(models):
        for problem, conditions in model.problems.items():
            sentences.append(f"{caption}, {', '.join(conditions)}: {problem}.")
        for condition, verdict in model.verdicts.items():
            control = model.control_of(condition)
            words = verdict_in_words(model.result, condition, verdict, other=control)
            sentences.append(f"{caption}: {words}")

    return sentences


def _direction(intervals: Sequence[Interval]) -> Direction:
    """Whether all intervals are below 0, or all above it; "unclear" otherwise."""
    if all(interval.high < 0 for interval in intervals):
        return "falls"
    if all(interval.low > 0 for interval in intervals):
        return "rises"
    return "unclear"


def _range_words(changes: np.ndarray, form: str) -> str:
    """The range of some relative changes in percent, from the lowest to the highest."""
    lowest = percent_number(changes.min(), form)
    highest = percent_number(changes.max(), form)
    if lowest == highest:
        return f"{lowest}\u00a0%"
    return f"{lowest} to {highest}\u00a0%"


def _counted_directions(intervals: Sequence[Interval]) -> str:
    """The range of the changes, and in how many models each direction is clear."""
    counts = Counter(_direction([interval]) for interval in intervals)
    counted_words = ", ".join(
        f"{words} in {counts[direction]}"
        for direction, words in DIRECTION_WORDS.items()
        if direction in counts
    )
    estimates = [interval.estimate for interval in intervals]
    return SENTENCES["several changes"].format(
        lowest=percent(min(estimates)),
        highest=percent(max(estimates)),
        directions=counted_words,
        models=len(intervals),
    )
