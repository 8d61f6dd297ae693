"""A model's attention while it writes its own answers, for right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

from mechattn.analysis.received_attention import SegmentFlow
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.engine.request_checks import with_baseline
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.evaluation.answer_units import units_of
from mechattn.evaluation.evaluation import Evaluation
from mechattn.model.load import as_hooked, load_model
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import Result
from mechattn.stats.intervals import FEWEST, t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Units

_CALIPER = 0.15  # of the longer answer's tokens, but at least 2


@dataclass(frozen=True, eq=False)
class WhileAnswering:
    """Attention of the tokens of a model's own answers to each segment; ``print(measured)`` shows it.

    Args:
        flow: By condition, the mean attention of an answer's tokens [prompt layer head segment]; NaN if it is empty.
        uniform: The same for uniform attention.
        right: By condition, whether each answer is right [prompt].
        tokens: By condition, the length of each answer in tokens [prompt].
        layers: The layers.
        units: The problems, or their groups.
        about: The model.
        predicting: Whether the queries are those that predict the answers' tokens, not those that read them.
    """

    flow: Mapping[str, np.ndarray]
    uniform: Mapping[str, np.ndarray]
    right: Mapping[str, np.ndarray]
    tokens: Mapping[str, np.ndarray]
    layers: tuple[int, ...]
    units: Units
    about: str
    predicting: bool = False

    @property
    def conditions(self) -> list[str]:
        """The conditions."""
        return list(self.flow)

    @property
    def queries(self) -> str:
        """Whose attention it is, in words."""
        return f"the queries that {'predict' if self.predicting else 'read'} its own answers"

    def table(self, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """One row per condition: attention of right and wrong answers to a segment, mean over heads and layers.

        ``right`` and ``wrong`` have t intervals over answers, and the same for uniform attention. The rest is over
        pairs of a right and a wrong answer of about the same length (optimal pairs whose lengths differ by 15 % or 2
        tokens at most, each answer once): ``difference`` (right minus wrong), its ``null``, and ``beyond`` (difference
        minus null) with a t interval and a sign-flip ``p_beyond`` over pairs. NaN with too few pairs. Where problems share
        groups (``Prompt.group``), both answers of a pair are from one group, and intervals and
        ``p_beyond`` are over groups; ``table.attrs["unit"]`` says which.

        Args:
            to: The segment of the keys.
            level: The level of the intervals.

        Raises:
            OptionError: There is no such segment.
        """
        rows = []
        for name in self.conditions:
            flow, null = (
                self._to(part[name], to).mean((1, 2)) for part in (self.flow, self.uniform)
            )
            row: dict[str, Any] = {"condition": name}
            for said, which in (("right", self.right[name]), ("wrong", ~self.right[name])):
                some = which & ~np.isnan(flow)
                each = self._units(np.flatnonzero(some)).means(flow[some])
                made = t_interval(each[:, None], level) if len(each) >= FEWEST else None
                row |= {
                    said: float(each.mean()) if some.any() else np.nan,
                    f"{said}_low": np.nan if made is None else float(made.low[0]),
                    f"{said}_high": np.nan if made is None else float(made.high[0]),
                    f"{said}_uniform": float(null[some].mean()) if some.any() else np.nan,
                    f"{said}_tokens": float(self.tokens[name][some].mean())
                    if some.any()
                    else np.nan,
                    f"{said}_n": int(some.sum()),
                }
            found = self._matched(name, flow[:, None], null[:, None], level)
            rows.append({**row, **{column: values[0] for column, values in found.items()}})
        table = pd.DataFrame(rows)
        table.attrs = {"unit": self.units.unit}
        return table

    def heads(self, condition: str, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """Right minus wrong over pairs of answers of similar length, for each head; ``q_beyond`` is over all heads.

        Raises:
            OptionError: There is no such condition or segment, or there are too few pairs.
        """
        if condition not in self.conditions:
            raise OptionError(
                f"there is no condition {condition!r}; the conditions are {', '.join(map(repr, self.conditions))}"
            )
        flow, null = (self._to(part[condition], to) for part in (self.flow, self.uniform))
        heads = flow.shape[2]
        found = self._matched(
            condition, flow.reshape(len(flow), -1), null.reshape(len(null), -1), level
        )
        if np.isnan(found["beyond"]).all():
            within = (
                ""
                if self.units.of is None
                else f", both from one group, in at least {FEWEST} groups"
            )
            raise OptionError(
                f"{found['pairs'][0]} pairs of a right and a wrong answer of about the same length under "
                f"{condition!r}: at least {FEWEST} are needed{within}; evaluate more problems"
            )
        places = {
            "layer": np.repeat(self.layers, heads),
            "head": np.tile(np.arange(heads), len(self.layers)),
        }
        return pd.DataFrame({**places, **found}).sort_values(
            "q_beyond", kind="stable", ignore_index=True
        )

    def _to(self, flow: np.ndarray, to: str) -> np.ndarray:
        if to not in SEGMENTS:
            raise OptionError(f"to={to!r}: choose one of {', '.join(map(repr, SEGMENTS))}")
        return flow[..., SEGMENTS.index(to)]

    def _matched(
        self, name: str, flow: np.ndarray, null: np.ndarray, level: float
    ) -> dict[str, np.ndarray]:
        """Right minus wrong, over pairs of about the same length [cell]."""
        there = ~np.isnan(flow).any(1)
        right = self.right[name]
        pairs = matched_pairs(self.tokens[name], right & there, ~right & there, self.units.of)
        names = ("difference", "null", "beyond", "beyond_low", "beyond_high")
        first, second = pairs.T
        units = self._units(first)
        if units.n < FEWEST:
            empty = np.full(flow.shape[1], np.nan)
            missing = dict.fromkeys((*names, "p_beyond", "q_beyond"), empty)
            return missing | {"pairs": np.full(flow.shape[1], len(pairs))}
        of_flow, of_null = (units.means(of[first] - of[second]) for of in (flow, null))
        made = paired(of_flow, of_null, level, bootstrap_ends=False)
        tests = {
            "p_beyond": made.p,
            "q_beyond": made.q,
            "pairs": np.full(flow.shape[1], len(pairs)),
        }
        return {each: getattr(made, each) for each in names} | tests

    def _units(self, some: np.ndarray) -> Units:
        """The units of some prompts, by their places."""
        return (
            Units(len(some))
            if self.units.of is None
            else Units.grouped(self.units.of[some].astype(str).tolist())
        )

    def __str__(self) -> str:
        first = (
            f"{self.about}: attention of {self.queries} to the question, mean over heads and layers"
        )
        columns = [
            "condition",
            "right",
            "right_n",
            "wrong",
            "wrong_n",
            "pairs",
            "difference",
            "beyond",
            "p_beyond",
        ]
        return f"{first}\n{self.table()[columns].to_string(index=False, float_format=lambda x: f'{x:.3g}')}"


def matched_pairs(
    tokens: np.ndarray, right: np.ndarray, wrong: np.ndarray, groups: np.ndarray | None = None
) -> np.ndarray:
    """Pairs of a right and a wrong answer of about the same length [pair 2]: as many and as similar as possible."""
    first, second = np.flatnonzero(right), np.flatnonzero(wrong)
    if not len(first) or not len(second):
        return np.zeros((0, 2), dtype=int)
    apart = np.abs(tokens[first][:, None] - tokens[second])
    allowed = apart <= np.maximum(_CALIPER * np.maximum(tokens[first][:, None], tokens[second]), 2)
    if groups is not None:
        allowed &= groups[first][:, None] == groups[second]
    forbidden = 1.0 + apart.max() * min(apart.shape)  # costlier than all allowed pairs together
    rows, columns = linear_sum_assignment(np.where(allowed, apart, forbidden))
    kept = allowed[rows, columns]
    return np.stack([first[rows[kept]], second[columns[kept]]], 1)


def while_answering(
    model: Any,
    evaluation: Evaluation,
    prompts: Seq[Prompt],
    conditions: Mapping[str, Condition] | None = None,
    *,
    predicting: bool = False,
    layers: Seq[int] | int | None = None,
    seed: int = 0,
) -> WhileAnswering:
    """Measure a model's attention while it writes its own answers, under each condition of an evaluation.

    The token ids of each answer are read again after its prompt, under its own condition, in one pass
    (``evaluation.answered``). The queries are those that read the answer's tokens; with ``predicting``, those that
    predict them, from the prompt's last token to the answer's last but one. Correctness is related to length, and
    attention to the question falls with length by definition. Answers are therefore compared in pairs of about the same
    length, together with the null.

    Args:
        model: The model that wrote the answers.
        evaluation: Its answers; the first of several to a problem.
        prompts: The evaluated problems.
        conditions: The conditions of the evaluation, by the same names.
        predicting: Measure the queries that predict the answer's tokens.
        layers: The layers, from 0; all by default.
        seed: The seed of the conditions' draws: that of the evaluation.

    Raises:
        OptionError: A condition or a prompt was not evaluated.
    """
    model = load_model(as_hooked(model))
    named = with_baseline(conditions)
    lacking = [name for name in named if name not in evaluation.conditions]
    if lacking:
        have = ", ".join(map(repr, evaluation.conditions))
        raise OptionError(
            f"the condition {lacking[0]!r} was not evaluated; the evaluation has {have}"
        )
    unknown = {prompt.id for prompt in prompts} - {answer.prompt for answer in evaluation.answers}
    if unknown:
        raise OptionError(
            f"prompt {min(unknown)} was not evaluated; give the prompts of the evaluation"
        )
    measure = partial(run, model, analyses=SegmentFlow(predicting), layers=layers, seed=seed)
    made = [
        _measured(measure, evaluation, prompts, name, condition)
        for name, condition in named.items()
    ]
    flow, uniform, right, tokens, read = (
        dict(zip(named, part, strict=True)) for part in zip(*made, strict=True)
    )
    units = units_of(evaluation._of([prompt.id for prompt in prompts]), "auto")
    name = str(model.cfg.model_name)
    return WhileAnswering(flow, uniform, right, tokens, read[BASELINE], units, name, predicting)


def _measured(
    measure: Callable[..., Result],
    evaluation: Evaluation,
    prompts: Seq[Prompt],
    name: str,
    condition: Condition,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    """Flow and null [prompt layer head segment], whether right and how long [prompt], and the layers."""
    answers = {a.prompt: a for a in evaluation.answers if a.condition == name and a.sample == 0}
    right = np.array([answers[p.id].right for p in prompts])
    tokens = np.array([len(answers[p.id].tokens) for p in prompts])
    written = [p for p in prompts if answers[p.id].tokens]
    if not written:
        raise OptionError(f"no answer under {name!r} has any token, so there is nothing to measure")
    result = measure(
        evaluation.answered(written, name), {} if name == BASELINE else {name: condition}
    )
    data = result["segment_flow"].sel(condition=name, segment="answer")
    index = np.flatnonzero(tokens)
    found = []
    for variable in (data.flow, data.flow_uniform.broadcast_like(data.flow)):
        values = variable.transpose("prompt", "layer", "head", "to_segment").values.astype(
            np.float64
        )
        every = np.full((len(prompts), *values.shape[1:]), np.nan)
        absent = np.isnan(values).all(
            (0, 1, 2)
        )  # in every prompt; a segment that one prompt lacks receives 0 there
        every[index] = np.where(absent, np.nan, np.nan_to_num(values))
        found.append(every)
    return found[0], found[1], right, tokens, tuple(int(layer) for layer in data.layer.values)
