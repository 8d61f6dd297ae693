"""Which heads copying needs in real models: a Markdown file with one table a model.

    python experiments/real/circuits/induction.py out/real/smollm2 out/real/qwen2.5 --spans 8 --span 16

For each model: the losses, the rank correlations, and the heads that copying needs most. Every
model is loaded, measured and written before the next, so an interrupted command keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from datetime import date
from pathlib import Path

import mechattn as ma

COLUMNS = [
    "layer",
    "head",
    "score",
    "effect",
    "effect_low",
    "effect_high",
    "q_effect",
    "attributed",
]
HEADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--spans", type=int, default=8)
    parser.add_argument("--span", type=int, default=16)
    default = Path(__file__).parent / f"{date.today()}-induction.md"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()

    for path in options.models:
        section = measured(path, options.spans, options.span)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(section)


def measured(path: Path, spans: int, span: int) -> str:
    """One model's section."""
    model = ma.load_model(str(path))
    start = time.process_time()
    heads = ma.induction_heads(model, spans, span=span)
    seconds = time.process_time() - start

    ranks = heads.ranks
    by_score = heads.table().sort_values("score", ascending=False).head(HEADS)
    lines = [
        f"## {path.name}",
        "",
        f"{spans} spans of {span} tokens, float32, {seconds:.0f} CPU-seconds.",
        f"Spearman's correlation with the effect of mean ablation, over {heads.scores[0].size} "
        f"heads: {ranks['score']:.2f} for the score, {ranks['attributed']:.2f} for attribution.",
        "",
        "```text",
        str(heads),
        "",
        f"the {HEADS} heads with the largest scores:",
        by_score[COLUMNS].to_string(index=False, float_format=lambda x: f"{x:.3g}"),
        "```",
        "",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
