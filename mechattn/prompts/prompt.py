"""A prompt: text in segments, before tokenization and before any condition."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mechattn.errors import PromptError, check_choice, plain

Template = Literal["plain", "chat", "joined"]
# Generated prompts, inserted tokens, samples: far beyond any use, and still a list in memory.
LARGEST_COUNT = 1_000_000
# Halves of surrogate pairs, which neither tokenizers nor files accept.
_SURROGATES = re.compile("[\ud800-\udfff]")
_FEWEST_ALIKE = 4  # prompts; with fewer, intervals are wide in any case
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"\b[A-Z]\w*")


@dataclass(frozen=True)
class Prompt:
    """A question with optional text before it (``system``) and after it (``answer``).

    Args:
        question: The text of the question.
        system: The text before the question.
        answer: The text after the question, which the model reads too.
        template: "plain" ends each segment but an answer with a newline, "joined" adds nothing;
            "chat" uses the tokenizer's chat template.
        id: A name that is stable between runs; random draws depend on it. Several prompts that all
            have the default are named after their places, from "0" on.
        solution: The reference answer; the model doesn't read it.
        tokens: Token ids to read in place of the texts.
        group: What the prompt shares with others that are not independent of it, such as its
            template; statistics then treat the group as the unit. A prompt without one is its own
            unit. The model doesn't read it.
        answer_tokens: Token ids to read in place of the answer's text: those that were generated.
        counterpart: The question's other version, for ``Counterpart``: a text, or token ids in
            place of ``tokens``.
        other_answer: The answer that the other version calls for, for the metric "logit_diff": a
            text or token ids.
        template_options: Options of the chat template, such as ``{"enable_thinking": False}``.
        split_special_tokens: Read control tokens that the question or the system text spells out,
            such as "<eos>", as ordinary text; without it they are control tokens, and a warning
            names them.
    """

    question: str = ""
    system: str = ""
    answer: str = ""
    template: Template = "plain"
    id: str = "0"
    solution: str | None = None
    tokens: tuple[int, ...] = ()
    # Not part of the prompts' hash: nothing measured depends on it.
    group: str | None = field(default=None, repr=False)
    answer_tokens: tuple[int, ...] = ()
    counterpart: str | tuple[int, ...] = ""
    other_answer: str | tuple[int, ...] = ""
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    split_special_tokens: bool = False

    def __post_init__(self) -> None:
        check_choice(Template, template=self.template)
        texts = [self.id, self.question, self.system, self.answer]
        texts += [text for text in (self.solution, self.group) if text is not None]
        token_ids = [*self.tokens, *self.answer_tokens]
        for version in (self.counterpart, self.other_answer):
            if isinstance(version, (tuple, list)):
                token_ids += version
            else:
                texts.append(version)

        for text in texts:
            if not isinstance(text, str):
                raise PromptError(
                    f"prompt {self.id} has {text!r:.40} in place of a text, such as its id or its"
                    ' solution; give a text, such as "5"'
                )
            if _SURROGATES.search(text):
                raise PromptError(
                    f"prompt {self.id} holds half of a surrogate pair (\\ud800 …), which is not"
                    " valid text"
                )
        for token in token_ids:
            is_whole = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_whole or not -(2**63) <= token < 2**63:
                raise PromptError(
                    f"prompt {self.id} holds the token id {token!r:.40}; give whole numbers, of 64"
                    " bits at most"
                )

        if not self.question.strip() and not self.tokens:
            raise PromptError(f"prompt {self.id} has an empty question; give every prompt a text")
        if self.group is not None and not self.group.strip():
            raise PromptError(
                f"prompt {self.id} has group={self.group!r}; give the name of its group, or None"
            )
        for name in (self.id, self.group or ""):
            if plain(name) != name:
                raise PromptError(
                    f"prompt {self.id} has an id or a group with characters that cannot be"
                    f" printed: {name!r}"
                )

    @property
    def where(self) -> str:
        """The id and the beginning of the question, for use in messages."""
        text = " ".join(self.question.split()) or f"{len(self.tokens)} token ids"
        return f'prompt {self.id} ("{shortened(text)}")'


def as_prompts(prompts: Any) -> list[Prompt]:
    """Convert a text, texts, prompts, or token ids [batch pos] to prompts.

    Token ids come as a tensor, as an array, or as what a tokenizer returned: "input_ids" with its
    "attention_mask", whose padding is left out.

    Raises:
        PromptError: Something else was given, there is no prompt, or two have the same id.
    """
    if isinstance(prompts, Mapping):
        prompts = _from_encoding(prompts)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OUT":  # texts
        prompts = prompts.tolist()
    if isinstance(prompts, (Tensor, np.ndarray)):
        prompts = _from_tensor(torch.as_tensor(prompts))
    if isinstance(prompts, (str, Prompt)):
        prompts = [prompts]

    is_table = hasattr(prompts, "columns") or hasattr(prompts, "column_names")
    is_unordered = isinstance(prompts, (bytes, Set))
    if is_table or is_unordered or not isinstance(prompts, Iterable):
        raise PromptError(
            f"the prompts are of type {type(prompts).__name__}; give a text, a list of texts or"
            " prompts, or a tensor of token ids (load_prompts reads files and data sets)"
        )

    named = [_named(index, prompt) for index, prompt in enumerate(prompts)]
    if not named:
        raise PromptError("there are no prompts; give at least one")
    if all(prompt.id == Prompt.id for prompt in named):  # none was given one
        named = [replace(prompt, id=str(index)) for index, prompt in enumerate(named)]
    name, count = Counter(prompt.id for prompt in named).most_common(1)[0]
    if count > 1:
        raise PromptError(f"several prompts have the id {name!r}; give every prompt its own")

    # Beside prompts with groups, one without is a group of its own.
    if not any(prompt.group for prompt in named):
        return named
    return [replace(prompt, group=prompt.group or f"prompt {prompt.id} alone") for prompt in named]


def _named(index: int, prompt: object) -> Prompt:
    """One of several prompts; a text is named after its place."""
    if isinstance(prompt, Prompt):
        return prompt
    if not isinstance(prompt, str):
        raise PromptError(
            f"prompt {index} is of type {type(prompt).__name__}; give a text, a Prompt, or a tensor"
            " of token ids"
        )

    if prompt.endswith((".jsonl", ".json", ".csv", ".parquet")) and " " not in prompt:
        raise PromptError(
            f"prompt {index} is {prompt!r}, the name of a file: load_prompts({prompt!r}) reads its "
            "prompts"
        )
    return Prompt(str(prompt), id=str(index))


def _from_encoding(encoding: Mapping[str, Any]) -> list[Prompt]:
    """What a tokenizer returned: one sequence, or several with their padding."""
    if "input_ids" not in encoding:
        raise PromptError(
            f"the prompts are a {type(encoding).__name__} with {sorted(map(str, encoding))}; give"
            " a list of texts, prompts, or what a tokenizer returns (with input_ids)"
        )
    rows = _rows(encoding["input_ids"])
    if "attention_mask" not in encoding:
        return _from_rows(rows)

    masks = _rows(encoding["attention_mask"])
    lengths = list(map(len, rows))
    mask_lengths = list(map(len, masks))
    if mask_lengths != lengths:
        raise PromptError(
            f"input_ids has rows of {lengths} tokens, but attention_mask rows of {mask_lengths};"
            " give them as the tokenizer returned them"
        )
    return _from_rows(map(compress, rows, masks))


def _rows(numbers: Any) -> list[list[int]]:
    """One row of whole numbers or several, from a tensor, an array or lists, as lists."""
    rows = _listed(numbers)
    if rows and isinstance(rows[0], Integral):
        return [rows]
    return [_listed(row) for row in rows]


def _listed(numbers: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list."""
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    return list(numbers)


def _from_tensor(tokens: Tensor) -> list[Prompt]:
    """Rows of token ids, each as long as its prompt."""
    is_integer = not tokens.is_floating_point() and tokens.dtype != torch.bool
    if tokens.ndim != 2 or not is_integer or not tokens.numel():
        raise PromptError(
            f"token ids came as a {tokens.dtype} tensor of shape {tuple(tokens.shape)}; "
            "give a non-empty integer tensor [batch, pos], every row as long as its prompt "
            "(one prompt: tokens[None])"
        )
    return _from_rows(tokens.tolist())


def _from_rows(rows: Iterable[Iterable[int]]) -> list[Prompt]:
    """Prompts of token ids, named after their places."""
    return [Prompt(tokens=tuple(row), id=str(index)) for index, row in enumerate(rows)]


def likeness_of(prompts: Sequence[Prompt]) -> str:
    """How much the prompts repeat each other, apart from numbers and names, if at least half of
    them do: in one sentence, without its full stop; "" if they don't, or if they have groups.

    Intervals are then too narrow by ``√(Σ m_t² / n)`` at most, with m_t prompts of template t:
    Kish's design effect where the prompts of a template all give the same number.
    """
    groups = {prompt.group for prompt in prompts if prompt.group is not None}
    has_groups = 0 < len(groups) < len(prompts)  # which the statistics take as units
    if len(prompts) < _FEWEST_ALIKE or has_groups:
        return ""

    sizes: Counter[str] = Counter()  # by template
    for prompt in prompts:
        template = _NAME.sub("@", _NUMBER.sub("#", prompt.question)).strip()
        sizes[template or " ".join(map(str, prompt.tokens))] += 1
    if len(sizes) > len(prompts) / 2:
        return ""

    largest, largest_size = sizes.most_common(1)[0]
    templates = f"{len(sizes)} templates"
    if len(sizes) == 1:
        templates = "one template"
    design_effect = sum(size**2 for size in sizes.values()) / len(prompts)
    return (
        f"{len(prompts)} prompts follow {templates}, apart from numbers and names"
        f' ("{shortened(largest)}" {largest_size} times): intervals and tests assume independent'
        f" prompts, so intervals are up to {design_effect**0.5:.1f} times too narrow"
    )


def shortened(text: str, length: int = 40) -> str:
    """The beginning of a text, for use in messages."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"
