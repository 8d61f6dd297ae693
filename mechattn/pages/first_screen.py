"""The first screen of a page: the verdicts on its models as a picture, in words and in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
from mechattn.contrast.first_token import first_token_words
from mechattn.engine.labelled_datasets import lacking
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.render.budget_figures import budget_sentences, own_attention_words
from mechattn.render.words import largest_layer_words, model_caption, percent, percent_words, stated
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result
from mechattn.stats.intervals import Interval

VERDICT_COLUMNS = (
    "model",
    "condition",
    "question attention, change",
    "by the null alone",
    "heads that fall and rise by more than 5 %",
    "prompts",
)
RECEIVES = "each token of the question receives on average"
SINGLE = (
    "the attention that a token of the question receives from all tokens after it changes on"
    " average by"
)
PERCENT_SIGN = "\u00a0%"
TICK_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_TICKS = 6
Direction = Literal["less", "more", "unclear"]


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
    def verdicts(self) -> dict[str, Verdict | OptionError]:
        """The verdict on each condition, or why there is none; empty without received attention."""
        verdicts: dict[str, Verdict | OptionError] = {}
        if "received_attention" not in self.result.datasets:
            return verdicts
        for condition in self.result.conditions[1:]:
            try:
                with explained([self.result]):
                    verdicts[condition] = self.result.verdict(condition)
            except MemoryOptionError:
                raise
            # Too few prompts for an interval, or a prompt without a question.
            except OptionError as error:
                verdicts[condition] = error
        return verdicts

    @cached_property
    def against(self) -> tuple[str, Interval] | None:
        """The matched control of the first condition, and the change from it; None without one."""
        if not self.verdicts:
            return None
        condition, verdict = next(iter(self.verdicts.items()))
        control = matched_control(self.result, condition)
        if control is None or not isinstance(verdict, Verdict):
            return None
        change, _ = Contrast(self.result, condition, to=control).overall()
        return control, change

    @property
    def without_verdict(self) -> str:
        """Why there is no verdict on some condition; empty if there is one on each."""
        for verdict in self.verdicts.values():
            if isinstance(verdict, OptionError):
                return f"no verdict, since {verdict}"
        return ""


@dataclass(frozen=True)
class Change:
    """A row of the picture: a model, a condition, and the verdict or why there is none.

    For the first condition of a model, ``against`` has its matched control and the change from it.
    """

    model: str
    condition: str
    verdict: Verdict | None
    problem: str = ""
    against: tuple[str, Interval] | None = None


@dataclass(frozen=True)
class Mark:
    """A row as drawn, lengths in percent of the axis; no model if it is that of the row above."""

    model: str
    condition: str
    low: float = 0.0  # where the interval starts
    length: float = 0.0  # of the interval
    point: float = 0.0
    words: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Picture:
    """Points with whiskers on one axis, with labels, where 0 is, and all of it in one sentence."""

    rows: Sequence[Mark]
    ticks: Sequence[tuple[float, str]]
    zero: float
    says: str


def changes(models: Sequence[ShownModel]) -> list[Change]:
    """The change of the question's attention for each model and condition."""
    rows = []
    names = captions([model.result for model in models])
    for name, model in zip(names, models, strict=True):
        against = model.against
        for condition, verdict in model.verdicts.items():
            if isinstance(verdict, Verdict):
                rows.append(Change(name, condition, verdict, against=against))
            else:
                rows.append(Change(name, condition, None, f"no verdict, since {verdict}"))
            against = None  # only the first condition has one
    return rows


def picture(rows: Sequence[Change]) -> Picture | None:
    """Draw the rows on one axis; None if there is nothing to draw."""
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    if not verdicts:
        return None

    changes = [verdict.change for verdict in verdicts]
    lowest = min(0.0, *(float(change.low) for change in changes))
    highest = max(0.0, *(float(change.high) for change in changes))
    fitting_steps = [step for step in TICK_STEPS if (highest - lowest) / step <= MOST_TICKS]
    step = min(fitting_steps, default=TICK_STEPS[-1])
    start = np.floor(lowest / step) * step
    end = max(np.ceil(highest / step) * step, start + step)

    def position(value: float | np.ndarray) -> float:
        return round(float(100 * (value - start) / (end - start)), 3)

    marks = []
    model_above = ""
    for row in rows:
        model = row.model if row.model != model_above else ""
        model_above = row.model
        if row.verdict is None:
            marks.append(Mark(model, row.condition, problem=row.problem))
            continue
        change = row.verdict.change
        mark = Mark(
            model,
            row.condition,
            low=position(change.low),
            length=round(position(change.high) - position(change.low), 3),
            point=position(change.estimate),
            words=percent_words(change),
        )
        marks.append(mark)

    ticks = []
    for value in np.arange(start, end + step / 2, step):
        is_zero = abs(value) <= step / 2
        label = "0" if is_zero else percent(value).replace(".0", "")
        ticks.append((position(value), label))

    said = [
        f"{row.model}, {row.condition}: {percent_words(row.verdict.change)}"
        for row in rows
        if row.verdict is not None
    ]
    return Picture(marks, ticks, position(0.0), "; ".join(said))


def sentence(rows: Sequence[Change], in_layers: str = "") -> str:
    """Describe the picture in words.

    It says how attention changes with the first condition, then ``in_layers``, then how that
    differs from a control of the same length.
    """
    verdicts: dict[str, list[Verdict]] = {}
    for row in rows:
        if row.verdict is not None:
            verdicts.setdefault(row.condition, []).append(row.verdict)
    if not verdicts:
        return f"{rows[0].model}: {rows[0].problem}." if rows else ""

    condition = next(iter(verdicts))
    beside = _against_words(rows)
    amount = Amount.of(verdicts[condition])
    if amount.models == 1:
        (verdict,) = verdicts[condition]
        change = f"{SINGLE} {percent_words(verdict.change)}{_unsure_words(amount)}"
        return f"With “{condition}”, {change}.{in_layers}{beside}"

    models = f", in {amount.models} models"
    changes = {
        "less": f"{RECEIVES} {amount.words} less attention than without it{models}",
        "more": f"{RECEIVES} {amount.words} more attention than without it{models}",
        "unclear": (
            f"the attention that {RECEIVES} changes by {amount.words}{models}"
            f"{_unsure_words(amount)}"
        ),
    }
    return f"With “{condition}”, {changes[amount.direction]}.{in_layers}{beside}"


def layer_sentence(models: Sequence[ShownModel]) -> str:
    """In which layer attention changes most; empty for several models, or without a verdict."""
    if len(models) != 1:
        return ""
    (model,) = models
    condition = model.result.shown_condition()
    if not isinstance(model.verdicts.get(condition), Verdict):
        return ""
    words = largest_layer_words(model.result, condition, "question")
    return f" {words}." if words else ""


def own_attention_sentences(models: Sequence[ShownModel]) -> list[str]:
    """How the question's attention to itself changes with the first condition and its control; none
    for several models, or without a budget."""
    if len(models) != 1 or "attention_budget" not in models[0].result.datasets:
        return []
    result = models[0].result
    condition = result.shown_condition()
    if condition == BASELINE:
        return []
    words = f"With “{condition}”, the question attends {own_attention_words(result, condition)}."
    control = matched_control(result, condition)
    if control is not None:
        beside = own_attention_words(result, control)
        words += f" With the control “{control}”, which is as long, it attends {beside}."
    return [words]


def more_of_the_answer(models: Sequence[ShownModel]) -> list[str]:
    """What the tokens of the first condition and of its control take, and from what, if the page
    has one model; and whether a sink moves."""
    sentences = []
    for model in models:
        condition = model.result.shown_condition()
        if condition == BASELINE:
            continue
        if len(models) == 1 and "attention_budget" in model.result.datasets:
            for name in filter(None, (condition, matched_control(model.result, condition))):
                sentences.append(" ".join(budget_sentences(model.result, name)[:2]))
        sentences.append(first_token_words(model.result, condition))
    return sentences


@dataclass(frozen=True)
class Amount:
    """How much attention to the question changes with a condition, in one or several models.

    Args:
        direction: Whether every interval is on one side of 0.
        words: The smallest and the largest change, with signs if the direction is unclear.
        models: How many models there are.
        unsure: In how many of them the interval contains 0.
    """

    direction: Direction
    words: str
    models: int
    unsure: int

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Amount:
        """The amount by the verdicts of the models on one condition."""
        changes = [verdict.change for verdict in verdicts]
        direction: Direction = "unclear"
        if all(change.high < 0 for change in changes):
            direction = "less"
        elif all(change.low > 0 for change in changes):
            direction = "more"

        estimates = sorted((float(change.estimate) for change in changes), key=abs)
        smallest, *larger = dict.fromkeys(map(percent, estimates))
        words = smallest
        if larger:
            words = f"{smallest.removesuffix(PERCENT_SIGN)} to {larger[-1]}"
        if direction != "unclear":  # then the direction says the sign
            words = words.replace("−", "").replace("+", "")

        unsure = sum(bool(change.low <= 0 <= change.high) for change in changes)
        return cls(direction, words, len(changes), unsure)


def _unsure_words(amount: Amount) -> str:
    """Whether, or in how many models, no change can be told."""
    if not amount.unsure:
        return ""
    models = f" in {amount.unsure} of them" if amount.models > 1 else ""
    return f", which cannot be distinguished from 0{models}"


def _against_words(rows: Sequence[Change]) -> str:
    """How the first condition differs from its matched control, in one model or several."""
    changes = []
    relation = ""
    for row in rows:
        if row.against is not None:
            control, change = row.against
            changes.append(change)
            relation = relation or f"“{row.condition}” with “{control}”"
    if not changes:
        return ""

    words = percent_words(changes[0])
    if len(changes) > 1:
        rises = sum(bool(change.low > 0) for change in changes)
        falls = sum(bool(change.high < 0) for change in changes)
        unclear = len(changes) - rises - falls
        counts = {"more": rises, "less": falls, "no clear difference": unclear}
        count_words = ", ".join(f"{name} in {count}" for name, count in counts.items() if count)
        estimates = [float(change.estimate) for change in changes]
        low = percent(min(estimates))
        high = percent(max(estimates))
        words = f"{low} to {high} ({count_words} of {len(changes)} models)"
    return f" Comparing {relation}, which is as long, instead of with no insertion: {words}."


def verdict_sentences(model: ShownModel) -> list[str]:
    """One sentence per condition; controls are reported with what they match."""
    result = model.result
    caption = model_caption(result)
    if model.without_verdict:
        return [f"{caption}: {model.without_verdict}."]

    verdicts = {
        condition: verdict
        for condition, verdict in model.verdicts.items()
        if isinstance(verdict, Verdict)
    }
    sentences = []
    for condition, verdict in verdicts.items():
        control = matched_control(result, condition)
        compared = None
        if control is not None and control in verdicts:
            change, _ = Contrast(result, condition, to=control).overall()
            compared = (control, verdicts[control], change)
        words = stated(result, condition, verdict, "question", compared)
        sentences.append(f"{caption}: {words}")
    return sentences


def verdict_rows(model: ShownModel) -> list[tuple[str, ...]]:
    """The verdicts as table rows with the columns ``VERDICT_COLUMNS``."""
    caption = model_caption(model.result)
    if model.without_verdict:
        return [(caption, "", model.without_verdict, "", "", "")]
    return [
        (
            caption,
            condition,
            percent_words(verdict.change),
            f"{percent(verdict.null.estimate)} ({verdict.null_kind})",
            _falls_and_rises(verdict),
            str(verdict.n),
        )
        for condition, verdict in model.verdicts.items()
        if isinstance(verdict, Verdict)
    ]


def _falls_and_rises(verdict: Verdict) -> str:
    """How many heads are marked as falling, and how many as rising."""
    is_marked = verdict.marked
    if is_marked is None:
        is_marked = np.ones_like(verdict.falls)
    falls = int((verdict.falls & is_marked).sum())
    rises = int((verdict.rises & is_marked).sum())
    return f"{falls} and {rises} of {verdict.falls.size}"


def captions(results: Sequence[Result]) -> list[str]:
    """The caption of each result: its model, numbered if several results have the same model."""
    names = [model_caption(result) for result in results]
    counts = Counter(names)
    numbers: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbers[name] += 1
        numbered.append(f"{name}, result {numbers[name]}" if counts[name] > 1 else name)
    return numbered


def strip_words(result: Result) -> str:
    """One line of provenance."""
    provenance = result.provenance
    model = provenance["model"]
    prompts = provenance["prompts"]
    versions = provenance["versions"]
    words = [
        model_caption(result),
        f"{model['dtype']} on {model['device']}",
        "verified" if model["verified"] else "not verified",
        f"{prompts['count']} prompts ({prompts['hash']})",
        f"seed {provenance['seed']}",
        f"engine {provenance['engine']}",
        f"mechattn {versions['mechattn']}",
        f"transformer-lens {versions['transformer-lens']}",
        f"torch {versions['torch']}",
        time_words(result),
    ]
    return " · ".join(words)


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)


@contextmanager
def explained(results: Sequence[Result]) -> Iterator[None]:
    """Explain errors that missing quantities of a stored result cause; others are bugs of ours."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        for result in results:
            for analysis_class in ANALYSES:
                analysis = analysis_class()
                if analysis.name not in result.datasets:
                    continue
                missing = lacking(result[analysis.name], analysis)
                if missing:
                    raise OptionError(
                        f"{analysis.name} lacks {', '.join(missing[:4])}: the result was stored "
                        "by another version, or changed since"
                    ) from error
        raise


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested values into table rows."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{label} ")
        else:
            rows.append((label, str(value)))
    return rows
