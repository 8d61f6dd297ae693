"""Checks that a row's logits do not depend on the other rows of its batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.model.hooked import HookedModel, config_of, original_of
from mechattn.model.positions import Boundary, boundary_of
from mechattn.model.verify.tensor_differences import compare_positions
from mechattn.model.verify.verification import Check

_REMEDY = (
    "its logits depend on the batch in a way that mechattn does not know, so conditions cannot be compared; please "
    "report it"
)


def check_neighbours(
    model: HookedModel,
    native: Any,
    tokens: Int[Tensor, "1 pos"],
    alone: Float[Tensor, "1 pos d_vocab"],
    tolerance: float,
) -> Check:
    """Compare the probe alone with the probe beside a row half as long again and, if possible, at far positions."""
    asked: Any = native or model
    device = next(asked.parameters()).device
    boundary, length, most = boundary_of(model), tokens.shape[1], _most(model)
    limit = min(most, boundary.at) if boundary is not None and length <= boundary.at else most
    longer = max(min(length + length // 2, limit), length)
    real = torch.ones(2, longer, dtype=torch.long, device=device)
    real[0, length:] = 0
    twice = tokens.repeat(1, 2)[:, :longer]
    both = torch.cat([twice, twice.flip(1)]).to(device)
    options: dict[str, Any] = {"attention_mask": real}
    far = 0
    if "position_ids" in inspect.signature((original_of(model) or asked).forward).parameters:
        far = limit - longer
        options["position_ids"] = torch.arange(longer, device=device) + torch.tensor([[0], [far]], device=device)
    try:
        beside = _logits(asked, both, **options)[:, :length]
    except Exception as error:
        return Check(
            "neighbours", "not checked", detail=f"the probe batched with a longer row raises {type(error).__name__}"
        )
    detail = f"logits of the probe batched with a row of {longer} tokens{_far(far, longer)} against those alone"
    return compare_positions("neighbours", beside[0], alone[0], tolerance, detail + _kept_apart(boundary), _REMEDY)


def _most(model: HookedModel) -> int:
    """A lower bound of the number of positions that the model has."""
    own = getattr(config_of(model), "max_position_embeddings", None)
    said = [int(number) for number in (own, model.cfg.n_ctx) if number]
    return min(said, default=1)


def _logits(model: Any, tokens: Int[Tensor, "batch pos"], **options: Any) -> Float[Tensor, "batch pos d_vocab"]:
    with torch.no_grad():
        if hasattr(model, "hook_dict"):
            return model(tokens, return_type="logits", **options).float().cpu()
        return model(tokens, use_cache=False, **options).logits.float().cpu()


def _far(far: int, longer: int) -> str:
    return f" at positions {far:,} to {far + longer - 1:,}" if far else ""


def _kept_apart(boundary: Boundary | None) -> str:
    return "" if boundary is None else f"; {boundary}: no batch holds both"
