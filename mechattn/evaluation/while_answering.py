"""A model's attention while it writes its own answers, for right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy.optimize import linear_sum_assignment

from mechattn.analysis.received_attention import SegmentFlow
from mechattn.axes import SEGMENTS
from mechattn.engine.request_checks import with_baseline
from mechattn.engine.run import run
from mechattn.errors import OptionError, check_choice
from mechattn.evaluation.evaluation import Evaluation
from mechattn.model.load import load_model
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import Result
from mechattn.stats.intervals import FEWEST, check_level, t_interval
from mechattn.stats.paired import paired
from mechattn.stats.units import Unit, Units

# The largest difference in length within a pair: this fraction of the longer answer's tokens, or 2
# tokens, which short answers would otherwise hardly ever be within.
_CALIPER = 0.15
# The columns on pairs of answers, and the fields of ``Paired`` that they hold.
_FIELDS_OF_PAIRS = {
    "difference": "difference",
    "null": "null",
    "beyond": "beyond",
    "beyond_low": "beyond_low",
    "beyond_high": "beyond_high",
    "p_beyond": "p",
    "q_beyond": "q",
}


@dataclass(frozen=True, eq=False)
class WhileAnswering:
    """The attention from a model's own answers to each segment; ``print(measured)`` shows a table.

    Args:
        data: ``flow``, the mean attention from an answer's tokens to a segment [condition prompt
            layer head segment], NaN if the answer is empty or no prompt has the segment;
            ``uniform``, the same for uniform attention; ``right``, whether each answer is right
            [condition prompt]; ``tokens``, the length of each answer [condition prompt].
        units: The problems, or their groups.
        model_name: The name of the model.
        predicting: Whether the queries are those that predict the answers' tokens, rather than
            those that read them.
    """

    data: xr.Dataset
    units: Units
    model_name: str
    predicting: bool = False

    @property
    def conditions(self) -> list[str]:
        """The names of the conditions."""
        return [str(name) for name in self.data.condition.values]

    @property
    def queries(self) -> str:
        """Which queries were measured, in words."""
        if self.predicting:
            return "the queries that predict its own answers"
        return "the queries that read its own answers"

    def table(self, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """The attention of right and of wrong answers to a segment, and its difference in pairs.

        All attention is a mean over layers and heads, as a fraction from 0 to 1.

        A pair is a right and a wrong answer whose lengths differ by at most 15 % or 2 tokens. Each
        answer is in at most one pair. There are as many pairs as possible, with lengths as similar
        as possible. If problems share groups (``Prompt.group``), both answers of a pair are from
        one group, and means of attention, intervals and p are over groups.

        Args:
            to: The segment of the keys.
            level: The level of the intervals.

        Returns:
            A row for each condition. ``right`` is the mean attention of right answers, with a t
            interval (``right_low``, ``right_high``), the same mean for uniform attention
            (``right_uniform``), the mean length of the answers (``right_tokens``) and their number
            (``right_n``). ``wrong`` has the same columns for wrong answers. ``pairs`` is the number
            of pairs, ``difference`` the mean of right minus wrong over them, ``null`` the same for
            uniform attention, and ``beyond`` the difference minus its null, with a t interval
            (``beyond_low``, ``beyond_high``) and the p of a paired test (``p_beyond``: that of sign
            flips or, if it is larger, of a bootstrap-t test). Figures are NaN with too few answers
            or pairs. ``table.attrs["unit"]`` names the units.

        Raises:
            OptionError: There is no such segment, or the level is not between 0.5 and 1.
        """
        rows = []
        for name in self.conditions:
            answers = self._answers(name, to).mean(("layer", "head"))
            row: dict[str, Any] = {"condition": name}
            row |= self._means("right", answers, answers.right, level)
            row |= self._means("wrong", answers, ~answers.right, level)
            row |= self._pair_columns(answers, level).to_dict("records")[0]
            rows.append(row)

        table = pd.DataFrame(rows)
        table.attrs = {"unit": self.units.unit}
        return table

    def heads(self, condition: str, to: str = "question", level: float = 0.95) -> pd.DataFrame:
        """The attention of right minus that of wrong answers in pairs of similar length, by head.

        Args:
            condition: The condition.
            to: The segment of the keys.
            level: The level of the intervals.

        Returns:
            A row for each head, the smallest q first: layer, head, the columns of :meth:`table` on
            pairs, and ``q_beyond``, which is over all heads.

        Raises:
            OptionError: There is no such condition, segment or level, or there are too few pairs.
        """
        check_choice(self.conditions, condition=condition)
        answers = self._answers(condition, to).stack(cell=("layer", "head"))
        table = self._pair_columns(answers, level)
        if table.beyond.isna().all():
            has_groups = self.units.group_of_prompt is not None
            where = f", both from one group, in at least {FEWEST} groups" if has_groups else ""
            raise OptionError(
                f"there are {table.pairs[0]} pairs of a right and a wrong answer of similar"
                f" length under {condition!r}: at least {FEWEST} are needed{where}; evaluate more"
                " problems"
            )

        table.insert(0, "layer", answers.layer.values)
        table.insert(1, "head", answers["head"].values)
        return table.sort_values("q_beyond", kind="stable", ignore_index=True)

    def _answers(self, condition: str, to: str) -> xr.Dataset:
        """The answers under a condition, with their attention to one segment."""
        check_choice(SEGMENTS, to=to)
        return self.data.sel(condition=condition, segment=to)

    def _means(
        self, prefix: str, answers: xr.Dataset, mask: xr.DataArray, level: float
    ) -> dict[str, Any]:
        """The columns of :meth:`table` on the right or the wrong answers, which ``mask`` marks."""
        indices = np.flatnonzero(mask & answers.flow.notnull())
        measured = answers.isel(prompt=indices)
        # Both are means over units, since attention and its null could not be compared otherwise.
        units = self._units(indices)
        values = units.means(measured.flow.values)
        uniform = units.means(measured.uniform.values)

        columns = {
            prefix: pd.Series(values).mean(),  # a Series, since numpy warns of the mean of nothing
            f"{prefix}_low": np.nan,
            f"{prefix}_high": np.nan,
            f"{prefix}_uniform": pd.Series(uniform).mean(),
            f"{prefix}_tokens": pd.Series(measured.tokens.values).mean(),
            f"{prefix}_n": len(indices),
        }
        if len(values) >= FEWEST:
            interval = t_interval(values, level)
            columns[f"{prefix}_low"] = float(interval.low)
            columns[f"{prefix}_high"] = float(interval.high)
        return columns

    def _pair_columns(self, answers: xr.Dataset, level: float) -> pd.DataFrame:
        """The columns on pairs, with a row for each head, or one row for a mean over heads."""
        check_level(level)
        count = answers.sizes["prompt"]
        flow = answers.flow.values.reshape(count, -1)
        uniform = answers.uniform.values.reshape(count, -1)

        is_right = answers.right.values
        is_measured = ~np.isnan(flow).any(1)
        pairs = matched_pairs(
            answers.tokens.values,
            is_right & is_measured,
            ~is_right & is_measured,
            self.units.group_of_prompt,
        )
        right_indices, wrong_indices = pairs.T
        columns: dict[str, Any] = dict.fromkeys(_FIELDS_OF_PAIRS, np.nan)

        # Both answers of a pair are from one group, so the group of the right one is the pair's.
        units = self._units(right_indices)
        if units.n >= FEWEST:
            test = paired(
                units.means(flow[right_indices] - flow[wrong_indices]),
                units.means(uniform[right_indices] - uniform[wrong_indices]),
                level,
                bootstrap_ends=False,
            )
            for column, field in _FIELDS_OF_PAIRS.items():
                columns[column] = getattr(test, field)

        columns["pairs"] = len(pairs)
        return pd.DataFrame(columns, index=range(flow.shape[1]))

    def _units(self, indices: np.ndarray) -> Units:
        """The units of the prompts with these indices."""
        if self.units.group_of_prompt is None:
            return Units(len(indices))
        return Units.grouped(self.units.group_of_prompt[indices].astype(str).tolist())

    def __str__(self) -> str:
        title = (
            f"{self.model_name}: attention of {self.queries} to the question, mean over heads and"
            " layers"
        )
        answer_columns = ["condition", "right", "right_n", "wrong", "wrong_n"]
        pair_columns = ["pairs", "difference", "beyond", "p_beyond"]
        table = self.table()[[*answer_columns, *pair_columns]]
        table_text = table.to_string(index=False, float_format="{:.3g}".format)
        return f"{title}\n{table_text}"


def matched_pairs(
    lengths: np.ndarray,
    is_right: np.ndarray,
    is_wrong: np.ndarray,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Pairs of a right and a wrong answer of about the same length.

    There are as many pairs as possible, and their lengths are as similar as possible.

    Args:
        lengths: The length of each answer, in tokens [answer].
        is_right: Which answers are right and measured [answer].
        is_wrong: Which answers are wrong and measured [answer].
        groups: The group of each answer, from which its partner must be too; None without groups.

    Returns:
        The indices of the right and the wrong answer of each pair [pair 2].
    """
    right_indices = np.flatnonzero(is_right)
    wrong_indices = np.flatnonzero(is_wrong)
    right_lengths = lengths[right_indices][:, None]
    wrong_lengths = lengths[wrong_indices]
    distance = np.abs(right_lengths - wrong_lengths)
    longer_length = np.maximum(right_lengths, wrong_lengths)
    is_allowed = distance <= np.maximum(_CALIPER * longer_length, 2)
    if groups is not None:
        is_allowed &= groups[right_indices][:, None] == groups[wrong_indices]

    # A forbidden pair costs more than all allowed ones together, so it is taken only if it must be.
    forbidden_cost = 1.0 + distance.max(initial=0) * min(distance.shape)
    rows, columns = linear_sum_assignment(np.where(is_allowed, distance, forbidden_cost))
    is_pair = is_allowed[rows, columns]
    return np.stack([right_indices[rows[is_pair]], wrong_indices[columns[is_pair]]], 1)


def while_answering(
    model: Any,
    evaluation: Evaluation,
    prompts: Sequence[Prompt],
    conditions: Mapping[str, Condition] | None = None,
    *,
    predicting: bool = False,
    layers: Sequence[int] | int | None = None,
    seed: int = 0,
    unit: Unit = "auto",
) -> WhileAnswering:
    """Measure a model's attention while it writes its own answers, under each condition.

    The token ids of each answer are read again after its prompt, under its own condition, in one
    pass (``evaluation.answered``). The queries are those that read the answer's tokens. With
    ``predicting`` they are those that predict these tokens, from the prompt's last token to the
    answer's last but one.

    Right and wrong answers often differ in length, and the longer an answer is, the less of its
    attention can go to the question. They are therefore compared in pairs of about the same
    length, and their difference with that of uniform attention.

    Args:
        model: The model that wrote the answers.
        evaluation: Its answers. Only the first of several answers to a problem is used.
        prompts: The evaluated problems, or some of them.
        conditions: The conditions of the evaluation, by the same names.
        predicting: Whether to measure the queries that predict the answer's tokens.
        layers: The layers, from 0; all by default.
        seed: The seed of the conditions' draws, which must be that of the evaluation.
        unit: "auto" uses groups of prompts as units if there are any; "prompt" uses single prompts.

    Returns:
        The attention of each answer by condition, layer, head and segment, and uniform attention.

    Raises:
        OptionError: A condition or a prompt was not evaluated, no answer under a condition has any
            token, or there are fewer than three groups.
    """
    model = load_model(model)
    prompts = as_prompts(prompts)
    named_conditions = with_baseline(conditions)
    ids = [prompt.id for prompt in prompts]
    for name in named_conditions:
        check_choice(evaluation.conditions, condition=name)
        answers = evaluation._answers_by_problem(name)
        for prompt_id in ids:
            if prompt_id not in answers:
                raise OptionError(
                    f"prompt {prompt_id} was not evaluated under {name!r}; give the prompts of the"
                    " evaluation"
                )
    units = evaluation._restricted_to(ids)._units(unit)  # before the run, as it may refuse them

    measure = partial(run, model, analyses=SegmentFlow(predicting), layers=layers, seed=seed)
    datasets = [
        _condition_data(measure, evaluation, prompts, name, condition)
        for name, condition in named_conditions.items()
    ]
    return WhileAnswering(
        data=xr.concat(datasets, pd.Index(list(named_conditions), name="condition")),
        units=units,
        model_name=str(model.cfg.model_name),
        predicting=predicting,
    )


def _condition_data(
    measure: Callable[..., Result],
    evaluation: Evaluation,
    prompts: Sequence[Prompt],
    name: str,
    condition: Condition,
) -> xr.Dataset:
    """The dataset of :class:`WhileAnswering` for one condition."""
    answers = evaluation._answers_by_problem(name)
    answered_prompts = [prompt for prompt in prompts if answers[prompt.id].tokens]
    if not answered_prompts:
        raise OptionError(f"no answer under {name!r} has any token, so there is nothing to measure")

    result = measure(evaluation.answered(answered_prompts, name), {name: condition})
    data = result["segment_flow"].sel(condition=name, segment="answer", drop=True)

    uniform = data.flow_uniform.broadcast_like(data.flow)
    flow = xr.Dataset({"flow": data.flow, "uniform": uniform}).astype(np.float64)
    flow = flow.rename(to_segment="segment").transpose("prompt", "layer", "head", "segment")
    # A segment that all prompts lack stays NaN; one that a single prompt lacks receives 0.
    is_absent = flow.isnull().all(("prompt", "layer", "head"))
    flow = flow.fillna(0).where(~is_absent)

    ids = [prompt.id for prompt in prompts]
    flow = flow.reindex(prompt=ids)  # NaN for empty answers
    flow["right"] = ("prompt", [answers[prompt_id].right for prompt_id in ids])
    flow["tokens"] = ("prompt", [len(answers[prompt_id].tokens) for prompt_id in ids])
    return flow
