"""How much word problems of one template agree: the correlation within templates, and what it does to an interval."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

import numpy as np

import mechattn as ma
from experiments.toys.generated_problems import SYSTEM, word_problems
from mechattn.stats.intervals import t_interval
from mechattn.stats.units import Units

TEMPLATES, SIZE, SEARCHED = 24, 5, 20_000


def correlation(d: np.ndarray, size: int) -> np.ndarray:
    """Intraclass correlation of each column of d, rows in groups of one size: one-way analysis of variance."""
    groups = d.reshape(-1, size, d.shape[1])
    between = size * groups.mean(1).var(0, ddof=1)
    within = groups.var(1, ddof=1).mean(0)
    return (between - within) / (between + (size - 1) * within)


def main() -> None:
    """Print the correlation, the design effect and the width of intervals, over the heads of each toy."""
    by_template = defaultdict(list)
    for problem in islice(word_problems("test"), SEARCHED):
        by_template[problem.template].append(problem)
    kept = sorted(
        (t for t in by_template if len(by_template[t]) >= SIZE), key=lambda t: -len(by_template[t])
    )
    chosen = [(t, problem) for t in kept[:TEMPLATES] for problem in by_template[t][:SIZE]]
    prompts = [
        ma.Prompt(p.question, system=SYSTEM, id=str(i), group=t) for i, (t, p) in enumerate(chosen)
    ]
    for name in ("toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"):
        result = ma.run(name, prompts, {"slash": ma.MeaninglessTokens()})
        at = (
            result["received_attention"]
            .sel(segment="question")
            .transpose("prompt", "condition", "layer", ...)
        )
        ratio = [
            np.log(at[of].sel(condition="slash").values / at[of].sel(condition="baseline").values)
            for of in ("received_by_segment", "received_by_segment_uniform")
        ]
        d = (
            (ratio[0] - ratio[1].reshape(*ratio[1].shape[:2], -1))
            .reshape(len(prompts), -1)
            .astype(np.float64)
        )
        units = Units.grouped([t for t, _ in chosen])
        half = [made.high - made.estimate for made in (t_interval(d), t_interval(units.means(d)))]
        rho = correlation(d, SIZE)
        print(
            f"{name}: {units.words}; correlation within a template, quartiles over heads "
            f"{np.round(np.quantile(rho, [0.25, 0.5, 0.75]), 2).tolist()}; design effect "
            f"{1 + (SIZE - 1) * np.median(rho):.2f}; interval over groups "
            f"/ over prompts {np.median(half[1] / half[0]):.2f}"
        )


if __name__ == "__main__":
    main()
