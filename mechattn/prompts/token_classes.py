"""Classes of tokens by their text, such as "digit"."""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

TOKEN_CLASSES = ("digit", "operator", "conjunction", "other")
_OPERATOR = re.compile(r"[-+*/=<>^%×÷·±√≤≥≠∑∏−]+|\\(?:times|div|cdot|frac|sqrt|pm|leq|geq|neq)")
_CONJUNCTION = re.compile(
    "and|or|but|nor|so|yet|for|because|if|then|than|when|while|since|although|though|unless|until"
    "|whereas|once|as|that|whether|after|before|therefore|thus|hence|however"
)


def token_class(text: str) -> str:
    """The class of a token by its text, without the white space around it.

    A token that is only a part of a word is classed as if it were a word: "or" in "or|ange" is a
    "conjunction".
    """
    word = text.replace("▁", " ").strip()
    if word.replace(".", "").replace(",", "").isnumeric():
        return "digit"
    if _OPERATOR.fullmatch(word):
        return "operator"
    if _CONJUNCTION.fullmatch(word.lower()):
        return "conjunction"
    return "other"


def vocabulary_classes(tokenizer: Any, size: int) -> Int[Tensor, " d_vocab"]:
    """The index in ``TOKEN_CLASSES`` of the class of every token id.

    Without a tokenizer all are "other", as are ids beyond its vocabulary.
    """
    classes = torch.full((size,), TOKEN_CLASSES.index("other"))
    if tokenizer is None:
        return classes
    token_ids = range(min(size, len(tokenizer)))
    texts = tokenizer.batch_decode([[token_id] for token_id in token_ids])
    for token_id, text in enumerate(texts):
        classes[token_id] = TOKEN_CLASSES.index(token_class(text))
    return classes
