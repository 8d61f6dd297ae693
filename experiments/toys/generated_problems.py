"""Generated questions that no model was trained on: word problems with worked answers, and recall questions.

A problem is a chain of one to five arithmetic steps told as a short story. Its *chain* (the first number and
the operations) decides its split by a hash, so no test problem can appear among the training problems. A recall
question states several people's scores and asks for one; no arithmetic is needed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

Split = Literal["train", "test"]

SYSTEM = "Solve the problem step by step. End with the word Answer and the number."
MAX_STEPS = 5
LARGEST = 999
MOST_PEOPLE = 6  # in a recall question

_HE = ("Tom", "Ben", "Omar", "Luca", "Ravi", "Sam", "Noah", "Ivan", "Hugo", "Eli", "Adam", "Finn")
_SHE = (
    "Anna",
    "Mia",
    "Sara",
    "Lena",
    "Zoe",
    "Ines",
    "Ruth",
    "Tara",
    "Nora",
    "Emma",
    "Yuki",
    "Leila",
)
PEOPLE = _HE + _SHE
_COUNTED = (
    "apples", "marbles", "books", "stickers", "pencils", "shells", "coins", "cards", "eggs", "cookies", "stamps",
    "balloons", "flowers", "buttons", "candles", "oranges", "stones", "toys", "tickets", "beads",
)  # fmt: skip
_MEASURED = (
    "liters of water", "kilograms of rice", "meters of rope", "grams of sugar", "cups of flour", "liters of paint",
    "meters of cloth", "bags of sand",
)  # fmt: skip
_PLACES = (
    "garden",
    "kitchen",
    "box",
    "park",
    "school",
    "shop",
    "street",
    "attic",
    "library",
    "market",
)
_DAYS = ("On Monday", "On Friday", "The next day", "Later", "In the evening", "After lunch", "Then")
_TIMES_WORDS = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


@dataclass(frozen=True)
class Problem:
    """A word problem, its worked answer and the number at its end."""

    question: str  # the story and the question
    answer: str  # the calculations and the final number
    solution: int
    steps: int  # the number of calculations
    chain: str  # the first number and the operations
    template: str  # the sentences that it is made of, regardless of names, numbers, things, places and days

    @property
    def split(self) -> Split:
        """The split that the chain belongs to."""
        return _split(self.chain)


@dataclass
class _Story:
    """The story so far: who owns the things, how many there are, and the calculations."""

    rng: random.Random
    name: str
    item: str
    value: int
    chain: str
    others: list[str]
    sentences: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)

    @property
    def he(self) -> str:
        return "he" if self.name in _HE else "she"

    def choose(self, kind: str, *ways: str) -> str:
        """Choose one of several ways to say something, and record the choice."""
        which = self.rng.choice(range(len(ways)))
        self.forms.append(f"{kind} {which}")
        return ways[which]

    def tell(self, kind: str, *ways: str) -> None:
        """Add a sentence, said in one of several ways."""
        self.sentences.append(self.choose(kind, *ways))

    def compare(self, form: str, how: str) -> None:
        """Continue with the next person, who has as many things as this one, or more or fewer."""
        before = self.name
        self.others.append(before)
        self.name = self.others.pop(0)
        self.forms.append(form)
        self.sentences.append(f"{self.name} has {how.format(item=self.item)} {before}.")

    def apply(self, sign: str, operand: int) -> int:
        """Work out one step, write it down, and return the value that it started from."""
        before = self.value
        self.value = {
            "+": before + operand,
            "-": before - operand,
            "*": before * operand,
            "÷": before // operand,
        }[sign]
        self.sums.append(f"{before} {sign} {operand} = {self.value}.")
        self.chain += f"{sign}{operand}"
        return before


def generate_problem(rng: random.Random, steps: int) -> Problem:
    """One problem with ``steps`` arithmetic steps, drawn with ``rng`` (either split)."""
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps={steps}: a word problem has 1 to {MAX_STEPS} steps")
    names = rng.sample(PEOPLE, 4)
    item = rng.choice(_COUNTED) if rng.random() < 0.8 else rng.choice(_MEASURED)
    first = rng.randint(2, 99)
    story = _Story(rng, names[0], item, first, str(first), names[1:])
    _opening(story)
    for _ in range(steps - 1):
        rng.choice(_possible_steps(story))(story)
    last = _finish(story)
    question = " ".join([*story.sentences, last])
    if (
        rng.random() < 0.1
    ):  # a second way to write the marks, so that " ?" and " /" are ordinary tokens too
        question = question.replace("?", " ?")
    if rng.random() < 0.5:
        question = question.replace("/", " / ")
    answer, template = " ".join([*story.sums, f"Answer: {story.value}"]), ", ".join(story.forms)
    return Problem(question, answer, story.value, steps, story.chain, template)


def word_problems(
    split: Split, steps: tuple[int, ...] = (1, 2, 3, 4, 5), seed: int = 0
) -> Iterator[Problem]:
    """An endless stream of problems of one split: the same arguments give the same stream."""
    rng = random.Random(f"word-problems {split} {seed}")
    every = (generate_problem(rng, rng.choice(steps)) for _ in count())
    return (problem for problem in every if problem.split == split)


@dataclass(frozen=True)
class Recall:
    """A question that contains its answer: "Scores: Tom 3, Anna 7, Ben 1. What is the score of Anna?"."""

    question: str
    solution: int

    @property
    def answer(self) -> str:
        """The answer in the form that a model writes."""
        return f"Answer: {self.solution}"

    @property
    def split(self) -> Split:
        """The split that the question belongs to."""
        return _split(self.question)


def generate_recall(rng: random.Random, most: int = MOST_PEOPLE) -> Recall:
    """One question about two or more people, at most ``most``, with numbers from 1 to 9 (either split)."""
    names = rng.sample(PEOPLE, rng.randint(2, most))
    numbers = [rng.randint(1, 9) for _ in names]
    scores = ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    asked = rng.randrange(len(names))
    return Recall(f"Scores: {scores}. What is the score of {names[asked]}?", numbers[asked])


def recall_questions(split: Split, seed: int = 0, most: int = MOST_PEOPLE) -> Iterator[Recall]:
    """An endless stream of questions of one split: the same arguments give the same stream."""
    rng = random.Random(f"recall {split} {seed}")
    every = (generate_recall(rng, most) for _ in count())
    return (question for question in every if question.split == split)


def _split(text: str) -> Split:
    """The split by a hash of a text: about one in ten is for testing."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] % 10 == 0 else "train"


def _opening(story: _Story) -> None:
    name, item, value = story.name, story.item, story.value
    story.tell(
        "opening",
        f"{name} has {value} {item}.",
        f"{name} starts the week with {value} {item}.",
        f"There are {value} {item} in the {story.rng.choice(_PLACES)} of {name}.",
        f"{name} owns {value} {item}.",
        f"At first {name} has {value} {item} in a {story.rng.choice(_PLACES)}.",
    )


def _possible_steps(story: _Story) -> list[Any]:
    possible = []
    if story.value + 60 <= LARGEST:
        possible += [_gain, _gain, partial(_other_has, more=True)]
    if story.value >= 3:
        possible += [_lose, _lose, partial(_other_has, more=False)]
    if story.value * 2 <= 200:
        possible += [_multiply]
    if _divisors(story.value):
        possible += [_divide]
    return possible


def _finish(story: _Story) -> str:
    """The last step and the question: another calculation and how many there are, or what they cost."""
    possible = _possible_steps(story)
    if story.value * 2 <= 200 and " of " not in story.item:
        possible.append(_price)
    return story.rng.choice(possible)(story) or _how_many(story)


def _divisors(value: int) -> list[int]:
    return [k for k in _TIMES_WORDS if value % k == 0 and value > k]


def _gain(story: _Story) -> None:
    more = story.rng.randint(2, 60)
    he, item, other = story.he, story.item, story.others[0]
    him = {"he": "him", "she": "her"}[he]
    day, place = story.rng.choice(_DAYS), story.rng.choice(_PLACES)
    story.tell(
        "gain",
        f"{he.capitalize()} buys {more} more.",
        f"{day} {other} gives {him} {more} more {item}.",
        f"{day} {he} finds {more} {item} in the {place}.",
        f"{he.capitalize()} gets {more} {item} from {other}.",
        f"{day} {he} adds {more} {item}.",
    )
    story.apply("+", more)


def _lose(story: _Story) -> None:
    fewer = story.rng.randint(1, min(60, story.value - 1))
    he, item, other = story.he, story.item, story.others[0]
    day, place = story.rng.choice(_DAYS), story.rng.choice(_PLACES)
    story.tell(
        "loss",
        f"{he.capitalize()} gives {fewer} to {other}.",
        f"{day} {he} loses {fewer} of them.",
        f"{day} {he} sells {fewer} {item} at the {place}.",
        f"{he.capitalize()} uses {fewer} {item} for {other}.",
        f"{day} {he} leaves {fewer} {item} in the {place}.",
    )
    story.apply("-", fewer)


def _multiply(story: _Story) -> None:
    factor = story.rng.choice([k for k in _TIMES_WORDS if story.value * k <= 200])
    times, he, item = _TIMES_WORDS[factor], story.he, story.item
    if story.rng.random() < 0.4:
        story.compare("as many as", f"{times} as many {{item}} as")
    else:
        story.tell(
            "product",
            f"{story.rng.choice(_DAYS)} {he} has {times} as many.",
            f"A week later {he} has {times} as many {item}.",
        )
    story.apply("*", factor)


def _divide(story: _Story) -> None:
    parts = story.rng.choice(_divisors(story.value))
    he, item = story.he, story.item
    story.tell(
        "share",
        f"{he.capitalize()} puts them into {parts} equal boxes and keeps only one box.",
        f"{story.rng.choice(_DAYS)} {he} shares the {item} equally among {parts} people and keeps one share.",
        f"{he.capitalize()} packs them in {parts} bags with the same number/bag and keeps one bag.",
    )
    story.apply("÷", parts)


def _other_has(story: _Story, more: bool) -> None:
    number = story.rng.randint(2, 60) if more else story.rng.randint(1, min(60, story.value - 1))
    word = "more" if more else "fewer"
    story.compare(f"{word} than", f"{number} {word} {{item}} than")
    story.apply("+" if more else "-", number)


def _how_many(story: _Story) -> str:
    name, item = story.name, story.item
    return story.choose(
        "question",
        f"How many {item} does {name} have now?",
        f"How many {item} does {name} have in the end?",
        f"What is the number of {item} that {name} has now?",
        f"So how many {item} does {name} have?",
        f"Can you say how many {item} {name} has?",
        f"Find how many {item} {name} has in the end.",
    )


def _price(story: _Story) -> str:
    price = story.rng.choice([p for p in range(2, 10) if story.value * p <= 400])
    name, one = story.name, story.item.removesuffix("s")
    story.apply("*", price)
    return story.choose(
        "price",
        f"Each {one} costs {price} dollars. How much do the {story.item} of {name} cost?",
        f"The price is {price} dollars/{one}. What does {name} pay for all {story.item}?",
        f"{name} sells them all at {price} dollars each. How many dollars does {name} get?",
    )
