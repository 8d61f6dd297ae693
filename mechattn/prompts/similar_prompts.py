"""Warns of repeated prompts and prompts from one template, which carry little more information than one prompt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence as Seq

from mechattn.errors import warn
from mechattn.prompts.prompt import Prompt

_FEWEST = 4  # prompts; with fewer, intervals are wide in any case
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"\b[A-Z]\w*")


def warn_of_likeness(prompts: Seq[Prompt]) -> None:
    """Warn if at least half of the prompts repeat another one, apart from numbers and names."""
    groups = {prompt.group for prompt in prompts if prompt.group is not None}
    if len(prompts) < _FEWEST or 0 < len(groups) < len(prompts):
        return
    texts = Counter(_text(prompt) for prompt in prompts)
    shapes = Counter(_shape(prompt) for prompt in prompts)
    if len(texts) <= len(prompts) / 2:
        few = "the same" if len(texts) == 1 else f"{len(texts)} different ones"
        said, many = f"{len(prompts)} prompts are {few} ({_most(texts)})", len(prompts) / len(texts)
    elif len(shapes) <= len(prompts) / 2:
        few = "one template" if len(shapes) == 1 else f"{len(shapes)} templates"
        said = f"{len(prompts)} prompts follow {few}, apart from numbers and names ({_most(shapes)})"
        many = len(prompts) / len(shapes)
    else:
        return
    warn(
        f"{said}: intervals and tests assume independent prompts, so intervals are up to {many**0.5:.1f} times too "
        "narrow. Use more varied prompts, or give their groups: Prompt(group=…), load_prompts(group_field=…)",
    )


def _text(prompt: Prompt) -> str:
    return prompt.question.strip() or " ".join(map(str, prompt.tokens))


def _shape(prompt: Prompt) -> str:
    """A text with numbers and names removed; token ids are left as they are."""
    return _NAME.sub("@", _NUMBER.sub("#", prompt.question)).strip() or _text(prompt)


def _most(counted: Counter[str]) -> str:
    text, count = counted.most_common(1)[0]
    shown = text if len(text) <= 40 else text[:39] + "…"
    return f'"{shown}" {count} times'
