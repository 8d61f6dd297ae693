"""Counterparts: the other version of a prompt, its tokens aligned with the prompt's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch

from mechattn.axes import SEGMENTS
from mechattn.errors import ConditionError, OptionError
from mechattn.markup import fields_table
from mechattn.prompts.conditions import Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import INSERTED, Sequence
from mechattn.prompts.tokenization import TokenizedModel, tokenize

Version = str | tuple[int, ...]  # a text, or token ids


@dataclass(frozen=True)
class Counterpart:
    """The other version of each prompt (a corrupted one, say), with the same system text and answer.

    Tokens of both versions are paired: one by one if the versions have as many tokens; otherwise what a longest-match
    difference leaves in place, and replaced stretches of equal length. A token without a partner is marked (its origin
    is −1) and never patched. Tokens that differ, or have no partner, are the segment "changed" of both versions.

    Args:
        versions: The other versions by prompt id, or in the order of prompts whose ids count from 0: texts, or token
            ids for prompts that are token ids. By default each prompt's own ``counterpart``.
        from_the_end: Also pair the tokens of replaced stretches of unequal length, from their last tokens backwards: a
            subject's last token, where its attributes are read, then has a partner.

    Raises:
        ConditionError: A prompt has no other version, both have the same tokens, or the answer's tokens differ.
    """

    versions: Mapping[str, Version] | Seq[Version] | None = None
    from_the_end: bool = False
    _repr_html_ = fields_table

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The tokens of the other version, each with its partner in the prompt."""
        version = self._version(prompt)
        changed: dict[str, Any] = (
            {"question": version} if isinstance(version, str) else {"tokens": tuple(version)}
        )
        own, other = (tokenize(one, model) for one in (prompt, replace(prompt, **changed)))
        if own.tokens.equal(other.tokens):
            raise ConditionError(
                f"both versions of {prompt.where} have the same tokens, so nothing could have an effect"
            )
        if not own.tokens[own.of_segment("answer")].equal(other.tokens[other.of_segment("answer")]):
            raise ConditionError(
                f"the answer of {prompt.where} becomes other tokens after its other version; begin the answer where a "
                'token begins, such as with a space (template="joined")'
            )
        return _paired(own, other, self.from_the_end)

    def under(self, intervention: Any) -> Variant:
        """Return the same version read under an intervention."""
        return Variant(self).under(intervention)

    def _version(self, prompt: Prompt) -> Version:
        if self.versions is None:
            found: Any = prompt.counterpart
        elif isinstance(self.versions, Mapping):
            found = self.versions.get(prompt.id)
        else:
            index = int(prompt.id) if prompt.id.isdecimal() else len(self.versions)
            found = self.versions[index] if index < len(self.versions) else None
        if not found:
            raise ConditionError(
                f"{prompt.where} has no other version: load_prompts(…, counterpart=<field>), Prompt(…, counterpart=…) "
                "or Counterpart({<prompt id>: <text or token ids>}) gives it one"
            )
        if isinstance(found, str) == bool(prompt.tokens):
            kinds = ("token ids", "a text")
            raise OptionError(
                f"{prompt.where} is {kinds[not prompt.tokens]} and its counterpart {kinds[isinstance(found, str)]}; "
                "give the same kind"
            )
        return found


def _paired(own: Sequence, other: Sequence, from_the_end: bool) -> Sequence:
    """The other version's tokens with origins in the own one."""
    tokens, partners = own.tokens.tolist(), torch.full((len(other),), INSERTED)
    segment = torch.full((len(other),), SEGMENTS.index("inserted"))
    for mine, theirs in _pairs(tokens, other.tokens.tolist(), from_the_end):
        partners[theirs] = mine
        same = tokens[mine] == int(other.tokens[theirs])
        segment[theirs] = int(own.segment[mine]) if same else SEGMENTS.index("changed")
    return replace(other, origin=partners, segment=segment, counterpart=True)


def _pairs(own: Seq[int], other: Seq[int], from_the_end: bool) -> Iterator[tuple[int, int]]:
    """Positions in both that belong together."""
    if len(own) == len(other):
        yield from zip(range(len(own)), range(len(other)), strict=True)
        return
    for kind, first, end, begin, stop in SequenceMatcher(
        None, own, other, autojunk=False
    ).get_opcodes():
        if kind == "equal" or (kind == "replace" and (from_the_end or end - first == stop - begin)):
            count = min(end - first, stop - begin)
            yield from zip(range(end - count, end), range(stop - count, stop), strict=True)


def with_changes(sequences: Mapping[str, Sequence], baseline: str) -> dict[str, Sequence]:
    """The sequences of a prompt, with every token that a counterpart changes or lacks in the segment "changed"."""
    kept = torch.ones(len(sequences[baseline]), dtype=torch.bool)
    for one in (one for one in sequences.values() if one.counterpart):
        there = torch.zeros_like(kept)
        there[one.origin[~one.inserted & ~one.of_segment("changed")]] = True
        kept &= there
    if kept.all():
        return dict(sequences)

    def marked(one: Sequence) -> Sequence:
        changed = ~one.inserted & ~kept[one.origin.clamp(min=0)]
        return replace(one, segment=one.segment.masked_fill(changed, SEGMENTS.index("changed")))

    return {name: marked(one) for name, one in sequences.items()}
