"""The attention budget: attention of queries to segments, and what it would be at the positions of
a longer sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
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
    """How a layer rotates its queries and keys by position (RoPE): pair i of the dimensions by
    ``position · f[i]``.

    Source: Su et al., arXiv:2104.09864.
    """

    frequencies: Float[Tensor, " pair"]  # radians per position; empty in a layer without positions
    adjacent: bool = False  # whether dimensions 2i and 2i + 1 are a pair; otherwise i and i + pairs
    first: int = 0  # the first rotated dimension

    def turns(
        self, old: Int[Tensor, "batch pos"], new: Int[Tensor, "batch pos"], dtype: torch.dtype
    ) -> Turns:
        """Cosine and sine of the angles between the old and the new positions.

        Args:
            old: The positions at which queries or keys were rotated.
            new: Those to which they are moved.
            dtype: The dtype of the result.

        Returns:
            Cosine and sine for each position and pair of dimensions.
        """
        frequencies = self.frequencies.float().to(old.device)

        # The model rounds each angle to float32. Rounding likewise gives its own angles, and not
        # only nearly them.
        old_angles = old[:, None, :, None].float() * frequencies
        new_angles = new[:, None, :, None].float() * frequencies

        # Their difference is small, and would lose digits in float32.
        difference = new_angles.double() - old_angles.double()
        return difference.cos().to(dtype), difference.sin().to(dtype)

    def moved(self, x: Vectors, turns: Turns) -> Vectors:
        """Rotated queries or keys at other positions: ``R(new) x = R(new − old) R(old) x``.

        Args:
            x: Queries or keys, rotated at their old positions; not changed.
            turns: Cosine and sine, see :meth:`turns`.

        Returns:
            A copy, as the layer would have rotated it at the new positions.
        """
        cos, sin = turns
        pairs = len(self.frequencies)
        moved = x.clone()

        last = self.first + 2 * pairs
        rotated = moved[..., self.first : last]
        if self.adjacent:
            real, imaginary = rotated.unflatten(-1, (pairs, 2)).unbind(-1)
        else:
            real, imaginary = rotated.unflatten(-1, (2, pairs)).unbind(-2)

        # Both are parts of the copy, which is changed in place: other tensors would cost as much as
        # the rotation.
        turned = real * cos - imaginary * sin
        imaginary.mul_(cos)
        imaginary.addcmul_(real, sin)
        real.copy_(turned)
        return moved


NO_ROTATION = Rotation(torch.zeros(0))  # of a layer without positions in its queries and keys
_ROUNDINGS = 8  # of the largest entry: two rotations instead of one differ by less


def before_hidden_states(
    attention: Attention,
    longer: Int[Tensor, " row"],
    baseline: Int[Tensor, " row"],
    origin: Int[Tensor, "row pos"],
    rotation: Rotation,
    turns: Turns,
    queries: slice,
) -> Attention:
    """The attention of some queries of longer sequences, had their hidden states not changed.

    The original tokens have the queries and keys of the baseline, at their positions in the longer
    sequence; the inserted tokens have their own keys. Window, bias, cap, sinks and cut edges are
    those of the longer sequence.

    Args:
        attention: A layer's attention for a batch with both.
        longer: The rows of the longer sequences.
        baseline: The row of the baseline of each.
        origin: For each position of a longer sequence its position in the baseline; negative where
            there is none.
        rotation: How the layer rotates queries and keys.
        turns: By how much, for each position of the longer sequences.
        queries: The positions in the longer sequences whose queries are asked for; others keep
            their own.
    """
    dtype = working_dtype(attention.q)
    cos, sin = turns

    # Without values: rows alone are asked for.
    without_values = replace(attention, v=attention.k[..., :0])
    own = without_values.of(longer)

    def baseline_vectors(x: Vectors, positions: slice) -> Float[Tensor, "row head query d_head"]:
        """Vectors of the baseline's tokens at their positions in the longer sequence."""
        # An inserted token has no place there; what it gets here is not used.
        index = origin[:, None, positions, None].clamp(min=0)
        index = index.expand(-1, x.shape[1], -1, x.shape[3])
        original = x[baseline].gather(2, index)

        own_turns = (cos[:, :, positions], sin[:, :, positions])
        return rotation.moved(original.to(dtype), own_turns)

    is_original = (origin >= 0)[:, None, :, None]

    # Other queries are not asked for, and moving them would cost as much.
    q = own.q.to(dtype, copy=True)
    q[:, :, queries] = torch.where(
        is_original[:, :, queries],
        baseline_vectors(attention.q, queries),
        q[:, :, queries],
    )

    # All keys, since any of these queries may see them.
    k_of_baseline = baseline_vectors(attention.k, slice(None))
    k = torch.where(is_original, k_of_baseline, own.k.to(dtype))
    return replace(own, q=q, k=k)


def is_unchanged(before: Attention, after: Attention) -> Bool[Tensor, " row"]:
    """Whether two rotations instead of one are all that tells the queries and keys of a row apart.

    So it is in layer 0, whose hidden states are embeddings. What large biases, as Qwen's, make of
    this rounding must not appear as a change.

    Args:
        before: Attention had the hidden states not changed, see :func:`before_hidden_states`.
        after: Attention with the changed hidden states, at the same positions.

    Returns:
        A truth value for each row, on the device of the queries.
    """

    def is_rounding(x_before: Vectors, x_after: Vectors) -> Bool[Tensor, " row"]:
        """Whether the largest difference is one of rounding."""
        eps = torch.finfo(x_after.dtype).eps
        largest = x_after.abs().amax((1, 2, 3))
        difference = (x_before - x_after).abs().amax((1, 2, 3))
        return difference <= _ROUNDINGS * eps * largest

    # As tensors: reading them here would wait for the GPU.
    return is_rounding(before.q, after.q) & is_rounding(before.k, after.k)


def masses_of_rows(pattern: Pattern, members: Members) -> Masses:
    """``mass[s, q] = Σ_{k in s} A[q, k]`` of a block of rows.

    Args:
        pattern: Attention probabilities.
        members: The segments of the block's keys.

    Returns:
        Probability mass of each query on each segment.
    """
    # Heads and queries in one product, and the few segments as its rows: other ways are several
    # times as slow.
    masses = torch.bmm(members.to(pattern.dtype), pattern.flatten(1, 2).mT)
    return masses.unflatten(-1, pattern.shape[1:3])


def segment_masses(attention: Attention, members: Members, queries: slice) -> Masses:
    """The masses of these queries, from attention without values.

    Args:
        attention: A layer's attention, the values of which are not read.
        members: The segments of all keys.
        queries: The positions of these queries.

    Returns:
        Probability mass of each of the queries on each segment.
    """
    blocks: list[Tensor] = []

    def see(rows: Rows) -> None:
        blocks.append(masses_of_rows(rows.pattern, members[..., rows.keys]))

    attention_by_rows(attention, see, queries=queries)
    return torch.cat(blocks, -1)


def mean_over_queries(masses: Masses, weights: Float[Tensor, " batch #head query"]) -> Means:
    """The mean of each query's masses, weighted; the weights of a sequence add up to 1.

    Args:
        masses: Masses of some queries.
        weights: The weight of each of these queries, for all heads or for each.

    Returns:
        Probability mass of each segment.
    """
    weights = weights.to(masses.dtype).expand(-1, masses.shape[2], -1)
    return torch.einsum("bshq,bhq->bhs", masses, weights)


def mean_among_original(
    masses: Masses, weights: Float[Tensor, "batch 1 query"], inserted: int, sinks: bool
) -> Means:
    """The mean of what a softmax over the original keys alone would give: ``A_s / (1 −
    A_inserted)``, 0 for inserted.

    Args:
        masses: Masses of a softmax over all keys.
        weights: As in :func:`mean_over_queries`.
        inserted: The index of the segment of inserted tokens.
        sinks: Whether learned sinks take part of each row, so that its masses do not add up to 1.
    """
    if sinks:
        left = 1 - masses[:, inserted]
    else:
        # This sum is exact however little is left; 1 − A_inserted would lose digits.
        before = masses[:, :inserted].sum(1)
        after = masses[:, inserted + 1 :].sum(1)
        left = before + after

    # The weights are divided, and not the masses, which have an entry for each segment too.
    tiny = torch.finfo(masses.dtype).tiny
    mean = mean_over_queries(masses, weights / left.clamp(min=tiny))
    mean[..., inserted] = 0
    return mean
