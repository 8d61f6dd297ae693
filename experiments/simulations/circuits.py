"""Circuits whose truth is known: how well each method finds them, and how often something is found where nothing is.

python experiments/simulations/circuits.py --seeds 8 --models 24 --out experiments/simulations/circuits.md

Seeds are fixed; a quarter of an hour on one core. Quoted by docs/concepts/known-answers.md and the README.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.stats.intervals import t_interval, wilson_interval
from tests.known_answers.known_circuits import METHODS, known_circuits, scores_of
from tests.known_answers.known_heads import VOCABULARY, copying_model
from tests.tiny_families import tiny_model

PROMPTS, SPAN, STEPS = 16, (6, 8), 5


def known(seeds: int) -> Iterator[dict[str, Any]]:
    """AUROC of edges and heads, and precision, over models with other noise."""
    for circuit in known_circuits():
        for method in METHODS:
            found = [
                scores_of(circuit, method, seed, prompts=3 if method == "exact" else 6)
                for seed in range(seeds)
            ]
            row: dict[str, Any] = {"circuit": circuit.name, "method": method}
            for name in ("edges", "heads", "precision"):
                made = t_interval(np.array([each[name] for each in found]))
                low, high = max(0.0, float(made.low)), min(1.0, float(made.high))
                row[name] = f"{float(made.estimate):.3f} [{low:.3f}, {high:.3f}]"
            yield row


def nothing(models: int) -> Iterator[dict[str, Any]]:
    """The share of trials in which some edge has q < 0.05 where there is nothing to find, and where there is."""
    trained = copying_model(0)
    kinds = {
        "random weights, shuffled answers": (
            lambda seed: tiny_model("GPT-2", VOCABULARY, seed),
            True,
            "≤ 0.05",
        ),
        "a trained model, shuffled answers": (lambda seed: trained, True, "≤ 0.05"),
        "random weights, own answers": (
            lambda seed: tiny_model("GPT-2", VOCABULARY, seed),
            False,
            "no promise",
        ),
        "a trained model, own answers": (lambda seed: trained, False, "higher is better"),
    }
    for name, (model_of, shuffled, should) in kinds.items():
        found = []
        for seed in range(models):
            model = ma.load_model(model_of(seed), tokenizer=lettered_tokenizer(VOCABULARY))
            pairs = ma.pairs(model, "repeated-random", PROMPTS, span=SPAN, seed=seed)
            if shuffled:
                pairs = with_other_answers(pairs, seed)
            found.append(
                bool(
                    (
                        ma.edges(model, pairs, Counterpart(), steps=STEPS, seed=seed)
                        .table()
                        .q_effect
                        < 0.05
                    ).any()
                )
            )
        low, high = wilson_interval(sum(found), len(found))
        share = f"{np.mean(found):.2f} [{low:.2f}, {high:.2f}]"
        yield {
            "trials": name,
            "found": f"{sum(found)} of {len(found)}",
            "share": share,
            "should be": should,
        }


def with_other_answers(pairs: list[ma.Prompt], seed: int) -> list[ma.Prompt]:
    """The same prompts with two tokens as answers that have nothing to do with them."""
    made = []
    for pair in pairs:
        answers = random.Random(f"answers {seed} {pair.id}").sample(range(VOCABULARY), 2)
        made.append(replace(pair, answer_tokens=(answers[0],), other_answer=(answers[1],)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("out/circuits.md"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = []
    for heading, rows in (
        ("Circuits written by hand", known(given.seeds)),
        ("Nothing to find", nothing(given.models)),
    ):
        tables.append(f"## {heading}\n\n{markdown(pd.DataFrame(list(rows)))}\n")
        print(tables[-1], flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        "# Circuits whose truth is known\n\n" + "\n".join(tables), encoding="utf-8"
    )


def markdown(table: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.values)])


if __name__ == "__main__":
    main()
