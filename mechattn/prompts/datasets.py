"""Loads prompts that come with the package, from a .jsonl file or from a dataset on the hub."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mechattn.errors import OptionError, PromptError, check_choice, check_counts
from mechattn.hub_access import asked_once, may_be_on_hub
from mechattn.prompts.prompt import Prompt, Template, shortened

WORD_PROBLEMS = "word-problems"
RECALL = "recall"
GSM8K = "gsm8k"
# The text before each of the word problems.
SYSTEM = "Solve the problem step by step. End with the word Answer and the number."
_SHIPPED_FILES = {
    GSM8K: "gsm8k.jsonl",
    WORD_PROBLEMS: "word_problems.jsonl",
    RECALL: "recall.jsonl",
}
_MORE_TOY_QUESTIONS = "experiments/toys/generated_problems.py makes others"
# Where to find more questions than those that come with the package.
_MORE_QUESTIONS = {
    GSM8K: 'the dataset "openai/gsm8k" on the hub has others',
    WORD_PROBLEMS: _MORE_TOY_QUESTIONS,
    RECALL: _MORE_TOY_QUESTIONS,
}
_DEFAULT_LIMIT = 64  # of the questions that come with the package
_MOST_NAMED_FIELDS = 12  # in a message
_QUOTE_LENGTH = 60  # characters of a value in a message


def load_prompts(
    source: str | os.PathLike[str],
    *,
    limit: int | None = None,
    field: str = "question",
    system: str | None = None,
    template: Template = "plain",
    with_answer: bool = False,
    split: str = "test",
    seed: int = 0,
    answer: str | None = None,
    group: str | None = None,
    counterpart: str | None = None,
    other_answer: str | None = None,
) -> list[Prompt]:
    """Load prompts that come with the package, a .jsonl file or a dataset on the hub.

    Args:
        source: "gsm8k", the first 200 questions of GSM8K's test split, which people wrote;
            "word-problems", generated problems of one to five steps, which the toys solve;
            "recall", generated questions that contain their answer, which toy:relay solves; the
            path of a .jsonl file; or a dataset on the hub such as "openai/gsm8k", with its subset
            (configuration) after a colon: "openai/gsm8k:socratic". Without a colon it is the subset
            "main" or, if there is none, the first. For random tokens see
            :func:`~mechattn.prompts.generated.repeated_random`.
        limit: The number of prompts, from the beginning. By default 64 of those that come with the
            package, and all of a file or dataset.
        field: The field with the question.
        system: The text before each question. By default word problems have a system text that
            asks for steps and an answer, and other questions have none.
        template: "plain", "joined" or "chat", as for :class:`Prompt`.
        with_answer: Whether the model reads the answer after the question.
        split: The split of a dataset on the hub.
        seed: Which of the questions that come with the package. 512 word problems have seed 0, 128
            others seed 1, 200 others seed 11, and 16 others seed 977; all recall questions (256)
            and all of GSM8K have seed 0. No toy was trained on any of them.
        answer: The field with the answer. By default the reference is in "solution", or in "answer"
            without such a field, and may be missing; the model reads "answer".
        group: The field with what prompts share, such as their template (``Prompt.group``);
            statistics treat such groups as the unit. By default word problems are grouped by their
            template, and other prompts have no group.
        counterpart: The field with the question's other version, for ``Counterpart()``.
        other_answer: The field with the answer that this version calls for, for
            ``metric="logit_diff"``. The model then reads the question's own answer too.

    Raises:
        PromptError: There is no such source or field, a field does not hold what it should, or
            there are no prompts.
        OptionError: The limit, split, seed or template is not allowed.
    """
    check_choice(Template, template=template)
    if not isinstance(source, (str, os.PathLike)):
        raise PromptError(
            f'source={source!r}: give "gsm8k", "word-problems", "recall", the path of a .jsonl'
            " file, or a dataset on the hub"
        )

    source = os.fspath(source)
    if limit is not None:
        check_counts(limit=limit)

    if source in _SHIPPED_FILES:
        if limit is None:
            limit = _DEFAULT_LIMIT
        rows = _shipped_rows(source, split, limit, seed)
    else:
        rows = _stored_rows(source, split, limit)

    if not rows:
        raise PromptError(f"{source} contains no prompts")
    if source == WORD_PROBLEMS:
        group = group or "template"
        if system is None:
            system = SYSTEM

    answer_field = None
    if with_answer or other_answer:
        answer_field = answer or "answer"

    prompts = []
    for index, row in enumerate(rows):
        fields = _Fields(row, f"prompt {index} of {source}")
        prompt = Prompt(
            question=fields.text(field, option="field"),
            system=system or "",
            answer=fields.text(answer_field, option="answer"),
            template=template,
            id=str(index),
            group=fields.group(group),
            solution=fields.solution(answer),
            counterpart=fields.text(counterpart, option="counterpart"),
            other_answer=fields.text(other_answer, option="other_answer"),
        )
        prompts.append(prompt)

    return prompts


def _shipped_rows(source: str, split: str, limit: int, seed: int) -> list[dict[str, Any]]:
    """The rows of questions that come with the package.

    Raises:
        OptionError: The split or seed does not exist, or there are too few questions.
    """
    if split != "test":
        raise OptionError(
            f"split={split!r}: the questions that come with the package are all of the split "
            f'"test"; {_MORE_QUESTIONS[source]}'
        )

    questions_by_seed = _shipped_questions(source)
    if seed not in questions_by_seed:
        seeds = ", ".join(map(str, questions_by_seed))
        raise OptionError(
            f"seed={seed}: the package has {source!r} questions for each of these seeds: {seeds};"
            f" {_MORE_QUESTIONS[source]}"
        )

    questions = questions_by_seed[seed]
    if limit > len(questions):
        raise OptionError(
            f"limit={limit}: the package has {len(questions)} {source!r} questions with"
            f" seed={seed} ({_MORE_QUESTIONS[source]})"
        )

    return questions[:limit]


@cache
def _shipped_questions(source: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of a file that comes with the package, by their seed."""
    text = (resources.files("mechattn.prompts") / _SHIPPED_FILES[source]).read_text("utf-8")
    questions_by_seed: dict[int, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        question = json.loads(line)
        questions_by_seed.setdefault(question["seed"], []).append(question)
    return questions_by_seed


def _stored_rows(source: str, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a local file or of a dataset on the hub: the first ``limit``, or all if it is
    None."""
    suffix = Path(source).suffix
    if suffix in (".csv", ".parquet"):
        raise PromptError(
            f"{source} is a table; give a .jsonl file, one JSON object a line: "
            f'pandas.read_{suffix[1:]}({source!r}).to_json("prompts.jsonl", orient="records",'
            " lines=True)"
        )

    name, colon, subset = source.partition(":")
    is_subset_name = not colon or re.fullmatch(r"\w[\w.-]*", subset)
    is_hub_name = may_be_on_hub(name) and is_subset_name
    if suffix in (".jsonl", ".json") or os.path.exists(source) or not is_hub_name:
        return _file_rows(Path(source), limit)
    return _hub_rows(name, subset or None, split, limit)


def _file_rows(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a file of JSON objects, one a line."""
    if not os.path.isfile(path):  # for a name that is too long Path.is_file would raise
        raise PromptError(f"there is no file of prompts at {path}")
    rows: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_json_object(line, f"line {line_number} of {path}"))
                if len(rows) == limit:
                    break
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None
    return rows


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    """The object in a line."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); save the file as"
            " UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON: {error}") from None

    if not isinstance(row, dict):
        raise PromptError(f"{where} is not a JSON object with named fields")
    return row


def _hub_rows(name: str, subset: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a dataset on the hub; see :func:`load_prompts` for a subset of None."""
    # A misspelt name of the package's own questions; 0.7 still takes "gsm8" and "word_problem".
    similar_names = get_close_matches(name, _SHIPPED_FILES, n=1, cutoff=0.7)
    if "/" not in name and similar_names:
        raise PromptError(
            f"no prompts at {name!r}: did you mean {similar_names[0]!r}? (The hub was not queried.)"
        )

    import datasets

    try:
        with asked_once(name):
            if subset is None:
                subsets = datasets.get_dataset_config_names(name)
                subset = "main" if "main" in subsets else subsets[0]
            rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise PromptError(
            f"no prompts at {name!r}: it does not come with the package, is not a local file, and"
            f" loading it from the hub failed ({type(error).__name__}: {reason})"
        ) from error

    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return [dict(row) for row in rows]


@dataclass(frozen=True)
class _Fields:
    """The fields of one prompt in a file or dataset."""

    values: dict[str, Any]
    where: str  # the prompt's number and source, for messages

    def text(self, field: str | None, option: str) -> str:
        """The text in a field; empty if ``field`` is None.

        ``option`` is the option of ``load_prompts`` that names the field, for messages.
        """
        if field is None:
            return ""
        text = self._value(field, option)
        if not isinstance(text, str) or not text.strip():
            raise PromptError(f"{self.where} has no text in field {field!r}: {_quoted(text)}")
        return text

    def group(self, field: str | None) -> str | None:
        """The name of the prompt's group; None if ``field`` is None."""
        if field is None:
            return None
        group = self._value(field, option="group")
        if type(group) not in (str, int) or not str(group).strip():  # True is an int too
            raise PromptError(
                f"{self.where} has no group in field {field!r}: {_quoted(group)}; give a text or"
                " whole number"
            )
        return str(group)

    def solution(self, field: str | None) -> str | None:
        """The reference answer; None if there is none.

        Without a ``field`` it is in "solution", or in "answer" without such a field.
        """
        if field is None:
            field = "solution" if "solution" in self.values else "answer"
            solution = self.values.get(field)
        else:
            solution = self._value(field, option="answer")
        if solution is None:
            return None
        if type(solution) not in (str, int, float):
            raise PromptError(
                f"{self.where} has an answer of type {type(solution).__name__} in field {field!r}:"
                f" {_quoted(solution)}; give one text or number, as for GSM8K"
            )
        return str(solution)

    def _value(self, field: str, option: str) -> Any:
        """The value in a field that ``option`` of ``load_prompts`` names."""
        if field not in self.values:
            names = [_quoted(name) for name in self.values]
            listed_names = ", ".join(names[:_MOST_NAMED_FIELDS]) or "none"
            raise PromptError(
                f"{self.where} has no field {field!r}; its fields are {listed_names}. Name the"
                f" field with {option}=…"
            )
        return self.values[field]


def _quoted(value: object) -> str:
    """The beginning of a value as Python writes it, for a message."""
    return shortened(repr(value), _QUOTE_LENGTH)
