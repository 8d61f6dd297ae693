"""A prompt in a tokenizer's chat template, and where in the rendered text its own texts stand.

The places are those of the template's slots: the template is rendered a second time with markers in
place of the texts. Searching for the texts would fail where the template contains them too, such as
for the question "assistant".
"""

from __future__ import annotations

from itertools import product
from typing import Any

from mechattn.errors import ModelError, PromptError
from mechattn.prompts.prompt import Prompt

Span = tuple[str, int, int]  # segment, first character, character after the last

# Private-use characters, which no prompt contains and no template treats in a special way.
_SYSTEM_SLOT = "\ue000\ue001"
_QUESTION_SLOT = "\ue000\ue002"


def chat_text(prompt: Prompt, tokenizer: Any) -> tuple[str, list[Span]]:
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
    text = ""
    system_spans: list[Span] = []
    question_spans: list[Span] = []
    rest = outline
    while rest:
        if rest.startswith(_SYSTEM_SLOT):
            system_spans.append(("system", len(text), len(text) + len(system)))
            text += system
            rest = rest.removeprefix(_SYSTEM_SLOT)
        elif rest.startswith(_QUESTION_SLOT):
            question_spans.append(("question", len(text), len(text) + len(question)))
            text += question
            rest = rest.removeprefix(_QUESTION_SLOT)
        else:
            end = rest.find("\ue000", 1)
            literal = rest if end < 0 else rest[:end]
            text += literal
            rest = rest.removeprefix(literal)

    return text, system_spans[:1] + question_spans[-1:]


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
