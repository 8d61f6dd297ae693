"""Conditions: how a prompt's tokens are changed before the model reads them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from mechattn.errors import ConditionError, OptionError, check_choice, check_counts, plain
from mechattn.markup import fields_table
from mechattn.prompts import fillers
from mechattn.prompts.fillers import Place, position_behind, position_of
from mechattn.prompts.prompt import LARGEST_COUNT, Prompt
from mechattn.prompts.token_sequences import CutEdges, TokenSequence, insert
from mechattn.prompts.tokenization import TokenizedModel, require_tokenizer, tokenize


@runtime_checkable
class Condition(Protocol):
    """Turns a prompt into the sequence that the model reads.

    The same seed and prompt always give the same sequence.
    """

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> TokenSequence: ...


@runtime_checkable
class Marks(Protocol):
    """An intervention that marks the sequence, such as ``AttentionKnockout``."""

    def marked(self, sequence: TokenSequence) -> TokenSequence: ...


def check_name(name: object) -> None:
    """Refuse a condition's name that is empty, not a text, or has characters that a table, a file
    or a terminal would change."""
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f'the condition {name!r} needs a name, such as "slash"')
    if plain(name) != name or "\n" in name or "\t" in name:
        raise OptionError(f"the condition {name!r} has a control character in its name; remove it")


@dataclass(frozen=True)
class Baseline:
    """The unchanged prompt, optionally under an intervention.

    Args:
        intervention: The intervention while the model reads the prompt, such as ``ARM()``, or
            several as a tuple.
    """

    intervention: Any = ()
    _repr_html_ = fields_table

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> TokenSequence:
        """The prompt's own tokens."""
        return _with_interventions(tokenize(prompt, model), self.interventions)

    @property
    def interventions(self) -> tuple[Any, ...]:
        """The interventions as a tuple, also if there is only one."""
        return _as_tuple(self.intervention)

    def under(self, intervention: Any) -> Variant:
        """Return the same condition under a further intervention."""
        return Variant(self).under(intervention)


@dataclass(frozen=True)
class Variant:
    """A condition whose inserted tokens are hidden or move nothing, or that is read under an
    intervention.

    The variants form the 2 × 2 that separates dilution from distance. With ``.masked()`` the
    inserted tokens move the original tokens apart but receive none of their attention. With
    ``.unshifted()`` they receive attention but move nothing. With both, the original tokens are
    read as in the baseline.

    Args:
        condition: The condition that inserts tokens.
        hides: Whether the inserted tokens are hidden from the original ones.
        keeps_positions: Whether the original tokens keep their position ids of the baseline.
            Inserted tokens then get the ids just before that of the next original token, so they
            are as near to it as without this option.
        interventions: The interventions while the model reads the sequence.
    """

    condition: Condition
    hides: bool = False
    keeps_positions: bool = False
    interventions: tuple[Any, ...] = ()
    _repr_html_ = fields_table

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> TokenSequence:
        """The condition's tokens, marked as this variant is read.

        Raises:
            ConditionError: The inserted tokens are to be hidden, but the condition itself has
                already cut edges, which this would restore.
        """
        sequence = self.condition.apply(prompt, model, seed)
        if self.keeps_positions:
            sequence = replace(sequence, keeps_positions=True)
        if self.hides:
            if sequence.cut_edges is not None:
                raise ConditionError(
                    f"{type(self.condition).__name__} has cut edges of its own, which masked()"
                    " would replace: leave masked() out, or cut all edges in the condition"
                )
            sequence = replace(sequence, cut_edges=CutEdges(~sequence.inserted, sequence.inserted))
        return _with_interventions(sequence, self.interventions)

    def masked(self) -> Variant:
        """Return the variant whose inserted tokens are hidden from the original ones.

        It is refused when applied if the condition itself cuts edges.
        """
        return replace(self, hides=True)

    def unshifted(self) -> Variant:
        """Return the variant whose original tokens keep their position ids."""
        return replace(self, keeps_positions=True)

    def under(self, intervention: Any) -> Variant:
        """Return the variant under a further intervention, or several as a tuple."""
        return replace(self, interventions=(*self.interventions, *_as_tuple(intervention)))


class Insertion(ABC):
    """The base class of conditions that insert tokens into the prompt.

    Built-in conditions use it, and your own can. A subclass is a frozen dataclass with the fields
    ``count`` and ``place``, and any others that its ``filler`` needs::

        @dataclass(frozen=True)
        class Dots(ma.conditions.Insertion):
            count: int = 10
            place: str = "before_question"

            def filler(self, prompt, model, seed=0):
                return model.tokenizer(" ." * self.count, add_special_tokens=False)["input_ids"]
    """

    count: int | None = None  # None if the prompt or a text decides, as in ``Text``
    place: Place = "before_question"
    own_line: bool = False
    _repr_html_ = fields_table

    def __post_init__(self) -> None:
        check_counts(most=LARGEST_COUNT, count=self.count)
        if self.own_line and self.count == 1:
            raise OptionError(
                "count=1: a line of its own takes at least two tokens, one for its break"
            )
        check_choice(Place, place=self.place)

    @abstractmethod
    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the token ids to insert into this prompt."""

    def apply(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> TokenSequence:
        """Return the prompt's tokens with the filler's token ids inserted.

        Raises:
            ConditionError: The filler does not have exactly ``count`` tokens, or the place does not
                exist in this prompt.
        """
        sequence = tokenize(prompt, model)
        filler = self._filler_with_line(prompt, model, seed)
        if self.count is not None and len(filler) != self.count:
            raise ConditionError(
                f"{type(self).__name__}: filler gives {len(filler)} tokens for prompt {prompt.id},"
                f" but count={self.count}"
            )
        return insert(sequence, filler, self._insertion_point(sequence, prompt, model, seed))

    def _filler_with_line(self, prompt: Prompt, model: TokenizedModel, seed: int) -> list[int]:
        """The filler; with ``own_line`` one of its tokens is a line break, or ends with one."""
        if not self.own_line:
            return self.filler(prompt, model, seed)

        tokenizer = require_tokenizer(model)
        line_break = fillers.line_break(tokenizer)
        # mypy knows neither that a subclass is a dataclass nor that it has a count.
        one_token_less: Any = replace(self, count=self.count - 1)  # type: ignore
        if self.place == "after_question":
            return [*line_break, *one_token_less.filler(prompt, model, seed)]

        # A tokenizer may have a single token for the last one with a line break, such as Qwen's
        # ".\n". Otherwise the line break takes one of the tokens. A text that cannot fill the
        # whole count, which is a ConditionError, may still fill one token less.
        with suppress(ConditionError):
            filler = self.filler(prompt, model, seed)
            ending = fillers.tokens_of(tokenizer, tokenizer.decode(filler[-1:]) + "\n")
            if len(ending) == 1:
                return [*filler[:-1], *ending]
        return [*one_token_less.filler(prompt, model, seed), *line_break]

    def _insertion_point(
        self, sequence: TokenSequence, prompt: Prompt, model: TokenizedModel, seed: int
    ) -> int:
        """The position before which the filler is inserted."""
        return position_of(self.place, sequence, prompt, seed)

    def masked(self) -> Variant:
        """Return the variant whose inserted tokens are hidden from the original ones.

        They still move the original tokens apart.
        """
        return Variant(self).masked()

    def unshifted(self) -> Variant:
        """Return the variant whose original tokens keep the position ids of the baseline."""
        return Variant(self).unshifted()

    def under(self, intervention: Any) -> Variant:
        """Return the variant under an intervention such as ``ARM()``, or several as a tuple."""
        return Variant(self).under(intervention)


@dataclass(frozen=True)
class MeaninglessTokens(Insertion):
    """Insert a repeated text into the prompt, ``count`` tokens in all.

    Args:
        text: The repeated text.
        count: The number of inserted *tokens*, at least 1.
        place: "before_question"; "start" (after BOS, before everything else); "middle" (of the
            question's tokens); "after_question" (in a chat template still in the user's turn);
            "before_answer" (in a chat template in the assistant's turn; at the end of a prompt
            without an answer, where a generated answer follows); "random" (at one token boundary
            inside the question, drawn for each prompt).
        separator: The text between two repetitions; "" for none.
        own_line: Whether one of the ``count`` tokens holds a line break: the first with the place
            "after_question", and otherwise the last. By default there is none, as in the paper.

    Source:
        arXiv:2510.01032, with 55 × "/".
    """

    text: str = "/"
    count: int = 55
    place: Place = "before_question"
    separator: str = " "
    own_line: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise OptionError(f'text={self.text!r}: give the text to repeat, such as "/"')
        if not isinstance(self.separator, str):
            raise OptionError(f'separator={self.separator!r}: give a text, "" for none')
        super().__post_init__()

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the repeated text, exactly ``count`` of them."""
        return fillers.repeated(require_tokenizer(model), self.text, self.separator, self.count)

    def fitted(self, model: TokenizedModel) -> MeaninglessTokens:
        """Return the condition with the nearest count that this tokenizer can reach.

        A tokenizer that splits "/" into two tokens, for example, reaches only even counts.

        Raises:
            ConditionError: No count within ten of ``count`` can be reached.
        """
        count = fillers.nearest_count(
            require_tokenizer(model), self.text, self.separator, self.count, self.own_line
        )
        return replace(self, count=count)


@dataclass(frozen=True)
class Text(Insertion):
    """Insert a text of your own into the prompt once.

    For example ``Text(" Take your time.", place="middle")``.

    Args:
        text: The inserted text; it is tokenized on its own, including its spaces.
        place: As for :class:`MeaninglessTokens`.
        after: A text in the prompt; the insertion follows the first token that completes it. Give
            it instead of ``place``.
    """

    text: str
    place: Place = "before_question"
    after: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise OptionError(
                f'text={self.text!r}: give the text to insert, such as " Take your time."'
            )

        if self.after == "":
            raise OptionError("after='': give a text that every prompt contains, or omit it")
        if self.after is not None and self.place != "before_question":
            raise OptionError(
                f"place={self.place!r} and after={self.after!r}: give only one of the two"
            )
        check_choice(Place, place=self.place)

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the text."""
        return fillers.tokens_of(require_tokenizer(model), self.text)

    def _insertion_point(
        self, sequence: TokenSequence, prompt: Prompt, model: TokenizedModel, seed: int
    ) -> int:
        if self.after is None:
            return super()._insertion_point(sequence, prompt, model, seed)
        return position_behind(self.after, sequence, prompt, require_tokenizer(model))


@dataclass(frozen=True)
class RepeatedWord(Insertion):
    """Insert a repeated word that has a meaning, as a control for :class:`MeaninglessTokens`.

    Args:
        word: The word; its repetitions are separated by spaces.
        count: The number of inserted tokens.
        place: As for :class:`MeaninglessTokens`.
        own_line: As for :class:`MeaninglessTokens`.

    Source:
        arXiv:2510.01032, with 55 × "he".
    """

    word: str = "he"
    count: int = 55
    place: Place = "before_question"
    own_line: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.word, str) or not self.word.strip():
            raise OptionError(f'word={self.word!r}: give a word, such as "he"')
        super().__post_init__()

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the repeated word, exactly ``count`` of them."""
        return fillers.repeated(require_tokenizer(model), self.word, " ", self.count)


@dataclass(frozen=True)
class _Drawn(Insertion):
    """Base class of conditions whose filler is drawn for each prompt."""

    count: int = 55
    place: Place = "before_question"
    draw: int = 0
    own_line: bool = False


@dataclass(frozen=True)
class RandomTokens(_Drawn):
    """Insert ordinary tokens, drawn uniformly from the vocabulary for each prompt.

    Such filler has neither a meaning nor a pattern that is repeated.

    Args:
        count: The number of inserted tokens.
        place: As for :class:`MeaninglessTokens`.
        draw: The number of the draw. Give different numbers to have several draws in one run.
        own_line: As for :class:`MeaninglessTokens`.
    """

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the drawn tokens."""
        generator = random.Random(f"tokens {seed} {prompt.id} {self.draw}")
        return fillers.random_tokens(
            require_tokenizer(model), int(model.cfg.d_vocab), self.count, generator
        )


@dataclass(frozen=True)
class RandomSentence(_Drawn):
    """Insert grammatical sentences that are unrelated to the question, ``count`` tokens in all.

    Each prompt gets different sentences. arXiv:2510.01032 has such a control, but does not publish
    its sentences.

    Args:
        count: The number of inserted tokens.
        place: As for :class:`MeaninglessTokens`.
        draw: The number of the draw. Give different numbers to have several draws in one run.
        own_line: As for :class:`MeaninglessTokens`.
        cut: Whether the last sentence is cut off after ``count`` tokens. With False, sentences are
            drawn until whole ones have exactly ``count`` tokens; a prompt for which none are found
            raises a ``ConditionError``.
    """

    cut: bool = True

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the sentences."""
        generator = random.Random(f"sentence {seed} {prompt.id} {self.draw}")
        tokenizer = require_tokenizer(model)
        if self.cut:
            return fillers.random_sentence(tokenizer, self.count, generator)[: self.count]
        return fillers.whole_sentences(tokenizer, self.count, generator)


@dataclass(frozen=True)
class ShuffledSentence(RandomSentence):
    """Insert the tokens of :class:`RandomSentence` in random order, as words without grammar.

    With the same seed and options, both insert the same tokens; with ``own_line`` those that hold
    the line break may differ.

    Args:
        count: The number of inserted tokens.
        place: As for :class:`MeaninglessTokens`.
        draw: The number of the draw. Give different numbers to have several draws in one run.
        own_line: As for :class:`MeaninglessTokens`.
        cut: As for :class:`RandomSentence`.
    """

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the sentences, shuffled."""
        tokens = super().filler(prompt, model, seed)
        random.Random(f"shuffle {seed} {prompt.id} {self.draw}").shuffle(tokens)
        return tokens


@dataclass(frozen=True)
class Counting(Insertion):
    """Insert "1 2 3 …" on a line of its own, as filler that is unrelated to the question.

    Args:
        count: The number of inserted tokens. The numbers go up to the last that fits, and further
            line breaks before them fill the rest.
        place: As for :class:`MeaninglessTokens`; after the question by default.

    Source:
        Greenblatt, December 2025: large models that answer without reasoning are right more often
        with such filler.
    """

    count: int = 55
    place: Place = "after_question"

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the numbers and line breaks."""
        tokenizer = require_tokenizer(model)
        line_break = fillers.line_break(tokenizer)
        last_break = _last_break(self.place, line_break)
        room = self.count - len(last_break)
        numbers = fillers.numbers_in_order(tokenizer, room - len(line_break))
        first_breaks = line_break * (room - len(numbers))
        return first_breaks + numbers + last_break


@dataclass(frozen=True)
class RepeatQuestion(Insertion):
    """Insert the question's own tokens once or several times.

    Each repetition of a text is on a line of its own. Questions that are token ids get no line
    breaks.

    Args:
        times: The number of repetitions.
        place: As for :class:`MeaninglessTokens`; after the question by default.

    Source:
        Greenblatt, December 2025: helps large models that answer without reasoning as much as
        counting, or more.
    """

    times: int = 1
    place: Place = "after_question"

    def __post_init__(self) -> None:
        check_counts(times=self.times, most=LARGEST_COUNT)
        check_choice(Place, place=self.place)

    def filler(self, prompt: Prompt, model: TokenizedModel, seed: int = 0) -> list[int]:
        """Return the tokens of the question and line breaks."""
        sequence = tokenize(prompt, model)
        question = sequence.tokens[sequence.of_part("question")].tolist()
        line_break = [] if prompt.tokens else fillers.line_break(require_tokenizer(model))
        return (line_break + question) * self.times + _last_break(self.place, line_break)


def _last_break(place: Place, line_break: list[int]) -> list[int]:
    """The line break after filler lines; none after the question, whose own line ends there."""
    return [] if place == "after_question" else line_break


def _as_tuple(intervention: Any) -> tuple[Any, ...]:
    """One intervention or several as a tuple."""
    if isinstance(intervention, (tuple, list)):
        return tuple(intervention)
    return (intervention,)


def _with_interventions(sequence: TokenSequence, interventions: tuple[Any, ...]) -> TokenSequence:
    """The sequence under interventions: marked by some, and with the rest for the forward pass.

    Raises:
        OptionError: Something else than an intervention was given.
    """
    for intervention in interventions:
        is_class = isinstance(intervention, type)
        if isinstance(intervention, Marks) and not is_class:
            sequence = intervention.marked(sequence)
        elif callable(getattr(intervention, "acting", None)) and not is_class:
            sequence = replace(sequence, interventions=(*sequence.interventions, intervention))
        else:
            raise OptionError(
                f"intervention={intervention!r}: give an intervention such as ARM() (with"
                " brackets), or several as a tuple"
            )
    return sequence
