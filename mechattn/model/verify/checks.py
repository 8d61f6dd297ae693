"""Compares a hooked model with the model itself: logits, kernel, weights, layers, padding,
neighbours, BOS, hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.attention import Tokens
from mechattn.model import hooks
from mechattn.model.checkpoint import prepends_bos
from mechattn.model.hooked import HookedModel, ModelFacts, config_of, original_of
from mechattn.model.positions import boundary_of
from mechattn.model.several_devices import device_of
from mechattn.model.verify import verification as probe
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.kernel_check import attention_of, check_kernel, run_native
from mechattn.model.verify.layer_checks import ProbedHooks, check_layers, is_read
from mechattn.model.verify.verification import Check, Report, compare_positions

Logits = Float[Tensor, "1 pos d_vocab"]

PADDED_TOKENS = 3

# Input hooks that TransformerLens fires only if a flag of cfg is set.
HOOKS_BY_FLAG = (
    "hook_mlp_in",
    "hook_attn_in",
    "hook_q_input",
    "hook_k_input",
    "hook_v_input",
    "hook_result",
)


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model behind it and with itself, on random tokens and their
    padded beginning."""
    tokens = probe.probe_tokens(model, length)
    dtype = probe.dtype_of(model)
    tolerance = probe.TOLERANCE[dtype][0]
    hook_values, logits, fired = _forward(model, tokens)

    native_logits = None
    kernel = Check("kernel", "not checked", detail=facts.why_not_native)
    if facts.native is not None:
        native_tokens = tokens.to(device_of(facts.native))
        native_logits, patterns, source = run_native(facts.native, native_tokens)
        native_logits = native_logits.float().cpu()
        kernel = check_kernel(model, hook_values, patterns, source, dtype)
    logits_alone = logits[:1] if native_logits is None else native_logits

    checks = [
        _logits(facts, logits[:1], native_logits, dtype),
        kernel,
        check_config(model, facts.native),
        *_weights(facts, native_logits, tolerance),
        *check_layers(ProbedHooks(model, hook_values, dtype, tokens.shape[1])),
        _padding(logits, tolerance),
        check_neighbours(model, facts.native, tokens, logits_alone, tolerance),
        _bos(model),
        _hooks(model, fired),
    ]
    architecture = getattr(model.cfg, "architecture", None)
    if not architecture:
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


def _forward(
    model: HookedModel, tokens: Int[Tensor, "1 pos"]
) -> tuple[dict[str, Tensor], Float[Tensor, "batch pos d_vocab"], set[str]]:
    """Activations and logits of the probe and of its beginning (padded), and the names of the hooks
    that fired."""
    values: dict[str, Tensor] = {}
    fired: set[str] = set()

    def note(value: Any, hook: Any, name: str) -> None:
        fired.add(name)
        is_of_layer = name.startswith("blocks.")
        if is_of_layer and is_read(name.split(".", 2)[2]) and isinstance(value, Tensor):
            values[name] = value.detach().clone()

    names = [name for name in model.hook_dict if not name.endswith(HOOKS_BY_FLAG)]
    fwd_hooks: list[tuple[str, Callable[..., Any]]] = [
        (name, partial(note, name=name)) for name in names
    ]

    device = device_of(model)
    real = torch.ones(2, tokens.shape[1], dtype=torch.long, device=device)
    real[1, -PADDED_TOKENS:] = 0
    pad_token = getattr(getattr(model, "tokenizer", None), "pad_token_id", None) or 0
    batch = torch.cat([tokens, tokens]).to(device).masked_fill(real == 0, pad_token)

    options = {"attention_mask": real, **hooks.keeping_nothing(model)}
    with torch.no_grad():
        logits = model.run_with_hooks(batch, fwd_hooks=fwd_hooks, return_type="logits", **options)
    in_float32 = {name: value.float().cpu() for name, value in values.items()}
    return in_float32, logits.detach().float().cpu(), fired


def _logits(facts: ModelFacts, hooked: Logits, native: Logits | None, dtype: torch.dtype) -> Check:
    if native is None:
        detail = f"{facts.why_not_native}; give the transformers model as native=…"
        return Check("logits", "not checked", detail=detail)
    detail = (
        f"logits against the model's own attention ({attention_of(facts.native)}), worst position"
    )
    remedy = f"the hooked model differs from the transformers model; {probe.what_to_try(dtype)}"
    tolerance = probe.TOLERANCE[dtype][0]
    return compare_positions("logits", hooked[0], native[0], tolerance, detail, remedy)


def _weights(facts: ModelFacts, native: Logits | None, tolerance: float) -> list[Check]:
    """Check that the weights are those of the first verification: a longer probe begins with the
    same tokens."""
    if native is None:
        return []
    position = probe.AT_LOADING - 1
    logits = native[0, position]
    if facts.probe_logits is None:
        facts.probe_logits = logits.clone()

    detail = f"native logits of position {position} against those when the model was first verified"
    remedy = (
        "weights were changed after loading; load the model again, or give verify=False if the"
        " change is intended"
    )
    check = compare_positions(
        "weights", logits[None], facts.probe_logits[None], tolerance, detail, remedy
    )
    return [check]


def _padding(logits: Float[Tensor, "2 pos d_vocab"], tolerance: float) -> Check:
    without = logits[0, :-PADDED_TOKENS]
    padded = logits[1, :-PADDED_TOKENS]
    detail = "logits of a sequence padded on the right against those without padding"
    remedy = "run prompts of one length together; padding changes this model"
    return compare_positions("padding", padded, without, tolerance, detail, remedy)


def check_neighbours(
    model: HookedModel, native: Any, tokens: Int[Tensor, "1 pos"], alone: Logits, tolerance: float
) -> Check:
    """Compare the probe alone with the probe beside a row half as long again and, if possible, at
    far positions."""
    module: Any = native or model
    device = device_of(module)
    length = tokens.shape[1]
    boundary = boundary_of(model)
    limit = _positions_of(model)
    if boundary is not None and length <= boundary.at:
        limit = min(limit, boundary.at)
    longer = max(min(length + length // 2, limit), length)

    real = torch.ones(2, longer, dtype=torch.long, device=device)
    real[0, length:] = 0
    row = tokens.repeat(1, 2)[:, :longer]
    batch = torch.cat([row, row.flip(1)]).to(device)
    options: dict[str, Any] = {"attention_mask": real}

    first_position = 0  # of the longer row
    forward = (original_of(model) or module).forward
    if "position_ids" in inspect.signature(forward).parameters:
        first_position = limit - longer
        starts = torch.tensor([[0], [first_position]], device=device)
        options["position_ids"] = torch.arange(longer, device=device) + starts

    try:
        logits = _logits_of(module, batch, **options)[:, :length]
    except Exception as error:
        detail = f"the probe batched with a longer row raises {type(error).__name__}"
        return Check("neighbours", "not checked", detail=detail)

    positions = ""
    if first_position:
        positions = f" at positions {first_position:,} to {first_position + longer - 1:,}"
    detail = (
        f"logits of the probe batched with a row of {longer} tokens{positions} against those alone"
    )
    if boundary is not None:
        detail += f"; {boundary}: no batch holds both"
    remedy = (
        "its logits depend on the batch in a way that mechattn does not know, so conditions cannot"
        " be compared; please report it"
    )
    return compare_positions("neighbours", logits[0], alone[0], tolerance, detail, remedy)


def _positions_of(model: HookedModel) -> int:
    """The number of positions that the model has at least."""
    in_config = getattr(config_of(model), "max_position_embeddings", None)
    numbers = [int(number) for number in (in_config, model.cfg.n_ctx) if number]
    return min(numbers, default=1)


def _logits_of(model: Any, tokens: Tokens, **options: Any) -> Float[Tensor, "batch pos d_vocab"]:
    with torch.no_grad():
        if hasattr(model, "hook_dict"):
            return model(tokens, return_type="logits", **options).float().cpu()
        return model(tokens, use_cache=False, **options).logits.float().cpu()


def _bos(model: HookedModel) -> Check:
    """Check that TransformerLens prepends a BOS token exactly where the tokenizer does."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return Check("bos", "not checked", detail="the model has no tokenizer")

    hooked = bool(getattr(model.cfg, "default_prepend_bos", False))
    detail = f"cfg.default_prepend_bos={hooked}"
    if hooked and tokenizer.bos_token_id is None:
        remedy = "set model.cfg.default_prepend_bos = False"
        return Check("bos", "failed", None, 0.0, 1.0, 1.0, 0.0, detail, remedy)

    expected = prepends_bos(tokenizer)
    figures = (float(hooked), float(expected), float(hooked != expected), 0.0)
    if hooked == expected:
        return Check("bos", "passed", None, *figures, f"{detail}, as the tokenizer does")
    habit = "starts" if expected else "does not start"
    detail += f", though the tokenizer itself {habit} a text with BOS"
    return Check("bos", "limited", None, *figures, detail, "set it as intended; it is recorded")


def _hooks(model: HookedModel, fired: set[str]) -> Check:
    """Check that every declared hook fires, apart from those that a flag turns on."""
    silent = [
        name for name in model.hook_dict if name not in fired and not name.endswith(HOOKS_BY_FLAG)
    ]
    count = len(model.hook_dict)
    figures = (float(count - len(silent)), float(count), float(len(silent)), 0.0)
    if not silent:
        return Check("hooks", "passed", None, *figures, "every declared hook fires")

    of_any_layer = sorted({_without_numbers(name) for name in silent})
    detail = f"never fire: {', '.join(of_any_layer[:6])}"
    if len(of_any_layer) > 6:
        detail += f" and {len(of_any_layer) - 6} more"
    return Check("hooks", "limited", None, *figures, detail)


def _without_numbers(hook_name: str) -> str:
    """A hook's name for all layers, such as "blocks.*.attn.hook_z"."""
    return ".".join("*" if word.isdigit() else word for word in hook_name.split("."))
