"""On which side of a model's boundary of positions a sequence is: both sides never share a batch, nor a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from mechattn.errors import PromptError, PromptTooLong
from mechattn.model.positions import Boundary, boundary_of
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence


def positions_of(sequence: Sequence) -> int:
    """How many positions a model counts in a sequence: fewer than tokens where the original ones keep theirs."""
    return int(sequence.position_ids.max()) + 1


def sides_of(model: Any, sequences: Seq[Mapping[str, Sequence]]) -> list[str]:
    """The side of each prompt, "short" or "long"; no sides for a model without a boundary."""
    boundary = boundary_of(model)
    if boundary is None:
        return []
    return [boundary.side(max(map(positions_of, made.values()))) for made in sequences]


def counted_sides(sides: Seq[str]) -> str:
    """How many prompts have which factors, in words."""
    counts = {side: sides.count(side) for side in sorted(set(sides), reverse=True)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{side} for {count} prompts" for side, count in counts.items())


def check_side(prompt: Prompt, made: Mapping[str, Sequence], model: Any, new_tokens: int = 0) -> None:
    """A prompt is read, and answered in ``new_tokens``, with the same frequencies under every condition.

    Raises:
        PromptTooLong: The model has no frequencies of its own for one so long (dynamic NTK).
        PromptError: Two conditions, or an answer and its prompt, would be of two models (LongRoPE).
    """
    boundary = boundary_of(model)
    if boundary is None:
        return
    where, name = f'prompt {prompt.id} ("{prompt.excerpt}")', str(model.cfg.model_name)
    counts = {condition: positions_of(sequence) for condition, sequence in made.items()}
    if boundary.kind == "dynamic":
        _check_not_beyond(boundary, counts, new_tokens, where, name)
        return
    for condition, count in counts.items():
        if boundary.side(count) != boundary.side(count + new_tokens):
            raise PromptError(
                f'{where} has {count:,} positions with the condition "{condition}", and {new_tokens} new tokens are '
                f"allowed: beyond {boundary.at:,} positions {name} computes with other factors (LongRoPE), which would "
                f"change in the middle of an answer. {_room(boundary.at - count)}"
            )
    short, long = min(counts, key=lambda c: counts[c]), max(counts, key=lambda c: counts[c])
    if boundary.side(counts[short]) != boundary.side(counts[long]):
        raise PromptError(
            f'{where} has {counts[short]:,} positions with the condition "{short}" and {counts[long]:,} with "{long}": '
            f"beyond {boundary.at:,} {name} computes with other factors (LongRoPE), so the two would be read by two "
            "models, and their difference would not be what the tokens do. Leave the prompt out, insert fewer tokens, "
            "or let the original ones keep their positions (.unshifted())"
        )


def _room(left: int) -> str:
    return f"Give new_tokens={left} at most, or another prompt" if left > 0 else "Leave the prompt out"


def _check_not_beyond(boundary: Boundary, counts: Mapping[str, int], new_tokens: int, where: str, name: str) -> None:
    longest = max(counts, key=lambda condition: counts[condition])
    if counts[longest] + new_tokens > boundary.at:
        more = f" and {new_tokens} new tokens are allowed" if new_tokens else ""
        raise PromptTooLong(
            f'{where} has {counts[longest]:,} positions with the condition "{longest}"{more}: beyond {boundary.at:,} '
            f"the frequencies of {name} are those of the longest text that it has read so far (dynamic NTK), so that "
            "one so long has no numbers of its own. Shorten it, or insert fewer tokens"
        )
