"""Tokenizes a prompt, plainly joined or by the chat template; gives each token its segment, and its class."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError, PromptError
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence, baseline_sequence

TOKEN_CLASSES = ("digit", "operator", "conjunction", "other")
_OPERATOR = re.compile(r"[-+*/=<>^%×÷·±√≤≥≠∑∏−]+|\\(?:times|div|cdot|frac|sqrt|pm|leq|geq|neq)")
_CONJUNCTIONS = (
    "and or but nor so yet for because if then than when while since although though unless until whereas once as that "
    "whether after before therefore thus hence however"
)


@runtime_checkable
class TokenizedModel(Protocol):
    """The part of a model that prompts need: its tokenizer, and whether it prepends a BOS token."""

    tokenizer: Any
    cfg: Any


Spans = list[tuple[str, int, int]]  # segment, first character, character after the last


def tokenize(prompt: Prompt, model: TokenizedModel) -> Sequence:
    """The baseline sequence of a prompt: BOS exactly once (if the model uses one), each token in its segment."""
    if answer := prompt.answer_tokens:
        read = tokenize(replace(prompt, answer="", answer_tokens=()), model)
        segments = [
            read.first_part,
            *(SEGMENTS[code] for code in read.segment[1:].tolist()),
            *["answer"] * len(answer),
        ]
        return baseline_sequence([*read.tokens.tolist(), *answer], segments, read.decode)
    if prompt.tokens:
        bos = own_bos(model)
        _refuse_padding(prompt, model.tokenizer)
        _refuse_other_bos(prompt, model, bos)
        segments = [
            "bos" if i == 0 and t == bos else "question" for i, t in enumerate(prompt.tokens)
        ]
        return baseline_sequence(prompt.tokens, segments, getattr(model.tokenizer, "decode", None))
    tokenizer = require_tokenizer(model)
    text, spans = _chat(prompt, tokenizer) if prompt.template == "chat" else _plain(prompt)
    tokens, segments = _tokens_in_spans(tokenizer, text, spans)
    bos = own_bos(model)
    if bos is not None and tokens[:1] == [bos]:
        segments[0] = "bos"
    elif bos is not None:
        tokens, segments = [bos, *tokens], ["bos", *segments]
    return baseline_sequence(tokens, segments, tokenizer.decode)


def require_tokenizer(model: TokenizedModel) -> Any:
    """The tokenizer of the model."""
    if getattr(model, "tokenizer", None) is None:
        raise ModelError(
            "this model has no tokenizer; pass one to load_model(model, tokenizer=…), or give token ids: as prompts, "
            "and as filler by an Insertion of your own, since built-in conditions make theirs with a tokenizer"
        )
    return model.tokenizer


def own_bos(model: TokenizedModel) -> int | None:
    """The BOS token that this model expects before a text; None if there is none."""
    if not getattr(model.cfg, "default_prepend_bos", False):
        return None
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None and model.tokenizer is not None:
        raise ModelError(
            "the model is set to prepend a BOS token (cfg.default_prepend_bos) but its tokenizer has none; "
            "set model.cfg.default_prepend_bos = False"
        )
    return bos


def _refuse_other_bos(prompt: Prompt, model: TokenizedModel, bos: int | None) -> None:
    """Check that token ids begin as the model's texts do, since the first token takes much of the attention."""
    if bos is not None and prompt.tokens[0] != bos:
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with {prompt.tokens[0]}, but this model reads text after a BOS "
            f"token ({bos}); put it first, or set model.cfg.default_prepend_bos = False"
        )
    own = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None and own is not None and prompt.tokens[0] == own:
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with the BOS token {own}, but this model reads text without "
            f"one; remove it, or set model.cfg.default_prepend_bos = True"
        )


def _refuse_padding(prompt: Prompt, tokenizer: Any) -> None:
    pad = getattr(tokenizer, "pad_token_id", None)
    ends = (prompt.tokens[0], prompt.tokens[-1])
    doubles = pad is not None and pad in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    run_of_pads = (pad, pad) in (prompt.tokens[:2], prompt.tokens[-2:])
    if pad is not None and (run_of_pads if doubles else pad in ends):
        raise PromptError(
            f"prompt {prompt.id} begins or ends with the padding token {pad}, which would count as text; remove the "
            f"padding and give each prompt as Prompt(tokens=…) or as text"
        )


def _plain(prompt: Prompt) -> tuple[str, Spans]:
    text, spans = "", []
    between = "" if prompt.template == "joined" else "\n"
    for segment, part in (
        ("system", prompt.system),
        ("question", prompt.question),
        ("answer", prompt.answer),
    ):
        if part:
            spans.append((segment, len(text), len(text) + len(part)))
            text += part + between
    return (text.removesuffix(between) if prompt.answer else text), spans


def _chat(prompt: Prompt, tokenizer: Any) -> tuple[str, Spans]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError('this tokenizer has no chat template; use template="plain"')
    user = {"role": "user", "content": prompt.question}
    messages = [{"role": "system", "content": prompt.system}, user] if prompt.system else [user]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (
        Exception
    ):  # some templates refuse a system role; the system text then starts the user's turn
        text = _without_system(prompt, tokenizer)
    spans: Spans = []
    start = 0
    for segment, part in (("system", prompt.system.strip()), ("question", prompt.question.strip())):
        if part:
            # The question comes last, so its last occurrence is the right one if the template repeats it.
            start = text.rfind(part, start) if segment == "question" else text.find(part, start)
            if start < 0:
                raise PromptError(
                    f"the chat template changes the {segment} of {prompt.where}, so its tokens cannot be found; use "
                    'template="plain"'
                )
            spans.append((segment, start, start + len(part)))
            start += len(part)
    if prompt.answer:
        spans.append(("answer", len(text), len(text) + len(prompt.answer)))
        text += prompt.answer
    return text, spans


def _without_system(prompt: Prompt, tokenizer: Any) -> str:
    user = {
        "role": "user",
        "content": f"{prompt.system}\n\n{prompt.question}" if prompt.system else prompt.question,
    }
    try:
        text: str = tokenizer.apply_chat_template(
            [user], tokenize=False, add_generation_prompt=True
        )
    except (
        Exception
    ) as error:  # a template is a program from the checkpoint and may fail in any way
        raise ModelError(
            f"the chat template of this tokenizer fails on prompt {prompt.id} ({type(error).__name__}: {error}); use "
            'template="plain"'
        ) from error
    return text


def _tokens_in_spans(tokenizer: Any, text: str, spans: Spans) -> tuple[list[int], list[str]]:
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not report the characters of each token; "
            f"load the fast one (AutoTokenizer with use_fast=True), or give token ids as prompts"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    segments = []
    for start, end in encoded["offset_mapping"]:
        first = start + len(text[start:end]) - len(text[start:end].lstrip())
        first = first if first < end else start
        segments.append(next((name for name, a, b in spans if a <= first < b), "template"))
    return list(encoded["input_ids"]), segments


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
    made = [
        TOKEN_CLASSES.index(token_class(text))
        for text in tokenizer.batch_decode([[i] for i in range(known)])
    ]
    return torch.tensor(made + [other] * (size - known))
