"""Runs all tests against known answers; here those of models trained by others, skipped if not found."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mechattn.errors import ModelError
from mechattn.known_answers.answer import KnownAnswer, SelfTest, compared, tried
from mechattn.known_answers.known_circuits import found_circuits
from mechattn.known_answers.known_heads import handmade_heads, trained_heads
from mechattn.model.load import load_model

STORIES, SORT = "stories260K", "llm-viz-sort"
_STORIES_BY = "llama2.c, doc/stories260K.md (A. Karpathy)"
_SORT_BY = "llm-viz (B. Bycroft)"
_TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do."
)
_ACTIVATIONS = "gpt-nano-sort-t0-partials.json"
_LETTERS = 6


def selftest(
    models: str | os.PathLike[str] | None = None,
    *,
    stories: str | None = None,
    sort: str | None = None,
    say: Callable[[KnownAnswer], None] | None = None,
) -> SelfTest:
    """Test this library against known answers; takes about two minutes.

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
        raise ModelError(
            f"there is no folder of models at {models}; it should hold {STORIES} and {SORT}"
        )
    if models is not None:
        stories, sort = stories or str(Path(models) / STORIES), sort or str(Path(models) / SORT)
    answers = []
    for answer in chain(
        sorting(sort), story(stories), handmade_heads(), trained_heads(), found_circuits()
    ):
        answers.append(answer)
        if say is not None:
            say(answer)
    return SelfTest(tuple(answers))


def story(place: str | None) -> Iterator[KnownAnswer]:
    """stories260K reproduces its published greedy text from BOS alone."""
    known = f"its greedy text from BOS alone begins with the {len(_TEXT)} characters that were published"
    if (lacking := _lacking(place)) is not None:
        yield KnownAnswer(STORIES, known, lacking, "not tried", _STORIES_BY)
        return
    model = load_model(str(place))
    tokens = [model.tokenizer.bos_token_id]
    text = ""
    with torch.no_grad():
        while len(text) < len(_TEXT) and len(tokens) < model.cfg.n_ctx:
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            text = model.tokenizer.decode(tokens[1:])
    text = text.lstrip()
    same = next(
        (i for i, (a, b) in enumerate(zip(text, _TEXT)) if a != b), min(len(text), len(_TEXT))
    )
    passed, differs = (
        same == len(_TEXT),
        f"{same} characters are the same, then {text[same:][:20]!r}",
    )
    yield tried(
        STORIES,
        known,
        f"{len(tokens) - 1} tokens, the same" if passed else differs,
        passed,
        _STORIES_BY,
    )


def sorting(place: str | None) -> Iterator[KnownAnswer]:
    """llm-viz-sort sorts six letters, and its activations agree with another implementation's."""
    sorts = "it sorts every sequence of six letters"
    if (lacking := _lacking(place)) is not None:
        yield KnownAnswer(SORT, sorts, lacking, "not tried", _SORT_BY)
        yield KnownAnswer(SORT, "its activations", lacking, "not tried", _SORT_BY)
        return
    model = load_model(str(place))
    letters = torch.tensor(list(product(range(3), repeat=_LETTERS)))
    tokens = letters
    with torch.no_grad():
        for _ in range(_LETTERS):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    right = int((tokens[:, _LETTERS:] == letters.sort(-1).values).all(-1).sum())
    yield tried(SORT, sorts, f"{right} of {len(letters)}", right == len(letters), _SORT_BY)
    stored = Path(str(place)) / _ACTIVATIONS
    if not stored.exists():
        yield KnownAnswer(
            SORT,
            "its activations",
            f"there is no {_ACTIVATIONS} in its folder",
            "not tried",
            _SORT_BY,
        )
        return
    yield from _activations(model, json.loads(stored.read_text()))


def _activations(model: Any, stored: dict[str, Any]) -> Iterator[KnownAnswer]:
    """Activations of layer 0 and logits, on three sequences; values above 1 are relative to the largest."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(torch.tensor(_array(stored["idx"]).astype(int)))
    names = {
        name: f"blocks.0.attn.hook_{name}"
        for name in ("q", "k", "v", "attn_scores", "pattern", "z")
    }
    ours = {name: cache[hook].double().numpy() for name, hook in names.items()}
    for name in ("q", "k", "v"):
        ours[name] = ours[name].swapaxes(1, 2)
    ours["z"] = ours["z"].reshape(*ours["z"].shape[:2], -1)
    ours["logits"] = logits.double().numpy()
    theirs = {
        "q": "q",
        "k": "k",
        "v": "v",
        "attn_scores": "att",
        "pattern": "attSm",
        "z": "y",
        "logits": "lm_head",
    }
    for name, key in theirs.items():
        expected = _array(stored[key])
        seen = np.isfinite(expected)  # scores of later tokens are −∞ there
        scale = max(1.0, float(abs(expected[seen]).max()))
        away = float(abs(ours[name][seen] - expected[seen]).max()) / scale
        where = name if name == "logits" else f"{name} of layer 0"
        yield compared(SORT, f"{where}, against another implementation", away, 1e-6, _SORT_BY)


def _array(stored: dict[str, Any]) -> np.ndarray:
    return (
        np.frombuffer(base64.b64decode(stored["data"]), "<f4")
        .reshape(stored["shape"])
        .astype(np.float64)
    )


def _lacking(place: str | None) -> str | None:
    """Why a model cannot be tried; None if it can."""
    if place is None:
        return "give its folder with --models"
    if (os.sep in place or place.startswith(".")) and not os.path.isdir(place):
        return f"there is no folder {place}"
    return None
