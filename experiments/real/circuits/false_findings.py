"""How often a head or an edge is found where there is nothing: effects with swapped labels.

    python experiments/real/circuits/false_findings.py out/real/smollm2 --pairs 32 --trials 100

The effects of a real run are computed once. In each trial the two versions of each pair change
places at random: the effects of that pair, of all heads or edges together, change their sign. So no
head or edge has an effect on average, and each q < 0.05 is a false finding. Effects keep their
sizes, their tails and their correlations, which simulated ones would not.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

import mechattn as ma
from mechattn.stats.units import Units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--kinds", nargs="+", default=["heads", "edges"])
    parser.add_argument("--trials", type=int, default=100)
    default = Path(__file__).parent / f"{date.today()}-false-findings.md"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()

    model = ma.load_model(str(options.model))
    prompts = ma.pairs(model, "ioi", limit=max(options.pairs))
    other = ma.conditions.Counterpart()
    kinds = {}
    if "heads" in options.kinds:
        kinds["heads"] = ma.patch(
            model, prompts, other, method="attribution", direction="noising", controls=()
        )
    if "edges" in options.kinds:
        kinds["edges"] = ma.edges(model, prompts, other)
    lines = [
        f"{options.model.name}, IOI, {options.trials} trials; units are templates.",
        "",
        "| | pairs (units) | q < 0.05 with the true labels | trials with a false finding | "
        "false findings a trial, at most |",
        "|---|---|---|---|---|",
    ]
    for kind, patching in kinds.items():
        for count in options.pairs:
            first_pairs = replace(
                patching,
                effects=patching.effects.isel(prompt=slice(count)),
                units=Units.grouped([prompt.group or prompt.id for prompt in prompts[:count]]),
            )
            true_count = findings(first_pairs)
            counts = []
            for trial in range(options.trials):
                counts.append(findings(swapped(first_pairs, trial)))
            share = np.mean(np.array(counts) > 0)
            lines.append(
                f"| {kind} ({len(first_pairs._cells):,}) | {count} ({first_pairs.units.n}) | "
                f"{true_count} | {share:.2f} | {max(counts)} |"
            )
            print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def swapped(patching: ma.Patching, seed: int) -> ma.Patching:
    """The same with each pair's effects negated or not, at random; pairs of one template alike."""
    units = patching.units
    unit_signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=units.n)
    of_prompts = np.arange(units.n) if units.group_of_prompt is None else units.group_of_prompt
    signs = unit_signs[of_prompts]
    return replace(patching, effects=patching.effects * _by_prompt(patching, signs))


def _by_prompt(patching: ma.Patching, signs: np.ndarray):
    return patching.effects.whole.copy(data=signs)


def findings(patching: ma.Patching) -> int:
    """How many rows have q < 0.05."""
    return int((patching._tests["effect"].q < 0.05).sum())


if __name__ == "__main__":
    main()
