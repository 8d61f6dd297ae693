"""The attention budget: the attention of queries to segments, and what it would be at the positions
of a longer sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.functional.attention import (
    Attention,
    Pattern,
    Rows,
    Vectors,
    attention_by_rows,
    working_dtype,
)

Masses = Float[Tensor, "batch segment head query"]  # attention of each query to each segment
Means = Float[Tensor, "batch head segment"]
Members = Float[Tensor, "batch segment key"]  # 1 where a key belongs to a segment
Turns = tuple[Float[Tensor, "batch 1 pos pair"], Float[Tensor, "batch 1 pos pair"]]  # cos and sin


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates its queries and keys (RoPE): pair i of dimensions by ``position · f[i]``.

    Source: Su et al., arXiv:2104.09864.
    """

    frequencies: Float[Tensor, " pair"]  # radians per position; empty in a layer without positions
    adjacent: bool = False  # whether dimensions 2i and 2i + 1 are a pair; otherwise i and i + pairs
    first: int = 0  # the first rotated dimension

    def turns(
        self, old: Int[Tensor, "batch pos"], new: Int[Tensor, "batch pos"], dtype: torch.dtype
    ) -> Turns:
        """The cosine and sine of the angles between the old and the new positions.

        Args:
            old: The positions at which queries or keys were rotated.
            new: The positions to which they are moved.
            dtype: The dtype of the result.

        Returns:
            Cosine and sine for each position and pair of dimensions.
        """
        frequencies = self.frequencies.float().to(old.device)

        # The model computes its angles in float32, so these have the same rounding.
        old_angles = old[:, None, :, None].float() * frequencies
        new_angles = new[:, None, :, None].float() * frequencies

        # In float64, because a small difference of large angles would lose digits.
        difference = new_angles.double() - old_angles.double()
        return difference.cos().to(dtype), difference.sin().to(dtype)

    def moved(self, x: Vectors, turns: Turns) -> Vectors:
        """Move rotated queries or keys to other positions, by ``R(new) = R(new − old) R(old)``.

        Args:
            x: Queries or keys, rotated at their old positions.
            turns: Cosine and sine, see :meth:`turns`.

        Returns:
            A copy, as the layer would have rotated it at the new positions.
        """
        cos, sin = turns
        pairs = len(self.frequencies)
        copy = x.clone()

        rotated = copy[..., self.first : self.first + 2 * pairs]
        if self.adjacent:
            real, imaginary = rotated.unflatten(-1, (pairs, 2)).unbind(-1)
        else:
            real, imaginary = rotated.unflatten(-1, (2, pairs)).unbind(-2)

        # Both are views of the copy, which is changed in place: allocating more tensors would take
        # as long as the rotation.
        turned_real = real * cos - imaginary * sin
        imaginary.mul_(cos)
        imaginary.addcmul_(real, sin)
        real.copy_(turned_real)
        return copy


NO_ROTATION = Rotation(torch.zeros(0))  # for a layer without positions in its queries and keys
# Rotating twice rather than once changes entries by less than this many roundings of the largest.
_ROUNDINGS = 8


def before_hidden_states(
    attention: Attention,
    longer_rows: Int[Tensor, " row"],
    baseline_rows: Int[Tensor, " row"],
    origin: Int[Tensor, "row pos"],
    rotation: Rotation,
    turns: Turns,
    queries: slice,
) -> Attention:
    """The attention of longer sequences if inserted tokens left the hidden states unchanged.

    The original tokens have the queries and keys of the baseline, moved to their positions in the
    longer sequence. The inserted tokens have their own. Window, bias, cap, sinks and cut edges are
    those of the longer sequence.

    Args:
        attention: A layer's attention for a batch with the longer sequences and their baselines.
        longer_rows: The rows of the longer sequences.
        baseline_rows: The row of each longer sequence's baseline.
        origin: For each position of a longer sequence, its position in the baseline; negative for
            an inserted token and padding.
        rotation: How the layer rotates queries and keys.
        turns: The rotation from the position in the baseline to that in the longer sequence.
        queries: The positions of the needed queries in the longer sequences. Other queries are not
            moved.

    Returns:
        Attention without values, for rows alone.
    """
    dtype = working_dtype(attention.q)
    cos, sin = turns

    # Values are not needed for rows alone.
    without_values = replace(attention, v=attention.k[..., :0])
    attention_of_longer = without_values.of(longer_rows)

    def baseline_vectors(x: Vectors, positions: slice) -> Float[Tensor, "row head query d_head"]:
        """Vectors of the baseline's tokens at their positions in the longer sequence."""
        # An inserted token has no position there; it gets the first token's vector, which the
        # caller replaces.
        old_positions = origin[:, None, positions, None].clamp(min=0)
        index = old_positions.expand(-1, x.shape[1], -1, x.shape[3])
        at_old_positions = x[baseline_rows].gather(2, index)

        turns_of_positions = (cos[:, :, positions], sin[:, :, positions])
        return rotation.moved(at_old_positions.to(dtype), turns_of_positions)

    is_original = (origin >= 0)[:, None, :, None]

    # Only the needed queries are moved, to save time.
    q = attention_of_longer.q.to(dtype, copy=True)
    q[:, :, queries] = torch.where(
        is_original[:, :, queries],
        baseline_vectors(attention.q, queries),
        q[:, :, queries],
    )

    # All keys are moved, since these queries may see any of them.
    k_of_baseline = baseline_vectors(attention.k, slice(None))
    k = torch.where(is_original, k_of_baseline, attention_of_longer.k.to(dtype))
    return replace(attention_of_longer, q=q, k=k)


def is_unchanged(with_old_states: Attention, with_own_states: Attention) -> Bool[Tensor, " row"]:
    """Whether the queries and keys of each row differ by no more than the rounding of a rotation.

    This is so in layer 0, whose hidden states are embeddings. With large biases, such as Qwen's,
    the rounding has visible effects, which must not be reported as a change of hidden states.

    Args:
        with_old_states: Attention with the baseline's hidden states, see
            :func:`before_hidden_states`.
        with_own_states: Attention with the sequences' own hidden states, at the same positions.

    Returns:
        True for a row that is unchanged, on the device of the queries.
    """

    def is_rounding(old_vectors: Vectors, own_vectors: Vectors) -> Bool[Tensor, " row"]:
        """Whether the largest difference of each row can be due to rounding."""
        eps = torch.finfo(own_vectors.dtype).eps
        largest = own_vectors.abs().amax((1, 2, 3))
        difference = (old_vectors - own_vectors).abs().amax((1, 2, 3))
        return difference <= _ROUNDINGS * eps * largest

    # Tensors, because reading their values would wait for the GPU.
    is_same_q = is_rounding(with_old_states.q, with_own_states.q)
    is_same_k = is_rounding(with_old_states.k, with_own_states.k)
    return is_same_q & is_same_k


def masses_of_rows(pattern: Pattern, members: Members) -> Masses:
    """The attention of each query of a block to each segment, ``mass[s, q] = Σ_{k in s} A[q, k]``.

    Args:
        pattern: Attention probabilities.
        members: The segments of the block's keys.

    Returns:
        Probability masses.
    """
    # One product with the few segments as rows, and heads and queries as columns: other layouts
    # take several times as long.
    masses = torch.bmm(members.to(pattern.dtype), pattern.flatten(1, 2).mT)
    return masses.unflatten(-1, pattern.shape[1:3])


def segment_masses(attention: Attention, members: Members, queries: slice) -> Masses:
    """The attention of some queries to each segment.

    Args:
        attention: A layer's attention. Its values may be empty, since the output is discarded.
        members: The segments of all keys.
        queries: The positions of the queries.

    Returns:
        Probability masses.
    """
    masses_of_blocks: list[Masses] = []

    def see(rows: Rows) -> None:
        masses_of_blocks.append(masses_of_rows(rows.pattern, members[..., rows.keys]))

    attention_by_rows(attention, see, queries=queries)
    return torch.cat(masses_of_blocks, -1)


def mean_over_queries(masses: Masses, weights: Float[Tensor, " batch #head query"]) -> Means:
    """The weighted mean over queries of their attention to each segment.

    Args:
        masses: The attention of some queries to each segment.
        weights: The weight of each of these queries, for all heads or for each; weights that add up
            to 1 give a mean.

    Returns:
        Probability masses of each segment.
    """
    weights_of_heads = weights.to(masses.dtype).expand(-1, masses.shape[2], -1)
    return einsum(
        masses,
        weights_of_heads,
        "batch segment head query, batch head query -> batch head segment",
    )


def mean_among_original(
    masses: Masses, weights: Float[Tensor, "batch 1 query"], inserted: int, sinks: bool
) -> Means:
    """The mean over queries of their attention to each segment s, if they saw no inserted keys.

    Without these keys, the softmax gives ``A_s / (1 − A_inserted)``.

    Args:
        masses: The attention of some queries to each segment, from a softmax over all keys.
        weights: The weight of each of these queries, as in :func:`mean_over_queries`.
        inserted: The index of the segment of inserted tokens.
        sinks: Whether learned sinks take part of each row, so that its masses do not add up to
            1.

    Returns:
        Probability masses of each segment; 0 for inserted tokens.
    """
    if sinks:
        remaining_mass = 1 - masses[:, inserted]
    else:
        # 1 − A_inserted would lose digits if little remains; the sum of the other masses does not.
        sum_before = masses[:, :inserted].sum(1)
        sum_after = masses[:, inserted + 1 :].sum(1)
        remaining_mass = sum_before + sum_after

    # Dividing the weights is cheaper than dividing the masses, which have an entry per segment.
    tiny = torch.finfo(masses.dtype).tiny
    mean = mean_over_queries(masses, weights / remaining_mass.clamp(min=tiny))
    mean[..., inserted] = 0
    return mean
