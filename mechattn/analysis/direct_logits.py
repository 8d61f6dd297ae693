"""What each head adds directly to the logit of the next token, through the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, Captures, Quantity, Sums
from mechattn.errors import ModelError
from mechattn.functional.received import segment_mean
from mechattn.functional.updates import update_product
from mechattn.model.frozen_norm import FrozenNorm, frozen_norm
from mechattn.model.hooked import HookedModel
from mechattn.model.unembedding import unembedding
from mechattn.model.weights import output_weights, wide
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch

_Z, POST = "attn.hook_z", "ln1_post.hook_in"


@dataclass(frozen=True)
class DirectLogits(AnalysisBase):
    """Direct logit attribution: what each head adds to the logit of the next token in the text.

    ``⟨Δ, γ · (W_U[:, next] − mean over the vocabulary)⟩ · f / σ``, in logits above the mean logit; Δ is the head's
    update of the residual stream, γ the weight of the final norm and σ its scale at this token (LayerNorm subtracts the
    mean first), f the factor of the logits (Cohere, Granite; 1 in most models). ``Δ = z W_O``; where a norm follows
    attention (Gemma 2 and 3, OLMo 2), ``Δ = γ' · z W_O / σ'`` with the scale σ' of the whole block's output at this
    token. Both scales are held fixed. The sum over all heads of all layers, the embedding, the MLPs and the biases is
    the logit (before the cap in a model that caps its logits, such as Gemma 2). The model always runs to its last
    layer. Means over the tokens of each segment; the last token has no next token.

    Args:
        per_query: Also keep the value of each token, as ``next_token_logit_at``.

    Source:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
    """

    per_query: bool = False
    weights: Any = field(default=None, repr=False, compare=False)
    reads: Any = field(default=None, repr=False, compare=False)  # Unembedding
    norms: Any = field(default=None, repr=False, compare=False)  # of each layer, the FrozenNorm after its attention

    name = "direct_logits"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The contribution of each head."""
        about = (
            "direct contribution to the logit of the next token (before any cap), above the mean over the vocabulary"
        )
        mean = Quantity(("head", "segment"), "logits", f"{about}, mean over the tokens of the segment", "difference")
        made = {"next_token_logit": mean}
        if self.per_query:
            made["next_token_logit_at"] = Quantity(("head", "key"), "logits", f"{about}, of each token")
        return made

    @property
    def captures(self) -> Seq[str]:
        """Each head's output before W_O; the input of the norm after attention, where there is one."""
        return (_Z, POST) if self.norms else (_Z,)

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Prepare W_O of the layers, the norms after attention, and the unembedding.

        Raises:
            ModelError: A head's update, or its path to the logits, cannot be computed for this model.
        """
        weights = {layer: output_weights(model, layer) for layer in layers}
        return replace(self, weights=weights, reads=unembedding(model), norms=norms_after(model, layers))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return {}

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Multiply each head's update with the direction of the next token, before the scale of the final norm."""
        assert self.weights is not None, "calibrated() comes first"
        assert self.reads is not None, "calibrated() comes first"
        w_o, norm = wide(self.weights[captures.layer]), (self.norms or {}).get(captures.layer)
        z = captures.by_head(_Z, len(w_o)).to(w_o.dtype)
        toward = self.reads.direction(captures.batch.tokens.roll(-1, 1)).to(w_o.dtype)
        if norm is None:
            sums["product"] = update_product(z, w_o, toward)
            return
        scale = norm.scale(captures.tensors[POST]).to(w_o.dtype)
        sums["product"] = update_product(z, w_o, norm.toward(toward)) / scale[:, None]

    def add_final(self, sums: Sums, stream: Float[Tensor, "batch pos d_model"]) -> None:
        """Keep the scale of the final norm."""
        assert self.reads is not None, "calibrated() comes first"
        sums["scale"] = self.reads.scale(stream)[:, None]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments; the last token has no next token."""
        last = batch.real & ~batch.real.roll(-1, 1)
        last[:, -1] |= batch.real[:, -1]
        each = (sums["product"] / sums["scale"]).masked_fill((last | ~batch.real)[:, None], torch.nan)
        made = {"next_token_logit": segment_mean(each, batch.members())}
        return made | ({"next_token_logit_at": each} if self.per_query else {})


def norms_after(model: HookedModel, layers: Seq[int]) -> Mapping[int, FrozenNorm]:
    """The norms between attention and the residual stream, by layer."""
    found = {layer: getattr(model.blocks[layer], "ln1_post", None) for layer in layers}
    norms = {layer: norm for layer, norm in found.items() if norm is not None}
    named = model.hook_dict if norms else {}
    for layer in norms:
        if f"blocks.{layer}.{POST}" not in named:
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} has no hook for the input of the norm after attention, so "
                f"its scale is unknown"
            )
    return {
        layer: frozen_norm(model, norm, f"the norm after attention of layer {layer}") for layer, norm in norms.items()
    }
