"""Compares a hooked model with the model itself: logits, kernel, config, layers, batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, ModelFacts, config_of, original_of
from mechattn.model.positions import boundary_of
from mechattn.model.several_devices import device_of
from mechattn.model.verify import verification as probe
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.kernel_check import attention_of, check_kernel, run_native
from mechattn.model.verify.layer_checks import ProbedHooks, check_layers, is_read
from mechattn.model.verify.verification import Check, Report, compare_positions

Logits = Float[Tensor, "pos d_vocab"]


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model behind it and with itself, on random tokens."""
    tokens = probe.probe_tokens(model, length)
    dtype = probe.dtype_of(model)
    hook_values, logits = _forward(model, tokens)

    if facts.native is None:
        reason = facts.why_not_native
        advice = f"{reason}; give the transformers model as native=…"
        native_checks = [
            Check("logits", "not checked", detail=advice),
            Check("kernel", "not checked", detail=reason),
        ]
    else:
        native_tokens = tokens.to(device_of(facts.native))
        native_logits, patterns, source = run_native(facts.native, native_tokens)
        native_checks = [
            _logits(facts.native, logits, native_logits[0].float().cpu(), dtype),
            check_kernel(model, hook_values, patterns, source, dtype),
        ]

    checks = [
        *native_checks,
        check_config(model, facts.native),
        *check_layers(ProbedHooks(model, hook_values, dtype, tokens.shape[1])),
        _neighbours(model, tokens, logits, dtype),
    ]
    architecture = getattr(model.cfg, "architecture", None)
    if not architecture:  # a HookedTransformer
        architecture = getattr(model.cfg, "original_architecture", None)

    return Report(
        model=str(model.cfg.model_name),
        architecture=str(architecture),
        dtype=str(dtype).removeprefix("torch."),
        versions=(
            f"transformer-lens {version('transformer-lens')}, transformers"
            f" {version('transformers')}"
        ),
        checks=tuple(checks),
        mended=facts.mended,
    )


def _forward(model: HookedModel, tokens: Int[Tensor, "1 pos"]) -> tuple[dict[str, Tensor], Logits]:
    """The activations of the probe that the checks of layers read, and its logits."""
    values: dict[str, Tensor] = {}

    def note(value: Any, hook: Any, name: str) -> None:
        if isinstance(value, Tensor):
            values[name] = value.detach().float().cpu()

    fwd_hooks: list[tuple[str, Callable[..., Any]]] = []
    for name in model.hook_dict:
        if name.startswith("blocks.") and is_read(name.split(".", 2)[2]):
            fwd_hooks.append((name, partial(note, name=name)))

    options = hooks.keeping_nothing(model)
    with torch.no_grad():
        logits = model.run_with_hooks(
            tokens.to(device_of(model)), fwd_hooks=fwd_hooks, return_type="logits", **options
        )

    return values, logits[0].float().cpu()


def _logits(native: Any, hooked: Logits, expected: Logits, dtype: torch.dtype) -> Check:
    """Check that the hooked model gives the logits of the model itself."""
    detail = f"logits against the model's own attention ({attention_of(native)}), worst position"
    remedy = f"the hooked model differs from the transformers model; {probe.what_to_try(dtype)}"
    tolerance = probe.TOLERANCE[dtype][0]
    return compare_positions("logits", hooked, expected, tolerance, detail, remedy)


def _neighbours(
    model: HookedModel, tokens: Int[Tensor, "1 pos"], logits_alone: Logits, dtype: torch.dtype
) -> Check:
    """Compare the probe alone with the probe padded beside a row half as long again and, if
    possible, at far positions."""
    device = device_of(model)
    length = tokens.shape[1]
    boundary = boundary_of(model)
    most_positions = _positions_of(model)
    if boundary is not None and length <= boundary.at:
        most_positions = min(most_positions, boundary.at)
    longer_length = min(length + length // 2, most_positions)
    longer_length = max(longer_length, length)

    # Row 0: the probe, padded by its own first tokens, which the mask hides.
    # Row 1: the same tokens backwards, so that a leak between rows would show.
    probe_row = tokens.repeat(1, 2)[:, :longer_length]
    batch = torch.cat([probe_row, probe_row.flip(1)]).to(device)
    attention_mask = torch.ones(2, longer_length, dtype=torch.long, device=device)
    attention_mask[0, length:] = 0
    options: dict[str, Any] = {"attention_mask": attention_mask, **hooks.keeping_nothing(model)}

    detail = f"logits of the probe padded beside a row of {longer_length} tokens"
    module: Any = original_of(model) or model
    if "position_ids" in inspect.signature(module.forward).parameters:
        # The other row gets the last positions that the model has.
        far_start = most_positions - longer_length
        row_starts = torch.tensor([[0], [far_start]], device=device)
        options["position_ids"] = torch.arange(longer_length, device=device) + row_starts
        detail += f" at positions {far_start:,} to {most_positions - 1:,}"

    detail += " against those alone"
    if boundary is not None:
        detail += f"; {boundary}: no batch holds both"

    with torch.no_grad():
        logits = model(batch, return_type="logits", **options)[0, :length].float().cpu()

    remedy = (
        "its logits depend on padding or on the batch in a way that mechattn does not know, so"
        " conditions cannot be compared; please report it"
    )
    tolerance = probe.TOLERANCE[dtype][0]
    return compare_positions("neighbours", logits, logits_alone, tolerance, detail, remedy)


def _positions_of(model: HookedModel) -> int:
    """The number of positions that the model has at least."""
    in_config = getattr(config_of(model), "max_position_embeddings", None)
    numbers = [int(number) for number in (in_config, model.cfg.n_ctx) if number]
    return min(numbers, default=1)
