"""What each head adds directly to the logit of the next token, also by the segment of the keys
that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from mechattn.analysis.analysis import (
    DEPENDS_ON_VALUES,
    HEAD_AND_SEGMENT,
    Analysis,
    AnalysisBase,
    AttentionRows,
    Captures,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    means_by_segment,
    means_of,
    nan_outside,
    of_each,
    of_each_query,
    seen_keys,
    zeros_of_rows,
)
from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError
from mechattn.functional.attention import (
    Marked,
    Stream,
    Tokens,
    for_each_head,
    in_working_dtype,
    working_dtype,
)
from mechattn.functional.head_outputs import Weights, update_product
from mechattn.model.head_parts import output_weights
from mechattn.model.hooked import HookedModel, limit_of
from mechattn.model.unembedding import FrozenNorm, Unembedding, frozen_norm, unembedding
from mechattn.model.verify.layer_checks import GATES, gate_of
from mechattn.prompts.token_sequences import Batch

_Z_HOOK = "attn.hook_z"
NORM_INPUT = "ln1_post.hook_in"  # the input of the norm between attention and residual stream
_DIRECT_CONTRIBUTION = "direct contribution to the logit of the next token"


@dataclass(frozen=True, kw_only=True)
class _Logits(AnalysisBase):
    """Base class of :class:`DirectLogits` and :class:`SegmentLogits`."""

    weights: Mapping[int, Weights] = calibrated_field(default_factory=dict)  # W_O by layer
    unembed: Unembedding = calibrated_field(default=None)
    # The norm after attention, of the layers that have one.
    norms: Mapping[int, FrozenNorm] = calibrated_field(default_factory=dict)

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Any:
        """Prepare W_O, the norms after attention and the unembedding.

        Raises:
            ModelError: A head's update, or its path to the logits, cannot be computed for this
                model.
        """
        weights = {layer: output_weights(model, layer) for layer in layers}
        norms = norms_after(model, layers)
        return replace(self, weights=weights, unembed=unembedding(model), norms=norms)

    def next_direction(self, next_tokens: Tokens, layer: int) -> Stream:
        """The direction ``u`` that turns a head's update into its contribution to the next logit.

        The contribution is the product of both, divided by the scales of the norms.

        Args:
            next_tokens: The next token at each position.
            layer: The layer of the head.
        """
        dtype = working_dtype(self.weights[layer])
        direction = self.unembed.direction(next_tokens).to(dtype)
        norm = self.norms.get(layer)
        if norm is None:
            return direction
        return norm.toward(direction)

    def add_final(self, sums: Sums, stream: Stream) -> None:
        """Keep the scale of the final norm."""
        sums["scale"] = self.unembed.norm.scale(stream)[:, None]


@dataclass(frozen=True)
class DirectLogits(_Logits):
    """Direct logit attribution: what each head adds to the logit of the next token in the text.

    ``⟨Δ, γ · (W_U[:, next] − mean over the vocabulary)⟩ · f / σ``, in logits above the mean logit.
    Δ is the head's update of the residual stream, γ the weight of the final norm and σ its scale at
    this token (a LayerNorm subtracts the mean of Δ first), f the factor of the logits (Cohere,
    Granite; 1 in most models). ``Δ = z W_O``; if a norm follows attention (Gemma 2 and 3, OLMo 2),
    ``Δ = γ' · z W_O / σ'`` with the scale σ' of attention's whole output at this token. Both
    scales are held fixed. The contributions of all heads of all layers, the embedding, the MLPs and
    the biases add up to the logit above the mean logit (before the cap in a model that caps its
    logits, such as Gemma 2). The model always runs to its last layer. Values are means over the
    tokens of each segment, except the last token, which has no next token.

    Args:
        per_query: Also keep the value at each query (token), as ``next_token_logit_at``.

    Source:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
    """

    name = "direct_logits"
    per_query: bool = False

    @property
    def quantities(self) -> Quantities:
        """The contribution of each head."""
        description = f"{_DIRECT_CONTRIBUTION} (before any cap), above the mean over the vocabulary"
        token_quantities = {
            "next_token_logit": Quantity(
                HEAD_AND_SEGMENT, "logits", description, compared="difference"
            )
        }
        quantities = means_of(token_quantities, "tokens")
        if self.per_query:
            quantities |= of_each(token_quantities, "token")
        return quantities

    @property
    def captures(self) -> Sequence[str]:
        """Each head's output before W_O, and the input of a norm after attention."""
        if self.norms:
            return (_Z_HOOK, NORM_INPUT)
        return (_Z_HOOK,)

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Store the product of each head's update with the direction of the next token.

        It is not yet divided by the scale of the final norm.
        """
        w_o = in_working_dtype(self.weights[captures.layer])
        z = captures.by_head(_Z_HOOK, len(w_o)).to(w_o.dtype)
        direction = self.next_direction(_next_tokens(captures.batch), captures.layer)
        sums["product"] = update_product(z, w_o, direction)

        norm = self.norms.get(captures.layer)
        if norm is not None:
            scale = norm.scale(captures.tensors[NORM_INPUT]).to(w_o.dtype)
            sums["product"] /= scale[:, None]

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the tokens of each segment that have a next token."""
        logit = nan_outside(sums["product"] / sums["scale"], _has_next(batch))
        per_token = {"next_token_logit": logit}
        values = means_by_segment(per_token, batch)
        if self.per_query:
            values |= of_each_query(per_token, per_token, batch)
        return values


def norms_after(model: HookedModel, layers: Sequence[int]) -> Mapping[int, FrozenNorm]:
    """The norms between attention and the residual stream, by layer; empty in most models.

    Raises:
        ModelError: Such a norm has no hook at its input, or its scale cannot be computed.
    """
    norms = {}
    for layer in layers:
        norm = getattr(model.blocks[layer], "ln1_post", None)
        if norm is None:
            continue
        if f"blocks.{layer}.{NORM_INPUT}" not in model.hook_dict:
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} has no hook for the input of the norm"
                " after attention, so its scale is unknown"
            )
        norms[layer] = frozen_norm(model, norm, f"the norm after attention of layer {layer}")
    return norms


@dataclass(frozen=True)
class SegmentLogits(_Logits):
    """Split each head's direct contribution to the logit of the next token by the segment of the
    keys.

    ``φ[q, segment] = Σ_{k in segment} A[q, k] · ⟨v[k] W_O, u[q]⟩``, where ``⟨Δ, u[q]⟩`` is the
    value that :class:`DirectLogits` gives an update Δ at query q, with the scales of the final norm
    and of a norm after attention held fixed. If a gate of the query multiplies the head's output
    (Qwen3-Next), ``v[k] · g[q]`` replaces ``v[k]``. The sum over all segments is
    ``next_token_logit`` of ``DirectLogits``, except for a head that an intervention on z changes,
    such as an ablated one: it acts later and has no effect on φ. Values are means over the queries
    of each segment, except the last token, which has no next token.

    ``next_token_logit_per_key`` is φ divided by the number of keys of the segment that the query
    sees; queries that see none do not count in its mean. The difference of two segments is the
    contrast of a needle with the rest of its context (LOCOS).

    Source:
        arXiv:2607.01002. The next tokens of the text replace its answer tokens.
    """

    name = "segment_logits"
    gate: _Gate | None = calibrated_field(default=None)  # on z; None without one

    @property
    def quantities(self) -> Quantities:
        """The contribution that queries of ``segment`` read from keys of ``to_segment``."""
        from_keys = Quantity(
            ("head", "segment", "to_segment"),
            "logits",
            f"{_DIRECT_CONTRIBUTION}, read from the keys of to_segment",
            compared="difference",
            no_null=DEPENDS_ON_VALUES,
        )
        per_key = replace(from_keys, description=f"{from_keys.description}, per key seen")
        return means_of({"next_token_logit_from": from_keys, "next_token_logit_per_key": per_key})

    @property
    def captures(self) -> Sequence[str]:
        """The input of a norm after attention and the gate; z if the model has neither."""
        hooks = []
        if self.norms:
            hooks.append(NORM_INPUT)
        if self.gate is not None:
            hooks.append(self.gate.hook)
        # ``add_captures`` is called after the last hook, so one is needed; z is not read.
        return hooks or [_Z_HOOK]

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Prepare W_O of the layers, the norms after attention, the gates of their outputs, and the
        unembedding.

        Raises:
            ModelError: A head's update, or its path to the logits, cannot be computed for this
                model, or z is not the sum of ``A · v`` times a known gate, so that the share of a
                key cannot be separated.
        """
        calibrated = super().calibrated(model, layers, prompts)
        limit = limit_of(model, "values")
        if limit is None:
            return calibrated

        function = gate_of(model)
        attention = f"blocks.{layers[0]}.attn"
        gate_hooks = [f"attn.{name}" for name in GATES if f"{attention}.{name}" in model.hook_dict]
        if function is None or not gate_hooks:
            raise ModelError(
                f"{model.cfg.model_name}: {limit}, so a key's share of a head's update is not A"
                " · v W_O"
            )
        return replace(calibrated, gate=_Gate(gate_hooks[0], function))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zeros [batch head query segment]."""
        return {"from_keys": zeros_of_rows(batch, heads, batch.tokens.shape[1], len(SEGMENTS))}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store what these queries read from each segment, not yet divided by the scales of the
        norms."""
        v = rows.values_for("a key's contribution")[:, :, rows.keys]

        # The product of a value vector with ``W_O u`` of a query is its contribution there.
        w_o = in_working_dtype(self.weights[rows.layer])
        next_tokens = _next_tokens(rows.batch)[:, rows.queries]
        directions = einsum(
            self.next_direction(next_tokens, rows.layer),
            w_o,
            "batch query d_model, head d_head d_model -> batch head query d_head",
        )

        values = for_each_head(v.to(directions.dtype), len(w_o))
        members = rows.batch.members()[:, None, :, rows.keys].to(directions.dtype)
        if self.gate is None:
            key_logits = rows.pattern * (directions @ values.mT)
            sums["from_keys"][:, :, rows.queries] = key_logits @ members.mT
            return

        # The gate multiplies each channel and fires later, so channels are kept apart until then.
        segment_values = members[..., None] * values[:, :, None]
        segment_z = rows.pattern.to(values.dtype)[:, :, None] @ segment_values
        channel_logits = segment_z * directions[:, :, None]
        if rows.is_first_block:  # ``start`` does not know d_head
            d_head = values.shape[-1]
            sums["by_channel"] = values.new_zeros(*sums["from_keys"].shape, d_head)
        sums["by_channel"][:, :, rows.queries] = channel_logits.transpose(2, 3)

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Apply the gate, and keep the scale of the norm after attention."""
        if self.gate is not None:
            channel_logits = sums.pop("by_channel")
            gate = self.gate.function(captures.by_head(self.gate.hook, channel_logits.shape[1]))
            # A gate has one number per head, or one per channel.
            gate_by_head = rearrange(gate, "batch pos head d -> batch head pos 1 d")
            sums["from_keys"] = (channel_logits * gate_by_head).sum(-1)
        norm = self.norms.get(captures.layer)
        if norm is not None:
            sums["norm_scale"] = norm.scale(captures.tensors[NORM_INPUT])[:, None]

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over those queries of each segment that have a next token."""
        scale = sums["scale"]
        if self.norms:  # a model has one in each measured layer, or none
            scale = scale * sums["norm_scale"]
        from_keys = sums["from_keys"] / scale[..., None]
        has_next = _has_next(batch)[:, None]
        is_query = (batch.members() & has_next).to(from_keys.dtype)[:, None]
        query_counts = is_query.sum(-1)[..., None]

        # The number of keys of each segment that each query sees.
        visible = seen_keys(batch, batch.positions, window).to(from_keys.dtype)
        key_counts = (visible @ batch.members().to(from_keys.dtype).mT)[:, None]
        per_key = torch.where(key_counts > 0, from_keys / key_counts, 0.0)
        # The number of queries of the segment that see a key of to_segment.
        seeing_counts = is_query @ (key_counts > 0).to(from_keys.dtype)

        is_empty = seeing_counts == 0  # a segment without queries, or without keys that they see
        from_mean = is_query @ from_keys / query_counts
        per_key_mean = is_query @ per_key / seeing_counts
        return {
            "next_token_logit_from": from_mean.masked_fill(is_empty, torch.nan),
            "next_token_logit_per_key": per_key_mean.masked_fill(is_empty, torch.nan),
        }


@dataclass(frozen=True)
class _Gate:
    """A gate that multiplies z."""

    hook: str  # within the block
    function: Callable[[Tensor], Tensor]  # from the value at the hook to the gate


def _next_tokens(batch: Batch) -> Tokens:
    """The token after each; arbitrary for those that :func:`_has_next` leaves out."""
    return batch.tokens.roll(-1, 1)


def _has_next(batch: Batch) -> Marked:
    """Whether a token has a next token."""
    return torch.nn.functional.pad(batch.real[:, 1:], (0, 1))
