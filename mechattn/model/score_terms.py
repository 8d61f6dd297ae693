"""The terms of a model's attention scores, if the scores are a sum of separable parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.received import visible_keys
from mechattn.functional.scores import alibi_slopes, score_parts
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.heads import clip_of, score_biases
from mechattn.model.hooked import HookedModel, config_of
from mechattn.model.hooks import attention_layers, attention_window, logits_and_values, pattern_hook, sinks_of

Q, K = "attn.hook_q", "attn.hook_k"


@dataclass(frozen=True)
class Scores:
    """The scores of one layer: ``score[q, k] = scale · q·k + alibi[k]``, with q and k that contain b_Q and b_K."""

    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    scale: float
    slopes: Float[Tensor, " head"] | None = None  # None without ALiBi; in Falcon multiplied by the scale as well
    rounded: bool = False  # whether slopes, positions and products are rounded to bfloat16 (Falcon)

    def alibi(self, keys: int) -> Float[Tensor, "1 head 1 key"]:
        """What ALiBi adds to the score of each key, apart from terms that depend only on the query."""
        device = self.b_q.device
        if self.slopes is None:
            return torch.zeros(1, len(self.b_q), 1, keys, device=device)
        positions = torch.arange(keys, device=device)
        if not self.rounded:
            return (self.slopes[:, None] * positions)[None, :, None]
        return (self.slopes.bfloat16()[:, None] * positions.bfloat16()).float()[None, :, None] * self.scale

    def parts(
        self, q: Float[Tensor, "batch query head d_head"], k: Float[Tensor, "batch key kv_head d_head"]
    ) -> tuple[
        Float[Tensor, "batch head query key"],
        Float[Tensor, "batch head 1 key"],
        Float[Tensor, "1 head 1 key"],
        Float[Tensor, "batch head query 1"],
    ]:
        """Content, bias, alibi, rest."""
        by_head = "batch pos head d_head -> batch head pos d_head"
        q, k = rearrange(q.float(), by_head), rearrange(k.float(), by_head)
        parts = score_parts(q, k, self.b_q, self.b_k, self.scale)
        return parts[0], parts[1], self.alibi(k.shape[2]), parts[2]


@dataclass(frozen=True)
class BlindScores:
    """What a model adds to its scores regardless of content: ALiBi, and learned sinks."""

    heads: int = 1  # in a layer
    alibi: Scores | None = None  # how scores are computed in a model with ALiBi
    sinks: Mapping[int, Float[Tensor, " head"]] = field(default_factory=dict)  # each head's score, by layer

    def differ(self, layer: int) -> bool:
        """Whether a content-blind head of this layer may attend non-uniformly."""
        return self.alibi is not None or layer in self.sinks

    def key(self, layer: int) -> int | None:
        """A key that distinguishes layers; None if all are the same."""
        return layer if layer in self.sinks else None

    def scores(
        self, layer: int, keys: int, blind: bool
    ) -> tuple[Float[Tensor, "1 head key"] | None, Float[Tensor, " sink"] | None]:
        """The terms added to each key's score [1 head key], and the sinks [head]: the model's own, or uniform (0)."""
        sinks = self.sinks.get(layer)
        if not blind:
            return None, None if sinks is None else torch.zeros_like(sinks[:1])
        return None if self.alibi is None else self.alibi.alibi(keys)[:, :, 0], sinks


def blind_scores(model: HookedModel) -> BlindScores:
    """What a model adds to its scores; ALiBi only if it reproduces the model's pattern on a few tokens."""
    layers = attention_layers(model)
    found = {layer: sinks for layer in layers if (sinks := sinks_of(model, layer)) is not None}
    alibi = None
    if layers and _slopes(model) is not None:
        try:
            alibi = scores_of(model, layers[:1])[layers[0]]
        except ModelError:  # another kind of bias: only the uniform null is known
            alibi = None
    return BlindScores(int(model.cfg.n_heads), alibi, found)


def _slopes(model: HookedModel) -> Float[Tensor, " head"] | None:
    """The ALiBi slopes; None for a model without ALiBi."""
    heads, special = int(model.cfg.n_heads), particulars_of(model).slopes
    if special is not None:
        return special(config_of(model), heads)
    return alibi_slopes(heads) if str(getattr(model.cfg, "positional_embedding_type", "")) == "alibi" else None


def scores_of(model: HookedModel, layers: list[int]) -> dict[int, Scores]:
    """How each layer computes its scores, checked against the model's own pattern on a few tokens."""
    name = str(model.cfg.model_name)
    if str(getattr(model.cfg, "positional_embedding_type", "")) == "rotary":
        raise ModelError(
            f"{name} rotates queries and keys by position (RoPE), so its scores are not a sum of position, bias and "
            f"content; ScoreDecomposition is defined for ALiBi (Falcon-RW, BLOOM, MPT) and for models without "
            f"position terms in their scores (GPT-2, OPT, GPT-Neo)"
        )
    if clip := next((limit for layer in layers if (limit := clip_of(model, layer)) is not None), None):
        raise ModelError(
            f"{name} clips queries and keys at ±{clip:g} after projection, so its scores are not a sum of parts"
        )
    made, slopes = {}, _slopes(model)
    for layer in layers:
        b_q, b_k = score_biases(model, layer)
        here = None if slopes is None else slopes.to(b_q.device)
        scale = score_scale(model, layer, b_q.shape[-1])
        made[layer] = Scores(b_q, b_k, scale, here, particulars_of(model).alibi_in_bfloat16)
    for layer, error in _errors(model, made).items():
        if error > (1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2):
            raise ModelError(
                f"{name}, layer {layer}: softmax of scale · q·k{'' if slopes is None else ' + ALiBi'} is not "
                f"the pattern (largest difference {error:.2g}), so the parts of its scores are unknown"
            )
    return made


def _errors(model: HookedModel, made: dict[int, Scores]) -> dict[int, float]:
    """The largest difference between the softmax of the parts and the pattern, for each layer."""
    tokens = torch.arange(5, 21, device=next(model.parameters()).device)[None]
    names = [f"blocks.{layer}.{hook}" for layer in made for hook in (Q, K)] + [pattern_hook(layer) for layer in made]
    if lacking := [name for name in names if name not in model.hook_dict]:
        raise ModelError(f"{model.cfg.model_name} has no {lacking[0]}, so its scores cannot be decomposed")
    _, seen = logits_and_values(model, tokens, names)
    found = {}
    for layer, scores in made.items():
        q, k, pattern = (seen[name].float() for name in (*(f"blocks.{layer}.{h}" for h in (Q, K)), pattern_hook(layer)))
        total = sum(scores.parts(q, k))
        visible = visible_keys(torch.arange(16, device=pattern.device), 16, attention_window(model, layer))
        own = total.masked_fill(~visible, -torch.inf).softmax(-1)  # type: ignore[union-attr]
        found[layer] = float((own - pattern).abs().max())
    return found
