"""A tokenizer for models without one: its tokens are a, b, … z, aa, ab …"""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any


def lettered_tokenizer(size: int) -> Any:
    """A transformers tokenizer for token ids without meaning: tokens are separated by spaces, none is special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({_name(number): number for number in range(size)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _name(number: int) -> str:
    more, last = divmod(number, len(ascii_lowercase))
    return (_name(more - 1) if more else "") + ascii_lowercase[last]
