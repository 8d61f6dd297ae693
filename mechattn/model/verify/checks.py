"""The checks of a verification.

The hooked model is compared with the model itself: logits, patterns, configuration, layers and
batches. Attention in row blocks and from a fused kernel is compared with the patterns at the hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mechattn.errors import reason
from mechattn.functional.attention import Pattern, Rows, Tokens
from mechattn.functional.fused import Fused
from mechattn.model import hooks
from mechattn.model.hooked import (
    HookedModel,
    ModelFacts,
    architecture_of,
    config_of,
    device_of,
    innermost,
)
from mechattn.model.patch.streaming import streaming, why_not_streamed
from mechattn.model.positions import boundary_of
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.layer_checks import READ_HOOKS, ProbedHooks, checks_of_layers
from mechattn.model.verify.verification import (
    LOGIT_TOLERANCE,
    PROBE,
    Check,
    Logits,
    Pairs,
    Report,
    as_limited,
    compare,
    compare_positions,
    dtype_of,
    probe_tokens,
    root_mean_square,
    what_to_try,
)

# The largest allowed difference of a probability. In float32, deeper layers accumulate rounding
# errors: 4e-5 was seen with scores in the hundreds, while a wrong mask, scale or head gives at
# least 0.01. In bfloat16 probabilities usually differ by 0.05, and by 0.18 with large scores (0.03
# in float16).
KERNEL_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 2e-4,
    torch.float16: 1e-1,
    torch.bfloat16: 3e-1,
}

# In float32 and float64, the largest allowed difference of a probability. Scores in the hundreds,
# as in large models, are rounded by 3e-5, and later layers enlarge the effect: 4e-5 was seen in the
# third of three wide layers. A wrong mask or scale gives 0.01.
#
# In half precision, the root mean square of a layer's differences, in units of that of its pattern.
# The hooks' own scores are rounded to 8 or 11 bits, so a single probability may differ by 0.15
# (0.04 in float16) although nothing is wrong. With 30 architectures and four toys the root mean
# square is at most 0.042 (0.0085). A wrong window, sink, slope, head or rotation gives at least
# 0.12. A scale that is 5 % off gives only 0.03, which a check in float32 notices.
STREAMED_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}

# The arguments of scaled_dot_product_attention, in order.
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model itself, on a probe of this many random tokens."""
    tokens = probe_tokens(model, length)
    dtype = dtype_of(model)
    hook_values, logits = _forward(model, tokens)

    if facts.native is None:
        advice = f"{facts.why_not_native}; give the transformers model as native=…"
        native_checks = [
            Check("logits", "not checked", detail=advice),
            Check("kernel", "not checked", detail=facts.why_not_native),
        ]
    else:
        native_tokens = tokens.to(device_of(facts.native))
        native_logits, patterns, source = _run_native(facts.native, native_tokens)
        remedy = f"the hooked model differs from the transformers model; {what_to_try(dtype)}"
        if facts.native_is_given:
            remedy += (
                ". That model was given as native=…, and later verifications compare with it too:"
                " if it is the wrong one, call verify_model(model, native=…) with the right one"
            )
        native_checks = [
            compare_positions(
                "logits",
                hooked=logits,
                expected=native_logits[0].float().cpu(),
                tolerance=LOGIT_TOLERANCE[dtype],
                detail=(
                    f"logits against the model's own attention ({_attention_of(facts.native)}),"
                    " worst position"
                ),
                remedy=remedy,
            ),
            _kernel(model, hook_values, patterns, source, dtype),
        ]

    checks = [
        *native_checks,
        check_config(model, facts.native),
        *checks_of_layers(ProbedHooks(model, hook_values, dtype, tokens.shape[1])),
        _neighbours(model, tokens, logits, dtype),
    ]
    return Report(
        model=str(model.cfg.model_name),
        architecture=architecture_of(model),
        dtype=str(dtype).removeprefix("torch."),
        versions=(
            f"transformer-lens {version('transformer-lens')}, transformers"
            f" {version('transformers')}"
        ),
        checks=tuple(checks),
        mended=facts.mended,
        probe_length=tokens.shape[1],
    )


def check_streaming(model: HookedModel) -> Check:
    """Check that attention in blocks of rows gives the logits and patterns of a pass with hooks."""
    return _against_hooks(model, "streaming", "patterns of row blocks", fused=False)


def check_fused(model: HookedModel) -> Check:
    """Check that a fused kernel gives the logits of a pass with hooks, and that its sums over
    single queries are the patterns."""
    return _against_hooks(model, "fused", "sums over queries of a fused kernel", fused=True)


def _forward(model: HookedModel, tokens: Int[Tensor, "1 pos"]) -> tuple[dict[str, Tensor], Logits]:
    """The activations that the checks of layers read, and the logits, of the probe."""
    names = [
        name
        for name in model.hook_dict
        if name.startswith("blocks.") and name.split(".", 2)[2] in READ_HOOKS
    ]
    logits, values = hooks.logits_and_values(model, tokens.to(device_of(model)), names)
    hook_values = {name: value.float().cpu() for name, value in values.items()}
    return hook_values, logits[0].float().cpu()


def _run_native(
    native: Any, tokens: Tokens
) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Pattern], str]:
    """The logits of the model itself, the pattern of each of its calls of attention, and what shows
    these patterns, in words."""
    options = {}
    if _attention_of(native) == "eager":
        options["output_attentions"] = True
    with torch.no_grad(), _ThroughIdentity() as sdpa_calls:
        output = native(tokens, use_cache=False, **options)

    if sdpa_calls.patterns:
        return output.logits, sdpa_calls.patterns, "SDPA with identity values"
    attentions = getattr(output, "attentions", None) or ()
    # A layer without attention has None in its place.
    patterns = [pattern for pattern in attentions if pattern is not None]
    return output.logits, patterns, "the weights of eager attention"


def _attention_of(native: Any) -> str:
    """The attention that a transformers model runs, such as "sdpa" or "eager"."""
    return getattr(native.config, "_attn_implementation", None) or "eager"


class _ThroughIdentity(TorchFunctionMode):
    """Repeats each call of SDPA in this thread with blocks of identity matrices as values.

    The output is then the pattern A of that call, because A · I = A, computed by the kernel that
    torch chooses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            arguments = dict(zip(SDPA_ARGUMENTS, args)) | kwargs
            value = arguments["value"]
            key_count, d_value = value.shape[-2:]
            columns = []
            for start in range(0, key_count, d_value):
                identity = torch.zeros_like(value)
                diagonal = identity[..., start : start + d_value, :].diagonal(dim1=-2, dim2=-1)
                diagonal.fill_(1)  # V[k, c] = 1 where k = start + c
                columns.append(func(**arguments | {"value": identity}))
            self.patterns.append(torch.cat(columns, -1)[..., :key_count])
        return func(*args, **kwargs)


def _kernel(
    model: HookedModel,
    hook_values: Mapping[str, Tensor],
    patterns: list[Pattern],
    source: str,
    dtype: torch.dtype,
) -> Check:
    """Check that the pattern at the hooks of each layer is that of the model's own attention."""
    layers = hooks.attention_layers(model)
    if len(patterns) != len(layers):
        return Check(
            "kernel",
            "not checked",
            detail="the model's own attention cannot be read:"
            f" {len(patterns)} calls of attention were seen in {len(layers)} layers",
        )

    pairs: Pairs = {}
    unmatched_layers = []
    for layer, pattern in zip(layers, patterns, strict=True):
        hooked_pattern = hook_values.get(hooks.pattern_hook(layer))
        if hooked_pattern is None or hooked_pattern[:1].shape != pattern.shape:
            unmatched_layers.append(layer)
            continue
        pairs[layer] = (hooked_pattern[0], pattern[0].float().cpu())

    detail = f"hook_pattern against the pattern of the model's own attention, by {source}"
    remedy = f"the hooks' pattern differs from the one that the model uses; {what_to_try(dtype)}"
    check = compare("kernel", pairs, KERNEL_TOLERANCE[dtype], detail, remedy, unit=1.0)
    if check.outcome == "passed" and unmatched_layers:
        absence = f"no pattern of its shape at the hooks of layers {unmatched_layers}"
        return Check("kernel", "not checked", detail=f"{detail}: {absence}")
    return check


def _neighbours(
    model: HookedModel, tokens: Int[Tensor, "1 pos"], logits_alone: Logits, dtype: torch.dtype
) -> Check:
    """Check that the logits of the probe do not depend on padding or on another row.

    The other row is longer by half if the model has enough positions. It is at the model's last
    positions if the model takes position ids.
    """
    device = device_of(model)
    length = tokens.shape[1]
    boundary = boundary_of(model)
    # The configurations of transformers and TransformerLens may state different numbers of
    # positions. The model has at least the smaller.
    stated_counts = (getattr(config_of(model), "max_position_embeddings", None), model.cfg.n_ctx)
    most_positions = min([count for count in stated_counts if count], default=1)
    if boundary is not None and length <= boundary.at:
        most_positions = min(most_positions, boundary.at)
    longer_length = max(length, min(length + length // 2, most_positions))

    # Row 0 is the probe, padded with its own first tokens, which the mask hides. Row 1 has the same
    # tokens in reverse order, so that a leak between the rows would show.
    probe_row = tokens.repeat(1, 2)[:, :longer_length]
    batch = torch.cat([probe_row, probe_row.flip(1)]).to(device)
    attention_mask = torch.ones(2, longer_length, dtype=torch.long, device=device)
    attention_mask[0, length:] = 0
    options: dict[str, Any] = {"attention_mask": attention_mask, **hooks.without_cache(model)}

    detail = f"logits of the probe padded beside a row of {longer_length} tokens"
    if "position_ids" in inspect.signature(innermost(model).forward).parameters:
        # The other row gets the model's last positions.
        far_start = max(0, most_positions - longer_length)
        row_starts = torch.tensor([[0], [far_start]], device=device)
        options["position_ids"] = torch.arange(longer_length, device=device) + row_starts
        detail += f" at positions {far_start:,} to {far_start + longer_length - 1:,}"

    detail += " against those alone"
    if boundary is not None:
        detail += f"; {boundary}: no batch holds both"

    with torch.no_grad():
        logits = model(batch, return_type="logits", **options)[0, :length].float().cpu()

    remedy = (
        "its logits depend on padding or on the batch in a way that mechattn does not know, so"
        " conditions cannot be compared; please report it"
    )
    return compare_positions(
        "neighbours",
        hooked=logits,
        expected=logits_alone,
        tolerance=LOGIT_TOLERANCE[dtype],
        detail=detail,
        remedy=remedy,
    )


def _against_hooks(model: HookedModel, name: str, pattern_words: str, fused: bool) -> Check:
    """Compare the logits and patterns of a streamed pass with those of a pass with hooks.

    The outcome is "passed" or "limited".

    Args:
        model: A hooked model.
        name: The name of the check.
        pattern_words: The patterns of the streamed pass in words.
        fused: Whether a fused kernel computes the attention, rather than blocks of rows.
    """
    layers = hooks.attention_layers(model)
    obstacle = why_not_streamed(model, layers)
    if obstacle is not None:
        return Check(name, "limited", detail=obstacle)

    tokens = probe_tokens(model, PROBE).to(device_of(model))
    pattern_hooks = [hooks.pattern_hook(layer) for layer in layers]
    expected_logits, patterns = hooks.logits_and_values(model, tokens, pattern_hooks)
    try:
        logits, streamed_patterns = _streamed(model, tokens, layers, fused)
    except Exception as error:  # the methods of bridges that streaming replaces raise any class
        return Check(name, "limited", detail=f"it raises {reason(error)}")

    pairs: Pairs = {}
    for layer, pattern_hook in zip(layers, pattern_hooks, strict=True):
        if layer not in streamed_patterns:
            return Check(name, "limited", layer, detail="its attention function cannot be replaced")
        pairs[layer] = (streamed_patterns[layer], patterns[pattern_hook].float().cpu())

    detail = f"{pattern_words} against the hooks"
    dtype = dtype_of(model)
    tolerance = STREAMED_TOLERANCE[dtype]
    if dtype.itemsize <= 2:
        summary_detail = f"{detail}, root mean square"
        pattern_check = compare(name, pairs, tolerance, summary_detail, summary=root_mean_square)
    else:
        pattern_check = compare(name, pairs, tolerance, detail, unit=1.0)

    logit_check = compare_positions(
        name,
        hooked=logits,
        expected=expected_logits[0].float().cpu(),
        tolerance=LOGIT_TOLERANCE[dtype],
        detail=f"{detail}: logits",
    )
    for check in (pattern_check, logit_check):
        if check.outcome != "passed":
            return as_limited(check, str(check))
    return pattern_check


def _streamed(
    model: HookedModel, tokens: Tensor, layers: list[int], fused: bool
) -> tuple[Logits, dict[int, Pattern]]:
    """The logits of a streamed pass, and its pattern by layer."""
    patterns: dict[int, Pattern] = {}
    length = tokens.shape[1]

    def see_rows(layer: int, rows: Rows) -> None:
        pattern = rows.pattern.cpu()
        if layer not in patterns:
            patterns[layer] = pattern.new_zeros(*pattern.shape[:2], length, length)
        patterns[layer][:, :, rows.queries, rows.keys] = pattern

    def see_whole(layer: int, attention: Fused) -> None:
        # If each query is a group of its own, the sums over queries are the pattern.
        query_weights = torch.eye(length).to(attention.own)[None]
        patterns[layer] = attention.column_sums(query_weights).mT.cpu()

    see_whole_layer = see_whole if fused else None
    with torch.no_grad(), streaming(model, layers, see_rows, see_whole_layer, rows_per_block=8):
        logits = model(tokens, return_type="logits", **hooks.without_cache(model))[0]
    return logits.float().cpu(), patterns
