"""What each head adds to the logit of the token that comes next, straight through the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, Captures, Quantity, Sums
from mechattn.functional.received import segment_mean
from mechattn.functional.updates import update_product
from mechattn.model.hooked import HookedModel
from mechattn.model.weights import output_weights, unembedding, wide
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch


@dataclass(frozen=True)
class DirectLogits(AnalysisBase):
    """Direct logit attribution: what each head adds to the logit of the token that comes next in the text.

    ``⟨z W_O, γ · (W_U[:, next] − mean over the vocabulary)⟩ / σ``, in logits above the mean logit; γ is the weight of
    the final norm and σ its scale at this token (in a LayerNorm the mean is taken off first). Added over all heads of
    all layers, and the same for the embedding, the MLPs and the biases, it gives the logit. The model runs to its end,
    whatever the layers. Means over the tokens of each segment; the last token has no next.

    Source:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
    """

    per_query: bool = False
    weights: Any = field(default=None, repr=False, compare=False)
    reads: Any = field(default=None, repr=False, compare=False)

    name = "direct_logits"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Of each head."""
        about = "direct contribution to the logit of the next token, above the mean over the vocabulary"
        mean = Quantity(("head", "segment"), "logits", f"{about}, mean over the tokens of the segment", "difference")
        made = {"next_token_logit": mean}
        if self.per_query:
            made["next_token_logit_at"] = Quantity(("head", "key"), "logits", f"{about}, of each token")
        return made

    @property
    def captures(self) -> Seq[str]:
        """Each head's output before W_O."""
        return ("attn.hook_z",)

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """With W_O of the layers, and the unembedding.

        Raises:
            ModelError: A head's update does not reach the logits as it is.
        """
        weights = {layer: output_weights(model, layer) for layer in layers}
        return replace(self, weights=weights, reads=unembedding(model))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Nothing measured yet."""
        return {}

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """The product of each head's update with the direction of the next token, before the final norm's scale."""
        assert self.weights is not None, "calibrated() comes first"
        assert self.reads is not None, "calibrated() comes first"
        w_o = wide(self.weights[captures.layer])
        following = captures.batch.tokens.roll(-1, 1)
        toward = self.reads.direction(following).to(w_o.dtype)
        sums["product"] = update_product(captures.by_head("attn.hook_z", len(w_o)).to(w_o.dtype), w_o, toward)

    def add_final(self, sums: Sums, stream: Float[Tensor, "batch pos d_model"]) -> None:
        """The scale of the final norm."""
        assert self.reads is not None, "calibrated() comes first"
        sums["scale"] = self.reads.scale(stream)[:, None]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over segments; the last token has no next."""
        last = batch.real & ~batch.real.roll(-1, 1)
        last[:, -1] |= batch.real[:, -1]
        each = (sums["product"] / sums["scale"]).masked_fill((last | ~batch.real)[:, None], torch.nan)
        made = {"next_token_logit": segment_mean(each, batch.members())}
        return made | ({"next_token_logit_at": each} if self.per_query else {})
