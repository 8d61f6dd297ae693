"""What float16 for each prompt's values changes in a table of comparisons, on the toys.

python experiments/benchmarks/half.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import mechattn as ma


def main() -> None:
    """The largest difference of each column from that of float32, over all heads."""
    print(
        "| toy | values | difference | interval's ends | q | q crosses 0.05 |\n|---|---|---|---|---|---|"
    )
    for name in ("toy:llama", "toy:qwen2"):
        prompts = ma.load_prompts("word-problems", limit=64)
        job = {
            "model": name,
            "prompts": prompts,
            "conditions": {"slash": ma.MeaninglessTokens("/", 55)},
        }
        with tempfile.TemporaryDirectory() as folder:
            made = [
                ma.run_job(ma.Job(**job, values=values), Path(folder) / f"{values}.zarr")
                for values in ("float32", "float16")
            ]
            for quantity in ("received", "mass"):
                full, half = (
                    result.compare("slash", quantity=quantity, columns="all") for result in made
                )
                away = [
                    float(np.nanmax(abs(full[c] - half[c])))
                    for c in ("difference", "difference_low", "difference_high", "q_beyond")
                ]
                crossing = int(((full.q_beyond < 0.05) != (half.q_beyond < 0.05)).sum())
                print(
                    f"| {name} | {quantity} | {away[0]:.1e} | {max(away[1:3]):.1e} | {away[3]:.1e} | "
                    f"{crossing} of {len(full)} |"
                )


if __name__ == "__main__":
    main()
