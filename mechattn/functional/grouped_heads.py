"""Grouped-query attention: several query heads per key-value head."""

from __future__ import annotations

from einops import repeat
from jaxtyping import Float
from torch import Tensor


def for_each_head(
    x: Float[Tensor, "batch kv_head pos *d_head"], heads: int
) -> Float[Tensor, "batch {heads} pos *d_head"]:
    """Repeat the tensor of each key-value head for its query heads: head h reads ``h // (head / kv_head)``."""
    return repeat(x, "batch kv_head pos ... -> batch (kv_head group) pos ...", group=heads // x.shape[1])
