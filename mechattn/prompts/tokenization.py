"""Tokenizes a prompt, as joined texts or with the chat template, and gives each token a segment."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError, PromptError, warn
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence, baseline_sequence

# A chat template is rendered a second time with these slots in place of the prompt's texts, to see
# where the texts are. A search for the texts themselves would fail if the template contains them
# too, as with the question "assistant". The slots are private-use characters, which prompts hardly
# ever contain and templates do not treat in a special way.
_SYSTEM_SLOT = "\ue000\ue001"
_QUESTION_SLOT = "\ue000\ue002"
_SLOT = re.compile(f"({_SYSTEM_SLOT}|{_QUESTION_SLOT})")


class Span(NamedTuple):
    """The characters of a text that belong to a segment."""

    segment: str
    start: int
    stop: int


@runtime_checkable
class TokenizedModel(Protocol):
    """What prompts need of a model.

    ``cfg`` has ``d_vocab``, and ``default_prepend_bos`` if texts are read after a BOS token.
    """

    tokenizer: Any
    cfg: Any


def tokenize(prompt: Prompt, model: TokenizedModel) -> TokenSequence:
    """The baseline sequence of a prompt: its tokens, each in its segment.

    A BOS token comes first exactly once if the model uses one.

    Raises:
        ModelError: The model has no fast tokenizer, its chat template is missing or fails, or it
            prepends a BOS token that its tokenizer lacks.
        PromptError: The token ids are padded or begin differently from texts in this model, the
            chat template changes the texts, or a control token cannot be read as text.
    """
    if prompt.answer_tokens:
        before_answer = tokenize(replace(prompt, answer="", answer_tokens=()), model)
        answer_tokens = torch.tensor(prompt.answer_tokens)
        answer_segment = torch.full_like(answer_tokens, SEGMENTS.index("answer"))
        return replace(
            before_answer,
            tokens=torch.cat([before_answer.tokens, answer_tokens]),
            origin=torch.arange(len(before_answer) + len(answer_tokens)),
            segment=torch.cat([before_answer.segment, answer_segment]),
        )

    if prompt.tokens:
        return _of_token_ids(prompt, model)

    tokenizer = require_tokenizer(model)
    if prompt.template == "chat":
        text, spans = _chat_text(prompt, tokenizer)
    else:
        text, spans = _plain_text(prompt)
    if prompt.answer:
        spans.append(Span("answer", len(text), len(text) + len(prompt.answer)))
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


def require_tokenizer(model: TokenizedModel) -> Any:
    """The tokenizer of the model.

    Raises:
        ModelError: There is none.
    """
    if getattr(model, "tokenizer", None) is None:
        raise ModelError(
            "this model has no tokenizer; pass one to load_model(model, tokenizer=…), or give token"
            " ids as prompts, and insert filler with an Insertion of your own, since built-in"
            " conditions need a tokenizer for theirs"
        )
    return model.tokenizer


def own_bos(model: TokenizedModel) -> int | None:
    """The BOS token that this model reads before a text; None if it reads texts without one.

    It is also None for a model without a tokenizer.

    Raises:
        ModelError: The model is set to prepend a BOS token, and its tokenizer has none.
    """
    if not getattr(model.cfg, "default_prepend_bos", False):
        return None
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None and model.tokenizer is not None:
        raise ModelError(
            "the model is set to prepend a BOS token (cfg.default_prepend_bos) but its tokenizer"
            " has none; set model.cfg.default_prepend_bos = False"
        )
    return bos


def _of_token_ids(prompt: Prompt, model: TokenizedModel) -> TokenSequence:
    """The sequence of a prompt of token ids, which are all its question apart from a BOS token."""
    bos = own_bos(model)
    _refuse_padding(prompt, model.tokenizer)
    _refuse_other_bos(prompt, model, bos)
    segments = ["question"] * len(prompt.tokens)
    if prompt.tokens[0] == bos:
        segments[0] = "bos"
    return baseline_sequence(prompt.tokens, segments, getattr(model.tokenizer, "decode", None))


def _refuse_padding(prompt: Prompt, tokenizer: Any) -> None:
    """Refuse token ids that begin or end with padding, which would count as text."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        # One such token may be a real beginning or end, but two are padding.
        is_padded = (pad, pad) in (prompt.tokens[:2], prompt.tokens[-2:])
    else:
        is_padded = pad in (prompt.tokens[0], prompt.tokens[-1])

    if is_padded:
        raise PromptError(
            f"prompt {prompt.id} begins or ends with the padding token {pad}, which would count as "
            "text; remove the padding and give each prompt as Prompt(tokens=…) or as text"
        )


def _refuse_other_bos(prompt: Prompt, model: TokenizedModel, bos: int | None) -> None:
    """Refuse token ids that do not begin as texts do in this model.

    Much of the attention goes to the first token, so another one would change all results.
    """
    first_token = prompt.tokens[0]
    if bos is not None and first_token != bos:
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with {first_token}, but this model reads"
            f" text after a BOS token ({bos}); put it first, or set"
            " model.cfg.default_prepend_bos = False"
        )

    unused_bos = getattr(model.tokenizer, "bos_token_id", None)
    is_unused = bos is None and unused_bos is not None and first_token == unused_bos
    if is_unused and not _opens_chats(model.tokenizer):
        raise PromptError(
            f"the token ids of prompt {prompt.id} begin with the BOS token {first_token}, but this"
            " model reads text without one; remove it, or set model.cfg.default_prepend_bos = True"
        )


def _opens_chats(tokenizer: Any) -> bool:
    """Whether the chat template writes the BOS token, as in SmolLM2, whose turns begin with it."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return tokenizer.bos_token in template or "bos_token" in template


def _chat_text(prompt: Prompt, tokenizer: Any) -> tuple[str, list[Span]]:
    """The rendered chat up to the answer, and the characters of the system text and the question.

    Raises:
        ModelError: The tokenizer has no chat template, or the template fails.
        PromptError: The template changes the texts beyond surrounding white space.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError('this tokenizer has no chat template; use template="plain"')

    text = _rendered(prompt, tokenizer, prompt.system, prompt.question)
    system_slot = _SYSTEM_SLOT if prompt.system else ""
    outline = _rendered(prompt, tokenizer, system_slot, _QUESTION_SLOT)

    for system, question in product(_trimmings(prompt.system), _trimmings(prompt.question)):
        chat, spans = _fill_slots(outline, system, question)
        if chat == text:
            return text, spans

    raise PromptError(
        f"the chat template changes the texts of {prompt.where}, so their tokens cannot be found; "
        'use template="plain"'
    )


def _rendered(prompt: Prompt, tokenizer: Any, system: str, question: str) -> str:
    """The chat template with these texts, up to the beginning of the assistant's turn.

    If the template fails with a system turn, the system text opens the user's turn.

    Raises:
        ModelError: The template fails.
    """
    conversations = [[{"role": "user", "content": question}]]
    if system:
        system_turn = {"role": "system", "content": system}
        joint_turn = {"role": "user", "content": f"{system}\n\n{question}"}
        conversations = [[system_turn, *conversations[0]], [joint_turn]]

    last_error = None
    for messages in conversations:
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **prompt.template_options
            )
            return text
        except Exception as error:  # a template is a program and may fail in any way
            last_error = error

    raise ModelError(
        f"the chat template of this tokenizer fails on prompt {prompt.id} "
        f'({type(last_error).__name__}: {last_error}); use template="plain"'
    ) from last_error


def _trimmings(text: str) -> list[str]:
    """The text as it is, and without the white space that a template may trim."""
    return [text, text.strip(), text.rstrip(), text.lstrip()]


def _fill_slots(outline: str, system: str, question: str) -> tuple[str, list[Span]]:
    """The outline with the texts in their slots, and the characters of each text.

    A template may repeat a text. The first occurrence of the system text and the last one of the
    question count.
    """
    chat = ""
    system_spans: list[Span] = []
    question_spans: list[Span] = []
    for piece in _SLOT.split(outline):
        start = len(chat)
        if piece == _SYSTEM_SLOT:
            chat += system
            system_spans.append(Span("system", start, len(chat)))
        elif piece == _QUESTION_SLOT:
            chat += question
            question_spans.append(Span("question", start, len(chat)))
        else:
            chat += piece
    return chat, system_spans[:1] + question_spans[-1:]


def _plain_text(prompt: Prompt) -> tuple[str, list[Span]]:
    """The system text and the question in one text, and the characters of each.

    Each ends with a newline, or with nothing if the template is "joined".
    """
    ending = "" if prompt.template == "joined" else "\n"
    text = ""
    spans: list[Span] = []
    for segment, part in (("system", prompt.system), ("question", prompt.question)):
        if part:
            spans.append(Span(segment, len(text), len(text) + len(part)))
            text += part + ending
    return text, spans


def _tokens_in_spans(
    prompt: Prompt, tokenizer: Any, text: str, spans: list[Span]
) -> tuple[list[int], list[str]]:
    """The tokens of a text, and the segment of each.

    A token belongs to the segment of its first character that is not white space.

    Raises:
        ModelError: The tokenizer is a slow one.
    """
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

    for token_id, (start, stop) in zip(
        encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        characters = text[start:stop]
        visible_characters = characters.lstrip()
        position = stop - len(visible_characters) if visible_characters else start
        segment = "template"  # for characters outside all spans
        for span in spans:
            if span.start <= position < span.stop:
                segment = span.segment
        read_ids = [token_id]
        if token_id in control_tokens and segment in ("system", "question"):
            read_ids = _spelled_out_tokens(prompt, tokenizer, token_id, characters)
        token_ids += read_ids
        segments += [segment] * len(read_ids)

    return token_ids, segments


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids of tokens that control the model rather than being text, such as "<eos>"."""
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    added_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    return frozenset(added_ids.union(getattr(tokenizer, "all_special_ids", ())))


def _spelled_out_tokens(
    prompt: Prompt, tokenizer: Any, token_id: int, characters: str
) -> list[int]:
    """The tokens of characters in the prompt's own text that spell out a control token.

    They are the control token alone, with a warning, or with ``split_special_tokens`` the tokens of
    ordinary text.

    Raises:
        PromptError: The tokenizer cannot read the characters as ordinary text.
    """
    if not prompt.split_special_tokens:
        warn(
            f"{prompt.where} contains {characters!r}, which this tokenizer reads as a control"
            " token; Prompt(…, split_special_tokens=True) has it read as text"
        )
        return [token_id]
    encoded = tokenizer(characters, add_special_tokens=False, split_special_tokens=True)
    text_ids: list[int] = encoded["input_ids"]
    if tokenizer.decode(text_ids).strip() != characters.strip():
        raise PromptError(
            f"{prompt.where} contains {characters!r}, which this tokenizer cannot read as text; "
            "write it in another way"
        )
    return text_ids
