"""The errors that mechattn raises, all of them MechattnErrors, and its warnings."""

import sys
import warnings
from types import FrameType
from typing import Any, get_args

from mechattn.markup import shown

# Frames of these packages are passed over in the search of the user's line: run-time type checks
# put some between ours.
_OURS = {"mechattn", "beartype", "jaxtyping"}


class MechattnError(Exception):
    """An input cannot be used; the message says what was given, what was expected and what to do.

    Input quoted in a message may come from someone else's file, so control characters are escaped
    and passwords removed.
    """

    def __str__(self) -> str:
        return shown(super().__str__())


class ModelError(MechattnError):
    """A model or its tokenizer cannot be loaded or used."""


class RowError(ModelError):
    """A row of a batch holds impossible values; ``row`` is its index."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class PromptError(MechattnError):
    """A prompt, or a file of prompts, cannot be used."""


class PromptTooLong(PromptError):
    """A prompt does not fit into the model's context."""


class ConditionError(MechattnError):
    """A condition cannot be applied to these prompts with this tokenizer."""


class OptionError(MechattnError, ValueError):
    """An argument has a value that is not allowed."""


class MemoryOptionError(OptionError):
    """What is asked for takes more memory than is allowed; the message says how much."""


class ServerError(MechattnError):
    """A generation server cannot be reached, refuses a request, or serves another model than
    expected; ``status`` is the HTTP status with which it answers, if that is the reason."""

    status = 0


class OutputError(MechattnError):
    """A result cannot be written to or read from this path."""


class Interrupted(MechattnError):
    """The work was interrupted; finished parts are kept, and the message says how to resume."""


def check_counts(least: int = 1, most: int | None = None, **counts: Any) -> None:
    """Refuse anything but whole numbers from ``least`` to ``most``, by the names of their
    arguments."""
    limits = f"at least {least}"
    if most is not None:
        limits += f" and at most {most:,}"
    for name, value in counts.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            raise OptionError(f"{name}={value!r}: give a whole number, {limits}")


def check_choice(known: Any, **given: Any) -> None:
    """Refuse anything but one of the known values, a ``Literal`` or a collection, by the names of
    the arguments."""
    choices = get_args(known) or tuple(known)
    for name, value in given.items():
        if value not in choices:
            raise OptionError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called mechattn, however many of our own calls lie between."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(shown(message), category, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _OURS
