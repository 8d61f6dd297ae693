"""Prompts, as texts or token ids, before any condition changes their tokens."""

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
# Of generated prompts, inserted tokens or samples: far beyond any use, but still a list that fits
# into memory.
LARGEST_COUNT = 1_000_000
# Halves of surrogate pairs, which neither tokenizers nor files accept.
_SURROGATES = re.compile("[\ud800-\udfff]")
_FEWEST_ALIKE = 4  # prompts; with fewer, intervals are wide anyway
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"\b[A-Z]\w*")


@dataclass(frozen=True)
class Prompt:
    """A question with optional text before it (``system``) and after it (``answer``).

    Args:
        question: The text of the question.
        system: The text before the question.
        answer: The text after the question, which the model reads too.
        template: "plain" ends each text but the answer with a newline, "joined" adds nothing, and
            "chat" uses the tokenizer's chat template.
        id: A name that stays the same between runs, since random draws depend on it. Several
            prompts that all have the default are named by their positions, from "0" on.
        solution: The reference answer; the model doesn't read it.
        tokens: Token ids to read in place of the texts.
        group: What the prompt shares with others that are not independent of it, such as its
            template. Statistics then treat the group as the unit. A prompt without a group is its
            own unit. The model doesn't read it.
        answer_tokens: Token ids to read in place of the answer's text, such as generated ones.
        counterpart: The question's other version, for ``Counterpart``: a text, or the token ids
            that replace ``tokens``.
        other_answer: The answer that the other version calls for, for the metric "logit_diff": a
            text or token ids.
        template_options: Options of the chat template, such as ``{"enable_thinking": False}``.
        split_special_tokens: Whether control tokens that the question or the system text spells
            out, such as "<eos>", are read as ordinary text. By default they are read as control
            tokens, and a warning names them.

    Raises:
        PromptError: The question is empty, a text or token id is not valid, or an id or group
            cannot be printed.
        OptionError: There is no such template.
    """

    question: str = ""
    system: str = ""
    answer: str = ""
    template: Template = "plain"
    id: str = "0"
    solution: str | None = None
    tokens: tuple[int, ...] = ()
    # Neither in the repr, from which the hash of the prompts is made, nor in the identity of a
    # prompt: no measurement depends on it.
    group: str | None = field(default=None, repr=False, metadata={"in_identity": False})
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
                    f"prompt {self.id} has {text!r:.40} where a text belongs (its id, question,"
                    ' solution, counterpart …); give a text, such as "5", or for a counterpart a'
                    " list of token ids"
                )
            if _SURROGATES.search(text):
                raise PromptError(
                    f"prompt {self.id} holds half of a surrogate pair (\\ud800 …), which is not"
                    " valid text"
                )
        for token in token_ids:
            is_integer = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_integer or not -(2**63) <= token < 2**63:
                raise PromptError(
                    f"prompt {self.id} holds the token id {token!r:.40}; give whole numbers of at"
                    " most 64 bits"
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

        # A list or numpy's integers would make another prompt of the same ids: prompts are
        # identified by their repr.
        for name in ("tokens", "answer_tokens", "counterpart", "other_answer"):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(map(int, value)))

    @property
    def where(self) -> str:
        """The id and the beginning of the question, for messages."""
        text = " ".join(self.question.split()) or f"{len(self.tokens)} token ids"
        return f'prompt {self.id} ("{shortened(text)}")'


def as_prompts(prompts: Any) -> list[Prompt]:
    """Convert a text, several texts or prompts, or token ids [batch pos] to prompts.

    Token ids are a tensor, an array, or what a tokenizer returned: "input_ids", from which padding
    is removed by the "attention_mask" if there is one. If any prompt has a group, each prompt
    without one gets a group of its own.

    Raises:
        PromptError: Something else was given, there is no prompt, or two have the same id.
    """
    if isinstance(prompts, Mapping):
        prompts = _from_encoding(prompts)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OUT":  # objects or texts
        prompts = prompts.tolist()
    if isinstance(prompts, (Tensor, np.ndarray)):
        prompts = _from_tensor(torch.as_tensor(prompts))
    if isinstance(prompts, (str, Prompt)):
        prompts = [prompts]

    is_table = hasattr(prompts, "columns") or hasattr(prompts, "column_names")
    if is_table or isinstance(prompts, (bytes, Set)) or not isinstance(prompts, Iterable):
        raise PromptError(
            f"the prompts are of type {type(prompts).__name__}; give a text, a list of texts or"
            " prompts, or a tensor of token ids (load_prompts reads files and datasets)"
        )

    prompt_list = [_prompt_at(index, prompt) for index, prompt in enumerate(prompts)]
    if not prompt_list:
        raise PromptError("there are no prompts; give at least one")
    if all(prompt.id == Prompt.id for prompt in prompt_list):  # all have the default
        prompt_list = [replace(prompt, id=str(index)) for index, prompt in enumerate(prompt_list)]
    commonest_id, count = Counter(prompt.id for prompt in prompt_list).most_common(1)[0]
    if count > 1:
        raise PromptError(
            f"several prompts have the id {commonest_id!r}; give every prompt its own"
        )

    if not any(prompt.group for prompt in prompt_list):
        return prompt_list
    return [
        replace(prompt, group=prompt.group or f"prompt {prompt.id} alone") for prompt in prompt_list
    ]


def likeness_of(prompts: Sequence[Prompt]) -> str:
    """A sentence, without its full stop, on how much the prompts repeat each other.

    Numbers and names are disregarded. The sentence is empty if fewer than half of the prompts
    repeat another one, if there are fewer than four, or if prompts share groups, which statistics
    then treat as the units.

    The sentence says by what factor intervals may be too narrow. For n prompts, m_t of them of
    template t, it is at most ``√(Σ m_t² / n)``, the root of Kish's design effect when all prompts
    of a template have the same result.
    """
    groups = {prompt.group for prompt in prompts if prompt.group is not None}
    has_groups = 0 < len(groups) < len(prompts)
    if len(prompts) < _FEWEST_ALIKE or has_groups:
        return ""

    sizes: Counter[str] = Counter()  # the number of prompts of each template
    for prompt in prompts:
        template = _NAME.sub("@", _NUMBER.sub("#", prompt.question)).strip()
        if not template:  # a prompt of token ids
            template = " ".join(map(str, prompt.tokens))
        sizes[template] += 1
    if len(sizes) > len(prompts) / 2:
        return ""

    commonest_template, largest_size = sizes.most_common(1)[0]
    template_count = "one template" if len(sizes) == 1 else f"{len(sizes)} templates"
    design_effect = sum(size**2 for size in sizes.values()) / len(prompts)
    return (
        f"{len(prompts)} prompts follow {template_count}, apart from numbers and names"
        f' ("{shortened(commonest_template)}" {largest_size} times): intervals and tests assume'
        f" independent prompts, so intervals are up to {design_effect**0.5:.1f} times too narrow"
    )


def shortened(text: str, length: int = 40) -> str:
    """The beginning of a text, at most ``length`` characters, for messages."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"


def _from_encoding(encoding: Mapping[str, Any]) -> list[Prompt]:
    """Prompts from what a tokenizer returned: one sequence, or several, without their padding."""
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
    unpadded_rows = map(compress, rows, masks)
    return _from_rows(unpadded_rows)


def _from_tensor(tokens: Tensor) -> list[Prompt]:
    """Prompts from rows of token ids, without padding."""
    is_integer = not tokens.is_floating_point() and tokens.dtype != torch.bool
    if tokens.ndim != 2 or not is_integer or not tokens.numel():
        raise PromptError(
            f"token ids came as a {tokens.dtype} tensor of shape {tuple(tokens.shape)}; "
            "give a non-empty integer tensor [batch, pos], every row as long as its prompt "
            "(one prompt: tokens[None])"
        )
    return _from_rows(tokens.tolist())


def _prompt_at(index: int, prompt: object) -> Prompt:
    """The prompt itself, or one of a text, which its index names."""
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


def _rows(numbers: Any) -> list[list[int]]:
    """One or several rows of whole numbers as lists, from a tensor, an array or lists."""
    rows = _as_list(numbers)
    if rows and isinstance(rows[0], Integral):
        return [rows]
    return [_as_list(row) for row in rows]


def _from_rows(rows: Iterable[Iterable[int]]) -> list[Prompt]:
    """Prompts of token ids, named by their positions."""
    return [Prompt(tokens=tuple(row), id=str(index)) for index, row in enumerate(rows)]


def _as_list(numbers: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list."""
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    return list(numbers)
