"""The tokens of the verification probe."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from mechattn.model import hooks
from mechattn.model.hooked import HookedModel

PROBE = 24
LONGEST_PROBE = 136


def probe_tokens(model: HookedModel, length: int) -> Int[Tensor, "1 pos"]:
    """Random ordinary tokens, the same each time, after a BOS token if the model is used with one."""
    windows = [hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)]
    short = [w + 8 for w in windows if w is not None and w + 8 <= LONGEST_PROBE]
    length = min(max([length, *short]), int(model.cfg.n_ctx or LONGEST_PROBE))
    tokenizer = getattr(model, "tokenizer", None)
    special = set(getattr(tokenizer, "all_special_ids", []) or [])
    size = min(int(model.cfg.d_vocab), len(tokenizer)) if tokenizer is not None else int(model.cfg.d_vocab)
    drawn = torch.randint(size, (2 * max(length, LONGEST_PROBE),), generator=torch.Generator().manual_seed(0))
    ordinary = [token for token in drawn.tolist() if token not in special][:length]
    bos = getattr(tokenizer, "bos_token_id", None)
    if getattr(model.cfg, "default_prepend_bos", False) and bos is not None:
        ordinary[0] = bos
    return torch.tensor([ordinary])
