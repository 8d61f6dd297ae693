"""Measures what was published in three real models of the paper's families, and keeps the table in this folder.

Attention on questions of GSM8K and of MATH-500 in turn, each of at least 100 letters, as several statements are about
places within a question. Every finished run is kept in out/paper, and the same call goes on from there. Accuracy has its
own experiment (experiments/real/accuracy.toml).

python experiments/paper/measure.py out/real gsm8k_test.jsonl math500_test.jsonl [--limit 32]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path

import mechattn as ma
from mechattn.published.comparison import measured_cell
from mechattn.published.statements import read_statements

MODELS = ("smollm2", "qwen2.5", "gemma3")  # Llama, Qwen2 and Gemma 3 architectures
HERE = Path(__file__).parent
OUT = Path("out/paper")
SHORTEST = 100  # letters of a question


def values_by_prompt(model: str) -> dict[str, dict[str, list[float]]]:
    """The values of each prompt by statement, and the mean of each draw of untrained weights."""
    newest: dict[str, Path] = {}
    for path in sorted(OUT.glob(f"{model}-*.json"), key=lambda path: path.stat().st_mtime):
        run = path.stem.removeprefix(f"{model}-").rpartition("-")[0]  # without its hash
        newest[run] = path
    values: dict[str, list[float]] = {}
    untrained: dict[str, list[float]] = defaultdict(list)
    for run, path in sorted(newest.items()):
        by_statement = json.loads(path.read_text(encoding="utf-8"))
        if not re.search(r"untrained-\d+$", run):
            values |= {
                name: [round(value, 4) for value in own] for name, own in by_statement.items()
            }
            continue
        for name, own in by_statement.items():
            untrained[name].append(round(sum(own) / len(own), 4))
    return {"values by prompt": values, "untrained, mean of each draw": untrained}


def differing_words(values: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    """The cells to which the two sets of questions, which take turns, give different words."""
    differing = []
    for model, of_model in values.items():
        by_statement = of_model["values by prompt"]
        for statement in read_statements().statements:
            if statement.key not in by_statement:
                continue
            of_prompts = by_statement[statement.key]
            gsm8k = measured_cell(statement, of_prompts[0::2])
            math500 = measured_cell(statement, of_prompts[1::2])
            if gsm8k.word != math500.word:
                differing.append(f"{model}, {statement.title}: GSM8K {gsm8k}; MATH-500 {math500}")
    return differing


def ask(gsm8k: Path, math500: Path, limit: int) -> Path:
    """A file with questions of both sets in turn, so that the first few are of both."""
    lines = []
    both = zip(long_ones(gsm8k, "question"), long_ones(math500, "problem"), strict=False)
    for first, second in islice(both, limit):
        lines.append({"question": first, "set": "GSM8K"})
        lines.append({"question": second, "set": "MATH-500"})
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def long_ones(path: Path, field: str) -> Iterator[str]:
    """The questions of a file of JSON lines that are not very short."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            question = json.loads(line)[field]
            if len(question) >= SHORTEST:
                yield question


def main() -> None:
    """Measure, and keep the table and the values of each prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, help="the folder with the three checkpoints")
    parser.add_argument("gsm8k", type=Path, help="GSM8K's test split as a .jsonl file")
    parser.add_argument("math500", type=Path, help="MATH-500 as a .jsonl file")
    parser.add_argument("--limit", type=int, default=32, help="questions of each set")
    options = parser.parse_args()
    places = [str(options.models / name) for name in MODELS]
    comparison = ma.paper(
        places,
        OUT,
        prompts=str(ask(options.gsm8k, options.math500, options.limit)),
        limit=2 * options.limit,
        command="python experiments/paper/measure.py out/real gsm8k_test.jsonl math500_test.jsonl",
    )
    shutil.copy(OUT / "paper.md", HERE / f"{date.today()}.md")
    values = {name: values_by_prompt(name) for name in MODELS}
    (HERE / f"{date.today()}.json").write_text(json.dumps(values), encoding="utf-8")
    print(comparison, *differing_words(values), sep="\n")


if __name__ == "__main__":
    main()
