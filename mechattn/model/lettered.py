"""A tokenizer for models without one: its tokens are a, b, … z, aa, ab …"""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any


def lettered_tokenizer(size: int) -> Any:
    """A tokenizer of transformers for token ids without meaning, with spaces between them and no special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({_name(number): number for number in range(size)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _name(number: int) -> str:
    more, last = divmod(number, len(ascii_lowercase))
    return (_name(more - 1) if more else "") + ascii_lowercase[last]
