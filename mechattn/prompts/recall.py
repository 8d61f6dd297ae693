"""Generated recall questions, which state several people's scores and ask for one; no arithmetic needed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mechattn.prompts.problems import PEOPLE

MOST = 6


@dataclass(frozen=True)
class Recall:
    """A question that contains its answer.

    Args:
        question: "Scores: Tom 3, Anna 7, Ben 1. What is the score of Anna?"
        solution: The number.
    """

    question: str
    solution: int

    @property
    def answer(self) -> str:
        """The answer in the form that a model writes."""
        return f"Answer: {self.solution}"

    @property
    def split(self) -> Literal["train", "test"]:
        """About one question in ten is for testing, by a hash of its text."""
        return "test" if hashlib.sha256(self.question.encode()).digest()[0] % 10 == 0 else "train"


def generate_recall(rng: random.Random, most: int = MOST) -> Recall:
    """One question about two or more people, at most ``most``, with numbers from 1 to 9 (either split)."""
    names = rng.sample(PEOPLE, rng.randint(2, most))
    numbers = [rng.randint(1, 9) for _ in names]
    scores = ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    asked = rng.randrange(len(names))
    question = f"Scores: {scores}. What is the score of {names[asked]}?"
    return Recall(question, numbers[asked])


def recall_questions(split: Literal["train", "test"], seed: int = 0, most: int = MOST) -> Iterator[Recall]:
    """An endless stream of questions of one split: the same arguments give the same stream."""
    rng = random.Random(f"recall {split} {seed}")
    while True:
        made = generate_recall(rng, most)
        if made.split == split:
            yield made
