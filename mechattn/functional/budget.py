"""The attention budget: attention of queries to segments, and what it would be at the positions of a longer sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import (
    Attention,
    attention_by_rows,
    fused_attention,
    widened,
)

Masses = Float[Tensor, "batch head pos segment"]  # attention of each query to each segment
Turns = tuple[Float[Tensor, "batch 1 pos pair"], Float[Tensor, "batch 1 pos pair"]]  # cos and sin


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates its queries and keys by position (RoPE): pair i of the dimensions by ``position · f[i]``.

    Source: Su et al., arXiv:2104.09864.
    """

    frequencies: Float[Tensor, " pair"]  # radians per position; empty in a layer without positions
    adjacent: bool = False  # whether dimensions 2i and 2i + 1 are a pair; otherwise i and i + pairs
    first: int = 0  # the first rotated dimension

    def turns(
        self, old: Int[Tensor, "batch pos"], new: Int[Tensor, "batch pos"], dtype: torch.dtype
    ) -> Turns:
        """Cosine and sine of the angles between the old and the new positions."""
        # The model rounds each angle to float32. Rounding likewise gives its own angles, and not only nearly them.
        frequencies = self.frequencies.float().to(old.device)
        angles = [ids[:, None, :, None].float() * frequencies for ids in (old, new)]
        difference = angles[1].double() - angles[0].double()
        return difference.cos().to(dtype), difference.sin().to(dtype)

    def moved(
        self, x: Float[Tensor, "batch head pos d_head"], turns: Turns
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Rotated queries or keys at other positions: ``R(new) x = R(new − old) R(old) x``."""
        cos, sin = turns
        pairs = len(self.frequencies)
        beyond = self.first + 2 * pairs
        layout = "(pair two)" if self.adjacent else "(two pair)"
        rotated = rearrange(x[..., self.first : beyond], f"... {layout} -> two ... pair", two=2)
        turned = torch.stack(
            [rotated[0] * cos - rotated[1] * sin, rotated[1] * cos + rotated[0] * sin]
        )
        joined = rearrange(turned, f"two ... pair -> ... {layout}")
        return torch.cat([x[..., : self.first], joined, x[..., beyond:]], -1)


NO_ROTATION = Rotation(torch.zeros(0))  # of a layer without positions in its queries and keys


def before_hidden_states(
    attention: Attention,
    longer: Int[Tensor, " row"],
    baseline: Int[Tensor, " row"],
    origin: Int[Tensor, "row pos"],
    rotation: Rotation,
    turns: Turns,
) -> Attention:
    """The attention of longer sequences, had their hidden states not changed.

    The original tokens have the queries and keys of the baseline, at their positions in the longer sequence; the
    inserted tokens have their own. Window, bias, cap, sinks and cut edges are those of the longer sequence.

    Args:
        attention: A layer's attention for a batch with both.
        longer: The rows of the longer sequences.
        baseline: The row of the baseline of each.
        origin: For each position of a longer sequence its position in the baseline; negative where there is none.
        rotation: How the layer rotates queries and keys.
        turns: By how much, for each position of the longer sequences.
    """
    own = attention.of(longer)
    source = origin.clamp(min=0)[:, None, :, None]
    parts = []
    for x in (attention.q, attention.k):
        index = source.expand(-1, x.shape[1], -1, x.shape[3])
        original = x[baseline].gather(2, index).to(widened(x))
        parts.append(rotation.moved(original, turns))
    q, k = parts
    is_original = (origin >= 0)[:, None, :, None]
    return replace(own, q=q, k=torch.where(is_original, k, own.k.to(k.dtype)))


def segment_masses(attention: Attention, members: Bool[Tensor, "batch segment pos"]) -> Masses:
    """``mass[q, s] = Σ_{k in s} A[q, k]``: the output of attention whose values say which segment a key is in."""
    kv_heads = attention.k.shape[1]
    values = members.mT[:, None].expand(-1, kv_heads, -1, -1).to(widened(attention.q))
    by_segment = replace(attention, v=values)
    if by_segment.fusable and by_segment.bias is None and by_segment.sinks is None:
        return fused_attention(by_segment).out
    return attention_by_rows(by_segment)


def mean_over_queries(
    masses: Masses, weights: Float[Tensor, "batch pos"]
) -> Float[Tensor, "batch head segment"]:
    """The mean of each query's masses, weighted; the weights of a sequence add up to 1."""
    return torch.einsum("bhqs,bq->bhs", masses, weights.to(masses.dtype))


def among_original(masses: Masses, inserted: int, sinks: bool) -> Masses:
    """The masses that a softmax over the original keys alone would give: ``A_s / (1 − A_inserted)``, 0 for inserted.

    Args:
        masses: Masses of a softmax over all keys.
        inserted: The index of the segment of inserted tokens.
        sinks: Whether learned sinks take part of each row, so that its masses do not add up to 1.
    """
    original = masses.clone()
    original[..., inserted] = 0
    # Without sinks the sum is exact however little is left; 1 − A_inserted would lose digits.
    left = 1 - masses[..., inserted] if sinks else original.sum(-1)
    return original / left.clamp(min=torch.finfo(masses.dtype).tiny)[..., None]
