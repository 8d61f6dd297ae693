"""Loads prompts: questions that come with the package, a .jsonl file, a dataset on the hub; makes
random tokens."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from mechattn.errors import OptionError, PromptError, check_choice, check_counts
from mechattn.hub_access import asked_once, may_be_on_hub
from mechattn.prompts.fillers import random_tokens
from mechattn.prompts.prompt import HALVES, MOST, Prompt, Template
from mechattn.prompts.tokenization import TokenizedModel, own_bos

WORD_PROBLEMS = "word-problems"
RECALL = "recall"
GSM8K = "gsm8k"
REPEATED = "repeated-random"
SYSTEM = (  # of the word problems
    "Solve the problem step by step. End with the word Answer and the number."
)
_FIELDS = ("answer", "group", "counterpart", "other_answer")
_SHIPPED_FILES = {
    GSM8K: "gsm8k.jsonl",
    WORD_PROBLEMS: "word_problems.jsonl",
    RECALL: "recall.jsonl",
}
_MORE_TOY_QUESTIONS = "experiments/toys/generated_problems.py makes others"
_MORE = {  # where there are more questions than those that come with the package
    GSM8K: 'the data set "openai/gsm8k" on the hub has others',
    WORD_PROBLEMS: _MORE_TOY_QUESTIONS,
    RECALL: _MORE_TOY_QUESTIONS,
}
_WITHOUT_LIMIT = 64  # questions of the package
_LONGEST = 4 * 2**20  # bytes per line: more than a million tokens


def load_prompts(
    source: str,
    *,
    limit: int | None = None,
    field: str = "question",
    system: str | None = None,
    template: Template = "plain",
    with_answer: bool = False,
    split: str = "test",
    seed: int = 0,
    **fields: str | None,
) -> list[Prompt]:
    """Load prompts that come with the package, a .jsonl file or a dataset on the hub.

    Args:
        source: "gsm8k", the first 200 questions of GSM8K's test split, which people wrote;
            "word-problems", of one to five steps, which the toys solve; "recall", questions that
            contain their answer, which toy:relay solves; the path of a .jsonl file; or a hub
            dataset such as "openai/gsm8k", with its subset (configuration) after a colon:
            "openai/gsm8k:socratic". For random tokens see
            :func:`~mechattn.prompts.datasets.repeated_random`.
        limit: The number of prompts, from the beginning; all by default (64 of those that come with
            the package).
        field: The field with the question.
        system: The text before each question; by default that of the word problems, and none before
            other questions.
        template: "plain", "joined" or "chat", as for :class:`Prompt`.
        with_answer: Whether the model reads the answer after the question.
        split: The split of a hub dataset.
        seed: Which questions that come with the package: 512 word problems have seed 0, 128 others
            seed 1, and 200 others seed 11; 256 recall questions have seed 0, and so do GSM8K's. No
            toy was trained on any of them.
        fields: The other fields. ``answer``: the one with the answer, if there is one ("answer" by
            default). ``group``: the one with what prompts share, such as their template
            (``Prompt.group``); statistics treat such groups as the unit. No group by default for a
            file or dataset; word problems use their template. ``counterpart``: the one with the
            question's other version, for ``Counterpart()``. ``other_answer``: the one with the
            answer that this version calls for, for ``metric="logit_diff"``; the model then reads the
            answer.

    Raises:
        PromptError: The source, field or prompt doesn't exist.
        OptionError: A limit, split, template or option is not allowed.
    """
    check_choice(Template, template=template)
    if not isinstance(source, (str, os.PathLike)):
        raise PromptError(
            f'source={source!r}: give "gsm8k", "word-problems", "recall", the path of a .jsonl'
            " file, or a dataset on the hub"
        )
    source = os.fspath(source)
    _check_options(source, limit, fields)
    answer_field, group_field = fields.get("answer", "answer") or "", fields.get("group")
    counterpart, other = (fields.get(name) for name in ("counterpart", "other_answer"))
    with_answer = with_answer or bool(other)
    if source in _SHIPPED_FILES:
        rows = _shipped(source, split, limit, seed, field, answer_field)
    else:
        rows = _stored(source, split, limit)
    if source == WORD_PROBLEMS:
        group_field = group_field or "template"
        if system is None:
            system = SYSTEM
    prompts = []
    for index, row in enumerate(rows):
        text = _text(row, field, source, index)
        answer = (
            _text(row, answer_field, source, index, "answer")
            if with_answer
            else row.get(answer_field)
        )
        prompts.append(
            Prompt(
                question=text,
                system=system or "",
                answer=str(answer) if with_answer else "",
                template=template,
                id=str(index),
                group=None if group_field is None else _group(row, group_field, source, index),
                solution=_solution(row, fields, source, index),
                counterpart=(
                    _text(row, counterpart, source, index, "counterpart") if counterpart else ""
                ),
                other_answer=_text(row, other, source, index, "other_answer") if other else "",
            )
        )
    if not prompts:
        raise PromptError(f"{source} contains no prompts")
    return prompts


def _check_options(source: str, limit: Any, fields: dict[str, Any]) -> None:
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise OptionError(
            f"{unknown[0]}=…: load_prompts has no such option; the fields are field,"
            f" {', '.join(_FIELDS)}"
        )
    if source == REPEATED:
        raise OptionError(
            "random tokens have no field, text or answer, and are drawn from the vocabulary of a"
            " model: ma.repeated_random(model)"
        )
    if limit is not None:
        check_limit(limit, generated=False)


def check_limit(limit: Any, generated: bool = True) -> None:
    """Refuse a number of prompts that is none, or more than are generated."""
    check_counts(limit=limit)
    if generated and limit > MOST:
        raise OptionError(f"limit={limit}: at most {MOST:,} prompts are generated")


def _shipped(
    source: str, split: str, limit: int | None, seed: int, field: str, answer_field: str
) -> list[dict[str, Any]]:
    """Questions that come with the package as rows, with the question and the answer under these
    names."""
    if split != "test":
        raise OptionError(
            f"split={split!r}: the questions that come with the package are all of the split "
            f'"test"; {_MORE[source]}'
        )
    questions_by_seed = _shipped_questions(source)
    if seed not in questions_by_seed:
        raise OptionError(
            f"seed={seed}: of the questions that come with the package, {source!r} has the seeds "
            f"{', '.join(map(str, questions_by_seed))}; {_MORE[source]}"
        )
    questions = questions_by_seed[seed]
    limit = limit or _WITHOUT_LIMIT
    if limit > len(questions):
        raise OptionError(
            f"the package has {len(questions)} questions {source!r} with seed={seed}: "
            f"limit={limit} is more; give at most that many ({_MORE[source]})"
        )
    rows = []
    for question in questions[:limit]:
        named = {field: question["question"], answer_field: question["answer"]}
        rows.append({**question, **named})
    return rows


@cache
def _shipped_questions(source: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of a file of the package, by their seeds."""
    text = (resources.files("mechattn.prompts") / _SHIPPED_FILES[source]).read_text("utf-8")
    questions_by_seed: dict[int, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        question = json.loads(line)
        questions_by_seed.setdefault(question["seed"], []).append(question)
    return questions_by_seed


def _stored(source: str, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a file here or of a dataset on the hub."""
    if (kind := Path(source).suffix) in (".csv", ".parquet"):
        raise PromptError(
            f"{source} is a table; give a .jsonl file, one JSON object a line: "
            f'pandas.read_{kind[1:]}({source!r}).to_json("prompts.jsonl", orient="records",'
            " lines=True)"
        )
    name, colon, subset = source.partition(":")
    on_hub = may_be_on_hub(name) and (not colon or re.fullmatch(r"\w[\w.-]*", subset))
    if kind in (".jsonl", ".json") or os.path.exists(source) or not on_hub:
        return _jsonl(Path(source), limit)
    return _hub(name, subset or None, split, limit)


def _text(row: dict[str, Any], field: str, source: str, index: int, option: str = "field") -> str:
    text = _field(row, field, source, index, option)
    if not isinstance(text, str) or not text.strip():
        raise PromptError(
            f"prompt {index} of {source} has no text in field {field!r}: {_short(text)}"
        )
    if HALVES.search(text):
        raise PromptError(
            f"prompt {index} of {source} holds half of a surrogate pair (\\ud800 …), which is not"
            " valid text"
        )
    return text


def _solution(
    row: dict[str, Any], fields: dict[str, str | None], source: str, index: int
) -> str | None:
    """The reference answer: the field that ``answer=`` names, or else "solution" or "answer"."""
    name = fields.get("answer") or ("solution" if "solution" in row else "answer")
    solution = row.get(name)
    if solution is None:
        return None
    if isinstance(solution, bool) or not isinstance(solution, (str, int, float)):
        raise PromptError(
            f"prompt {index} of {source} has an answer of type {type(solution).__name__} in field "
            f"{name!r}: {_short(solution)}; give one text or number, as for GSM8K"
        )
    return str(solution)


def _group(row: dict[str, Any], field: str, source: str, index: int) -> str:
    group = _field(row, field, source, index, "group")
    if isinstance(group, bool) or not isinstance(group, (str, int)) or not str(group).strip():
        raise PromptError(
            f"prompt {index} of {source} has no group in field {field!r}: {_short(group)}; give a"
            " text or whole number"
        )
    return str(group)


def _field(row: dict[str, Any], field: str, source: str, index: int, option: str) -> Any:
    if field not in row:
        names = [_short(name) for name in row]
        have = (
            ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            or "none"
        )
        raise PromptError(
            f"prompt {index} of {source} has no field {field!r}; its fields are {have}. Name the"
            f" field with {option}=…"
        )
    return row[field]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _jsonl(path: Path, limit: int | None) -> list[dict[str, Any]]:
    if not os.path.isfile(path):  # it returns False for a name that is too long, where Path raises
        raise PromptError(f"there is no file of prompts at {path}")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"line {number} of {path} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise PromptError(f"line {number} of {path} is not a JSON object with named fields")
            rows.append(row)
        if len(rows) == limit:
            break
    return rows


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, with a limit on the length of each."""
    try:
        with open(path, "rb") as lines:
            for number in count(1):
                line = lines.readline(_LONGEST + 1)
                if not line:
                    return
                if len(line) > _LONGEST:
                    raise PromptError(
                        f"line {number} of {path} is longer than {_LONGEST // 2**20} MiB, too long"
                        " for one prompt: is this a .jsonl file?"
                    )
                yield line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"line {number} of {path} is not UTF-8 text ({error.reason} at byte {error.start});"
            " save the file as UTF-8"
        ) from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None


def _hub(name: str, subset: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    if "/" not in name and (near := get_close_matches(name, list(_SHIPPED_FILES), 1, 0.7)):
        raise PromptError(
            f"no prompts at {name!r}: did you mean {near[0]!r}? (The hub was not queried.)"
        )
    import datasets

    try:
        with asked_once(name):
            if subset is None and len(subsets := datasets.get_dataset_config_names(name)) > 1:
                subset = "main" if "main" in subsets else subsets[0]
            rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise PromptError(
            f'no prompts at {name!r}: it is not "gsm8k" or "word-problems", not a file here, and'
            " loading it from "
            f"the hub failed ({type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else 'no reason given'})"
        ) from error
    return [
        dict(row) for row in (rows if limit is None else rows.select(range(min(limit, len(rows)))))
    ]


SHORTEST, LONGEST = 25, 50


def repeated_random(
    model: TokenizedModel,
    limit: int = 64,
    *,
    span: tuple[int, int] = (SHORTEST, LONGEST),
    times: int = 2,
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts of a random span of ordinary tokens, repeated twice or more; each prompt has its
    own span.

    No token occurs twice within a span, so an earlier occurrence of a token is always in an earlier
    copy of the span.

    Args:
        model: The model whose vocabulary tokens are drawn from. A BOS token comes first if the
            model uses one. Without a tokenizer, all ids can be drawn.
        limit: The number of prompts.
        span: The shortest and the longest span, in tokens; all lengths are equally likely.
        times: How often the span occurs.
        seed: The seed of the draws.

    Raises:
        OptionError: There are no or too many prompts, or a span is empty, occurs only once, or
            needs more tokens than the vocabulary has.

    Source:
        Olsson et al. 2022, "In-context learning and induction heads": prefix matching.
    """
    check_limit(limit)
    shortest, longest = span
    if not 1 <= shortest <= longest or times < 2:
        raise OptionError(
            f"span={span!r}, times={times!r}: give a shortest and a longest span, and at least two"
            " repetitions"
        )
    bos = own_bos(model)
    problems = []
    for index in range(limit):
        draw = random.Random(f"repeated {seed} {index}")
        tokens = _distinct(model, draw.randint(shortest, longest), draw)
        problems.append(
            Prompt(tokens=(*([] if bos is None else [bos]), *tokens * times), id=str(index))
        )
    return problems


def _distinct(model: TokenizedModel, count: int, draw: random.Random) -> list[int]:
    size = int(model.cfg.d_vocab)
    if model.tokenizer is None and size >= count:
        return draw.sample(range(size), count)
    drawn: dict[int, None] = {}
    # Draws are with replacement, so a small vocabulary needs several rounds.
    for _ in range(200 if size >= count else 0):
        drawn |= dict.fromkeys(random_tokens(model.tokenizer, size, count, draw))
        if len(drawn) >= count:
            return list(drawn)[:count]
    raise OptionError(
        f"a span of {count} different tokens needs a larger vocabulary than {size}; give a shorter"
        " span"
    )
