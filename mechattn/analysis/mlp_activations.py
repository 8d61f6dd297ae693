"""The distribution of MLP activations after the nonlinearity, and how it changes per token between conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Activations, Analysis, AnalysisBase, Quantity, Sums
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError, check_choice, warn
from mechattn.functional import activations as fn
from mechattn.functional.received import segment_mean
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import forward_to
from mechattn.model.patch.mixtures import Routing, routing_now
from mechattn.model.patch.nonlinearities import at_nonlinearity, mixture_of
from mechattn.model.several_devices import device_of
from mechattn.prompts.conditions import Baseline
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Batch, Sequence
from mechattn.prompts.tokenization import TOKEN_CLASSES, vocabulary_classes

Rule = Literal["quantile", "mad", "absolute"]
_NONE = -1.0  # stands for an undefined number, as sums must be finite
_METRICS = ("near_zero", "saturated", "l1", "l2", "gini", "variance", "kurtosis", "token_change")
_OF_CHANGES = {
    "change_product": "sum over the question's tokens of <change, change in the other condition>, from the baseline",
    "change_within": "sum of squared changes of the question's tokens, over the entries that the other condition "
    "changes",
}
_CALIBRATION = 16  # prompts
_CALIBRATION_SEED = (
    977  # of the calibration problems: not the default seed, so they are not the measured ones
)
_TOKENS = 64  # tokens at a time, in all conditions of a prompt
_ENTRIES = (
    2**22
)  # channels of these tokens in one condition: the experts of a layer have many channels in all
_LEAST = 1e-4  # relative to a token's activations: a smaller change may be rounding
_EDGES = tuple(
    round(-0.51 + 0.02 * i, 2) for i in range(102)
)  # 0, the most frequent value, is the middle of a bin


@dataclass(frozen=True)
class MlpActivations(AnalysisBase):
    """Measure MLP activations after the nonlinearity, ``act(gate)`` in gated MLPs (arXiv:2510.01032, section 4).

    Gives means over the tokens of each segment of the per-token statistics in
    :mod:`mechattn.functional.activations`, the near-zero share by class of the question's tokens, a histogram
    of the question's activations, and the change of each original token from the baseline.

    In a mixture of experts a token's activations are ``w · act(gate)`` of the experts that it is routed to, with router
    weight w, and of the shared expert (:mod:`mechattn.model.patch.mixtures`). Changes are over the channels of
    all experts, which are 0 where a token is not routed to the expert.

    "Near zero" is ``|x| ≤ threshold``, with one threshold per layer, set before the run on calibration prompts in the
    baseline condition, and recorded. The rule gives one number per prompt; the threshold is their median:

    - "quantile": the ``value``-th quantile of ``|x|`` over the prompt's tokens and channels;
    - "mad": ``1.4826 · value · MAD(|x|)``, the ε of ARM;
    - "absolute": ``value`` itself, for every layer and model; no calibration.

    Args:
        rule: The rule for the threshold.
        value: The number that the rule takes.
        calibration: The calibration prompts; by default 16 generated word problems, none of which
            ``load_prompts("word-problems")`` gives with its default seed.
        edges: The edges of the histogram's bins; values outside are counted in two open bins.
    """

    name = "mlp_activations"
    rule: Rule = "quantile"
    value: float = 0.25
    calibration: tuple[Prompt, ...] | None = None
    edges: tuple[float, ...] = _EDGES
    thresholds: Mapping[int, float] | None = field(default=None, repr=False)
    classes: Any = field(
        default=None, repr=False, compare=False
    )  # Int[Tensor, " d_vocab"], once calibrated
    mixtures: Any = field(
        default=None, repr=False, compare=False
    )  # of each layer, its Mixture of experts or None

    def __post_init__(self) -> None:
        check_choice(Rule, rule=self.rule)
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not number or not 0 < self.value < (1 if self.rule == "quantile" else float("inf")):
            what = "a quantile, between 0 and 1" if self.rule == "quantile" else "a number above 0"
            raise OptionError(f"value={self.value!r}: the rule {self.rule!r} takes {what}")
        if self.calibration is not None and not self.calibration and self.rule != "absolute":
            raise OptionError(
                "calibration=(): give at least one prompt, or omit it to use generated word problems"
            )
        if len(self.edges) < 2 or list(self.edges) != sorted(set(self.edges)):
            raise OptionError("edges: give at least two numbers in increasing order")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options recorded with the result."""
        named = (
            "16 generated word problems"
            if self.calibration is None
            else [p.id for p in self.calibration]
        )
        known = {"rule": self.rule, "value": self.value, "thresholds": dict(self.thresholds or {})}
        return known | ({} if self.rule == "absolute" else {"calibration": named})

    @property
    def coords(self) -> Mapping[str, Seq[object]]:
        """Labels of the bins (their left edge) and of the token classes."""
        return {"bin": [float("-inf"), *self.edges], "token_class": list(TOKEN_CLASSES)}

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """For each segment, token class or bin."""
        near = "share of channels with |act| <= threshold"
        per_segment = {
            "near_zero": ("share", near),
            "saturated": (
                "share",
                f"{near} that lie left of the nonlinearity's minimum: switched off",
            ),
            "l1": ("activation", "sum of |act| over the channels"),
            "l2": ("activation", "root of the sum of act^2 over the channels"),
            "gini": ("share", "Gini coefficient of |act| over the channels"),
            "variance": ("activation squared", "variance of act over the channels"),
            "kurtosis": ("ratio", "kurtosis of act over the channels; 3 if normal"),
        }
        mean, of_class = (
            ", mean over the tokens of the segment",
            f"{near}, mean over the question's tokens of the class",
        )
        change = "|act - act in the baseline| / |act in the baseline|"
        return {
            **{
                f"{n}_by_segment": Quantity(("segment",), u, d + mean)
                for n, (u, d) in per_segment.items()
            },
            "token_change_by_segment": Quantity(("segment",), "share", change + mean, "difference"),
            "near_zero_by_token_class": Quantity(("token_class",), "share", of_class),
            "histogram": Quantity(
                ("bin",), "share", "share of the question's activations in [bin, next bin)"
            ),
            **{
                name: Quantity(("other_condition",), "activation squared", about, "difference")
                for name, about in _OF_CHANGES.items()
            },
        }

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence without question tokens cannot be measured."""
        return None if sequence.of_segment("question").any() else "has no question tokens"

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Set the thresholds of the layers and the class of every token.

        Warns where the calibration prompts are among the measured ones.
        """
        mixtures = {layer: mixture_of(model, layer) for layer in layers}
        made = replace(
            self,
            classes=vocabulary_classes(model.tokenizer, int(model.cfg.d_vocab)),
            mixtures=mixtures,
        )
        if self.rule == "absolute":
            return replace(made, thresholds=dict.fromkeys(layers, float(self.value)))
        prompts = self._calibration(model)
        texts = {prompt.question for prompt in measured if prompt.question}
        if repeated := [prompt.id for prompt in prompts if prompt.question in texts]:
            warn(
                f"{len(repeated)} of {len(prompts)} calibration prompts ({repeated[0]!r}, for example) are also "
                f"measured, so the threshold is set on the data it is applied to; calibrate on other prompts"
            )
        found: dict[int, list[float]] = {layer: [] for layer in layers}

        def see(
            layer: int, pre: Float[Tensor, "*token d_mlp"], post: Float[Tensor, "*token d_mlp"]
        ) -> None:
            found[layer].append(self._of_prompt(post.detach().float().abs().flatten()))

        for prompt in prompts:
            tokens = Baseline().apply(prompt, model).tokens[None].to(device_of(model))
            with at_nonlinearity(model, dict.fromkeys(layers, see)):
                forward_to(model, tokens, max(layers), [])
        return replace(
            made, thresholds={layer: float(np.median(values)) for layer, values in found.items()}
        )

    def _calibration(self, model: HookedModel) -> Seq[Prompt]:
        if self.calibration is not None:
            return self.calibration
        if model.tokenizer is None:
            raise OptionError(
                f"{model.cfg.model_name} has no tokenizer, so the generated calibration prompts cannot be read: give "
                'calibration=… as prompts of token ids, or rule="absolute"'
            )
        return load_prompts("word-problems", limit=_CALIBRATION, seed=_CALIBRATION_SEED)

    def _of_prompt(self, size: Float[Tensor, " entry"]) -> float:
        ordered = size.sort().values
        if self.rule == "quantile":
            return float(ordered[round(self.value * (len(ordered) - 1))])
        median = ordered[(len(ordered) - 1) // 2]
        return fn.KAPPA * self.value * float((ordered - median).abs().median())

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        rows, length = batch.tokens.shape
        device = batch.tokens.device
        made = {name: torch.full((rows, length), _NONE, device=device) for name in _METRICS}
        made["histogram"] = torch.zeros(rows, len(self.edges) + 1, device=device)
        others = max(sum(prompt == p for p, _ in batch.rows) for prompt, _ in batch.rows)
        for name in ("product", "within"):
            made[name] = torch.zeros(rows, others, device=device, dtype=torch.float64)
        return made

    def add_activations(self, sums: Sums, activations: Activations) -> None:
        """Measure each token, one sequence at a time; then the changes between each prompt's conditions."""
        threshold = (self.thresholds or {})[activations.layer]
        asks = activations.batch.of_segment("question")
        edges = torch.tensor(self.edges, device=activations.post.device)
        for row, length in enumerate(activations.batch.lengths.tolist()):
            x, pre = activations.post[row, :length].float(), activations.pre[row, :length].float()
            made = {
                "near_zero": fn.near_zero_share(x, threshold),
                "saturated": fn.saturated_share(x, pre, threshold, activations.minimum),
                "l1": x.abs().sum(-1),
                "l2": x.norm(dim=-1),
                "gini": torch.where(x.any(-1), fn.gini(x), _NONE),
                "variance": (variance := x.var(-1, correction=0)),
                "kurtosis": torch.where(variance > 0, fn.kurtosis(x), _NONE),
            }
            for name, value in made.items():
                sums[name][row, :length] = value
            counts = fn.counts_between(x[asks[row, :length]], edges)
            sums["histogram"][row] = counts / counts.sum()
        mixture = self.mixtures[activations.layer]
        routing = None if mixture is None else routing_now(mixture)
        for rows, at, change, norm, question in _changes(activations, routing):
            size = change.norm(dim=-1)
            for row, places, value in zip(
                rows, at, torch.where(norm > 0, size / norm, _NONE), strict=True
            ):
                sums["token_change"][row, places] = value
            asked = (change * (size > _LEAST * norm)[..., None])[:, question].double()
            asked = rearrange(asked, "row token d_mlp -> row (token d_mlp)")
            sums["product"][rows] += asked @ asked.T
            sums["within"][rows] += asked.square() @ (asked != 0).double().T

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments and classes."""
        each = torch.stack([sums[name] for name in _METRICS], 1)
        each = each.masked_fill(each == _NONE, torch.nan)
        by_segment = segment_mean(each, batch.members()).unbind(1)
        classes = self.classes.to(batch.tokens.device)[batch.tokens]
        members = (
            classes[:, None] == torch.arange(len(TOKEN_CLASSES), device=classes.device)[:, None]
        )
        members &= batch.of_segment("question")[:, None]
        return {
            **{
                f"{name}_by_segment": value
                for name, value in zip(_METRICS, by_segment, strict=True)
            },
            "near_zero_by_token_class": segment_mean(each[:, :1], members).squeeze(1),
            "histogram": sums["histogram"],
            "change_product": sums["product"],
            "change_within": sums["within"],
        }


def _changes(
    activations: Activations, routing: Routing | None
) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor, Tensor]]:
    """For some original tokens of a prompt at a time: the prompt's rows, the tokens' places in each, their changes."""
    pairs, shape = activations.pairs, activations.batch.tokens.shape
    experts = None if routing is None else routing.experts.unflatten(0, shape)
    wide = activations.post.shape[-1] if routing is None else routing.count * routing.width
    at_once = max(1, min(_TOKENS, _ENTRIES // wide))

    def channels(row: int, at: Any) -> Float[Tensor, "token channel"]:
        x = activations.post[row, at].float()
        return (
            x
            if routing is None or experts is None
            else replace(routing, experts=experts[row, at]).by_expert(x)
        )

    for first in pairs.baseline.unique().tolist():
        rows = (pairs.baseline == first).nonzero().flatten().tolist()
        for tokens in torch.arange(int(pairs.original[first].sum())).split(at_once):
            some = slice(int(tokens[0]), int(tokens[-1]) + 1)
            before = channels(first, some)
            places = pairs.place[rows, some]
            after = torch.stack([channels(row, at) for row, at in zip(rows, places, strict=True)])
            question = pairs.segment[first, some] == SEGMENTS.index("question")
            yield rows, places, after - before, before.norm(dim=-1), question
