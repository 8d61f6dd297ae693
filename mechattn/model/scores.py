"""How a model computes scores, if they are a sum of separable parts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import visible_keys
from mechattn.functional.scores import score_parts
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.head_parts import clip_of, score_biases
from mechattn.model.hooked import HookedModel, config_of, rounding_of

Q_HOOK = "attn.hook_q"
K_HOOK = "attn.hook_k"

PROBE_LENGTH = 16  # tokens on which the softmax of the parts is compared with the model's pattern
# The largest difference of a probability from rounding.
ROUNDING = {"in_float32": 1e-3, "in_half_precision": 2e-2}


@dataclass(frozen=True, eq=False)
class Scores:
    """How a layer computes its scores: ``score[q, k] = scale · q·k + alibi[k]``.

    q and k contain b_Q and b_K.
    """

    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    scale: float
    slopes: Float[Tensor, " head"] | None = None  # None without ALiBi
    # Whether slopes, positions and their products are rounded to bfloat16, and then multiplied by
    # the scale, as in Falcon.
    alibi_in_bfloat16: bool = False

    def alibi(self, key_count: int) -> Float[Tensor, "1 head 1 key"]:
        """The term that ALiBi adds to the score of each key, without terms that depend only on the
        query; zeros without ALiBi."""
        device = self.b_q.device
        if self.slopes is None:
            return torch.zeros(1, len(self.b_q), 1, key_count, device=device)

        slopes = self.slopes.to(device)[:, None]
        positions = torch.arange(key_count, device=device)
        if self.alibi_in_bfloat16:
            bias = (slopes.bfloat16() * positions.bfloat16()).float() * self.scale
        else:
            bias = slopes * positions
        return rearrange(bias, "head key -> 1 head 1 key")

    def parts(
        self,
        q: Float[Tensor, "batch query head d_head"],
        k: Float[Tensor, "batch key kv_head d_head"],
    ) -> tuple[
        Float[Tensor, "batch head query key"],
        Float[Tensor, "batch head 1 key"],
        Float[Tensor, "1 head 1 key"],
        Float[Tensor, "batch head query 1"],
    ]:
        """The four parts whose sum is the scores.

        Returns:
            The part of query and key without their biases; the part of b_Q and the key; ALiBi; and
            the rest, which depends only on the query and does not affect the pattern.
        """
        by_head = "batch pos head d_head -> batch head pos d_head"
        q = rearrange(q.float(), by_head)
        k = rearrange(k.float(), by_head)
        content, bias, rest = score_parts(q, k, self.b_q, self.b_k, self.scale)
        return content, bias, self.alibi(k.shape[2]), rest


@dataclass(frozen=True, eq=False)
class BlindScores:
    """The terms that a model adds to its scores regardless of content: ALiBi and learned sinks."""

    heads: int = 1  # how many a layer has
    alibi: Scores | None = None  # those of the first layer, for its ALiBi; None without ALiBi
    # By layer, the score of each head's sink.
    sinks: Mapping[int, Float[Tensor, " head"]] = field(default_factory=dict)

    def bias(self, key_count: int) -> Float[Tensor, "1 head key"] | None:
        """The term added to each key's score; None without ALiBi."""
        if self.alibi is None:
            return None
        return self.alibi.alibi(key_count)[:, :, 0]

    def uniform_sink(self, layer: int) -> Float[Tensor, " head"] | None:
        """The score 0, with which the sink of a single head gets as much attention as any key; None
        in a layer without sinks."""
        if layer not in self.sinks:
            return None
        return torch.zeros_like(self.sinks[layer][:1])


def blind_scores(model: HookedModel) -> BlindScores:
    """The terms that a model adds to its scores regardless of content.

    ALiBi is left out if it does not give the model's pattern on a few tokens.
    """
    layers = hooks.attention_layers(model)
    sinks = {}
    for layer in layers:
        layer_sinks = hooks.sinks_of(model, layer)
        if layer_sinks is not None:
            sinks[layer] = layer_sinks

    alibi = None
    if _slopes(model) is not None:
        first_layer = layers[0]  # ALiBi is the same in every layer
        with suppress(ModelError):  # for another kind of bias only the uniform null is known
            alibi = scores_of(model, [first_layer])[first_layer]
    return BlindScores(model.cfg.n_heads, alibi, sinks)


def scores_of(model: HookedModel, layers: list[int]) -> dict[int, Scores]:
    """How each layer computes its scores, checked against the model's own pattern on a few tokens.

    Raises:
        ModelError: They are not a sum of parts for content, bias and position.
    """
    name = model.cfg.model_name
    if model.cfg.positional_embedding_type == "rotary":
        raise ModelError(
            f"{name} rotates queries and keys by position (RoPE), so its scores are not a sum of"
            " position, bias and content; ScoreDecomposition is defined for ALiBi (Falcon-RW,"
            " BLOOM, MPT) and for models without position terms in their scores (GPT-2, OPT,"
            " GPT-Neo)"
        )

    slopes = _slopes(model)
    alibi_in_bfloat16 = particulars_of(model).alibi_in_bfloat16
    scores = {}

    for layer in layers:
        bound = clip_of(model, layer)
        if bound is not None:
            raise ModelError(
                f"{name} clips queries and keys at ±{bound:g} after projection, so its scores are"
                " not a sum of parts"
            )
        b_q, b_k = score_biases(model, layer)
        scale = score_scale(model, layer, b_q.shape[-1])
        scores[layer] = Scores(b_q, b_k, scale, slopes, alibi_in_bfloat16)

    rounding = rounding_of(model, **ROUNDING)
    formula = "scale · q·k" if slopes is None else "scale · q·k + ALiBi"

    for layer, error in _errors(model, scores).items():
        if error > rounding:
            raise ModelError(
                f"{name}, layer {layer}: softmax of {formula} is not the pattern (largest"
                f" difference {error:.2g}), so the parts of its scores are unknown"
            )

    return scores


def _slopes(model: HookedModel) -> Float[Tensor, " head"] | None:
    """The ALiBi slopes; None for a model without ALiBi."""
    return particulars_of(model).slopes(config_of(model), model.cfg)


def _errors(model: HookedModel, scores: Mapping[int, Scores]) -> dict[int, float]:
    """By layer, the largest difference between the softmax of the parts' sum and the pattern.

    Raises:
        ModelError: A layer has no hook for its queries, keys or pattern.
    """
    tokens = hooks.few_tokens(model, PROBE_LENGTH)
    hook_names = []
    for layer in scores:
        hook_names += [f"blocks.{layer}.{Q_HOOK}", f"blocks.{layer}.{K_HOOK}"]
        hook_names.append(hooks.pattern_hook(layer))
    hook_dict = model.hook_dict  # rebuilt at each access
    for hook_name in hook_names:
        if hook_name not in hook_dict:
            raise ModelError(
                f"{model.cfg.model_name} has no {hook_name}, so its scores cannot be decomposed"
            )

    _, values = hooks.logits_and_values(model, tokens, hook_names)
    errors = {}
    for layer, layer_scores in scores.items():
        q = values[f"blocks.{layer}.{Q_HOOK}"].float()
        k = values[f"blocks.{layer}.{K_HOOK}"].float()
        pattern = values[hooks.pattern_hook(layer)].float()
        content, bias, alibi, rest = layer_scores.parts(q, k)
        sum_of_parts = content + bias + alibi + rest

        queries = torch.arange(tokens.shape[1], device=pattern.device)
        window = hooks.attention_window(model, layer)
        visible = visible_keys(queries, tokens.shape[1], window)
        computed_pattern = sum_of_parts.masked_fill(~visible, -torch.inf).softmax(-1)
        errors[layer] = float((computed_pattern - pattern).abs().max())

    return errors
