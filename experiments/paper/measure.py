"""Measures what was published in three real models of the paper's families, and keeps the table in this folder.

Attention on the first questions of GSM8K; answers to the first problems, if some are asked for. Every finished run is
kept in out/paper, and the same call goes on from there. On two idle cores attention on 32 questions takes about
20 minutes; 100 problems take hours.

python experiments/paper/measure.py out/real gsm8k_test.jsonl [--limit 32] [--problems 100]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import mechattn as ma

MODELS = ("smollm2", "gemma3", "qwen2.5")  # Llama, Gemma 3 and Qwen2 architectures
HERE = Path(__file__).parent
OUT = Path("out/paper")


def main() -> None:
    """Measure, and copy the table."""
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
    for name in ("paper.md", "paper.json"):
        shutil.copy(OUT / name, HERE / name)
    print(comparison)


if __name__ == "__main__":
    main()
