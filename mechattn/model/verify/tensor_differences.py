"""Compares two tensors: the largest difference, its tolerance, and the figures to report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.model.hooked import HookedModel
from mechattn.model.verify.verification import Check, Outcome

# Largest difference of logits (root mean square at the worst position) and of activations (worst entry), in root mean
# squares of what is compared. The largest seen on 30 architectures with random weights and a toy: float32 1e-5 and
# 3e-6, float16 1e-2 and 5e-3, bfloat16 1e-1 and 3e-2.
TOLERANCE = {
    torch.float64: (1e-4, 2e-5),  # norms and softmax are computed in float32 all the same
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
    """The largest difference over layers; relative to the root mean square unless ``scale`` is given."""
    if not pairs:
        return Check(name, "not checked", detail=f"{detail}: its hooks do not fire in any layer")
    apart = {layer: _distances(*pair, scale) for layer, pair in pairs.items()}
    worst = max(apart, key=lambda layer: float(apart[layer].max()))
    difference = float(apart[worst].max())
    passed = difference <= tolerance
    layer = list(pairs)[-1] if passed else worst
    shown = _largest(*pairs[layer]) if passed else _at(*pairs[layer], int(apart[layer].argmax()))
    return _judged(name, layer, shown, difference, tolerance, detail, remedy)


def compare_positions(
    name: str,
    hooked: Float[Tensor, "pos vocabulary"],
    expected: Float[Tensor, "pos vocabulary"],
    tolerance: float,
    detail: str,
    remedy: str,
) -> Check:
    """The largest root mean square of a position's differences."""
    # A constant added to all logits of a position changes no probability (centred unembeddings add one).
    hooked, expected = hooked - hooked.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    apart = (hooked - expected).square().mean(-1).sqrt() / expected.square().mean().sqrt().clamp_min(1e-12)
    apart = torch.nan_to_num(apart, nan=torch.inf)
    worst = int(apart.argmax())
    difference = float(apart[worst])
    if difference <= tolerance:
        shown = _largest(hooked[-1], expected[-1])
    else:
        shown = _at(hooked[worst], expected[worst], int(_distances(hooked[worst], expected[worst], 1.0).argmax()))
    return _judged(name, None, shown, difference, tolerance, detail, remedy)


def _distances(
    hooked: Float[Tensor, ...], expected: Float[Tensor, ...], scale: float | None
) -> Float[Tensor, " entry"]:
    unit = scale or max(float(expected.square().mean().sqrt()), 1e-12)
    return torch.nan_to_num((hooked - expected).abs() / unit, nan=torch.inf).flatten()


def _largest(hooked: Float[Tensor, ...], expected: Float[Tensor, ...]) -> tuple[float, float]:
    """The place of the largest expected figure; if several are nearly equal, each shows the same digits."""
    return _at(hooked, expected, int(expected.argmax()))


def _at(hooked: Float[Tensor, ...], expected: Float[Tensor, ...], entry: int) -> tuple[float, float]:
    return float(hooked.flatten()[entry]), float(expected.flatten()[entry])


def _judged(
    name: str,
    layer: int | None,
    shown: tuple[float, float],
    difference: float,
    tolerance: float,
    detail: str,
    remedy: str,
) -> Check:
    failed = difference > tolerance
    outcome: Outcome = "failed" if failed else "passed"
    return Check(name, outcome, layer, *shown, difference, tolerance, detail, remedy if failed else "")


def limited(check: Check, detail: str) -> Check:
    """Make a failure of this check exclude only some analyses."""
    return replace(check, outcome="limited", detail=detail, remedy="") if check.outcome == "failed" else check


def dtype_of(model: HookedModel) -> torch.dtype:
    """The dtype among a model's weights with the widest tolerance."""
    kinds = {p.dtype for p in model.parameters() if p.dtype in TOLERANCE}
    return max(kinds, key=lambda kind: TOLERANCE[kind]) if kinds else torch.float32
