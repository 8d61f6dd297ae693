"""How a model computes its attention scores, where they are a sum of parts that can be told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.received import visible_keys
from mechattn.functional.scores import alibi_slopes, mpt_slopes, score_parts
from mechattn.model.hooks import attention_window, pattern_hook
from mechattn.model.values import clip_of
from mechattn.model.weights import score_biases

Q, K = "attn.hook_q", "attn.hook_k"


@dataclass(frozen=True)
class Scores:
    """``score[q, k] = scale · q·k + alibi[k]``: of one layer.

    Args:
        b_q: b_Q of each head.
        b_k: b_K of each key-value head.
        scale: The factor of q·k.
        slopes: Of ALiBi; None without. In Falcon they are multiplied by the scale as well.
        rounded: Whether slopes, positions and products are rounded to bfloat16 (Falcon).
    """

    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    scale: float
    slopes: Float[Tensor, " head"] | None = None
    rounded: bool = False

    def alibi(self, keys: int) -> Float[Tensor, "1 head 1 key"]:
        """What ALiBi adds to the score of each key, up to what depends on the query alone."""
        device = self.b_q.device
        if self.slopes is None:
            return torch.zeros(1, len(self.b_q), 1, keys, device=device)
        positions = torch.arange(keys, device=device)
        if not self.rounded:
            return (self.slopes[:, None] * positions)[None, :, None]
        return (self.slopes.bfloat16()[:, None] * positions.bfloat16()).float()[None, :, None] * self.scale

    def parts(
        self, q: Float[Tensor, "batch query head d_head"], k: Float[Tensor, "batch key kv_head d_head"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Content [batch head query key], bias [batch head 1 key], alibi [1 head 1 key], rest [batch head query 1]."""
        parts = score_parts(q.float().transpose(1, 2), k.float().transpose(1, 2), self.b_q, self.b_k, self.scale)
        return parts[0], parts[1], self.alibi(k.shape[1]), parts[2]


def scores_of(model: Any, layers: list[int]) -> dict[int, Scores]:
    """How each layer computes its scores, tried on a few tokens against the model's own pattern.

    Raises:
        ModelError: The scores are no such sum: rotary positions, soft caps, norms of queries and keys, other biases.
    """
    name = str(model.cfg.model_name)
    if str(getattr(model.cfg, "positional_embedding_type", "")) == "rotary":
        raise ModelError(
            f"{name} turns queries and keys with the position (RoPE), so its scores are no sum of position, bias and "
            "content; ScoreDecomposition is defined for ALiBi (Falcon-RW, BLOOM, MPT) and for models whose scores hold "
            "no position (GPT-2, OPT, GPT-Neo)"
        )
    if clip := next((limit for layer in layers if (limit := clip_of(model, layer)) is not None), None):
        raise ModelError(
            f"{name} clips queries and keys at ±{clip:g} after they are projected, so its scores are no sum of parts"
        )
    made = {layer: _scores(model, layer) for layer in layers}
    for layer, (error, scores) in _tried(model, made).items():
        if error > (1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2):
            raise ModelError(
                f"{name}, layer {layer}: softmax of scale · q·k{'' if scores.slopes is None else ' + ALiBi'} is not "
                f"the pattern (largest difference {error:.2g}), so the parts of its scores are not known"
            )
    return made


def _scores(model: Any, layer: int) -> Scores:
    config = getattr(getattr(model, "original_model", None), "config", None)
    kind, heads = getattr(config, "model_type", ""), int(model.cfg.n_heads)
    b_q, b_k = score_biases(model, layer)
    scale = b_q.shape[-1] ** -0.5
    if kind == "gpt_neo":
        scale = 1.0
    elif kind == "gpt2" and getattr(config, "scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    slopes = None
    if mpt := getattr(config, "attn_config", None):
        scale = getattr(mpt, "softmax_scale", None) or scale
        slopes = mpt_slopes(heads, float(mpt.alibi_bias_max)) if mpt.alibi else None
    elif str(getattr(model.cfg, "positional_embedding_type", "")) == "alibi":
        slopes = alibi_slopes(heads)
    return Scores(b_q, b_k, scale, None if slopes is None else slopes.to(b_q.device), kind == "falcon")


def _tried(model: Any, made: dict[int, Scores]) -> dict[int, tuple[float, Scores]]:
    """The largest difference between the softmax of the parts and the pattern, for each layer."""
    seen: dict[str, Tensor] = {}
    tokens = torch.arange(5, 21, device=next(model.parameters()).device)[None]
    names = [f"blocks.{layer}.{hook}" for layer in made for hook in (Q, K)] + [pattern_hook(layer) for layer in made]
    if lacking := [name for name in names if name not in model.hook_dict]:
        raise ModelError(f"{model.cfg.model_name} has no {lacking[0]}, so its scores cannot be taken apart")
    with torch.no_grad():
        keep = [(name, lambda value, hook, name=name: seen.update({name: value.detach()})) for name in names]
        model.run_with_hooks(tokens, fwd_hooks=keep, return_type=None)
    found = {}
    for layer, scores in made.items():
        q, k, pattern = (seen[name].float() for name in (*(f"blocks.{layer}.{h}" for h in (Q, K)), pattern_hook(layer)))
        total = sum(scores.parts(q, k))
        visible = visible_keys(torch.arange(16, device=pattern.device), 16, attention_window(model, layer))
        own = total.masked_fill(~visible, -torch.inf).softmax(-1)  # type: ignore[union-attr]
        found[layer] = float((own - pattern).abs().max()), scores
    return found
