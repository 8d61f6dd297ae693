"""Runs real models on GSM8K questions, with and without inserted tokens, and keeps the results.

    python experiments/real/measure.py FOLDER [--questions 100] [--out out/real-runs]

FOLDER holds models as GGUF files or checkpoint folders. Each is run with its chat template (if it
has one) and with plain text, and once more on the bare question, where the first token of the
question is the sink. A run whose result is stored already is skipped, so an interrupted command
goes on where it stopped. ``tables.py`` turns the results into numbers, ``pictures.py`` draws them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import mechattn as ma

SYSTEM = r"Please reason step by step and put your final answer within \boxed{}."
COUNT = 55  # inserted tokens, as in arXiv:2510.01032
BARE_QUESTIONS = 32

SLASH = ma.MeaninglessTokens("/", count=COUNT)
CONDITIONS = {
    "slash": SLASH,
    "sentence": ma.RandomSentence(count=COUNT),
    "he": ma.conditions.RepeatedWord("he", count=COUNT),
    "masked": SLASH.masked(),
    "unshifted": SLASH.unshifted(),
}
ANALYSES = [ma.ReceivedAttention(queries="question"), ma.analyses.AttentionBudget()]


def model_paths(folder: Path) -> list[Path]:
    """The GGUF files of a folder; its checkpoint folders where there is no such file."""
    files = sorted(folder.glob("*.gguf"))
    return files or sorted(path.parent for path in folder.glob("*/config.json"))


def measure(model: object, template: str, questions: int, target: Path) -> None:
    """Run one model with one template and store the result, unless it is there."""
    if target.exists():
        print(f"{target} is there already", flush=True)
        return

    if template == "bare":
        prompts = ma.load_prompts("gsm8k", limit=min(questions, BARE_QUESTIONS))
        conditions = {"slash": SLASH}
    else:
        prompts = ma.load_prompts("gsm8k", limit=questions, system=SYSTEM, template=template)
        conditions = CONDITIONS

    begun = time.monotonic()
    result = ma.run(model, prompts, conditions, ANALYSES)
    result.save(target)
    print(f"{target}: {len(prompts)} questions in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out/real-runs"))
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    for path in model_paths(options.folder):
        model = ma.load_model(str(path))
        templates = ["plain", "bare"]
        if model.tokenizer.chat_template is not None:
            templates.insert(0, "chat")
        for template in templates:
            target = options.out / f"{path.stem}-{template}.zarr"
            measure(model, template, options.questions, target)


if __name__ == "__main__":
    main()
