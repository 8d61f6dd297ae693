"""Makes text from outside safe to show: no control characters for the terminal, no passwords in URLs."""

from __future__ import annotations

import re

# Everything that moves the cursor, colours, rings the bell or changes the writing direction; newlines and tabs stay.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A password may contain a slash not written as %2F; in an Azure URL, a container precedes the @, not a user.
_USER = re.compile(
    r"(?<=://)(?<!abfs://)(?<!abfss://)"
    r"(?:[^/?#\s\"'<>:@]{0,1000}:[^\s\"'<>@]{0,1000}@|[^/?#\s\"'<>@]{0,1000}@)+"
)
_QUERY = re.compile(r"(://[^\s\"'<>?]*\?)[^\s\"'<>()]+")


def plain(text: str) -> str:
    """A text with its control characters escaped, such as ``\\x1b[31m``, so that they do not act on a terminal."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)


def without_secrets(text: str) -> str:
    """A text with user names, passwords and query strings (which hold keys and tokens) removed from its URLs."""
    return _QUERY.sub(r"\1…", _USER.sub("…@", text))


def shown(text: str) -> str:
    """Both of the above, for anything printed or quoted in an error."""
    return without_secrets(plain(text))
