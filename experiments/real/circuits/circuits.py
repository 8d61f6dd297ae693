"""Heads, edges and circuits of real models: one section a model and task, in Markdown.

    python experiments/real/circuits/circuits.py out/real/smollm2 out/real/gemma3 --tasks ioi capitals

Each pair counts as a unit unless pairs share a template. Heads are attributed on all pairs. Edges
are ranked on one half of the pairs and judged on the other, beside random circuits of equal size.
"""

from __future__ import annotations

import argparse
import time
from datetime import date
from pathlib import Path

import mechattn as ma

HEAD_COLUMNS = ["layer", "head", "effect", "effect_low", "effect_high", "q_effect", "share"]
EDGE_COLUMNS = ["writer", "reader", "effect", "effect_low", "effect_high"]
SHARES = (0.002, 0.01, 0.05, 0.2)  # of all edges
ROWS = 8  # of each table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tasks", nargs="+", default=["ioi", "capitals"])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    default = Path(__file__).parent / f"{date.today()}-circuits.md"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()

    for path in options.models:
        model = ma.load_model(str(path))
        for task in options.tasks:
            section = measured(model, path.name, task, options.pairs, options.steps)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(section)


def measured(model: object, name: str, task: str, count: int, steps: int) -> str:
    """One model's section on one task."""
    start = time.process_time()
    pairs = ma.pairs(model, task, limit=count)
    other = ma.conditions.Counterpart()
    heads = ma.patch(
        model,
        pairs,
        other,
        method="attribution",
        metric="logit_diff",
        direction="noising",
        controls=("other_prompt",),
    )
    seconds_of_heads = time.process_time() - start

    edge_count = _edge_count(model)
    sizes = [round(share * edge_count) for share in SHARES]
    circuit = ma.circuit(model, pairs, other, steps=steps, sizes=sizes)
    seconds = time.process_time() - start
    similarity, by_chance = circuit.stability(sizes[1])

    mean, low, high = heads.whole
    edges = circuit.edges.table(top=ROWS)
    lines = [
        f"## {name}, {task}",
        "",
        f"{count} pairs, float32; heads {seconds_of_heads:.0f} CPU-seconds, edges ({steps} steps) "
        f"and circuits {seconds - seconds_of_heads:.0f}. Whole effect on the logit difference "
        f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]. The first {sizes[1]} edges of two halves of the "
        f"ranking pairs share {similarity:.2f} (Jaccard index; {by_chance:.3f} by chance).",
        "",
        "```text",
        heads.table(top=ROWS)[HEAD_COLUMNS].to_string(index=False, float_format=_short),
        "",
        edges[EDGE_COLUMNS].to_string(index=False, float_format=_short),
        "",
        circuit.curve.to_string(index=False, float_format=_short),
        "```",
        "",
    ]
    return "\n".join(lines) + "\n"


def _edge_count(model: object) -> int:
    from mechattn.patching.graph import graph_of

    return int(graph_of(model).exists.sum())


def _short(value: float) -> str:
    return f"{value:.3g}"


if __name__ == "__main__":
    main()
