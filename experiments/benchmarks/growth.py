"""Bytes and seconds of a large run, from the shapes that the code stores and a few constants, as a table.

    python experiments/benchmarks/growth.py

``tests/distributed/test_growth.py`` compares the bytes with those of real results, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.engine.nulls import BLIND, with_nulls
from mechattn.stats.units import resampled_count

RATIO = 1.12  # time of a streamed pass to that of a plain SDPA forward (2026-11-21-cpu.md, 256 to 8,192 tokens)
PEAK, SHARE = (
    989e12,
    0.4,
)  # of an H100 in bfloat16, and the share of it that a forward pass is assumed to reach
GPUS = 8


VALUES = "each prompt's values"
POSITIONS = "each prompt's positions"
MOMENTS = "moments by position"
TOKENS = "the tokens that were read"


@dataclass(frozen=True)
class Model:
    """What counts of a model."""

    name: str
    parameters: float
    layers: int
    heads: int
    d_model: int


MODELS = (
    Model("Llama-3.1-8B", 8.0e9, 32, 32, 4096),
    Model("a 70B (Llama-3.1)", 70.6e9, 80, 64, 8192),
)


def stored_bytes(
    analyses: Sequence[Any],
    layers: int,
    heads: int,
    prompts: int,
    conditions: int,
    length: int,
    inserted: int,
    positions: str,
) -> dict[str, int]:
    """The bytes of the arrays in memory, by kind."""
    sizes = {
        "head": heads,
        "segment": len(SEGMENTS),
        "to_segment": len(SEGMENTS),
        "other_condition": conditions,
    }
    longest = length + inserted
    counted = dict.fromkeys((VALUES, MOMENTS, POSITIONS), 0)
    for analysis in analyses:
        sizes |= {name: len(labels) for name, labels in getattr(analysis, "coords", {}).items()}
        for name, quantity in with_nulls(analysis).items():
            if name.endswith(BLIND):  # only in models with ALiBi or learned sinks
                continue
            numbers = [sizes.get(dim, longest) for dim in quantity.dims if dim != "key"]
            cells = conditions * layers * prod(numbers)
            if "key" in quantity.dims:
                counted[MOMENTS] += 3 * 8 * cells * (longest + length)
                if positions == "prompts":
                    counted[POSITIONS] += 4 * prompts * cells * (longest + length)
            else:  # products of changes are summed in float64
                number_bytes = 8 if "other_condition" in quantity.dims else 4
                counted[VALUES] += number_bytes * prompts * cells
    counted[TOKENS] = prompts * (3 * 4 * conditions * longest + 8)
    return counted


def seconds(model: Model, tokens: float) -> float:
    """Of all GPUs together: 2 FLOP a parameter and token; at some hundred tokens attention's own adds a percent."""
    return RATIO * 2 * model.parameters * tokens / (PEAK * SHARE)


def main() -> None:
    """100,000 prompts under 6 conditions."""
    prompts, conditions, length, inserted = 100_000, 6, 180, 55
    tokens = prompts * (length + (conditions - 1) * (length + inserted))
    print(
        f"{prompts:,} prompts of {length} tokens, {conditions} conditions, five with {inserted} more; {GPUS} GPUs\n"
    )
    print("| | " + " | ".join(model.name for model in MODELS) + " |\n|---|" + "---|" * len(MODELS))
    sets = {
        "ReceivedAttention": [ma.ReceivedAttention()],
        "… and AffineShift, MlpActivations, AttentionFocus": [
            ma.ReceivedAttention(),
            ma.analyses.AffineShift(),
            ma.analyses.MlpActivations(),
            ma.analyses.AttentionFocus(),
        ],
    }  # fmt: skip
    row("GPU hours", [seconds(model, tokens) / 3600 for model in MODELS], "{:.1f} h")
    row(f"on {GPUS} GPUs", [seconds(model, tokens) / 3600 / GPUS for model in MODELS], "{:.1f} h")
    for name, analyses in sets.items():
        counted = [
            stored_bytes(
                analyses, m.layers, m.heads, prompts, conditions, length, inserted, "prompts"
            )
            for m in MODELS
        ]
        for part in counted[0]:
            row(f"{name}: {part}", [count[part] / 2**30 for count in counted], "{:.3g} GiB")
    moment_rows(
        "ReceivedAttention", [ma.ReceivedAttention()], prompts, conditions, length, inserted
    )


def moment_rows(
    name: str, analyses: Sequence[Any], prompts: int, conditions: int, length: int, inserted: int
) -> None:
    """What a run takes: the moments of all chunks, and what a comparison of one quantity holds."""
    for chunk in (64, 1024):
        counted = [
            stored_bytes(
                analyses, m.layers, m.heads, chunk, conditions, length, inserted, "moments"
            )
            for m in MODELS
        ]
        moments = [count[MOMENTS] * prompts / chunk for count in counted]
        row(
            f"{name}, chunks of {chunk}: all moments",
            [size / 2**30 for size in moments],
            "{:,.1f} GiB",
        )
    row(
        "prompt values read to compare one condition",
        [2 * 4 * prompts * m.layers * m.heads * len(SEGMENTS) / 2**30 for m in MODELS],
        "{:.1f} GiB",
    )
    row(
        "draws of a comparison",
        [
            resampled_count(prompts) * (2 * 9999 + max(9999, 20 * m.layers * m.heads) / 8) / 2**30
            for m in MODELS
        ],
        "{:.2g} GiB",
    )
    row(
        "what is resampled",
        [8 * 6 * resampled_count(prompts) * m.layers * m.heads / 2**30 for m in MODELS],
        "{:.2g} GiB",
    )
    row(
        "a layer of a comparison", [8 * 8 * prompts * m.heads / 2**30 for m in MODELS], "{:.2f} GiB"
    )


def row(name: str, values: list[float], form: str) -> None:
    """A line of the table."""
    print(f"| {name} | " + " | ".join(form.format(value) for value in values) + " |")


if __name__ == "__main__":
    main()
