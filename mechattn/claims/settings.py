"""What a register is judged on, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from mechattn.errors import OptionError
from mechattn.prompts.prompt import MOST, Template
from mechattn.stats.intervals import FEWEST


@dataclass(frozen=True, kw_only=True)
class ClaimSettings:
    """What decides the numbers of ``ma.judge``, beside the register and the models.

    Args:
        prompts: "word-problems", a .jsonl file, or a hub dataset, with solutions.
        field: The field of a file or dataset with the question.
        answer_field: The field with the solution.
        group_field: The field with what problems share, as for ``load_prompts``.
        system: The text before each question; by default that of the register, before questions of a file or dataset.
        template: "plain" or "chat".
        limit: The number of prompts that analyses measure.
        problems: The number of problems to answer.
        samples: The number of sampled answers to each of two fifths of these problems.
        new_tokens: The longest answer, in tokens.
        without: Runs of the register to leave out, such as "samples".
        seed: The seed of all draws, those of random weights too.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: The torch device.
        command: The command line, for the record.

    Raises:
        OptionError: A number is no whole one, or too small.
    """

    prompts: str = "word-problems"
    field: str = "question"
    answer_field: str = "answer"
    group_field: str | None = None
    system: str | None = None
    template: Template = "plain"
    limit: int = 32
    problems: int = 100
    samples: int = 4
    new_tokens: int = 90
    without: Seq[str] = ()
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        least = {"limit": FEWEST, "problems": 2 * FEWEST, "samples": 2, "new_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= MOST:
                raise OptionError(f"{name}={value!r}: give a whole number from {fewest} to {MOST:,}")
        object.__setattr__(self, "without", (self.without,) if isinstance(self.without, str) else tuple(self.without))

    def decides(self) -> dict[str, Any]:
        """What decides the numbers: a folder holds the run of one such set."""
        return {name: value for name, value in asdict(self).items() if name not in ("device", "command")}
