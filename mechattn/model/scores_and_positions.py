"""How a model computes scores, if they are a sum of separable parts, and how it counts positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mechattn.errors import ModelError
from mechattn.functional.attention import Pattern, alibi_slopes, score_parts
from mechattn.functional.received import visible_keys
from mechattn.model import hooks
from mechattn.model.architectures import particulars_of, score_scale
from mechattn.model.head_parts import clip_of, score_biases
from mechattn.model.hooked import HookedModel, config_of, original_of
from mechattn.model.several_devices import device_of

Q, K = "attn.hook_q", "attn.hook_k"


@dataclass(frozen=True)
class Scores:
    """The scores of one layer: ``score[q, k] = scale · q·k + alibi[k]``, with q and k that contain b_Q and b_K."""

    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    scale: float
    slopes: Float[Tensor, " head"] | None = (
        None  # None without ALiBi; in Falcon multiplied by the scale as well
    )
    rounded: bool = False  # whether slopes, positions and products are rounded to bfloat16 (Falcon)

    def alibi(self, keys: int) -> Float[Tensor, "1 head 1 key"]:
        """What ALiBi adds to the score of each key, apart from terms that depend only on the query."""
        device = self.b_q.device
        if self.slopes is None:
            return torch.zeros(1, len(self.b_q), 1, keys, device=device)
        positions = torch.arange(keys, device=device)
        if not self.rounded:
            return (self.slopes[:, None] * positions)[None, :, None]
        return (self.slopes.bfloat16()[:, None] * positions.bfloat16()).float()[
            None, :, None
        ] * self.scale

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
        q, k = rearrange(q.float(), by_head), rearrange(k.float(), by_head)
        parts = score_parts(q, k, self.b_q, self.b_k, self.scale)
        return parts[0], parts[1], self.alibi(k.shape[2]), parts[2]


@dataclass(frozen=True)
class BlindScores:
    """What a model adds to its scores regardless of content: ALiBi, and learned sinks."""

    heads: int = 1  # in a layer
    alibi: Scores | None = None  # how scores are computed in a model with ALiBi
    sinks: Mapping[int, Float[Tensor, " head"]] = field(
        default_factory=dict
    )  # each head's score, by layer

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
    layers = hooks.attention_layers(model)
    found = {
        layer: sinks for layer in layers if (sinks := hooks.sinks_of(model, layer)) is not None
    }
    alibi = None
    if layers and _slopes(model) is not None:
        with suppress(ModelError):  # another kind of bias: only the uniform null is known
            alibi = scores_of(model, layers[:1])[layers[0]]
    return BlindScores(int(model.cfg.n_heads), alibi, found)


def _slopes(model: HookedModel) -> Float[Tensor, " head"] | None:
    """The ALiBi slopes; None for a model without ALiBi."""
    heads, special = int(model.cfg.n_heads), particulars_of(model).slopes
    if special is not None:
        return special(config_of(model), heads)
    return (
        alibi_slopes(heads)
        if str(getattr(model.cfg, "positional_embedding_type", "")) == "alibi"
        else None
    )


def scores_of(model: HookedModel, layers: list[int]) -> dict[int, Scores]:
    """How each layer computes its scores, checked against the model's own pattern on a few tokens."""
    name = str(model.cfg.model_name)
    if str(getattr(model.cfg, "positional_embedding_type", "")) == "rotary":
        raise ModelError(
            f"{name} rotates queries and keys by position (RoPE), so its scores are not a sum of position, bias and "
            f"content; ScoreDecomposition is defined for ALiBi (Falcon-RW, BLOOM, MPT) and for models without "
            f"position terms in their scores (GPT-2, OPT, GPT-Neo)"
        )
    if clip := next(
        (limit for layer in layers if (limit := clip_of(model, layer)) is not None), None
    ):
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
        if error > (
            1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2
        ):
            raise ModelError(
                f"{name}, layer {layer}: softmax of scale · q·k{'' if slopes is None else ' + ALiBi'} is not "
                f"the pattern (largest difference {error:.2g}), so the parts of its scores are unknown"
            )
    return made


def _errors(model: HookedModel, made: dict[int, Scores]) -> dict[int, float]:
    """The largest difference between the softmax of the parts and the pattern, for each layer."""
    tokens = torch.arange(5, 21, device=device_of(model))[None]
    of_layer = {n: (f"blocks.{n}.{Q}", f"blocks.{n}.{K}", hooks.pattern_hook(n)) for n in made}
    names = [name for named in of_layer.values() for name in named]
    if lacking := [name for name in names if name not in model.hook_dict]:
        raise ModelError(
            f"{model.cfg.model_name} has no {lacking[0]}, so its scores cannot be decomposed"
        )
    _, seen = hooks.logits_and_values(model, tokens, names)
    found = {}
    for layer, scores in made.items():
        q, k, pattern = (seen[name].float() for name in of_layer[layer])
        total = sum(scores.parts(q, k))
        visible = visible_keys(
            torch.arange(16, device=pattern.device), 16, hooks.attention_window(model, layer)
        )
        own = total.masked_fill(~visible, -torch.inf).softmax(-1)  # type: ignore[union-attr]
        found[layer] = float((own - pattern).abs().max())
    return found


_aten = torch.ops.aten
_LOOKUPS = (_aten.embedding, _aten.gather, _aten.index, _aten.index_select, _aten.take)
_SHIFT = 6


@dataclass(frozen=True)
class Boundary:
    """The number of positions up to which a model uses its frequencies for short texts; beyond it uses others.

    In "longrope" there is a second set of factors, and transformers uses the set for the longest row on the whole
    batch. In "dynamic" (NTK) the frequencies of a long text are those of the longest text that was read so far.
    """

    at: int
    kind: Literal["longrope", "dynamic"]

    def side(self, positions: int) -> Literal["short", "long"]:
        """The factors for a row of this length."""
        return "long" if positions > self.at else "short"

    def __str__(self) -> str:
        if self.kind == "longrope":
            return f"short factors up to {self.at:,} positions, long ones beyond (LongRoPE)"
        return f"dynamic NTK beyond {self.at:,} positions, which is not measured"


def boundary_of(model: Any) -> Boundary | None:
    """The boundary of a hooked model or a transformers model, from its configuration; None for most."""
    config = config_of(model) if original_of(model) is not None else getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    # The RoPE settings, for all layers or for each kind, under the new name or the old one.
    settings = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    given = [each for each in settings if isinstance(each, Mapping)]
    scalings = [
        *given,
        *(each for whole in given for each in whole.values() if isinstance(each, Mapping)),
    ]
    found = {
        boundary for scaling in scalings if (boundary := _boundary(scaling, config)) is not None
    }
    if len(found) > 1:
        several = ", ".join(f"{each.at:,}" for each in sorted(found, key=lambda each: each.at))
        raise ModelError(
            f"the layers of a {type(model).__name__} change their frequencies at different lengths ({several}), so "
            f"mechattn cannot separate its prompts by length"
        )
    return next(iter(found), None)


def _boundary(scaling: Mapping[str, Any], config: Any) -> Boundary | None:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "")
    longest = getattr(config, "max_position_embeddings", None)
    if "dynamic" in kind and longest:
        return Boundary(int(longest), "dynamic")
    if kind in ("longrope", "su") or "long_factor" in scaling:
        name = "original_max_position_embeddings"
        at = scaling.get(name) or getattr(config, name, longest)
        return Boundary(int(at), "longrope") if at else None
    return None


def takes_position_ids(model: HookedModel) -> bool:
    """Whether the model's attention depends on the given position ids, tried on a few tokens."""
    if original_of(model) is None:
        return False
    ids = torch.arange(_SHIFT, device=device_of(model))
    try:
        return not torch.equal(
            *_patterns_at(model, hooks.attention_layers(model)[-1], [ids, 3 * ids])
        )
    except (TypeError, ValueError):
        return False


def takes_negative_ids(model: HookedModel) -> bool:
    """Whether attention depends only on differences of position ids, so that negative ids work like any others."""
    ids, layers = torch.arange(2 * _SHIFT, device=device_of(model)), int(model.cfg.n_layers)
    shifted = [ids, ids + _SHIFT, ids - _SHIFT]
    try:
        with _NoNegativeRow():
            first, *others = _patterns_at(
                model, hooks.attention_layers(model)[0], shifted, layers - 1
            )
    except (_NegativeRow, TypeError, ValueError, IndexError, RuntimeError):
        return False
    rounding = 1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.1
    return all(float((other - first).abs().max()) <= rounding for other in others)


def _patterns_at(
    model: HookedModel,
    layer: int,
    position_ids: Sequence[Int[Tensor, " pos"]],
    last: int | None = None,
) -> list[Float[Tensor, "1 head query key"]]:
    """A layer's pattern of the same few tokens at each of these positions, from a pass up to the layer ``last``."""
    tokens = torch.arange(5, 5 + len(position_ids[0]), device=position_ids[0].device)[None]
    seen: list[Tensor] = []

    def see(layer: int, pattern: Pattern, v: Any) -> None:
        seen.append(pattern.float())

    for ids in position_ids:
        real = torch.ones_like(tokens)
        hooks.forward_with_patterns(
            model, tokens, real, [layer], see, position_ids=ids[None], last=last
        )
    return seen


class _NegativeRow(Exception):
    """A table was read at a negative index."""


class _NoNegativeRow(TorchDispatchMode):
    """Prevent reading a table at a negative index, which on a GPU would make all later calls of the process fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _LOOKUPS:
            given = [
                each
                for arg in args[1:]
                for each in (arg if isinstance(arg, (list, tuple)) else [arg])
            ]
            for index in given:
                if (
                    isinstance(index, Tensor)
                    and index.dtype in (torch.int32, torch.int64)
                    and (index < 0).any()
                ):
                    raise _NegativeRow
        return func(*args, **(kwargs or {}))
