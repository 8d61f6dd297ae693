"""Prompts for a server that takes only text: refused unless the text gives exactly the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from mechattn.errors import PromptError
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence


def text_of(tokenizer: Any, ids: Seq[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token; None if there is none."""
    ids = list(ids)
    bos = getattr(tokenizer, "bos_token_id", None)
    without = [ids[1:]] if ids and ids[0] == bos else []
    for some in (*without, ids):
        text = _decoded(tokenizer, some)
        if list(tokenizer(text)["input_ids"]) == ids:
            return text
    return None


def texts_of(
    tokenizer: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], address: str
) -> dict[tuple[str, str], str]:
    """The text of each prompt under each condition; refused if one would be read as different tokens."""
    made: dict[tuple[str, str], str] = {}
    refused: list[tuple[Prompt, str, list[int]]] = []
    for prompt, by_name in zip(prompts, sequences, strict=True):
        for name, sequence in by_name.items():
            ids = sequence.tokens.tolist()
            text = text_of(tokenizer, ids)
            if text is None:
                refused.append((prompt, name, ids))
            else:
                made[prompt.id, name] = text
    if refused:
        prompt, name, ids = refused[0]
        others = sorted({name for _, name, _ in refused})
        raise PromptError(
            f'the server at {address} takes only text, and prompt {prompt.id} ("{prompt.excerpt}") with the condition '
            f'"{name}" would be read as other tokens: {_first_difference(tokenizer, ids)}. So would {len(refused)} of '
            f"{len(refused) + len(made)} in all, under {', '.join(map(repr, others))}. Omit them, or serve the model "
            f"with an engine that takes token ids, such as vLLM or SGLang"
        )
    return made


def _first_difference(tokenizer: Any, ids: list[int]) -> str:
    """The first place where the text's tokens differ from the intended ones."""
    bos = getattr(tokenizer, "bos_token_id", None)
    got = list(tokenizer(_decoded(tokenizer, ids[1:] if ids[:1] == [bos] else ids))["input_ids"])
    at = next((i for i, (a, b) in enumerate(zip(ids, got, strict=False)) if a != b), min(len(ids), len(got)))
    meant, read = (_shown(tokenizer, some, at) for some in (ids, got))
    return f"at position {at} {meant} becomes {read}"


def _shown(tokenizer: Any, ids: list[int], at: int) -> str:
    return f"{_decoded(tokenizer, ids[at : at + 1])!r} ({ids[at]})" if at < len(ids) else "the end"


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
