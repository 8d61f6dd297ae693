"""Counterparts: the other version of a prompt, with its tokens aligned with the prompt's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch

from mechattn.axes import INSERTED, SEGMENTS
from mechattn.errors import ConditionError, OptionError
from mechattn.markup import fields_table
from mechattn.prompts.conditions import Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.prompts.tokenization import TokenizedModel, tokenize

Version = str | tuple[int, ...]  # a text, or token ids


@dataclass(frozen=True)
class Counterpart:
    """The other version of each prompt, such as a corrupted one.

    It has the prompt's own system text and answer. Each of its tokens is paired with one of the
    prompt, as far as possible. Versions with the same number of tokens are paired one by one.
    Otherwise a longest-match difference pairs the tokens that both versions have in common, and
    those of replaced stretches of equal length. A token without a partner has the origin −1 and is
    never patched.

    Paired tokens that differ are in the segment "changed" in both versions. A token without a
    partner is "changed" in the prompt and "inserted" in the other version.

    Args:
        versions: The other versions, by prompt id or as a list in the order of the prompts, whose
            ids must then count from 0. They are texts, or token ids for prompts that are token ids.
            By default each prompt's own ``counterpart``.
        from_the_end: Whether to pair replaced stretches of unequal length too, from their last
            tokens backwards. The last token of a subject, where its attributes are read, then has
            a partner.

    Raises:
        ConditionError: A prompt has no other version, both versions have the same tokens, or the
            answer's tokens differ.
        OptionError: ``versions`` is a single text or the token ids of a single prompt, or only one
            of a prompt and its other version is a text.
    """

    versions: Mapping[str, Version] | Sequence[Version] | None = None
    from_the_end: bool = False
    _repr_html_ = fields_table

    def __post_init__(self) -> None:
        versions = self.versions
        if versions is None or isinstance(versions, Mapping):
            return
        # The token ids of a single prompt are a list too, but of numbers.
        is_list = isinstance(versions, (list, tuple))
        if not is_list or any(isinstance(version, int) for version in versions):
            raise OptionError(
                f"versions={versions!r}: give a list with a version of each prompt, or a"
                " mapping from the prompts' ids to versions"
            )

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> TokenSequence:
        """The tokens of the other version, each with its partner in the prompt."""
        version = self._version(prompt)
        if isinstance(version, str):
            other_prompt = replace(prompt, question=version)
        else:
            other_prompt = replace(prompt, tokens=version)

        own_sequence = tokenize(prompt, model)
        other_sequence = tokenize(other_prompt, model)
        if own_sequence.tokens.equal(other_sequence.tokens):
            raise ConditionError(
                f"both versions of {prompt.where} have the same tokens, so nothing could have an"
                " effect"
            )

        own_answer = own_sequence.tokens[own_sequence.of_segment("answer")]
        other_answer = other_sequence.tokens[other_sequence.of_segment("answer")]
        if not own_answer.equal(other_answer):
            raise ConditionError(
                f"the answer of {prompt.where} has different tokens after the prompt's other"
                " version; begin the answer where a token begins, such as with a space"
                ' (template="joined")'
            )

        return _with_partners(own_sequence, other_sequence, self.from_the_end)

    def under(self, intervention: Any) -> Variant:
        """Return the other version under an intervention, or several as a tuple."""
        return Variant(self).under(intervention)

    def _version(self, prompt: Prompt) -> Version:
        """The other version of a prompt: a text if the prompt is one, and token ids otherwise."""
        version: Version | None = None
        if self.versions is None:
            version = prompt.counterpart
        elif isinstance(self.versions, Mapping):
            version = self.versions.get(prompt.id)
        elif prompt.id.isdecimal() and int(prompt.id) < len(self.versions):
            version = self.versions[int(prompt.id)]

        if not version:
            raise ConditionError(
                f"{prompt.where} has no other version: load_prompts(…, counterpart=<field>),"
                " Prompt(…, counterpart=…) or Counterpart({<prompt id>: <text or token ids>})"
                " gives it one"
            )

        has_text = not prompt.tokens
        if isinstance(version, str) != has_text:
            raise OptionError(
                f"one of {prompt.where} and its counterpart is a text and the other one is not;"
                " give texts for both, or token ids for both"
            )
        return version


def _with_partners(
    own_sequence: TokenSequence, other_sequence: TokenSequence, from_the_end: bool
) -> TokenSequence:
    """The other version, with the origin and segment of each token from its partner."""
    own_tokens = own_sequence.tokens.tolist()
    other_tokens = other_sequence.tokens.tolist()
    origin = torch.full((len(other_tokens),), INSERTED)
    segment = torch.full((len(other_tokens),), SEGMENTS.index("inserted"))

    partners = _partners(own_tokens, other_tokens, from_the_end)
    for position, partner in partners.items():
        origin[partner] = position
        if own_tokens[position] == other_tokens[partner]:
            segment[partner] = int(own_sequence.segment[position])
        else:
            segment[partner] = SEGMENTS.index("changed")
    return replace(other_sequence, origin=origin, segment=segment, counterpart=True)


def _partners(
    own_tokens: Sequence[int], other_tokens: Sequence[int], from_the_end: bool
) -> dict[int, int]:
    """Map the position of each paired token to that of its partner in the other version."""
    if len(own_tokens) == len(other_tokens):
        return {position: position for position in range(len(own_tokens))}

    partners = {}
    matcher = SequenceMatcher(None, own_tokens, other_tokens, autojunk=False)
    for kind, own_start, own_stop, other_start, other_stop in matcher.get_opcodes():
        own_length = own_stop - own_start
        other_length = other_stop - other_start
        is_paired = from_the_end or own_length == other_length
        if kind == "equal" or (kind == "replace" and is_paired):
            for steps_back in range(min(own_length, other_length), 0, -1):
                partners[own_stop - steps_back] = other_stop - steps_back
    return partners
