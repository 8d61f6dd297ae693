"""How far two tensors are apart, at the place where they differ most, and how far they may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.model.report import Check, Outcome

# Largest difference of logits (root mean square at the worst position) and of activations (worst entry), in root mean
# squares of what is compared. The largest seen on 30 architectures with random weights and a toy: float32 1e-5 and
# 3e-6, float16 1e-2 and 5e-3, bfloat16 1e-1 and 3e-2.
TOLERANCE = {
    torch.float64: (1e-6, 1e-7),
    torch.float32: (1e-3, 2e-4),
    torch.float16: (3e-2, 2e-2),
    torch.bfloat16: (2.5e-1, 1.5e-1),
}
PROBABILITY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def compare(
    name: str,
    pairs: dict[Any, tuple[Tensor, Tensor]],
    tolerance: float,
    detail: str,
    remedy: str,
    scale: float | None = None,
) -> Check:
    """The place of the largest difference over layers; relative to the root mean square unless ``scale`` is given."""
    worst: Check | None = None
    for layer, (hooked, expected) in pairs.items():
        unit = scale or max(float(expected.square().mean().sqrt()), 1e-12)
        distance = torch.nan_to_num((hooked - expected).abs() / unit, nan=torch.inf).flatten()
        at = int(distance.argmax())
        apart = float(distance[at])
        outcome: Outcome = "passed" if apart <= tolerance else "failed"
        figures = (float(hooked.flatten()[at]), float(expected.flatten()[at]), apart, tolerance)
        check = Check(name, outcome, layer, *figures, detail, remedy if outcome == "failed" else "")
        if worst is None or apart > (worst.difference or 0.0):
            worst = check
    if worst is None:
        return Check(name, "not checked", detail=f"{detail}: its hooks do not fire in any layer")
    return worst


def compare_positions(
    name: str,
    hooked: Float[Tensor, "pos vocabulary"],
    expected: Float[Tensor, "pos vocabulary"],
    tolerance: float,
    detail: str,
    remedy: str,
) -> Check:
    """The position with the largest root mean square of the difference; its figures are those of its worst logit."""
    # A constant added to all logits of a position changes no probability (centred unembeddings add one).
    hooked, expected = hooked - hooked.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    apart = (hooked - expected).square().mean(-1).sqrt() / expected.square().mean().sqrt().clamp_min(1e-12)
    at = int(torch.nan_to_num(apart, nan=torch.inf).argmax())
    worst = compare(name, {None: (hooked[at], expected[at])}, tolerance, detail, remedy)
    difference = float(torch.nan_to_num(apart, nan=torch.inf)[at])
    failed = difference > tolerance
    return replace(
        worst, outcome="failed" if failed else "passed", difference=difference, remedy=remedy if failed else ""
    )


def limited(check: Check, detail: str) -> Check:
    """A check that, failing, bars some analyses only."""
    return replace(check, outcome="limited", detail=detail, remedy="") if check.outcome == "failed" else check
