"""Conditions: what is done to a prompt's tokens before the model reads them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from mechattn.errors import ConditionError, OptionError
from mechattn.functional.rows import EdgeMask
from mechattn.markup import fields_table
from mechattn.prompts import fillers
from mechattn.prompts.places import Place, behind, check_place, check_run, position
from mechattn.prompts.prompt import HALVES, Prompt
from mechattn.prompts.sequences import Sequence, insert
from mechattn.prompts.templates import TokenizedModel, require_tokenizer, tokenize
from mechattn.shown import plain


@runtime_checkable
class Condition(Protocol):
    """Turns a prompt into the sequence that the model reads; the same seed and prompt give the same sequence."""

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence: ...


@runtime_checkable
class Marks(Protocol):
    """An intervention that is done by marking the sequence, such as ``Knockout``."""

    def marked(self, sequence: Sequence) -> Sequence: ...


def check_name(name: object) -> None:
    """Refuse a name that cannot stand in a table, a file or a terminal as it is; files end a text at a NUL.

    Raises:
        OptionError: It is no text, empty, or holds control characters or a newline.
    """
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f'the condition {name!r}: give it a name, such as "slash"')
    if plain(name) != name or not {"\n", "\t"}.isdisjoint(name):
        raise OptionError(f"the condition {name!r} has a control character in its name; leave it out")


@dataclass(frozen=True)
class Baseline:
    """The prompt as it is, perhaps under an intervention.

    Args:
        intervention: What is done to the model while it reads the prompt, such as ``ARM()``; several as a tuple.
    """

    intervention: Any = ()

    _repr_html_ = fields_table

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The prompt's own tokens."""
        return _intervened(tokenize(prompt, model), _several(self.intervention))

    def under(self, intervention: Any) -> Variant:
        """The same under a further intervention."""
        return Variant(self, interventions=_several(intervention))


@dataclass(frozen=True)
class Variant:
    """A condition whose inserted tokens take no attention, or don't move what follows them; or under an intervention.

    The 2 × 2 that separates dilution from distance: ``.masked()`` moves the original tokens apart and takes no
    attention; ``.unshifted()`` takes attention and moves nothing; both together are the baseline.

    Args:
        condition: What is inserted.
        hides: Original tokens cannot see the inserted ones.
        keeps_positions: Original tokens keep the position ids that they have in the baseline. Inserted ones get the
            ids just before that of the token which follows them, so their distance to it is what it was.
        interventions: What is done to the model while it reads the sequence.
    """

    condition: Condition
    hides: bool = False
    keeps_positions: bool = False
    interventions: tuple[Any, ...] = ()

    _repr_html_ = fields_table

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The same tokens, marked."""
        made = replace(self.condition.apply(prompt, model, seed), keeps_positions=self.keeps_positions)
        if self.hides:
            made = replace(made, edge_mask=EdgeMask(~made.inserted, made.inserted))
        return _intervened(made, self.interventions)

    def masked(self) -> Variant:
        """With inserted tokens that the original ones cannot see."""
        return replace(self, hides=True)

    def unshifted(self) -> Variant:
        """With original tokens that keep their position ids."""
        return replace(self, keeps_positions=True)

    def under(self, intervention: Any) -> Variant:
        """Under a further intervention."""
        return replace(self, interventions=(*self.interventions, *_several(intervention)))


class Insertion:
    """A run of tokens put into the prompt: the base of the ready kinds, and of one of your own.

    A kind is a frozen dataclass with the fields ``count`` and ``place``, and what else its ``filler`` needs::

        @dataclass(frozen=True)
        class Dots(ma.Insertion):
            count: int = 10
            place: str = "before_question"

            def filler(self, prompt, model, seed=0):
                return model.tokenizer(" ." * self.count, add_special_tokens=False)["input_ids"]
    """

    count: int
    place: Place

    _repr_html_ = fields_table

    def __post_init__(self) -> None:
        check_run(self.count, self.place)

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The token ids that are inserted into this prompt."""
        raise ConditionError(f"{type(self).__name__} has no filler: write def filler(self, prompt, model, seed=0)")

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The prompt's tokens with the run inserted on token ids.

        Raises:
            ConditionError: The run cannot be made of ``count`` tokens, or the place doesn't exist in this prompt.
        """
        sequence = tokenize(prompt, model)
        filler = self.filler(prompt, model, seed)
        return insert(sequence, filler, position(self.place, sequence, prompt, seed))

    def masked(self) -> Variant:
        """The same tokens, invisible to the original ones, which they still move apart."""
        return Variant(self, hides=True)

    def unshifted(self) -> Variant:
        """The same tokens, and original ones that keep the position ids that they have in the baseline."""
        return Variant(self, keeps_positions=True)

    def under(self, intervention: Any) -> Variant:
        """The same tokens, read under an intervention, such as ``ARM()``; several as a tuple."""
        return Variant(self, interventions=_several(intervention))


@dataclass(frozen=True)
class MeaninglessTokens(Insertion):
    """A run of one repeated text, ``count`` tokens long, put into the prompt (arXiv:2510.01032: 55 × "/").

    Args:
        text: What is repeated.
        count: How many *tokens* are inserted, at least 1.
        place: "before_question"; "start" (after BOS, before everything else); "middle" (of the question's tokens);
            "before_answer" (at the end where there is no answer); "random" (one run at a token boundary inside the
            question, drawn for each prompt).
        separator: What stands between two repetitions; "" for none.
    """

    text: str = "/"
    count: int = 55
    place: Place = "before_question"
    separator: str = " "

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise OptionError(f"text={self.text!r}, count={self.count!r}: give a text and a whole number of tokens")
        if not self.text:
            raise OptionError('text="": give the text that is to be repeated, "/" for example')
        if HALVES.search(self.text + str(self.separator)):
            raise OptionError(f"text={self.text!r} holds half of a surrogate pair, which is no text")
        super().__post_init__()

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The most repetitions that give exactly ``count`` tokens."""
        return fillers.repeated(require_tokenizer(model), self.text, self.separator, self.count)

    def fitted(self, model: TokenizedModel) -> MeaninglessTokens:
        """The same with the nearest count that this model's tokenizer can reach, as some cut one "/" into two tokens.

        Raises:
            ConditionError: None within ten of ``count`` can be reached.
        """
        tokenizer = require_tokenizer(model)
        return replace(self, count=fillers.nearest_count(tokenizer, self.text, self.separator, self.count))


@dataclass(frozen=True)
class Text(Insertion):
    """A text of your own, put into the prompt once, as it is: ``Text(" Take your time.", place="middle")``.

    Args:
        text: What is inserted; its tokens are those that the tokenizer makes of it alone, blanks included.
        place: As for :class:`MeaninglessTokens`; before the question by default.
        after: In place of a place: behind the first token that completes this text in the prompt, wherever that is.
    """

    text: str
    place: Place | None = None  # type: ignore[assignment]
    after: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise OptionError(f'text={self.text!r}: give the text that is inserted, " Take your time." for example')
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise OptionError(f"after={self.after!r}: give a text that stands in every prompt, or leave it out")
        if self.after is not None and self.place is not None:
            raise OptionError(f"place={self.place!r} and after={self.after!r}: give one of the two")
        check_place(self.place or "before_question")

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The tokens of the text."""
        return require_tokenizer(model)(self.text, add_special_tokens=False)["input_ids"]

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> Sequence:
        """The prompt's tokens with those of the text inserted.

        Raises:
            ConditionError: The place doesn't exist in this prompt, or the marker doesn't stand in it.
        """
        sequence = tokenize(prompt, model)
        if self.after is None:
            at = position(self.place or "before_question", sequence, prompt, seed)
        else:
            at = behind(self.after, sequence, prompt, require_tokenizer(model))
        return insert(sequence, self.filler(prompt, model, seed), at)


@dataclass(frozen=True)
class RepeatedWord(Insertion):
    """A run of one repeated word, which has a meaning: the paper's control (55 × "he").

    Args:
        word: What is repeated, separated by spaces.
        count: How many tokens are inserted.
        place: As for :class:`MeaninglessTokens`.
    """

    word: str = "he"
    count: int = 55
    place: Place = "before_question"

    def __post_init__(self) -> None:
        if not isinstance(self.word, str) or not self.word.strip() or HALVES.search(self.word):
            raise OptionError(f'word={self.word!r}: give a word, "he" for example')
        super().__post_init__()

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The repetitions that give exactly ``count`` tokens."""
        return fillers.repeated(require_tokenizer(model), self.word, " ", self.count)


@dataclass(frozen=True)
class RandomTokens(Insertion):
    """Ordinary tokens of the vocabulary, drawn uniformly and anew for each prompt: neither meaning nor repetition.

    Args:
        count: How many tokens are inserted.
        place: As for :class:`MeaninglessTokens`.
        draw: Another number, another draw: for several of them beside each other in one run.
    """

    count: int = 55
    place: Place = "before_question"
    draw: int = 0

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The drawn tokens."""
        draw = random.Random(f"tokens {seed} {prompt.id} {self.draw}")
        return fillers.random_tokens(require_tokenizer(model), int(model.cfg.d_vocab), self.count, draw)


@dataclass(frozen=True)
class RandomSentence(Insertion):
    """Grammatical sentences about nothing, drawn anew for each prompt and cut to exactly ``count`` tokens.

    The control of arXiv:2510.01032, whose own sentences are not published.

    Args:
        count: How many tokens are inserted.
        place: As for :class:`MeaninglessTokens`.
        draw: Another number, another draw: for several of them beside each other in one run.
    """

    count: int = 55
    place: Place = "before_question"
    draw: int = 0

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The tokens of the sentences."""
        draw = random.Random(f"sentence {seed} {prompt.id} {self.draw}")
        return fillers.random_sentence(require_tokenizer(model), self.count, draw)


@dataclass(frozen=True)
class ShuffledSentence(RandomSentence):
    """The tokens of :class:`RandomSentence` (the same ones, at the same seed) in random order: words without grammar.

    Args:
        count: How many tokens are inserted.
        place: As for :class:`MeaninglessTokens`.
        draw: Another number, another draw: for several of them beside each other in one run.
    """

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The tokens of the sentences, shuffled."""
        tokens = super().filler(prompt, model, seed)
        random.Random(f"shuffle {seed} {prompt.id} {self.draw}").shuffle(tokens)
        return tokens


@dataclass(frozen=True)
class Counting(Insertion):
    """Numbers in order, "1 2 3 …", cut to exactly ``count`` tokens: filler that says nothing of the question.

    Args:
        count: How many tokens are inserted.
        place: As for :class:`MeaninglessTokens`.

    Source:
        The filler under which large models without reasoning answer better (Greenblatt, December 2025).
    """

    count: int = 55
    place: Place = "before_answer"

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The tokens of the numbers."""
        numbers = " ".join(map(str, range(1, self.count + 1)))  # one token each at least
        return require_tokenizer(model)(numbers, add_special_tokens=False)["input_ids"][: self.count]


@dataclass(frozen=True)
class RepeatQuestion(Insertion):
    """The question's own tokens once more, or several times: what is inserted is as long as the question.

    Args:
        times: How often it is repeated.
        place: As for :class:`MeaninglessTokens`; after the question by default.

    Source:
        As good as counting, or better, in large models without reasoning (Greenblatt, December 2025).
    """

    times: int = 1
    place: Place = "before_answer"

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or self.times < 1:
            raise OptionError(f"times={self.times!r}: give a whole number, 1 at least; the baseline is always run")
        check_place(self.place)

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """The tokens of the question."""
        sequence = tokenize(prompt, model)
        return sequence.tokens[sequence.of_segment("question")].tolist() * self.times


def _several(interventions: Any) -> tuple[Any, ...]:
    return tuple(interventions) if isinstance(interventions, (tuple, list)) else (interventions,)


def _intervened(sequence: Sequence, interventions: tuple[Any, ...]) -> Sequence:
    """Marked where an intervention marks; the others are kept for the forward pass."""
    for intervention in interventions:
        if isinstance(intervention, type):
            raise OptionError(f"intervention={intervention.__name__}: give one such as ARM(), with its brackets")
        if isinstance(intervention, Marks):
            sequence = intervention.marked(sequence)
        elif callable(getattr(intervention, "acting", None)):
            sequence = replace(sequence, interventions=(*sequence.interventions, intervention))
        else:
            raise OptionError(f"intervention={intervention!r}: give one such as ARM(), or several as a tuple")
    return sequence
