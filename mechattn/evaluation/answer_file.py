"""The file of a run's answers: JSON lines, one written as each answer ends, and extended by later
calls."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from mechattn.errors import OptionError, OutputError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.graded_answers import GradedAnswer, as_lines

Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample
# A server may come back at another address; problems, conditions and samples may be added.
_MAY_DIFFER = (
    "versions",
    "server",
    "probe",
    "prompts",
    "conditions",
    "groups",
    "samples",
    "rope_factors",
)


@dataclass(frozen=True)
class Kept:
    """The answers so far, and where they come from; also in a file if one is given.

    Args:
        answers: The answers by prompt, condition and sample.
        path: The file; None without one.
        about: Their provenance.
    """

    answers: dict[Key, GradedAnswer]
    path: Path | None
    about: dict[str, Any]

    def note(self, name: str, value: Any, without: Sequence[Key] = ()) -> None:
        """Record one more fact about where the answers come from, which may cost some of them."""
        self.about[name] = value
        for key in without:
            self.answers.pop(key, None)
        if self.path is not None:
            Evaluation(tuple(self.answers.values()), self.about).save(self.path)

    def add(self, answer: GradedAnswer) -> None:
        """Add an answer; if the disk is full, earlier answers are kept."""
        self.answers[answer.prompt, answer.condition, answer.sample] = answer
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as lines:
                lines.write(as_lines([asdict(answer)]))
        except OSError as error:
            raise OutputError(
                f"answers could not be added to {self.path}: {error.strerror or error}. Earlier "
                "answers are kept; free some space, and call evaluate again with the same arguments"
            ) from error


@contextmanager
def kept(path: str | Path | None, about: Mapping[str, Any]) -> Iterator[Kept]:
    """The answers already in a run's file, locked for this process; nothing without a file.

    Args:
        path: The file, or None.
        about: The provenance of this run, which must be that of the file.

    Raises:
        OptionError: The file holds answers of another run.
        OutputError: Another process has the lock, or the file cannot be read or written.
    """
    if path is None:
        yield Kept({}, None, dict(about))
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


def load_evaluation(path: str | Path) -> Evaluation:
    """Load an evaluation written by ``Evaluation.save`` or ``evaluate(out=…)``.

    Raises:
        OutputError: The file is not an evaluation.
    """
    about, answers = _read(Path(path))
    return Evaluation(tuple(answers.values()), about)


def _continued(path: Path, about: Mapping[str, Any]) -> Kept:
    """The answers already in the file, if this run may extend it; a new file gets its first
    line."""
    if not path.exists() or not path.stat().st_size:
        Evaluation((), about).save(path)
        return Kept({}, path, dict(about))

    stored, answers = _read(path)
    about_as_stored = json.loads(json.dumps(about))  # tuples are lists in a file
    _check_same_run(path, stored, about_as_stored)

    extended = dict(stored)
    for name in ("conditions", "groups"):
        if name in stored or name in about:
            extended[name] = {**stored.get(name, {}), **about.get(name, {})}

    for name in ("prompts", "rope_factors"):
        if name in about:
            extended[name] = about[name]
    if "samples" in stored and "samples" in about:
        extended["samples"] = max(stored["samples"], about["samples"])

    # Written at once, also without a last line that was cut off.
    Evaluation(tuple(answers.values()), extended).save(path)
    return Kept(answers, path, extended)


def _check_same_run(path: Path, stored: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Refuse another model, other options, or a known condition with another content."""
    differing = [
        name
        for name, value in about.items()
        if name not in _MAY_DIFFER and stored.get(name) != value
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


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, GradedAnswer]]:
    """The provenance and the answers of a file.

    Raises:
        OutputError: It is not an evaluation, or one of its lines is not an answer.
    """
    try:
        content = path.read_bytes()
        lines = content.rstrip(b"\n").split(b"\n")
        about = json.loads(lines[0])["provenance"]

        by_name = [about.get("conditions", {}), about.get("groups", {})]
        if not all(isinstance(section, dict) for section in by_name):
            raise ValueError("its provenance, conditions or groups are not by name")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason: Any = error
        if isinstance(error, KeyError):
            reason = "its first line has no provenance"
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

            mistake = error.errors()[0]
            reason = mistake["msg"]
            if mistake["loc"]:
                reason = f"its {mistake['loc'][0]} is {mistake['input']!r:.40} ({reason})"
            raise OutputError(f"line {number} of {path} is not an answer: {reason}") from None

        answers[answer.prompt, answer.condition, answer.sample] = answer

    return about, answers
