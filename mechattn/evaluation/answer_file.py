"""Graded answers, and their file: JSON lines, the provenance first, then a line as each answer
ends. Later calls extend it."""

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
from mechattn.store.atomic_writes import check_writable, write_whole

Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample
# Of a later run's provenance: problems, conditions and samples may be added.
_OF_THE_LATER_RUN = ("prompts", "rope_factors")
_OF_BOTH_RUNS = ("conditions", "groups")
# A server may come back at another address.
_MAY_DIFFER = ("versions", "server", "probe", "samples", *_OF_THE_LATER_RUN, *_OF_BOTH_RUNS)


@dataclass(frozen=True)
class GradedAnswer:
    """A generated and graded answer.

    Args:
        prompt: The prompt's id.
        condition: The condition.
        sample: The index of the answer among several to the same question.
        text: The generated text.
        tokens: Its token ids.
        answer: The final answer; None if none was found.
        solution: The reference.
        right: Whether the final answer equals the reference.
        finished: Whether the model ended the answer before the limit.
        logprob: Mean log-probability of its tokens, in nats, at temperature 1.
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
        """What tells it from the other answers of a run."""
        return self.prompt, self.condition, self.sample


@dataclass
class KeptAnswers:
    """The answers so far, and where they come from; also in a file if one is given.

    Args:
        answers: The answers by prompt, condition and sample.
        path: The file; None without one.
        about: Their provenance.
    """

    answers: dict[Key, GradedAnswer]
    path: Path | None
    about: dict[str, Any]

    def note(self, name: str, value: Any) -> None:
        """Record one more fact about where the answers come from, and write the file again."""
        self.about[name] = value
        if self.path is not None:
            write_answers(self.path, self.about, self.answers.values())

    def drop(self, keys: Iterable[Key]) -> None:
        """Leave answers out; the file is without them from the next note on."""
        for key in keys:
            self.answers.pop(key, None)

    def add(self, answer: GradedAnswer) -> None:
        """Add an answer, also at the end of the file.

        Raises:
            OutputError: It cannot be written, as on a full disk; earlier answers are kept.
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


class _Provenance(BaseModel):
    """What has to be of one form in a file's provenance, whatever else it says."""

    conditions: dict[str, Any] = {}
    groups: dict[str, Any] = {}


class _FirstLine(BaseModel):
    """The first line of a file."""

    provenance: _Provenance


@contextmanager
def kept_answers(path: str | Path | None, about: Mapping[str, Any]) -> Iterator[KeptAnswers]:
    """The answers already in a run's file, locked for this process; nothing without a file.

    Args:
        path: The file, or None.
        about: The provenance of this run, which must be that of the file.

    Raises:
        OptionError: The file holds answers of another run.
        OutputError: Another process has the lock, or the file cannot be read or written.
    """
    if path is None:
        yield KeptAnswers({}, None, dict(about))
        return

    # Through links, so that two names of one file have one lock.
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
        yield _continued(real_path, about)
    finally:
        with suppress(OSError):  # where an open file cannot be deleted
            lock_path.unlink(missing_ok=True)
        lock.release()


def _continued(path: Path, about: Mapping[str, Any]) -> KeptAnswers:
    """The answers already in the file, if this run may extend it; a new file gets its first
    line."""
    if not path.exists() or not path.stat().st_size:
        write_answers(path, about, ())
        return KeptAnswers({}, path, dict(about))

    stored, answers = read_answers(path)
    about_as_stored = json.loads(json.dumps(about))  # tuples are lists in a file
    _check_same_run(path, stored, about_as_stored)

    later = {name: about[name] for name in _OF_THE_LATER_RUN if name in about}
    merged = {name: stored.get(name, {}) | about[name] for name in _OF_BOTH_RUNS if name in about}
    samples = max(stored.get("samples", 0), about.get("samples", 0))
    extended = {**stored, **later, **merged, "samples": samples}

    # Written at once, also without a last line that was cut off.
    write_answers(path, extended, answers.values())
    return KeptAnswers(answers, path, extended)


def _check_same_run(path: Path, stored: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Refuse another model, other options, or a known condition with another content."""
    # A fact of which the file says nothing differs too: only a server's answers have a served
    # model, and only those of the model here the hash of its weights.
    differing = [
        name
        for name, value in about.items()
        if name not in _MAY_DIFFER and (name not in stored or stored[name] != value)
    ]

    conditions = stored.get("conditions", {})
    for name, identity in about.get("conditions", {}).items():
        if conditions.get(name, identity) != identity:
            differing.append(f"the condition {name!r}")

    if differing:
        raise OptionError(
            f"{path} holds answers of another run ({differing[0]} differs); choose another file, or"
            " move this one"
        )


def write_answers(
    path: Path, provenance: Mapping[str, Any], answers: Iterable[GradedAnswer]
) -> None:
    """Write provenance and answers, completely or not at all; only an evaluation is replaced.

    Raises:
        OutputError: The path cannot be written to, or holds anything but an evaluation.
    """
    check_writable(path)
    if not _is_replaceable(path):
        raise OutputError(
            f"{path} exists and is not an evaluation; give another name, or move the file"
        )
    lines = [_line({"provenance": provenance})]
    lines += [_line(asdict(answer)) for answer in answers]
    write_whole(path, lambda new: new.write_text("".join(lines), encoding="utf-8"))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _is_replaceable(path: Path) -> bool:
    """Whether the path is free, or holds an evaluation, judged by its first line."""
    try:
        with open(path, "rb") as stored:
            first_line = stored.readline()
        return not first_line or set(json.loads(first_line)) == {"provenance"}
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_answers(path: Path) -> tuple[dict[str, Any], dict[Key, GradedAnswer]]:
    """The provenance and the answers of a file.

    Raises:
        OutputError: It is not an evaluation, or one of its lines is not an answer.
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
    for number, line in enumerate(lines[1:], 2):
        try:
            answer = reader.validate_json(line, strict=True)
        except ValidationError as error:
            is_cut_off = number == len(lines) and not content.endswith(b"\n")
            if is_cut_off:  # a run was killed while it wrote this line
                break

            raise OutputError(
                f"line {number} of {path} is not an answer: {_mistake(error)}"
            ) from None

        answers[answer.key] = answer

    return json.loads(lines[0])["provenance"], answers


def _mistake(error: ValidationError) -> str:
    """The first thing that is wrong with a line, in words."""
    mistake = error.errors()[0]
    fields = [name for name in mistake["loc"] if isinstance(name, str)]
    if not fields:
        return mistake["msg"]
    return f"its {fields[-1]} is {mistake['input']!r:.40} ({mistake['msg']})"
