"""Keyed random numbers: a token's draws do not depend on batch, order or device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def token_keys(
    seed: int, prompts: Sequence[str], positions: Int[Tensor, "row pos"], layer: int, purpose: str = ""
) -> Int[Tensor, "row pos"]:
    """A key for each token of some rows, from the seed, the row's prompt, the position, the layer and a purpose."""
    words = [f"{seed} {layer} {purpose} {prompt}".encode() for prompt in prompts]
    hashes = [int.from_bytes(hashlib.blake2b(w, digest_size=8).digest(), "little", signed=True) for w in words]
    rows = torch.tensor(hashes, dtype=torch.long, device=positions.device)
    return _mix(rows[:, None] + positions.long() * _GOLDEN)


def keyed_uniform(keys: Int[Tensor, "*token"], channels: int) -> Float[Tensor, "*token {channels}"]:
    """Numbers in [0, 1), multiples of 2⁻²⁴, one for each channel of each token: the bits of SplitMix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    channel = torch.arange(1, channels + 1, device=keys.device)
    return ((_mix(keys.unsqueeze(-1) + channel * _GOLDEN) >> 40) & 0xFFFFFF).float() / 2**24


def _mix(z: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """The finaliser of SplitMix64, in 64-bit integers that wrap around."""
    z = (z ^ _unsigned_shift(z, 30)) * _FIRST
    z = (z ^ _unsigned_shift(z, 27)) * _SECOND
    return z ^ _unsigned_shift(z, 31)


def _unsigned_shift(z: Int[Tensor, "*any"], by: int) -> Int[Tensor, "*any"]:
    return (z >> by) & (2 ** (64 - by) - 1)
