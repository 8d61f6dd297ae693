"""The file of one run's answers, JSON lines, written as they are generated, which a later call can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mechattn.errors import OptionError, OutputError
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer, as_lines

Key = tuple[str, str, int]
_KINDS: dict[str, Any] = {
    "prompt": str, "condition": str, "sample": int, "text": str, "tokens": tuple, "answer": str | None,
    "solution": str, "right": bool, "finished": bool, "logprob": int | float,
}  # fmt: skip
_MAY_DIFFER = ("versions", "server", "probe")  # a server may come back at another address


@dataclass(frozen=True)
class Kept:
    """The answers so far, by prompt, condition and sample, and where they come from; also in a file if one is given."""

    answers: dict[Key, GradedAnswer]
    path: Path | None
    about: dict[str, Any]

    def note(self, name: str, value: Any, without: Seq[Key] = ()) -> None:
        """Record one more fact about where the answers come from, which may cost some of them."""
        self.about[name] = value
        for key in without:
            self.answers.pop(key, None)
        if self.path is not None:
            Evaluation(tuple(self.answers.values()), self.about).save(self.path)

    def add(self, fresh: Seq[GradedAnswer]) -> None:
        """Add answers; if the disk is full, earlier answers are kept."""
        self.answers.update({(a.prompt, a.condition, a.sample): a for a in fresh})
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as lines:
                lines.write(as_lines(asdict(a) for a in fresh))
        except OSError as error:
            raise OutputError(
                f"answers could not be added to {self.path}: {error.strerror or error}. Earlier answers are kept; "
                f"free some space, and call evaluate again with the same arguments"
            ) from error


@contextmanager
def kept(path: str | Path | None, about: Mapping[str, Any]) -> Iterator[Kept]:
    """The answers of a run already in its file, locked for this process; nothing without a file."""
    if path is None:
        yield Kept({}, None, dict(about))
        return
    place = Path(os.path.realpath(path))
    lock = place.with_name(f".{place.name}.mechattn-lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=0)
        held.acquire()
    except Timeout:
        raise OutputError(
            f"another process is adding answers to {path} (it holds {lock}); wait for it, or use another file for "
            f"this run"
        ) from None
    except OSError as error:
        raise OutputError(f"nothing can be written to {path}: {error.strerror or error}") from None
    try:
        yield _continued(place, about)
    finally:
        with suppress(OSError):  # where an open file cannot be deleted
            lock.unlink(missing_ok=True)
        held.release()


def load_evaluation(path: str | Path) -> Evaluation:
    """Load an evaluation written by ``Evaluation.save`` or ``evaluate(out=…)``.

    Raises:
        OutputError: The file is not an evaluation.
    """
    about, found = _read(Path(path))
    return Evaluation(tuple(found.values()), about)


def _continued(path: Path, about: Mapping[str, Any]) -> Kept:
    """The answers already in the file, if it belongs to this run; a new file gets its first line."""
    if not path.exists() or not path.stat().st_size:
        Evaluation((), about).save(path)
        return Kept({}, path, dict(about))
    before, found = _read(path)
    for name, value in about.items():
        if name not in _MAY_DIFFER and before.get(name) != json.loads(json.dumps(value)):
            raise OptionError(
                f"{path} holds answers of another run ({name} differs); choose another file, or move this one"
            )
    Evaluation(tuple(found.values()), before).save(path)  # without a last line that was cut off
    return Kept(found, path, before)


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, GradedAnswer]]:
    try:
        content = path.read_bytes()
        lines = content.rstrip(b"\n").split(b"\n")
        about = json.loads(lines[0])["provenance"]
        if not (
            isinstance(about, dict)
            and all(isinstance(about.get(n, {}), dict) for n in ("conditions", "groups"))
        ):
            raise ValueError("its provenance, conditions or groups are not by name")
    except (
        OSError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = "its first line has no provenance" if isinstance(error, KeyError) else error
        raise OutputError(
            f"{path} is not an evaluation: {reason}; give another name, or move the file"
        ) from None
    found: dict[Key, GradedAnswer] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            row = json.loads(line)
            fields = {**row, "tokens": tuple(row["tokens"])}
            for name, kind in _KINDS.items():
                if not isinstance(fields[name], kind) or isinstance(fields[name], bool) != (
                    kind is bool
                ):
                    raise TypeError(f"its {name} is {fields[name]!r:.40}")
            if not all(type(token) is int for token in fields["tokens"]):
                raise TypeError(f"its tokens is {fields['tokens']!r:.40}")
            made = GradedAnswer(**fields)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            if number == len(lines) and not content.endswith(
                b"\n"
            ):  # a run was killed while it wrote this line
                break
            raise OutputError(f"line {number} of {path} is not an answer: {reason}") from None
        found[made.prompt, made.condition, made.sample] = made
    return about, found
