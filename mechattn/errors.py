"""Errors, warnings and messages of mechattn; checks of arguments; text that is safe to print."""

import re
import sys
import textwrap
import warnings
from types import FrameType
from typing import Any, get_args

# The user's line is the first that belongs to none of these packages. Run-time type checks put
# frames of beartype and jaxtyping between those of mechattn.
_OURS = {"mechattn", "beartype", "jaxtyping"}
_BYTES_OF_UNIT = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LONGEST_REASON = 300  # characters; some errors list every architecture
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
# Everything that moves the cursor, colours, rings the bell or changes the writing direction, except
# newlines and tabs.
_CONTROL_CHARACTER = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A password may contain a slash that is not written as %2F. In an Azure URL (abfs://), the text
# before the @ is a container, not a user. Without the bound of 1,000 characters, a long text that
# has no @ would take quadratic time.
_USER_IN_URL = re.compile(
    r"(?<=://)(?<!abfs://)(?<!abfss://)"
    r"(?:[^/?#\s\"'<>:@]{0,1000}:[^\s\"'<>@]{0,1000}@|[^/?#\s\"'<>@]{0,1000}@)+"
)
_QUERY_IN_URL = re.compile(r"(://[^\s\"'<>?]*\?)[^\s\"'<>()]+")


class MechattnError(Exception):
    """The base class of all errors that mechattn raises.

    The message says what was given, what was expected and what to do. It may quote someone else's
    file, so control characters are escaped and passwords removed.
    """

    def __str__(self) -> str:
        return shown(super().__str__())


class ModelError(MechattnError):
    """A model or its tokenizer cannot be loaded or used."""


class RowError(ModelError):
    """A row of a batch has impossible values; ``row`` is its index."""

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
    """A request takes more memory than is allowed; the message says how much."""


class ServerError(MechattnError):
    """A generation server cannot be reached, refuses a request, or serves another model than
    expected.

    ``status`` is the HTTP status of its answer, if that is the reason.
    """

    status: int | None = None


class OutputError(MechattnError):
    """A result cannot be written to or read from this path."""


class Interrupted(MechattnError):
    """The work was interrupted; finished parts are kept, and the message says how to resume."""


def check_counts(least: int = 1, most: int | None = None, **counts: Any) -> None:
    """Refuse arguments that are not whole numbers from ``least`` to ``most``.

    Args:
        least: The smallest allowed number.
        most: The largest allowed number, if there is one.
        **counts: The values, by the names of the arguments.

    Raises:
        OptionError: A value is not an ``int`` (True and 2.0 are not), or lies outside the limits.
    """
    limits = f"at least {least}"
    if most is not None:
        limits += f" and at most {most:,}"
    for name, value in counts.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            raise OptionError(f"{name}={value!r}: give a whole number, {limits}")


def check_choice(known: Any, **arguments: Any) -> None:
    """Refuse arguments that are not among the known values.

    Args:
        known: A ``Literal`` or a collection.
        **arguments: The values, by the names of the arguments.

    Raises:
        OptionError: A value is not known.
    """
    choices = get_args(known) or tuple(known)
    for name, value in arguments.items():
        if value not in choices:
            quoted_choices = ", ".join(map(repr, choices))
            raise OptionError(f"{name}={value!r}: choose one of {quoted_choices}")


def memory_bytes(memory: str) -> int:
    """The number of bytes of a budget such as "2GiB".

    Raises:
        OptionError: It is not a number with the unit KiB, MiB or GiB, or is less than a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(KiB|MiB|GiB)\s*", str(memory), re.IGNORECASE)
    if match:
        number, unit = match.groups()
        byte_count = int(float(number) * _BYTES_OF_UNIT[unit.upper()])
        if byte_count > 0:
            return byte_count
    raise OptionError(f'memory={memory!r}: write it like "2GiB" or "500MiB"')


def warn(message: str) -> None:
    """Warn at the user's line that called mechattn, however many internal calls lie between."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _package_of(frame) in _OURS:
        frame = frame.f_back
        level += 1
    warnings.warn(shown(message), stacklevel=level)


def reason(error: Exception) -> str:
    """An error's class and, if it has a text, the first line of this text.

    The line is shortened to 300 characters and has no full stop at its end.
    """
    error_class = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return error_class
    message = textwrap.shorten(lines[0], _LONGEST_REASON, placeholder=" …").rstrip(".")
    return f"{error_class}: {message}"


def say(message: str) -> None:
    """Print a message to standard error."""
    print(f"mechattn: {message}", file=sys.stderr, flush=True)


def plain(text: str) -> str:
    """A text whose control characters are escaped, as in ``\\x1b[31m``, so that they have no effect
    on a terminal."""
    return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)


def without_secrets(text: str) -> str:
    """A text whose URLs have no user names, passwords or query strings, which may hold keys and
    tokens."""
    return _QUERY_IN_URL.sub(r"\1…", _USER_IN_URL.sub("…@", text))


def shown(text: str) -> str:
    """A text as it is printed, or quoted in an error: without control characters and secrets."""
    return without_secrets(plain(text))


def visible(token: str) -> str:
    """A token's text with "⏎" for each newline; "·" if it has nothing but zero-width characters."""
    if not token.strip(_INVISIBLE):
        return "·"
    return token.replace("\n", "⏎")


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
