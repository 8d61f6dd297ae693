"""A model's attention while it writes its own answers, for right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
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
    """Attention of the tokens of a model's own answers to each segment; ``print(measured)`` shows
    it.

    Args:
        flow: By condition, the mean attention of an answer's tokens [prompt layer head segment];
            NaN if it is empty.
        uniform: The same for uniform attention.
        right: By condition, whether each answer is right [prompt].
        tokens: By condition, the length of each answer in tokens [prompt].
        layers: The layers.
        units: The problems, or their groups.
        about: The model.
        predicting: Whether the queries are those that predict the answers' tokens, not those that
            read them.
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
        if self.predicting:
            return "the queries that predict its own answers"
        return "the queries that read its own answers"

    def table(self, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """One row per condition: attention of right and wrong answers to a segment, mean over heads
        and layers.

        ``right`` and ``wrong`` have t intervals over answers, and the same for uniform attention.
        The rest is over pairs of a right and a wrong answer of about the same length (optimal pairs
        whose lengths differ by 15 % or 2 tokens at most, each answer once): ``difference`` (right
        minus wrong), its ``null``, and ``beyond`` (difference minus null) with a t interval and a
        sign-flip ``p_beyond`` over pairs. NaN with too few pairs. Where problems share groups
        (``Prompt.group``), both answers of a pair are from one group, and intervals and
        ``p_beyond`` are over groups; ``table.attrs["unit"]`` says which.

        Args:
            to: The segment of the keys.
            level: The level of the intervals.

        Raises:
            OptionError: There is no such segment.
        """
        rows = []
        for name in self.conditions:
            flow = self._to(self.flow[name], to).mean((1, 2))
            uniform = self._to(self.uniform[name], to).mean((1, 2))
            is_measured = ~np.isnan(flow)
            row: dict[str, Any] = {"condition": name}
            for kind, is_of_kind in (("right", self.right[name]), ("wrong", ~self.right[name])):
                places = np.flatnonzero(is_of_kind & is_measured)
                figures = self._of_kind(flow[places], places, level)
                figures["uniform"] = np.nan
                figures["tokens"] = np.nan
                if len(places):
                    figures["uniform"] = float(uniform[places].mean())
                    figures["tokens"] = float(self.tokens[name][places].mean())
                figures["n"] = len(places)
                row[kind] = figures.pop("mean")
                row |= {f"{kind}_{figure}": value for figure, value in figures.items()}
            matched = self._matched(name, flow[:, None], uniform[:, None], level)
            row |= {column: values[0] for column, values in matched.items()}
            rows.append(row)
        table = pd.DataFrame(rows)
        table.attrs = {"unit": self.units.unit}
        return table

    def _of_kind(self, flow: np.ndarray, places: np.ndarray, level: float) -> dict[str, Any]:
        """The mean attention of some answers with its t interval; NaN where there are too few."""
        figures = {"mean": np.nan, "low": np.nan, "high": np.nan}
        values = self._units(places).means(flow)
        if len(values):
            figures["mean"] = float(values.mean())
        if len(values) >= FEWEST:
            interval = t_interval(values[:, None], level)
            figures["low"] = float(interval.low[0])
            figures["high"] = float(interval.high[0])
        return figures

    def heads(self, condition: str, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """Right minus wrong over pairs of answers of similar length, for each head; ``q_beyond`` is
        over all heads.

        Raises:
            OptionError: There is no such condition or segment, or there are too few pairs.
        """
        if condition not in self.conditions:
            have = ", ".join(map(repr, self.conditions))
            raise OptionError(f"there is no condition {condition!r}; the conditions are {have}")
        flow = self._to(self.flow[condition], to)
        uniform = self._to(self.uniform[condition], to)
        prompt_count, layer_count, head_count = flow.shape
        matched = self._matched(
            condition,
            flow.reshape(prompt_count, -1),
            uniform.reshape(prompt_count, -1),
            level,
        )
        if np.isnan(matched["beyond"]).all():
            within = ""
            if self.units.of is not None:
                within = f", both from one group, in at least {FEWEST} groups"
            raise OptionError(
                f"{matched['pairs'][0]} pairs of a right and a wrong answer of about the same"
                f" length under {condition!r}: at least {FEWEST} are needed{within}; evaluate more"
                " problems"
            )
        columns = {
            "layer": np.repeat(self.layers, head_count),
            "head": np.tile(np.arange(head_count), layer_count),
            **matched,
        }
        return pd.DataFrame(columns).sort_values("q_beyond", kind="stable", ignore_index=True)

    def _to(self, flow: np.ndarray, to: str) -> np.ndarray:
        if to not in SEGMENTS:
            raise OptionError(f"to={to!r}: choose one of {', '.join(map(repr, SEGMENTS))}")
        return flow[..., SEGMENTS.index(to)]

    def _matched(
        self, name: str, flow: np.ndarray, uniform: np.ndarray, level: float
    ) -> dict[str, np.ndarray]:
        """Right minus wrong, over pairs of about the same length [cell]."""
        is_measured = ~np.isnan(flow).any(1)
        right = self.right[name]
        pairs = matched_pairs(
            self.tokens[name], right & is_measured, ~right & is_measured, self.units.of
        )
        right_places = pairs[:, 0]
        wrong_places = pairs[:, 1]
        units = self._units(right_places)
        cell_count = flow.shape[1]
        names = ("difference", "null", "beyond", "beyond_low", "beyond_high")
        pair_counts = np.full(cell_count, len(pairs))
        if units.n < FEWEST:
            missing = np.full(cell_count, np.nan)
            columns = dict.fromkeys((*names, "p_beyond", "q_beyond"), missing)
            return {**columns, "pairs": pair_counts}

        test = paired(
            units.means(flow[right_places] - flow[wrong_places]),
            units.means(uniform[right_places] - uniform[wrong_places]),
            level,
            bootstrap_ends=False,
        )
        columns = {name: getattr(test, name) for name in names}
        columns["p_beyond"] = test.p
        columns["q_beyond"] = test.q
        columns["pairs"] = pair_counts
        return columns

    def _units(self, places: np.ndarray) -> Units:
        """The units of some prompts, by their places."""
        if self.units.of is None:
            return Units(len(places))
        return Units.grouped(self.units.of[places].astype(str).tolist())

    def __str__(self) -> str:
        title = (
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
        table = self.table()[columns]
        rows = table.to_string(index=False, float_format=lambda value: f"{value:.3g}")
        return f"{title}\n{rows}"


def matched_pairs(
    tokens: np.ndarray, right: np.ndarray, wrong: np.ndarray, groups: np.ndarray | None = None
) -> np.ndarray:
    """Pairs of a right and a wrong answer of about the same length [pair 2]: as many and as similar
    as possible."""
    right_places = np.flatnonzero(right)
    wrong_places = np.flatnonzero(wrong)
    if not len(right_places) or not len(wrong_places):
        return np.zeros((0, 2), dtype=int)
    right_tokens = tokens[right_places][:, None]
    wrong_tokens = tokens[wrong_places]
    distance = np.abs(right_tokens - wrong_tokens)
    allowed = distance <= np.maximum(_CALIPER * np.maximum(right_tokens, wrong_tokens), 2)
    if groups is not None:
        allowed &= groups[right_places][:, None] == groups[wrong_places]
    forbidden = 1.0 + distance.max() * min(distance.shape)  # more than all allowed pairs together
    rows, columns = linear_sum_assignment(np.where(allowed, distance, forbidden))
    is_pair = allowed[rows, columns]
    return np.stack([right_places[rows[is_pair]], wrong_places[columns[is_pair]]], 1)


def while_answering(
    model: Any,
    evaluation: Evaluation,
    prompts: Sequence[Prompt],
    conditions: Mapping[str, Condition] | None = None,
    *,
    predicting: bool = False,
    layers: Sequence[int] | int | None = None,
    seed: int = 0,
) -> WhileAnswering:
    """Measure a model's attention while it writes its own answers, under each condition of an
    evaluation.

    The token ids of each answer are read again after its prompt, under its own condition, in one
    pass (``evaluation.answered``). The queries are those that read the answer's tokens; with
    ``predicting``, those that predict them, from the prompt's last token to the answer's last but
    one. Correctness is related to length, and attention to the question falls with length by
    definition. Answers are therefore compared in pairs of about the same length, together with the
    null.

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
    measurements = {
        name: _measured(measure, evaluation, prompts, name, condition)
        for name, condition in named.items()
    }
    by_field: dict[str, dict[str, np.ndarray]] = {}
    for field in ("flow", "uniform", "right", "tokens"):
        by_field[field] = {name: getattr(values, field) for name, values in measurements.items()}
    return WhileAnswering(
        **by_field,
        layers=measurements[BASELINE].layers,
        units=units_of(evaluation._of([prompt.id for prompt in prompts]), "auto"),
        about=str(model.cfg.model_name),
        predicting=predicting,
    )


class _Measurement(NamedTuple):
    """One condition: flow and null [prompt layer head segment], right and tokens [prompt]."""

    flow: np.ndarray
    uniform: np.ndarray
    right: np.ndarray
    tokens: np.ndarray
    layers: tuple[int, ...]


def _measured(
    measure: Callable[..., Result],
    evaluation: Evaluation,
    prompts: Sequence[Prompt],
    name: str,
    condition: Condition,
) -> _Measurement:
    answers = {
        answer.prompt: answer
        for answer in evaluation.answers
        if answer.condition == name and answer.sample == 0
    }
    right = np.array([answers[prompt.id].right for prompt in prompts])
    tokens = np.array([len(answers[prompt.id].tokens) for prompt in prompts])
    written = [prompt for prompt in prompts if answers[prompt.id].tokens]
    if not written:
        raise OptionError(f"no answer under {name!r} has any token, so there is nothing to measure")

    conditions = {name: condition}
    if name == BASELINE:
        conditions = {}  # every run has it
    result = measure(evaluation.answered(written, name), conditions)
    data = result["segment_flow"].sel(condition=name, segment="answer")
    uniform = data.flow_uniform.broadcast_like(data.flow)
    layers = tuple(int(layer) for layer in data.layer.values)
    return _Measurement(
        _of_all_prompts(data.flow, tokens > 0),
        _of_all_prompts(uniform, tokens > 0),
        right,
        tokens,
        layers,
    )


def _of_all_prompts(flow: xr.DataArray, is_written: np.ndarray) -> np.ndarray:
    """Flow of each prompt [prompt layer head segment], NaN where it has no answer."""
    values = flow.transpose("prompt", "layer", "head", "to_segment").values.astype(np.float64)
    # A segment that all prompts lack stays NaN; one that a single prompt lacks receives 0 there.
    is_absent = np.isnan(values).all((0, 1, 2))
    all_values = np.full((len(is_written), *values.shape[1:]), np.nan)
    all_values[is_written] = np.where(is_absent, np.nan, np.nan_to_num(values))
    return all_values
