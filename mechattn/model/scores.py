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
from mechattn.functional.attention import Pattern, visible_keys
from mechattn.functional.scores import alibi_slopes, score_parts
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.head_parts import clip_of, score_biases
from mechattn.model.hooked import HookedModel, config_of, device_of, rounding_of

Q = "attn.hook_q"
K = "attn.hook_k"

# The tokens on which a model's own pattern is compared with the softmax of the parts, and the
# largest difference.
PROBE_TOKENS = range(5, 21)
ROUNDING = (1e-3, 2e-2)  # in float32 and in half precision


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one layer: ``score[q, k] = scale · q·k + alibi[k]``, with q and k that contain
    b_Q and b_K."""

    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    scale: float
    # None without ALiBi; in Falcon multiplied by the scale as well.
    slopes: Float[Tensor, " head"] | None = None
    rounded: bool = False  # whether slopes, positions and products are rounded to bfloat16 (Falcon)

    def alibi(self, keys: int) -> Float[Tensor, "1 head 1 key"]:
        """What ALiBi adds to the score of each key, apart from terms that depend only on the
        query."""
        device = self.b_q.device
        if self.slopes is None:
            return torch.zeros(1, len(self.b_q), 1, keys, device=device)

        slopes = self.slopes[:, None]
        positions = torch.arange(keys, device=device)
        if self.rounded:
            bias = (slopes.bfloat16() * positions.bfloat16()).float() * self.scale
        else:
            bias = slopes * positions
        return rearrange(bias, "head key -> 1 head 1 key")

    def parts(
        self,
        q: Float[Tensor, "batch query head d_head"],
        k: Float[Tensor, "batch key kv_head d_head"],
    ) -> tuple[
        Pattern,
        Float[Tensor, "batch head 1 key"],
        Float[Tensor, "1 head 1 key"],
        Float[Tensor, "batch head query 1"],
    ]:
        """Content, bias, alibi, rest."""
        by_head = "batch pos head d_head -> batch head pos d_head"
        q = rearrange(q.float(), by_head)
        k = rearrange(k.float(), by_head)
        content, bias, rest = score_parts(q, k, self.b_q, self.b_k, self.scale)
        return content, bias, self.alibi(k.shape[2]), rest


@dataclass(frozen=True, eq=False)
class BlindScores:
    """What a model adds to its scores regardless of content: ALiBi, and learned sinks."""

    heads: int = 1  # in a layer
    alibi: Scores | None = None  # how scores are computed in a model with ALiBi
    # Each head's score of its sink, by layer.
    sinks: Mapping[int, Float[Tensor, " head"]] = field(default_factory=dict)

    def scores(
        self, layer: int, keys: int, blind: bool
    ) -> tuple[Float[Tensor, "1 head key"] | None, Float[Tensor, " sink"] | None]:
        """The terms added to each key's score [1 head key], and the sinks [head]: the model's own,
        or uniform (0)."""
        sinks = self.sinks.get(layer)
        if not blind:
            if sinks is not None:
                sinks = torch.zeros_like(sinks[:1])
            return None, sinks

        if self.alibi is None:
            return None, sinks
        return self.alibi.alibi(keys)[:, :, 0], sinks


def blind_scores(model: HookedModel) -> BlindScores:
    """What a model adds to its scores; ALiBi only if it reproduces the model's pattern on a few
    tokens."""
    layers = hooks.attention_layers(model)
    sinks = {}
    for layer in layers:
        sinks_of_layer = hooks.sinks_of(model, layer)
        if sinks_of_layer is not None:
            sinks[layer] = sinks_of_layer

    alibi = None
    if layers and _slopes(model) is not None:
        with suppress(ModelError):  # another kind of bias: only the uniform null is known
            alibi = scores_of(model, layers[:1])[layers[0]]
    return BlindScores(int(model.cfg.n_heads), alibi, sinks)


def _slopes(model: HookedModel) -> Float[Tensor, " head"] | None:
    """The ALiBi slopes; None for a model without ALiBi."""
    heads = int(model.cfg.n_heads)
    special = particulars_of(model).slopes
    if special is not None:
        return special(config_of(model), heads)
    if _embedding_type(model) != "alibi":
        return None
    return alibi_slopes(heads)


def _embedding_type(model: HookedModel) -> str:
    """How the model counts positions, in TransformerLens's words."""
    return str(getattr(model.cfg, "positional_embedding_type", ""))


def scores_of(model: HookedModel, layers: list[int]) -> dict[int, Scores]:
    """How each layer computes its scores, checked against the model's own pattern on a few tokens.

    Raises:
        ModelError: They are no sum of parts that depend on content, bias and position alone.
    """
    name = str(model.cfg.model_name)
    if _embedding_type(model) == "rotary":
        raise ModelError(
            f"{name} rotates queries and keys by position (RoPE), so its scores are not a sum of"
            " position, bias and content; ScoreDecomposition is defined for ALiBi (Falcon-RW,"
            " BLOOM, MPT) and for models without position terms in their scores (GPT-2, OPT,"
            " GPT-Neo)"
        )

    for layer in layers:
        limit = clip_of(model, layer)
        if limit:
            raise ModelError(
                f"{name} clips queries and keys at ±{limit:g} after projection, so its scores are"
                " not a sum of parts"
            )

    slopes = _slopes(model)
    rounded = particulars_of(model).alibi_in_bfloat16
    scores = {}

    for layer in layers:
        b_q, b_k = score_biases(model, layer)
        scale = score_scale(model, layer, b_q.shape[-1])
        slopes_here = slopes
        if slopes_here is not None:
            slopes_here = slopes_here.to(b_q.device)
        scores[layer] = Scores(b_q, b_k, scale, slopes_here, rounded)

    rounding = rounding_of(model, *ROUNDING)
    sum_of_parts = "scale · q·k" if slopes is None else "scale · q·k + ALiBi"

    for layer, error in _errors(model, scores).items():
        if error > rounding:
            raise ModelError(
                f"{name}, layer {layer}: softmax of {sum_of_parts} is not the pattern (largest"
                f" difference {error:.2g}), so the parts of its scores are unknown"
            )

    return scores


def _errors(model: HookedModel, scores: Mapping[int, Scores]) -> dict[int, float]:
    """The largest difference between the softmax of the parts and the pattern, for each layer."""
    tokens = torch.tensor(PROBE_TOKENS, device=device_of(model))[None]
    hook_names = {
        layer: (f"blocks.{layer}.{Q}", f"blocks.{layer}.{K}", hooks.pattern_hook(layer))
        for layer in scores
    }
    names = [name for names_of_layer in hook_names.values() for name in names_of_layer]

    for name in names:
        if name not in model.hook_dict:
            raise ModelError(
                f"{model.cfg.model_name} has no {name}, so its scores cannot be decomposed"
            )

    _, values = hooks.logits_and_values(model, tokens, names)
    errors = {}
    for layer, layer_scores in scores.items():
        q, k, pattern = (values[name].float() for name in hook_names[layer])
        content, bias, alibi, rest = layer_scores.parts(q, k)
        total = content + bias + alibi + rest

        queries = torch.arange(tokens.shape[1], device=pattern.device)
        window = hooks.attention_window(model, layer)
        visible = visible_keys(queries, tokens.shape[1], window)
        computed = total.masked_fill(~visible, -torch.inf).softmax(-1)
        errors[layer] = float((computed - pattern).abs().max())

    return errors
