"""The trained toy models that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mechattn.errors import ModelError

PREFIX = "toy:"
RELAY = "toy:relay"  # different from the others: it recalls, and passes what it recalls through filler
FOLDER = Path(__file__).parent.parent / "toys"


def toy_names() -> list[str]:
    """The toys that solve word problems, one per family, such as "toy:llama"."""
    return sorted({PREFIX + config.parent.name for config in FOLDER.glob("*/config.json")} - {RELAY})


def toy_folder(name: str) -> Path:
    """The folder with the weights of a toy."""
    if name not in (*toy_names(), RELAY):
        raise ModelError(f"there is no toy {name!r}; the toys are {', '.join(toy_names())} and {RELAY}")
    return FOLDER / name.removeprefix(PREFIX)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a toy, from its tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(toy_folder(name))
