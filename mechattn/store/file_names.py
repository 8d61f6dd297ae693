"""A name for the files of each of several models."""

from __future__ import annotations

from collections.abc import Iterable

from mechattn.errors import OptionError


def file_names(models: Iterable[str]) -> dict[str, str]:
    """A name for the files of each model, in place of "{model}": "toy:llama" gives "toy-llama", "/a/b/" gives "b"."""
    found: dict[str, str] = {}
    for model in models:
        last = model.rstrip("/").rsplit("/", 1)[-1]
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in last)
        for other, taken in found.items():
            if taken.casefold() == name.casefold() and other != model:
                raise OptionError(
                    f"the models {other!r} and {model!r} would both write to files named {name!r}: run them "
                    "separately, or give their folders different names"
                )
        found[model] = name
    return found
