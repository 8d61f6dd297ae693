"""Graded answers and their file of JSON lines: the provenance, then a line for each answer.

Lines are added as answers end, and later calls extend the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, TypeAdapter, ValidationError

from mechattn.errors import OptionError, OutputError
from mechattn.store.atomic_writes import check_writable, write_text

Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample
# A later run may add problems, conditions and samples. The file's provenance then has these facts
# of the later run alone, and those of both runs together.
_OF_THE_LATER_RUN = ("prompts", "rope_factors")
_OF_BOTH_RUNS = ("conditions", "groups")
# The facts that may differ between runs that share a file. A server may have another address.
_MAY_DIFFER = ("versions", "server", "probe", "samples", *_OF_THE_LATER_RUN, *_OF_BOTH_RUNS)


@dataclass(frozen=True)
class GradedAnswer:
    """A generated and graded answer.

    Args:
        prompt: The prompt's id.
        condition: The name of the condition.
        sample: The index of the answer among several to the same prompt under this condition.
        text: The generated text.
        tokens: Its token ids.
        answer: The final answer; None if none could be read.
        solution: The reference.
        right: Whether the final answer equals the reference.
        finished: Whether the model ended the answer before the limit.
        logprob: The mean log-probability of its tokens and its end token, in nats, at temperature
            1.
        read: A digest of the token ids that the model read.
    """

    prompt: str
    condition: str
    sample: int
    text: str
    tokens: tuple[int, ...]
    answer: str | None
    solution: str
    right: bool
    finished: bool
    logprob: float = float("nan")
    read: str = ""

    @property
    def key(self) -> Key:
        """The prompt, condition and sample, which identify the answer in a run."""
        return self.prompt, self.condition, self.sample


@dataclass
class KeptAnswers:
    """The answers so far and their provenance, both of which are also in a file if there is one.

    Args:
        answers: The answers by prompt, condition and sample.
        path: The file; None without one.
        provenance: The provenance.
    """

    answers: dict[Key, GradedAnswer]
    path: Path | None
    provenance: dict[str, Any]

    def note(self, name: str, value: Any) -> None:
        """Add a fact to the provenance, and write the file again."""
        self.provenance[name] = value
        if self.path is not None:
            write_answers(self.path, self.provenance, self.answers.values())

    def drop(self, keys: Iterable[Key]) -> None:
        """Remove answers; the file has them until the next :meth:`note`."""
        for key in keys:
            self.answers.pop(key, None)

    def add(self, answer: GradedAnswer) -> None:
        """Add an answer, also at the end of the file.

        Raises:
            OutputError: The answer cannot be written, as on a full disk. Earlier answers are kept.
        """
        self.answers[answer.key] = answer
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as lines:
                lines.write(_line(asdict(answer)))
        except OSError as error:
            raise OutputError(
                f"answers could not be added to {self.path}: {error.strerror or error}. Earlier "
                "answers are kept; free some space, and call evaluate again with the same arguments"
            ) from error


@contextmanager
def kept_answers(path: str | Path | None, provenance: Mapping[str, Any]) -> Iterator[KeptAnswers]:
    """The answers already in a run's file, which other processes cannot extend inside the block.

    Without a file there are no answers yet.

    Args:
        path: The file, or None.
        provenance: That of this run. Except for what a later run may add, it must agree with
            that of the file.

    Raises:
        OptionError: The file has answers of another run.
        OutputError: Another process has the lock, or the file cannot be read or written.
    """
    if path is None:
        yield KeptAnswers({}, None, dict(provenance))
        return

    # Links are resolved, so that two names of one file have one lock.
    real_path = Path(os.path.realpath(path))
    lock_path = real_path.with_name(f".{real_path.name}.mechattn-lock")
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path, timeout=0)
        lock.acquire()
    except Timeout:
        raise OutputError(
            f"another process is adding answers to {path} (it holds {lock_path}); wait for it, or "
            "use another file for this run"
        ) from None
    except OSError as error:
        raise OutputError(f"nothing can be written to {path}: {error.strerror or error}") from None

    try:
        yield _continued(real_path, provenance)
    finally:
        with suppress(OSError):  # Windows does not delete an open file
            lock_path.unlink(missing_ok=True)
        lock.release()


def write_answers(
    path: Path, provenance: Mapping[str, Any], answers: Iterable[GradedAnswer]
) -> None:
    """Write provenance and answers, completely or not at all.

    An existing file is replaced only if it is an evaluation.

    Raises:
        OutputError: The path cannot be written to, or holds something other than an evaluation.
    """
    check_writable(path)
    if not _is_replaceable(path):
        raise OutputError(
            f"{path} exists and is not an evaluation; give another name, or move the file"
        )
    lines = [_line({"provenance": provenance})]
    lines += [_line(asdict(answer)) for answer in answers]
    write_text(path, "".join(lines))


def read_answers(path: Path) -> tuple[dict[str, Any], dict[Key, GradedAnswer]]:
    """The provenance and the answers of a file.

    A last line that was cut off is ignored.

    Raises:
        OutputError: The file is not an evaluation, or one of its lines is not an answer.
    """
    try:
        content = path.read_bytes()
        lines = content.rstrip(b"\n").split(b"\n")
        _FirstLine.model_validate_json(lines[0], strict=True)
    except (OSError, ValidationError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            reason = f"in its first line {_mistake(error)}"
        raise OutputError(
            f"{path} is not an evaluation: {reason}; give another name, or move the file"
        ) from None

    reader = TypeAdapter(GradedAnswer)
    answers: dict[Key, GradedAnswer] = {}
    for line_number, line in enumerate(lines[1:], 2):
        try:
            answer = reader.validate_json(line, strict=True)
        except ValidationError as error:
            is_cut_off = line_number == len(lines) and not content.endswith(b"\n")
            if is_cut_off:  # a run was killed while it wrote this line
                break

            raise OutputError(
                f"line {line_number} of {path} is not an answer: {_mistake(error)}"
            ) from None

        answers[answer.key] = answer

    return json.loads(lines[0])["provenance"], answers


def _continued(path: Path, provenance: Mapping[str, Any]) -> KeptAnswers:
    """The answers already in a file, to which the provenance of this run is added."""
    if not path.exists() or not path.stat().st_size:
        write_answers(path, provenance, ())
        return KeptAnswers({}, path, dict(provenance))

    stored_provenance, answers = read_answers(path)
    _check_same_run(path, stored_provenance, provenance)

    extended_provenance = dict(stored_provenance)
    for name in _OF_THE_LATER_RUN:
        if name in provenance:
            extended_provenance[name] = provenance[name]
    for name in _OF_BOTH_RUNS:
        if name in provenance:
            extended_provenance[name] = stored_provenance.get(name, {}) | provenance[name]
    sample_counts = [stored_provenance.get("samples", 0), provenance.get("samples", 0)]
    extended_provenance["samples"] = max(sample_counts)

    # Written before any answer is added, to remove a last line that was cut off.
    write_answers(path, extended_provenance, answers.values())
    return KeptAnswers(answers, path, extended_provenance)


def _check_same_run(
    path: Path, stored_provenance: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Refuse a file of another model, other options, or a condition that has changed.

    Raises:
        OptionError: It is such a file.
    """
    facts = json.loads(json.dumps(provenance))  # tuples are lists in a file
    # A fact that the file does not have differs too. Only a server's answers have a served model,
    # and only answers of a model here have the hash of its weights.
    differences = [
        name
        for name, fact in facts.items()
        if name not in _MAY_DIFFER
        and (name not in stored_provenance or stored_provenance[name] != fact)
    ]

    stored_conditions = stored_provenance.get("conditions", {})
    for name, identity in facts.get("conditions", {}).items():
        if name in stored_conditions and stored_conditions[name] != identity:
            differences.append(f"the condition {name!r}")

    if differences:
        raise OptionError(
            f"{path} holds answers of another run ({differences[0]} differs); choose another file,"
            " or move this one"
        )


def _line(row: Mapping[str, Any]) -> str:
    """A row as a line of the file."""
    return json.dumps(row) + "\n"


def _is_replaceable(path: Path) -> bool:
    """Whether the path is free, empty, or has the first line of an evaluation."""
    try:
        with open(path, "rb") as file:
            first_line = file.readline()
        return not first_line or set(json.loads(first_line)) == {"provenance"}
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, RecursionError):
        return False


class _Provenance(BaseModel):
    """The facts of a file's provenance that must be mappings; others are not checked."""

    conditions: dict[str, Any] = {}
    groups: dict[str, Any] = {}


class _FirstLine(BaseModel):
    """The first line of a file."""

    provenance: _Provenance


def _mistake(error: ValidationError) -> str:
    """The first mistake in a line, in words."""
    mistake = error.errors()[0]
    fields = [name for name in mistake["loc"] if isinstance(name, str)]
    if not fields:
        return mistake["msg"]
    return f"its {fields[-1]} is {mistake['input']!r:.40} ({mistake['msg']})"
