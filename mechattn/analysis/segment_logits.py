"""A head's direct contribution to the logit of the next token, split by the segment of the keys it reads."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, AttentionRows, Captures, Quantity, Sums
from mechattn.analysis.direct_logits import POST, norms_after
from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError
from mechattn.functional.grouped_heads import for_each_head
from mechattn.functional.received import visible_keys
from mechattn.model.hooked import HookedModel
from mechattn.model.model_facts import facts_of
from mechattn.model.split_heads import split_heads
from mechattn.model.unembedding import unembedding
from mechattn.model.verify.mixed_values import GATES, gate_function
from mechattn.model.weights import output_weights, wide
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch

_BY_QUERY = "batch head segment query d_head -> batch head query segment d_head"
_NO_NULL = "it depends on the values"


@dataclass(frozen=True)
class SegmentLogits(AnalysisBase):
    """Split each head's direct contribution to the logit of the next token by the segment of the keys.

    ``φ[q, segment] = Σ_{k in segment} A[q, k] · ⟨v[k] W_O, u[q]⟩``, where ``⟨Δ, u[q]⟩`` is the value that
    :class:`DirectLogits` gives an update Δ at query q, with the scales of the final norm and of a norm after attention
    held fixed. If a gate of the query multiplies the head's output (Qwen3-Next), ``v[k] · g[q]`` replaces ``v[k]``. The
    sum over all segments is ``next_token_logit`` of ``DirectLogits``. Means over the queries of each segment; the last
    token has no next token.

    ``next_token_logit_per_key`` divides by the keys of the segment that the query sees. The difference of two segments
    is the contrast of a needle with the rest of its context (LOCOS).

    Source:
        arXiv:2607.01002; the next tokens of the text take the place of its answer tokens.
    """

    weights: Any = field(default=None, repr=False, compare=False)
    reads: Any = field(default=None, repr=False, compare=False)  # Unembedding
    norms: Any = field(default=None, repr=False, compare=False)  # of each layer, the FrozenNorm after its attention
    gate: Any = field(default=None, repr=False, compare=False)  # hook and function of a gate on z

    name = "segment_logits"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """From the queries of a segment to the keys of each."""
        dims = ("head", "segment", "to_segment")
        about = "direct contribution to the logit of the next token, read from the keys of to_segment"
        mean = ", mean over the queries of the segment"
        return {
            "next_token_logit_from": Quantity(dims, "logits", about + mean, "difference", _NO_NULL),
            "next_token_logit_per_key": Quantity(
                dims, "logits", f"{about}, per key seen{mean}", "difference", _NO_NULL
            ),
        }

    @property
    def captures(self) -> Seq[str]:
        """The input of the norm after attention (or z, unused, in a model without one), and the gate."""
        return (*((POST,) if self.norms else ("attn.hook_z",)), *((self.gate[0],) if self.gate else ()))

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Prepare W_O of the layers, the norms after attention, the gates of their outputs, and the unembedding.

        Raises:
            ModelError: A head's update, or its path to the logits, cannot be computed for this model; or the mixed
                values pass a norm before z, so that no key's share can be separated.
        """
        facts, gate = facts_of(model), None
        if facts is not None and facts.report is not None and "values" in facts.report.limited:
            why = facts.report.limited["values"]
            shown = next(
                (name for name in GATES if all(f"blocks.{n}.attn.{name}" in model.hook_dict for n in layers)), ""
            )
            function = gate_function(why)
            if function is None or not shown:
                raise ModelError(f"{model.cfg.model_name}: {why}; so a key's share of a head's update is not A · v W_O")
            gate = (f"attn.{shown}", function)
        weights = {layer: output_weights(model, layer) for layer in layers}
        return replace(self, weights=weights, reads=unembedding(model), norms=norms_after(model, layers), gate=gate)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        shape = (len(batch.rows), heads, batch.tokens.shape[1], len(SEGMENTS))
        return {"read": torch.zeros(shape, device=batch.tokens.device)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add the contributions that these queries read from each segment, before the norms' scales."""
        assert self.weights is not None, "calibrated() comes first"
        assert self.reads is not None, "calibrated() comes first"
        if rows.v is None:
            raise ModelError(f"layer {rows.layer} has no hook_v per head, so a key's contribution cannot be measured")
        w_o, norm = wide(self.weights[rows.layer]), (self.norms or {}).get(rows.layer)
        toward = self.reads.direction(rows.batch.tokens.roll(-1, 1)[:, rows.queries]).to(w_o.dtype)
        toward = toward if norm is None else norm.toward(toward)
        asked = einsum(toward, w_o, "batch query d_model, head d_head d_model -> batch head query d_head")
        values = for_each_head(rows.v[:, :, rows.keys].to(w_o.dtype), len(w_o))
        members = rows.batch.members()[..., rows.keys].to(w_o.dtype)
        if self.gate is not None:  # the gate of each channel comes later, so the mix of each segment is kept until then
            members = rearrange(members, "batch segment key -> batch 1 segment key 1")
            mixed = rearrange(rows.pattern.to(w_o.dtype), "batch head query key -> batch head 1 query key") @ (
                members * rearrange(values, "batch head key d_head -> batch head 1 key d_head")
            )
            if "mixed" not in sums:
                sums["mixed"] = mixed.new_zeros(*sums["read"].shape, mixed.shape[-1])
            sums["mixed"][:, :, rows.queries] = rearrange(mixed * asked.unsqueeze(2), _BY_QUERY)
            return
        each = rows.pattern * (asked @ rearrange(values, "batch head key d_head -> batch head d_head key"))
        sums["read"][:, :, rows.queries] = each @ rearrange(members, "batch segment key -> batch 1 key segment")

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Apply the gate, and keep the scale of the norm after attention."""
        if self.gate is not None:
            name, function = self.gate
            heads = sums["mixed"].shape[1]
            opened = function(split_heads(captures.tensors[name], heads))  # one number per head, or one per channel
            sums["read"] = (sums.pop("mixed") * rearrange(opened, "batch pos head d -> batch head pos 1 d")).sum(-1)
        norm = (self.norms or {}).get(captures.layer)
        if norm is not None:
            sums["post"] = norm.scale(captures.tensors[POST])[:, None]

    def add_final(self, sums: Sums, stream: Float[Tensor, "batch pos d_model"]) -> None:
        """Keep the scale of the final norm."""
        assert self.reads is not None, "calibrated() comes first"
        sums["scale"] = self.reads.scale(stream)[:, None]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment that have a next token."""
        scale = sums["scale"] * sums.get("post", torch.ones_like(sums["scale"]))
        read = sums["read"] / scale[..., None]
        last = batch.real & ~batch.real.roll(-1, 1)
        last[:, -1] |= batch.real[:, -1]
        asking = (batch.members() & ~last[:, None]).to(read.dtype)
        count = asking.sum(-1)[:, None, :, None]
        seen = _keys_seen(batch, window).to(read.dtype)[:, None]
        per_key = torch.where(seen > 0, read / seen.clamp(min=1), 0.0)
        some = rearrange(asking, "batch segment query -> batch 1 segment query")
        those = some @ (seen > 0).to(read.dtype)  # queries of the segment that see a key of to_segment
        there = (count > 0) & (those > 0)
        return {
            "next_token_logit_from": (some @ read / count).masked_fill(~there, torch.nan),
            "next_token_logit_per_key": (some @ per_key / those).masked_fill(~there, torch.nan),
        }


def _keys_seen(batch: Batch, window: int | None) -> Float[Tensor, "batch query segment"]:
    """The number of keys of each segment that each query sees."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    seen = visible_keys(places, len(places), window)[None]
    if batch.edge_mask is not None:
        seen = seen & ~batch.edge_mask.unseen(places.expand(len(batch.rows), -1), slice(0, len(places)))
    members = rearrange(batch.members().float(), "batch segment key -> batch key segment")
    return seen.float() @ members
