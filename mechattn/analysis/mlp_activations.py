"""The distribution of MLP activations after the nonlinearity, and how it changes per token between
conditions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.analysis.analysis import (
    Activations,
    Analysis,
    AnalysisBase,
    Coords,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    means_of,
    zeros_of_rows,
)
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError, check_choice, warn
from mechattn.functional import activations as fn
from mechattn.functional.received import segment_mean, segment_means
from mechattn.model.hooked import HookedModel, device_of
from mechattn.model.hooks import forward_to
from mechattn.model.patch.nonlinearities import at_nonlinearity, nonlinearity_of
from mechattn.prompts.conditions import Baseline
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_classes import TOKEN_CLASSES, vocabulary_classes
from mechattn.prompts.token_sequences import Batch, TokenSequence

Rule = Literal["quantile", "mad", "absolute"]
# Replaces an undefined statistic, since sums must be finite; no statistic is negative.
_UNDEFINED = -1.0
_NEAR_ZERO = "share of channels with |act| <= threshold"
_DIMS = ("segment",)
_PER_TOKEN = {
    "near_zero": Quantity(_DIMS, "share", _NEAR_ZERO),
    "saturated": Quantity(
        _DIMS,
        "share",
        f"{_NEAR_ZERO} that lie left of the nonlinearity's minimum: switched off",
    ),
    "l1": Quantity(_DIMS, "activation", "sum of |act| over the channels"),
    "l2": Quantity(_DIMS, "activation", "root of the sum of act^2 over the channels"),
    "gini": Quantity(_DIMS, "share", "Gini coefficient of |act| over the channels"),
    "variance": Quantity(_DIMS, "activation squared", "variance of act over the channels"),
    "kurtosis": Quantity(_DIMS, "ratio", "kurtosis of act over the channels; 3 if normal"),
    "token_change": Quantity(
        _DIMS, "share", "|act - act in the baseline| / |act in the baseline|", compared="difference"
    ),
}
_OF_QUESTIONS = {
    "near_zero_by_token_class": Quantity(
        ("token_class",), "share", f"{_NEAR_ZERO}, mean over the question's tokens of the class"
    ),
    "histogram": Quantity(
        ("bin",), "share", "share of the question's activations in [bin, next bin)"
    ),
    "change_product": Quantity(
        ("other_condition",),
        "activation squared",
        "sum over the question's tokens of <change, change in the other condition>, from the"
        " baseline",
        compared="difference",
    ),
    "change_within": Quantity(
        ("other_condition",),
        "activation squared",
        "sum of squared changes of the question's tokens, over the entries that the other condition"
        " changes",
        compared="difference",
    ),
}
_CALIBRATION_PROBLEMS = 16  # generated for calibration by default
# Their seed differs from the default of ``load_prompts``, which may give the measured problems.
_CALIBRATION_SEED = 977
# Tokens of which the changes in all conditions of a prompt are in memory at once.
_TOKENS_AT_ONCE = 64
_LEAST_CHANGE = 1e-4  # relative to a token's activations; a smaller change may be rounding
# The edges of bins of width 0.02. The most frequent value, 0, is in the middle of a bin.
_EDGES = tuple(round(-0.51 + 0.02 * i, 2) for i in range(102))


@dataclass(frozen=True)
class MlpActivations(AnalysisBase):
    """Measure MLP activations after the nonlinearity, ``act(gate)`` in gated MLPs
    (arXiv:2510.01032, section 4).

    Gives means over the tokens of each segment of the per-token statistics in
    :mod:`mechattn.functional.activations` and of each original token's change from the baseline,
    the near-zero share by class of the question's tokens, a histogram of the question's
    activations, and the products of the changes that two conditions make.

    A mixture of experts is refused, since its tokens share no channels.

    "Near zero" is ``|x| ≤ threshold``. Each layer has one threshold, which is set before the run on
    calibration prompts in the baseline condition, and recorded. The rule gives one number per
    calibration prompt, and the threshold is their median:

    - "quantile": the ``value``-th quantile of ``|x|`` over the prompt's tokens and channels;
    - "mad": ``1.4826 · value · MAD(|x|)``, the ε of ARM;
    - "absolute": ``value`` itself in every layer, without calibration prompts.

    Args:
        rule: The rule for the threshold.
        value: The number that the rule uses.
        calibration: The calibration prompts, as for ``ma.run``. By default they are 16 generated
            word problems, none of which ``load_prompts("word-problems")`` gives with its default
            seed.
        edges: The edges of the histogram's bins. Values below the first and from the last on are
            counted in two open bins.
    """

    name = "mlp_activations"
    rule: Rule = "quantile"
    value: float = 0.25
    calibration: Sequence[Prompt] | None = None
    edges: tuple[float, ...] = _EDGES
    thresholds: Mapping[int, float] = calibrated_field(default_factory=dict)  # by layer
    classes: Int[Tensor, " d_vocab"] = calibrated_field(default=None)  # of each token

    def __post_init__(self) -> None:
        check_choice(Rule, rule=self.rule)
        if not isinstance(self.value, Real) or not isfinite(self.value):
            raise OptionError(f"value={self.value!r}: give a finite number")
        if self.rule == "quantile" and not 0 < self.value < 1:
            raise OptionError(f"value={self.value!r}: give a quantile, between 0 and 1")
        if not self.value > 0:
            raise OptionError(f"value={self.value!r}: give a number above 0")
        if self.calibration is not None:
            as_prompts(self.calibration)  # raises unless it holds prompts
        is_listed = isinstance(self.edges, (Sequence, np.ndarray))
        if not is_listed or not all(isinstance(edge, Real) for edge in self.edges):
            raise OptionError(f"edges={self.edges!r}: give a tuple of numbers")
        is_increasing = all(low < high for low, high in pairwise(self.edges))
        if len(self.edges) < 2 or not is_increasing:
            raise OptionError("edges: give at least two numbers in increasing order")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options recorded with the result."""
        # Layers as text, as JSON reads them back.
        thresholds = {str(layer): threshold for layer, threshold in self.thresholds.items()}
        options = {"rule": self.rule, "value": self.value, "thresholds": thresholds}
        if self.rule == "absolute":
            return options
        calibration: object = f"{_CALIBRATION_PROBLEMS} generated word problems"
        if self.calibration is not None:
            calibration = [prompt.id for prompt in as_prompts(self.calibration)]
        return {**options, "calibration": calibration}

    @property
    def coords(self) -> Coords:
        """The labels of the bins, which are their left edges, and of the token classes."""
        return {"bin": [float("-inf"), *self.edges], "token_class": list(TOKEN_CLASSES)}

    @property
    def quantities(self) -> Quantities:
        """Means over each segment, near-zero shares by token class, the histogram, and the products
        of changes."""
        means = means_of(_PER_TOKEN, "tokens")
        by_segment = {f"{name}_by_segment": quantity for name, quantity in means.items()}
        return by_segment | _OF_QUESTIONS

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence without question tokens is refused."""
        if sequence.of_segment("question").any():
            return None
        return "has no question tokens"

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Set the thresholds of the layers and the class of every token.

        Warns if a calibration prompt has the question of a measured prompt.

        Raises:
            ModelError: A layer has no nonlinearity whose activations can be read.
            OptionError: The model has no tokenizer for the generated calibration prompts.
        """
        for layer in layers:
            nonlinearity_of(model, layer)  # raises if the layer has none
        classes = vocabulary_classes(model.tokenizer, int(model.cfg.d_vocab))
        if self.rule == "absolute":
            thresholds = dict.fromkeys(layers, float(self.value))
        else:
            thresholds = self._thresholds(model, layers, prompts)
        return replace(self, classes=classes, thresholds=thresholds)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Undefined values for each token; zero counts and products."""
        undefined = zeros_of_rows(batch, batch.tokens.shape[1]) + _UNDEFINED
        sums = {name: undefined.clone() for name in _PER_TOKEN}
        sums["histogram"] = zeros_of_rows(batch, len(self.edges) + 1)
        condition_count = len({condition for _, condition in batch.rows})
        for name in ("product", "within"):
            sums[name] = zeros_of_rows(batch, condition_count).double()
        return sums

    def add_activations(self, sums: Sums, activations: Activations) -> None:
        """Store the statistics of each token, and how each prompt's conditions change the
        activations."""
        for row, length in enumerate(activations.batch.lengths.tolist()):
            self._add_sequence(sums, activations, row, length)
        _add_changes(sums, activations)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over segments and token classes, the histogram, and the products of changes."""
        token_values = {}
        for name in _PER_TOKEN:
            value = sums[name][:, None]  # means over segments need a dimension for heads
            token_values[name] = value.masked_fill(value == _UNDEFINED, torch.nan)
        values = {}
        for name, mean in segment_means(token_values, batch.members()).items():
            values[f"{name}_by_segment"] = mean.squeeze(1)

        classes = self.classes.to(batch.tokens.device)
        class_numbers = torch.arange(len(TOKEN_CLASSES), device=classes.device)
        is_of_class = classes[batch.tokens][:, None] == class_numbers[:, None]
        members = is_of_class & batch.of_segment("question")[:, None]
        by_class = segment_mean(token_values["near_zero"], members)
        values["near_zero_by_token_class"] = by_class.squeeze(1)
        values["histogram"] = sums["histogram"]
        values["change_product"] = sums["product"]
        values["change_within"] = sums["within"]
        return values

    def _thresholds(self, model: HookedModel, layers: Layers, prompts: Prompts) -> dict[int, float]:
        """The threshold of each layer, which is the median over the calibration prompts."""
        if self.calibration is not None:
            calibration = as_prompts(self.calibration)
        elif model.tokenizer is not None:
            calibration = load_prompts(
                "word-problems", limit=_CALIBRATION_PROBLEMS, seed=_CALIBRATION_SEED
            )
        else:
            raise OptionError(
                f"{model.cfg.model_name} has no tokenizer for the generated calibration prompts:"
                ' give calibration=… as prompts of token ids, or rule="absolute"'
            )

        measured_questions = {prompt.question for prompt in prompts if prompt.question}
        repeated_ids = [
            prompt.id for prompt in calibration if prompt.question in measured_questions
        ]
        if repeated_ids:
            warn(
                f"{len(repeated_ids)} of {len(calibration)} calibration prompts"
                f" ({repeated_ids[0]!r}, for example) are also measured, so the threshold is set on"
                " the data it is applied to; calibrate on other prompts"
            )

        prompt_thresholds: dict[int, list[float]] = defaultdict(list)

        def add_threshold(layer: int, pre: fn.Channels, post: fn.Channels) -> None:
            """Store the threshold that the running prompt gives for a layer."""
            magnitudes = post.detach().float().abs().flatten()
            prompt_thresholds[layer].append(self._threshold_of_prompt(magnitudes))

        for prompt in calibration:
            sequence = Baseline().apply(prompt, model)
            tokens = sequence.tokens[None].to(device_of(model))
            with at_nonlinearity(model, dict.fromkeys(layers, add_threshold)):
                forward_to(model, tokens, max(layers), [])
        return {
            layer: float(np.median(thresholds)) for layer, thresholds in prompt_thresholds.items()
        }

    def _threshold_of_prompt(self, magnitudes: Float[Tensor, " entry"]) -> float:
        """The threshold that the rule gives for one prompt's ``|x|``."""
        ordered = magnitudes.sort().values
        if self.rule == "quantile":
            return float(ordered[round(self.value * (len(ordered) - 1))])
        return float(fn.mad_threshold(ordered[None], self.value))

    def _add_sequence(self, sums: Sums, activations: Activations, row: int, length: int) -> None:
        """Store the statistics of each token of one sequence, and the histogram of its
        question."""
        threshold = self.thresholds[activations.layer]
        post = activations.post[row, :length].float()
        pre = activations.pre[row, :length].float()
        variance = post.var(-1, correction=0)
        statistics = {
            "near_zero": fn.near_zero_share(post, threshold),
            "saturated": fn.saturated_share(post, pre, threshold, activations.minimum),
            "l1": post.abs().sum(-1),
            "l2": post.norm(dim=-1),
            "gini": torch.where(post.any(-1), fn.gini(post), _UNDEFINED),
            "variance": variance,
            "kurtosis": torch.where(variance > 0, fn.kurtosis(post), _UNDEFINED),
        }

        for name, value in statistics.items():
            sums[name][row, :length] = value

        is_question = activations.batch.of_segment("question")[row, :length]
        edges = torch.tensor(self.edges, device=post.device)
        counts = fn.counts_between(post[is_question], edges)
        sums["histogram"][row] = counts / counts.sum()


def _add_changes(sums: Sums, activations: Activations) -> None:
    """Store how much each original token changes from the baseline, and add the products of the
    changes that any two conditions of a prompt make."""
    pairs = activations.pairs
    for baseline in pairs.baseline.unique().tolist():
        rows = (pairs.baseline == baseline).nonzero()[:, 0]
        original_count = int(pairs.original[baseline].sum())
        for start in range(0, original_count, _TOKENS_AT_ONCE):
            tokens = slice(start, min(start + _TOKENS_AT_ONCE, original_count))
            baseline_post = activations.post[baseline, tokens].float()
            positions = pairs.place[rows, tokens]
            change = activations.post[rows[:, None], positions].float() - baseline_post
            baseline_norm = baseline_post.norm(dim=-1)
            change_norm = change.norm(dim=-1)
            relative_change = torch.where(
                baseline_norm > 0, change_norm / baseline_norm, _UNDEFINED
            )
            sums["token_change"][rows[:, None], positions] = relative_change

            is_question = pairs.segment[baseline, tokens] == SEGMENTS.index("question")
            is_large = change_norm > _LEAST_CHANGE * baseline_norm
            large_changes = change * is_large[..., None]  # the others are 0
            question_changes = large_changes[:, is_question].double().flatten(1)
            sums["product"][rows] += question_changes @ question_changes.T
            sums["within"][rows] += question_changes.square() @ (question_changes != 0).double().T
