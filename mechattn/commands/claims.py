"""The models of the commands ``mechattn paper`` and ``mechattn claims``."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from mechattn.claims.settings import named
from mechattn.errors import OptionError
from mechattn.known_answers.published import STORIES
from mechattn.store.atomic_writes import say


def models_of(given: Seq[str], folder: Path | None) -> tuple[str, ...]:
    """The named models, or else the toys, and stories260K if the folder contains it."""
    if folder is None:
        return named(list(given))
    if given:
        raise OptionError(
            "--models applies only to the default models; with --model give every model, including directories"
        )
    if not folder.is_dir():
        raise OptionError(f"there is no folder {folder}")
    if not (folder / STORIES).is_dir():
        say(f"{folder} has no {STORIES}, so only the toys are judged")
        return named(None)
    return (*named(None), str(folder / STORIES))
