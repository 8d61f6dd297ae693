"""Classifies tokens as digit, operator, conjunction or other."""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

TOKEN_CLASSES = ("digit", "operator", "conjunction", "other")
_OPERATOR = re.compile(r"[-+*/=<>^%×÷·±√≤≥≠∑∏−]+|\\(?:times|div|cdot|frac|sqrt|pm|leq|geq|neq)")
_CONJUNCTIONS = (
    "and or but nor so yet for because if then than when while since although though unless until whereas once as that "
    "whether after before therefore thus hence however"
)


def token_class(text: str) -> str:
    """The class of a token's text without surrounding spaces; part of a word counts as the whole word."""
    word = text.replace("▁", " ").strip()
    if word and all(c.isnumeric() or c in ".," for c in word) and any(c.isnumeric() for c in word):
        return "digit"
    if _OPERATOR.fullmatch(word):
        return "operator"
    return "conjunction" if word.lower() in _CONJUNCTIONS.split() else "other"


def vocabulary_classes(tokenizer: Any, size: int) -> Int[Tensor, " d_vocab"]:
    """The index in ``TOKEN_CLASSES`` of every token id; all "other" without a tokenizer."""
    other = TOKEN_CLASSES.index("other")
    if tokenizer is None:
        return torch.full((size,), other)
    known = min(size, len(tokenizer))
    texts = tokenizer.batch_decode([[i] for i in range(known)])
    made = [TOKEN_CLASSES.index(token_class(text)) for text in texts]
    return torch.tensor(made + [other] * (size - known))
