"""Measures what was published in three real models of the paper's families, and keeps the table in this folder.

Attention on the first questions of GSM8K; answers to the first problems, if some are asked for. Every finished run is
kept in out/paper, and the same call goes on from there. On two idle cores attention on 32 questions takes about
20 minutes; 100 problems take hours.

python experiments/paper/measure.py out/real gsm8k_test.jsonl [--limit 32] [--problems 100]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import defaultdict
from datetime import date
from pathlib import Path

import mechattn as ma

MODELS = ("smollm2", "qwen2.5", "gemma3")  # Llama, Qwen2 and Gemma 3 architectures
HERE = Path(__file__).parent
OUT = Path("out/paper")


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


def main() -> None:
    """Measure, and keep the table and the values of each prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, help="the folder with the three checkpoints")
    parser.add_argument("questions", help="GSM8K's test split as a .jsonl file")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--problems", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=400)
    options = parser.parse_args()
    places = [str(options.models / name) for name in MODELS]
    comparison = ma.paper(
        places,
        OUT,
        prompts=options.questions,
        limit=options.limit,
        problems=options.problems,
        new_tokens=options.new_tokens,
        command="python experiments/paper/measure.py out/real gsm8k_test.jsonl",
    )
    shutil.copy(OUT / "paper.md", HERE / f"{date.today()}.md")
    values = {name: values_by_prompt(name) for name in MODELS}
    (HERE / f"{date.today()}.json").write_text(json.dumps(values), encoding="utf-8")
    print(comparison)


if __name__ == "__main__":
    main()
