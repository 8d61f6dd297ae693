"""Statistics of MLP activations over channels, ARM, and the random numbers that ARM uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.attention import in_working_dtype

Channels = Float[Tensor, "*token channel"]
TokenValues = Float[Tensor, "*token"]
Entries = Float[Tensor, "row entry"]  # a row is a token, or the whole tensor
Integers = Int[Tensor, "*any"]
Form = Literal["paper", "released_llama", "released_qwen2", "gemma"]
Scope = Literal["token", "tensor"]
Control = Literal["random_direction", "random_channels", "shuffled_signs"]

_KAPPA = 1.4826  # makes the MAD of normal data equal to their standard deviation
_LEAST_MAD = 1e-12  # keeps the threshold above 0 if most entries are equal
# The smallest and the largest share of entries that each form moves.
_SHARES = {"paper": (0.02, 0.25), "released_llama": (0.2, 0.25), "released_qwen2": (0.02, 0.25)}
_HIGH_SHARE = 0.75  # above this rank, as a share of n, topk is faster than sorting all entries

# The constants of SplitMix64 as signed integers, since torch cannot add or multiply unsigned ones.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def near_zero_share(x: Channels, threshold: float) -> TokenValues:
    """The share of channels with ``|x| ≤ threshold``.

    Args:
        x: Activations after the nonlinearity.
        threshold: The largest size that counts as near zero.

    Returns:
        Shares from 0 to 1, one for each token.
    """
    return (x.abs() <= threshold).float().mean(-1)


def saturated_share(x: Channels, pre: Channels, threshold: float, minimum: float) -> TokenValues:
    """The share of channels with ``|x| ≤ threshold`` and ``pre`` below the nonlinearity's minimum.

    SiLU and GELU are near zero around ``pre = 0``, and also far below it, where a channel is
    switched off. The minimum lies between the two.

    Args:
        x: Activations after the nonlinearity.
        pre: The inputs of the nonlinearity.
        threshold: The largest size that counts as near zero.
        minimum: The input at which the nonlinearity has its minimum, see :func:`minimum_of`.

    Returns:
        Shares from 0 to 1, one for each token.
    """
    near_zero = x.abs() <= threshold
    return (near_zero & (pre < minimum)).float().mean(-1)


def minimum_of(nonlinearity: Callable[[Tensor], Tensor]) -> float:
    """The largest input in [−20, 0] at which a nonlinearity has its minimum over this range.

    It is −1.28 for SiLU, −0.75 for GELU and 0 for ReLU. For a nonlinearity that rises everywhere,
    such as tanh, it is below −15, so that hardly any input counts as saturated.

    Args:
        nonlinearity: An elementwise function that takes float64.

    Returns:
        The input, to within 0.0001.
    """
    grid = torch.linspace(-20, 0, 200_001, dtype=torch.float64)  # in steps of 0.0001
    values = nonlinearity(grid)
    inputs_at_minimum = grid[values == values.min()]
    return float(inputs_at_minimum.max())


def gini(x: Channels) -> TokenValues:
    """The Gini coefficient of ``|x|``: 0 if all channels are equally active, ``1 − 1/n`` if only
    one of n is.

    ``G = 2 Σ i·|x|₍ᵢ₎ / (n Σ |x|) − (n + 1) / n`` with ``|x|₍₁₎ ≤ |x|₍₂₎ ≤ …``

    Args:
        x: Activations, or any numbers of each channel; at least in float32, to hold the ranks.

    Returns:
        Coefficients from 0 to 1, one for each token; NaN if all its channels are 0.
    """
    sorted_sizes = x.abs().sort(-1).values
    n = sorted_sizes.shape[-1]
    ranks = torch.arange(1, n + 1, device=x.device, dtype=sorted_sizes.dtype)

    ranked_sum = sorted_sizes @ ranks
    total = sorted_sizes.sum(-1)
    return 2 * ranked_sum / (n * total) - (n + 1) / n


def kurtosis(x: Channels) -> TokenValues:
    """``mean of (x − mean)⁴ / variance²``: 3 for a normal distribution, more for heavy tails.

    Args:
        x: Activations, or any numbers of each channel.

    Returns:
        The kurtosis (not the excess kurtosis) of each token's channels; NaN if all are equal.
    """
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)

    # Divided first, because the fourth power of large numbers could overflow.
    standardised = centred / variance.sqrt()
    return standardised.pow(4).mean(-1)


def counts_between(x: Float[Tensor, "*any"], edges: Float[Tensor, " edge"]) -> Int[Tensor, " bin"]:
    """The number of entries below the first edge, in each ``[edge, next edge)``, and from the last
    edge on.

    Args:
        x: Numbers of any shape, none of them NaN.
        edges: Edges in ascending order.

    Returns:
        One count more than there are edges.
    """
    bins = torch.bucketize(x.flatten(), edges, right=True)
    return torch.bincount(bins, minlength=len(edges) + 1)


def redistribute(
    x: Channels,
    uniform: Channels,
    c: float,
    p1: float,
    form: Form = "paper",
    scope: Scope = "token",
    strength: float = 1.0,
) -> Channels:
    """Apply ARM to activations: ``x + strength · (arm(x) − x)``.

    Let ``ε = 1.4826 · c · MAD(|x|)``, and p the share of entries with ``|x| ≤ ε``. ARM moves the
    ``round(clip(p) · n)`` smallest ``|x|``; of equal ones, those with lower indices come first. The
    bound of a positive entry is the ``p1``-th percentile of x, at least 0. The bound of a negative
    entry is ``min(x)``. Entries that are 0, or whose bound is 0, are not moved.

    - "paper": p is clipped to [0.02, 0.25], and ``uniform · bound`` is added.
    - "released_llama" (the published code's file for Llama): p is clipped to [0.2, 0.25], and the
      entry becomes ``uniform · bound``. Some entries move towards 0.
    - "released_qwen2" (its file for Qwen2): as for Llama, with p clipped to [0.02, 0.25].
    - "gemma" (its file for Gemma 3): all entries with ``|x| ≤ quantile(|x|, c)`` become
      ``uniform · bound``, where the bound of positive entries is the percentile of ``|x|``.

    Medians are lower medians, percentiles are interpolated linearly, and halves are rounded to
    even. Statistics are at least in float32.

    Args:
        x: Activations after the nonlinearity.
        uniform: Random numbers in [0, 1) of the same shape, see
            :func:`mechattn.functional.activations.keyed_uniform`.
        c: The factor of the threshold; for "gemma" the share itself.
        p1: A percentile, 0 to 100.
        form: The published form.
        scope: "token" takes statistics and selects over the channels of each token. "tensor" does
            so over the whole tensor, as published; the result then depends on batch and padding.
        strength: The fraction of the change to apply.

    Returns:
        Activations in the dtype of ``x``. Entries that are not moved keep every bit.
    """
    # Each row, a token's channels or the whole tensor, has statistics of its own.
    row_length = x.shape[-1]
    if scope == "tensor":
        row_length = x.numel()
    stored_rows = x.reshape(-1, row_length)
    rows = in_working_dtype(stored_rows)
    uniform_of_rows = uniform.reshape(rows.shape).to(rows.dtype)

    sizes = rows.abs()
    if form == "gemma":
        is_small = sizes <= _percentile(sizes, 100 * c)
        upper = _percentile(sizes, p1)
    else:
        # Stable, so that lower indices come first among equal entries.
        sorted_sizes, order = sizes.sort(dim=-1, stable=True)
        ranks = torch.arange(row_length, device=sizes.device)
        is_low_rank = ranks < _moved_count(sorted_sizes, c, _SHARES[form])[:, None]
        is_small = torch.empty_like(is_low_rank).scatter_(-1, order, is_low_rank)
        upper = _percentile(rows, p1).clamp(min=0)

    # A positive entry is bounded by the percentile, a negative one by the row's smallest entry.
    lower = rows.amin(-1, keepdim=True).clamp(max=0)
    bound = torch.where(rows > 0, upper, lower)
    target = uniform_of_rows * bound
    if form == "paper":
        target = rows + target
    moved = rows + strength * (target - rows)

    is_moved = is_small & (rows != 0) & (bound != 0)
    return torch.where(is_moved, moved.to(x.dtype), stored_rows).reshape(x.shape)


def as_control(change: Channels, uniform: Channels, control: Control) -> Channels:
    """A random change that serves as a control for the given one.

    - "random_direction": a random direction, of the same norm.
    - "random_channels": the same numbers, in channels drawn at random.
    - "shuffled_signs": the same sizes in the same channels, with signs drawn at random.

    Args:
        change: What an intervention adds at each token.
        uniform: Random numbers in [0, 1) of the same shape, see :func:`keyed_uniform`.
        control: The kind of control.

    Returns:
        A change with the norm of the given one at each token.
    """
    if control == "random_direction":
        direction = (2 * uniform - 1).to(change.dtype)
        norm = change.norm(dim=-1, keepdim=True)
        direction_norm = direction.norm(dim=-1, keepdim=True)
        return direction * (norm / direction_norm)

    if control == "random_channels":
        permutation = uniform.argsort(stable=True, dim=-1)
        return change.gather(-1, permutation)

    # "shuffled_signs": each sign is turned with probability 1/2.
    return torch.where(uniform < 0.5, -change, change)


def mad_threshold(sorted_sizes: Entries, c: float) -> Float[Tensor, "row 1"]:
    """ARM's threshold ε of each row, ``1.4826 · c · MAD(|x|)``, with lower medians.

    Args:
        sorted_sizes: The absolute values of each row, in ascending order.
        c: The factor of the threshold.

    Returns:
        Thresholds. They are above 0 for ``c`` above 0, because a MAD below 1e-12 counts as 1e-12.
    """
    middle = (sorted_sizes.shape[-1] - 1) // 2
    median = sorted_sizes[:, middle : middle + 1]
    deviations = (sorted_sizes - median).abs()
    mad = deviations.kthvalue(middle + 1, dim=-1, keepdim=True).values
    return _KAPPA * c * mad.clamp(min=_LEAST_MAD)


def token_keys(
    seed: int,
    prompts: Sequence[str],
    positions: Int[Tensor, "row pos"],
    layer: int,
    purpose: str = "",
) -> Int[Tensor, "row pos"]:
    """A key for each token, from the seed, its prompt, position and layer, and a purpose.

    Args:
        seed: The seed of a run.
        prompts: The id of each row's prompt.
        positions: The position of each token in its prompt.
        layer: The layer whose activations are changed.
        purpose: A text; different texts give a token independent random numbers.

    Returns:
        64-bit integers, which do not depend on the batch that a token is in.
    """
    hashes = []
    for prompt in prompts:
        text = f"{seed} {layer} {purpose} {prompt}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little", signed=True))

    first_states = torch.tensor(hashes, dtype=torch.long, device=positions.device)
    states = first_states[:, None] + positions.long() * _GOLDEN
    return _mix(states)


def keyed_uniform(keys: Int[Tensor, "*token"], channels: int) -> Float[Tensor, "*token {channels}"]:
    """Uniform random numbers in [0, 1) for each channel of each token, from SplitMix64.

    Args:
        keys: A key for each token, see :func:`token_keys`.
        channels: The number of channels.

    Returns:
        Multiples of 2⁻²⁴ in float32, the same on every device.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    steps = torch.arange(1, channels + 1, device=keys.device)
    states = keys.unsqueeze(-1) + steps * _GOLDEN
    mixed = _mix(states)

    # The upper 24 bits, which float32 represents exactly.
    top_bits = (mixed >> 40) & 0xFFFFFF
    return top_bits.float() / 2**24


def _moved_count(
    sorted_sizes: Entries, c: float, share_bounds: tuple[float, float]
) -> Int[Tensor, " row"]:
    """The number of entries to move in each row, ``round(clip(p) · n)``."""
    n = sorted_sizes.shape[-1]
    threshold = mad_threshold(sorted_sizes, c)

    # In float64: a whole tensor may have more entries than float32 can count.
    share = (sorted_sizes <= threshold).sum(-1).double() / n
    count = share.clamp(*share_bounds) * n
    return count.round().long()


def _percentile(x: Entries, percent: float) -> Float[Tensor, "row 1"]:
    """The percentile of each row, interpolated linearly.

    ``torch.quantile`` takes at most 2²⁴ entries (pytorch/pytorch#64947).
    """
    n = x.shape[-1]
    position = percent / 100 * (n - 1)
    rank = int(position)
    if rank > _HIGH_SHARE * n:
        sorted_from_rank = x.topk(n - rank, -1).values.flip(-1)
    else:
        sorted_from_rank = x.sort(-1).values[:, rank:]

    # No value follows the last one. The next value's weight is then 0.
    next_index = min(1, n - 1 - rank)
    value = sorted_from_rank[:, 0, None]
    next_value = sorted_from_rank[:, next_index, None]
    return torch.lerp(value, next_value, position - rank)


def _mix(z: Integers) -> Integers:
    """The finaliser of SplitMix64, in 64-bit integers that wrap around."""
    z = (z ^ _unsigned_shift(z, 30)) * _FIRST_FACTOR
    z = (z ^ _unsigned_shift(z, 27)) * _SECOND_FACTOR
    return z ^ _unsigned_shift(z, 31)


def _unsigned_shift(z: Integers, bits: int) -> Integers:
    """Shift to the right and fill with zeros, as for an unsigned integer."""
    remaining_bits = 2 ** (64 - bits) - 1
    return (z >> bits) & remaining_bits
