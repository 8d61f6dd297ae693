"""Tokenizes a prompt, plainly joined or by the chat template, and gives each token its segment."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch

from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError, PromptError, warn
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence, baseline_sequence

Span = tuple[str, int, int]  # segment, first character, character after the last

# A chat template is rendered a second time with these in place of a prompt's texts, to see where
# they stand: a search for the texts would fail where the template holds them too, such as for the
# question "assistant". They are private-use characters, which no prompt contains and no template
# treats in a special way.
_SYSTEM_SLOT = "\ue000\ue001"
_QUESTION_SLOT = "\ue000\ue002"
_SLOT = re.compile(f"({_SYSTEM_SLOT}|{_QUESTION_SLOT})")


@runtime_checkable
class TokenizedModel(Protocol):
    """The part of a model that prompts need: its tokenizer, and whether it prepends a BOS token."""

    tokenizer: Any
    cfg: Any


def tokenize(prompt: Prompt, model: TokenizedModel) -> TokenSequence:
    """The baseline sequence of a prompt: BOS exactly once (if the model uses one), each token in
    its segment."""
    if prompt.answer_tokens:
        question = tokenize(replace(prompt, answer="", answer_tokens=()), model)
        answer = torch.tensor(prompt.answer_tokens)
        answer_segment = torch.full_like(answer, SEGMENTS.index("answer"))
        return replace(
            question,
            tokens=torch.cat([question.tokens, answer]),
            origin=torch.arange(len(question) + len(answer)),
            segment=torch.cat([question.segment, answer_segment]),
        )

    if prompt.tokens:
        return _of_token_ids(prompt, model)

    tokenizer = require_tokenizer(model)
    if prompt.template == "chat":
        text, spans = _chat_text(prompt, tokenizer)
    else:
        text, spans = _plain_text(prompt)
    if prompt.answer:
        spans.append(("answer", len(text), len(text) + len(prompt.answer)))
        text += prompt.answer

    tokens, segments = _tokens_in_spans(prompt, tokenizer, text, spans)

    bos = own_bos(model)
    if bos is not None:
        if tokens[:1] == [bos]:
            segments[0] = "bos"
        else:
            tokens.insert(0, bos)
            segments.insert(0, "bos")

    return baseline_sequence(tokens, segments, tokenizer.decode)


def _of_token_ids(prompt: Prompt, model: TokenizedModel) -> TokenSequence:
    """A prompt given as token ids, all of them its question, apart from a BOS token."""
    bos = own_bos(model)
    _refuse_padding(prompt, model.tokenizer)
    _refuse_other_bos(prompt, model, bos)
    segments = ["question"] * len(prompt.tokens)
    if prompt.tokens[0] == bos:
        segments[0] = "bos"
    return baseline_sequence(prompt.tokens, segments, getattr(model.tokenizer, "decode", None))


def require_tokenizer(model: TokenizedModel) -> Any:
    """The tokenizer of the model."""
    if getattr(model, "tokenizer", None) is None:
        raise ModelError(
            "this model has no tokenizer; pass one to load_model(model, tokenizer=…), or give token"
            " ids: as prompts, and as filler by an Insertion of your own, since built-in conditions"
            " make theirs with a tokenizer"
        )
    return model.tokenizer


def own_bos(model: TokenizedModel) -> int | None:
    """The BOS token that this model expects before a text; None if there is none."""
    if not getattr(model.cfg, "default_prepend_bos", False):
        return None
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None and model.tokenizer is not None:
        raise ModelError(
            "the model is set to prepend a BOS token (cfg.default_prepend_bos) but its tokenizer"
            " has none; set model.cfg.default_prepend_bos = False"
        )
    return bos


def _refuse_other_bos(prompt: Prompt, model: TokenizedModel, bos: int | None) -> None:
    """Check that token ids begin as the model's texts do, since the first token takes much of the
    attention."""
    first = prompt.tokens[0]
    if bos is not None and first != bos:
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with {first}, but this model reads text "
            f"after a BOS token ({bos}); put it first, or set model.cfg.default_prepend_bos = False"
        )

    own = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None and own is not None and first == own and not _opens_chats(model.tokenizer):
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with the BOS token {own}, but this model "
            "reads text without one; remove it, or set model.cfg.default_prepend_bos = True"
        )


def _opens_chats(tokenizer: Any) -> bool:
    """Whether the chat template writes the BOS token, as that of SmolLM2, whose turns begin with
    it."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return tokenizer.bos_token in str(template) or "bos_token" in str(template)


def _refuse_padding(prompt: Prompt, tokenizer: Any) -> None:
    """Check that token ids hold no padding, which would count as text."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        # One such token may be a real beginning or end, but not two.
        is_padded = (pad, pad) in (prompt.tokens[:2], prompt.tokens[-2:])
    else:
        is_padded = pad in (prompt.tokens[0], prompt.tokens[-1])

    if is_padded:
        raise PromptError(
            f"prompt {prompt.id} begins or ends with the padding token {pad}, which would count as "
            "text; remove the padding and give each prompt as Prompt(tokens=…) or as text"
        )


def _plain_text(prompt: Prompt) -> tuple[str, list[Span]]:
    """The texts up to the answer one after another, and the characters of each."""
    separator = "\n"
    if prompt.template == "joined":
        separator = ""
    texts = {"system": prompt.system, "question": prompt.question}
    joined = ""
    spans: list[Span] = []

    for segment, text in texts.items():
        if text:
            spans.append((segment, len(joined), len(joined) + len(text)))
            joined += text + separator

    return joined, spans


def _chat_text(prompt: Prompt, tokenizer: Any) -> tuple[str, list[Span]]:
    """The rendered chat up to the answer, and the characters that hold the system text and the
    question.

    Raises:
        ModelError: The tokenizer has no chat template, or the template fails.
        PromptError: The template changes the texts beyond surrounding white space.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError('this tokenizer has no chat template; use template="plain"')

    text = _rendered(prompt, tokenizer, prompt.system, prompt.question)
    system_slot = _SYSTEM_SLOT if prompt.system else ""
    outline = _rendered(prompt, tokenizer, system_slot, _QUESTION_SLOT)

    for system, question in product(_trimmed(prompt.system), _trimmed(prompt.question)):
        filled, spans = _filled(outline, system, question)
        if filled == text:
            return text, spans

    raise PromptError(
        f"the chat template changes the texts of {prompt.where}, so their tokens cannot be found; "
        'use template="plain"'
    )


def _trimmed(text: str) -> list[str]:
    """The text as it is, and as templates trim it."""
    return [text, text.strip(), text.rstrip(), text.lstrip()]


def _filled(outline: str, system: str, question: str) -> tuple[str, list[Span]]:
    """The outline with the texts in their slots, and where they stand.

    A template may repeat a text: the first place of the system text and the last one of the
    question count.
    """
    slots = {_SYSTEM_SLOT: ("system", system), _QUESTION_SLOT: ("question", question)}
    text = ""
    spans: dict[str, list[Span]] = {"system": [], "question": [], "template": []}
    for piece in _SLOT.split(outline):
        segment, filling = slots.get(piece, ("template", piece))
        spans[segment].append((segment, len(text), len(text) + len(filling)))
        text += filling

    return text, spans["system"][:1] + spans["question"][-1:]


def _rendered(prompt: Prompt, tokenizer: Any, system: str, question: str) -> str:
    """The template with these texts; the system text opens the user's turn if there is no such
    role."""
    conversations = [[{"role": "user", "content": question}]]
    if system:
        own_turn = {"role": "system", "content": system}
        opening = {"role": "user", "content": f"{system}\n\n{question}"}
        conversations = [[own_turn, *conversations[0]], [opening]]

    failure = None
    for messages in conversations:
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **prompt.template_options
            )
            return text
        except Exception as error:  # a template is a program and may fail in any way
            failure = error

    raise ModelError(
        f"the chat template of this tokenizer fails on prompt {prompt.id} "
        f'({type(failure).__name__}: {failure}); use template="plain"'
    ) from failure


def _tokens_in_spans(
    prompt: Prompt, tokenizer: Any, text: str, spans: list[Span]
) -> tuple[list[int], list[str]]:
    """The tokens of a text, and the segment of each: that of its first character that is no
    space."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not report the characters"
            " of each token; load the fast one (AutoTokenizer with use_fast=True), or give token"
            " ids as prompts"
        )

    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    control_tokens = _control_tokens(tokenizer)
    token_ids: list[int] = []
    segments: list[str] = []

    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        characters = text[start:end]
        first = start
        if characters.strip():
            first += len(characters) - len(characters.lstrip())
        segment = next((name for name, low, high in spans if low <= first < high), "template")
        pieces = [token]
        if token in control_tokens and segment in ("system", "question"):
            pieces = _as_written(prompt, tokenizer, token, characters)
        token_ids += pieces
        segments += [segment] * len(pieces)

    return token_ids, segments


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that mark up a text for the model, such as its end."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {token for token, described in added.items() if described.special}
    return frozenset(marked | set(getattr(tokenizer, "all_special_ids", ())))


def _as_written(prompt: Prompt, tokenizer: Any, token: int, characters: str) -> list[int]:
    """A control token that a prompt's own text spells out: itself with a warning, or its
    letters."""
    if not prompt.split_special_tokens:
        warn(
            f"{prompt.where} contains {characters!r}, which this tokenizer reads as a control"
            " token; Prompt(…, split_special_tokens=True) has it read as text"
        )
        return [token]
    letters = tokenizer(characters, add_special_tokens=False, split_special_tokens=True)
    pieces: list[int] = letters["input_ids"]
    if tokenizer.decode(pieces).strip() != characters.strip():
        raise PromptError(
            f"{prompt.where} contains {characters!r}, which this tokenizer cannot read as text; "
            "write it in another way"
        )
    return pieces
