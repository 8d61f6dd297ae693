"""Judges the register sinks-and-induction for a model that is trained here to copy, stories260K and the toys.

python experiments/sinks/judge.py ../shared/models
"""

import sys
from pathlib import Path

import mechattn as ma
from mechattn.model.checkpoint import lettered_tokenizer
from tests.known_answers.known_heads import VOCABULARY, copying_model

OUT = Path("out/sinks")
MODELS = ["toy:llama", "toy:falcon", "toy:gemma3", "toy:qwen2"]


def main(folder: str | None = None) -> None:
    """The positive control reads random tokens alone; the others read problems too."""
    control = OUT / "copying"
    copying_model().save_pretrained(control)
    lettered_tokenizer(VOCABULARY).save_pretrained(control)
    others = [*MODELS, f"{folder}/stories260K"] if folder else MODELS
    for models, out, without in (
        ([str(control)], "control", ("problems",)),
        (others, "models", ()),
    ):
        print(
            ma.judge(
                "sinks-and-induction",
                models,
                OUT / out,
                ma.ClaimSettings(limit=16, without=without),
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
