"""Runs all tests against known answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from mechattn.errors import ModelError
from mechattn.known_answers.answer import KnownAnswer, SelfTest
from mechattn.known_answers.known_heads import handmade_heads, trained_heads
from mechattn.known_answers.published import SORT, STORIES, sorting, story


def selftest(
    models: str | os.PathLike[str] | None = None,
    *,
    stories: str | None = None,
    sort: str | None = None,
    say: Callable[[KnownAnswer], None] | None = None,
) -> SelfTest:
    """Test this library against known answers; takes about a minute.

    Args:
        models: A folder with "stories260K" and "llm-viz-sort", checkpoints trained by others. Missing models are
            reported as not tried.
        stories: The checkpoint directory or hub name of stories260K, in place of the folder.
        sort: The directory of llm-viz-sort, in place of the folder.
        say: A function called with each answer as it is found.

    Raises:
        ModelError: ``models`` is not a folder.
    """
    if models is not None and not Path(models).is_dir():
        raise ModelError(f"there is no folder of models at {models}; it should hold {STORIES} and {SORT}")
    if models is not None:
        stories, sort = stories or str(Path(models) / STORIES), sort or str(Path(models) / SORT)
    answers = []
    for answer in chain(sorting(sort), story(stories), handmade_heads(), trained_heads()):
        answers.append(answer)
        if say is not None:
            say(answer)
    return SelfTest(tuple(answers))
