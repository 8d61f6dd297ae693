"""The checks of a hooked model against the model itself, with a few forward passes of a short probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.received import visible_keys
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.model_facts import ModelFacts
from mechattn.model.split_heads import output_projection, positions_first, split_heads
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.kernel import check_kernel, run_native
from mechattn.model.verify.mixed_values import GATES, LayerProbe, check_values
from mechattn.model.verify.native import attention_of
from mechattn.model.verify.neighbours import check_neighbours
from mechattn.model.verify.probe_tokens import probe_tokens
from mechattn.model.verify.tensor_differences import (
    PROBABILITY,
    TOLERANCE,
    compare,
    compare_positions,
    dtype_of,
    limited,
)
from mechattn.model.verify.verification import Check, Report

AT_LOADING = 8  # tokens: two passes over so few cost little compared with loading the weights
PADDED = 3


# Input hooks that TransformerLens fires only if a flag of cfg is set.
_BY_FLAG = ("hook_mlp_in", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_result")
ANOTHER_VERSION = "try another version of transformers or transformer-lens, or report it"

Seen = dict[str, Tensor]


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model behind it and with itself.

    The probe is a row of ``length`` random tokens, and its beginning padded on the right. Checked, at each layer that
    has attention: logits and patterns against native attention; every configuration field about attention is known;
    rows of the pattern sum to 1; no mass on keys that a query cannot see, some mass at every distance that it can see;
    softmax of the scores = pattern; pattern · v = z; Σ_h z W_O + b_O = attention output; residual + parts = residual;
    padded = unpadded; alone = batched with a longer row; BOS; every declared hook fires.
    """
    tokens = probe_tokens(model, length)
    dtype = dtype_of(model)
    captured, logits, fired = _forward(model, tokens)
    native, kernel = _native(model, facts, tokens, captured, dtype)
    checks = [
        _logits(facts, logits[:1], native, dtype),
        kernel,
        check_config(model, facts.native),
        *_weights(facts, native, dtype),
        _rows(model, captured),
        _mask(model, captured, tokens.shape[1]),
        _scores(model, captured, dtype),
        _values(model, captured, dtype),
        _heads(model, captured, dtype),
        _residual(model, captured, dtype),
        _padding(logits, dtype),
        check_neighbours(model, facts.native, tokens, logits[:1] if native is None else native, TOLERANCE[dtype][0]),
        _bos(model),
        _hooks(model, fired),
    ]
    return Report(
        model=str(model.cfg.model_name),
        architecture=architecture(model),
        dtype=str(dtype).removeprefix("torch."),
        versions=f"transformer-lens {version('transformer-lens')}, transformers {version('transformers')}",
        checks=tuple(checks),
        mended=facts.mended,
    )


def architecture(model: HookedModel) -> str:
    """The class of the model, as TransformerLens names it."""
    return str(getattr(model.cfg, "architecture", None) or getattr(model.cfg, "original_architecture", None))


def _forward(
    model: HookedModel, tokens: Int[Tensor, "1 pos"]
) -> tuple[Seen, Float[Tensor, "batch pos d_vocab"], set[str]]:
    """Activations and logits of the probe and of its beginning (padded), and the names of the hooks that fired."""
    captured: Seen = {}
    fired: set[str] = set()
    wanted = {name for name in model.hook_dict if name.startswith("blocks.") and _is_captured(name.split(".", 2)[2])}

    def keep(name: str) -> Callable[..., None]:
        def hook(value: Any, hook: Any) -> None:
            fired.add(name)
            if name in wanted and isinstance(value, Tensor):
                captured[name] = value.detach().clone()

        return hook

    device = next(model.parameters()).device
    real = torch.ones(2, tokens.shape[1], dtype=torch.long, device=device)
    real[1, -PADDED:] = 0
    padding = getattr(getattr(model, "tokenizer", None), "pad_token_id", None) or 0
    both = torch.cat([tokens, tokens]).to(device).masked_fill(real == 0, padding)
    named = [(name, keep(name)) for name in model.hook_dict if not name.endswith(_BY_FLAG)]
    with torch.no_grad():
        options = {"attention_mask": real, **hooks.keeping_nothing(model)}
        logits = model.run_with_hooks(both, fwd_hooks=named, return_type="logits", **options)
    return {name: value.float().cpu() for name, value in captured.items()}, logits.detach().float().cpu(), fired


def _is_captured(name: str) -> bool:
    return name in {
        *(f"attn.hook_{part}" for part in ("attn_scores", "pattern", "v", "z", "out")),
        *(f"attn.{gate}" for gate in GATES),
        *(f"hook_{part}" for part in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")),
    }


def _native(
    model: HookedModel, facts: ModelFacts, tokens: Int[Tensor, "1 pos"], seen: Seen, dtype: torch.dtype
) -> tuple[Float[Tensor, "1 pos d_vocab"] | None, Check]:
    """Check the logits against the model's own, and the patterns of the hooks against the model's own."""
    if facts.native is None:
        return None, Check("kernel", "not checked", detail=facts.why_not_native)
    logits, patterns, how = run_native(facts.native, tokens.to(next(facts.native.parameters()).device))
    return logits.float().cpu(), check_kernel(model, seen, patterns, how, dtype)


def _logits(
    facts: ModelFacts,
    hooked: Float[Tensor, "1 pos d_vocab"],
    native: Float[Tensor, "1 pos d_vocab"] | None,
    dtype: torch.dtype,
) -> Check:
    if native is None:
        why = f"{facts.why_not_native}; give the transformers model as native=…"
        return Check("logits", "not checked", detail=why)
    detail = f"logits against the model's own attention ({attention_of(facts.native)}), worst position"
    remedy = f"the hooked model differs from the transformers model; {ANOTHER_VERSION}"
    return compare_positions("logits", hooked[0], native[0], TOLERANCE[dtype][0], detail, remedy)


def _weights(facts: ModelFacts, native: Float[Tensor, "1 pos d_vocab"] | None, dtype: torch.dtype) -> list[Check]:
    """Check that the weights are those of the first verification: a longer probe begins with the same tokens."""
    if native is None:
        return []
    if facts.probe_logits is None:
        facts.probe_logits = native[0, AT_LOADING - 1].clone()
    pair = (native[0, AT_LOADING - 1, None], facts.probe_logits[None])
    remedy = "weights were changed after loading; load the model again, or give verify=False if the change is intended"
    detail = f"native logits of position {AT_LOADING - 1} against those when the model was first verified"
    return [compare_positions("weights", *pair, TOLERANCE[dtype][0], detail, remedy)]


def _rows(model: HookedModel, seen: Seen) -> Check:
    sinks = hooks.has_sinks(model)
    pairs = {}
    for layer, pattern in _each_layer(model, seen, "attn.hook_pattern"):
        sums = pattern[0].sum(-1)
        pairs[layer] = (sums, sums.clamp(0, 1) if sinks else torch.ones_like(sums))
    detail = "rows of the pattern sum to at most 1 (learned sinks)" if sinks else "rows of the pattern sum to 1"
    tolerance = max(10 * PROBABILITY[dtype_of(model)], 1e-4)
    return compare("rows", pairs, tolerance, detail, "hook_pattern shows no probabilities", scale=1.0)


def _mask(model: HookedModel, seen: Seen, length: int) -> Check:
    """Check that keys that a query cannot see have no mass and, if scores show it, that no visible key is masked."""
    pairs, beyond = {}, []
    masked = torch.finfo(dtype_of(model)).min / 2
    for layer, pattern in _each_layer(model, seen, "attn.hook_pattern"):
        window = hooks.attention_window(model, layer)
        if window is not None and window >= length:
            beyond.append(window)
        visible = visible_keys(torch.arange(length), length, window)
        stray = pattern[0].masked_fill(visible, 0.0).amax()
        scores = seen.get(f"blocks.{layer}.attn.hook_attn_scores", pattern)
        missing = (scores[0] < masked).logical_and(visible).any().float()
        pairs[layer] = (torch.stack([stray, missing]), torch.zeros(2))
    detail = "mass on keys that a query cannot see, and masked keys that it can see"
    if beyond:
        detail += f" (the probe of {length} tokens does not reach the window of {min(beyond)}; verify_model(length=…))"
    remedy = "the mask is not the model's; " + ANOTHER_VERSION
    return compare("mask", pairs, 1e-6, detail, remedy, scale=1.0)


def _scores(model: HookedModel, seen: Seen, dtype: torch.dtype) -> Check:
    pairs = {}
    for layer, pattern in _each_layer(model, seen, "attn.hook_pattern"):
        scores = seen.get(f"blocks.{layer}.attn.hook_attn_scores")
        if scores is not None and scores.shape == pattern.shape:
            total = pattern[0].sum(-1, keepdim=True)
            pairs[layer] = (scores[0].softmax(-1) * total, pattern[0])
    made = compare(
        "scores", pairs, PROBABILITY[dtype], "softmax of hook_attn_scores against the pattern", "", scale=1.0
    )
    return limited(made, "hook_attn_scores does not hold the scores; analyses read queries and keys instead")


def _values(model: HookedModel, seen: Seen, dtype: torch.dtype) -> Check:
    layers = {}
    for layer, pattern in _each_layer(model, seen, "attn.hook_pattern"):
        shown = [seen.get(f"blocks.{layer}.attn.{name}") for name in ("hook_v", "hook_z", *GATES)]
        v, z, *gates = (None if value is None else value[:1] for value in shown)
        v = None if v is None else positions_first(model, layer, v)[0]
        z = None if z is None else _by_head(model, z)[0]
        layers[layer] = LayerProbe(pattern[0], v, z, next((gate[0] for gate in gates if gate is not None), None))
    check = check_values(model, layers, TOLERANCE[dtype][1])
    if check.outcome != "failed":
        return check
    why = check.remedy or "the hooked pattern is not the one that mixes the values"
    return replace(check, remedy=f"{why}; {ANOTHER_VERSION}")


def _heads(model: HookedModel, seen: Seen, dtype: torch.dtype) -> Check:
    pairs, other = {}, ""
    for layer, shown in _each_layer(model, seen, "attn.hook_z"):
        z = _by_head(model, shown)
        parts = _sum_of_heads(model, layer, z)
        # If the two differ, one is before Gemma's post-norm, or after BLOOM has added the residual.
        outs = [
            seen[name] for name in (f"blocks.{layer}.attn.hook_out", f"blocks.{layer}.hook_attn_out") if name in seen
        ]
        outs = [out for out in outs if parts is not None and parts.shape == out.shape]
        if parts is None or not outs:
            other = f"layer {layer}: z {_shape(z)} and W_O do not give an output of the heads' shape"
            continue
        pairs[layer] = (parts[0], min((out[0] for out in outs), key=lambda out: float((out - parts[0]).abs().max())))
    if other:
        return Check("heads", "limited", detail=f"Σ_h z W_O + b_O against the attention output: {other}")
    remedy = "the heads' outputs are not what reaches the residual stream; " + ANOTHER_VERSION
    return compare("heads", pairs, TOLERANCE[dtype][1], "Σ_h z W_O + b_O against the attention output", remedy)


def _sum_of_heads(model: HookedModel, layer: int, z: Tensor) -> Tensor | None:
    try:
        w_o = output_projection(model, layer).float().cpu()
        b_o = getattr(model.blocks[layer].attn, "b_O", None)
    except Exception:  # an adapter that does not declare its output weights
        return None
    if z.ndim != 4 or w_o.ndim != 3 or z.shape[2:] != w_o.shape[:2]:
        return None
    bias = 0.0 if b_o is None else b_o.detach().float().cpu()
    together = rearrange(z, "batch pos head d_head -> batch pos (head d_head)")
    return together @ rearrange(w_o, "head d_head d_model -> (head d_head) d_model") + bias


def _residual(model: HookedModel, seen: Seen, dtype: torch.dtype) -> Check:
    pairs = {}
    for layer in hooks.attention_layers(model):
        parts = [seen.get(f"blocks.{layer}.hook_{n}") for n in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
        if any(part is None for part in parts):
            continue
        before, attention, mlp, after = (part[0] for part in parts if part is not None)
        pairs[layer] = (before + attention + mlp, after)
    made = compare("residual", pairs, TOLERANCE[dtype][1], "residual + attention + MLP = residual after", "")
    return limited(
        made, "the hooked parts do not add up to the residual stream, so analyses of updates refuse this model"
    )


def _padding(logits: Float[Tensor, "two pos vocabulary"], dtype: torch.dtype) -> Check:
    detail = "logits of a sequence padded on the right against those without padding"
    remedy = "run prompts of one length together; padding changes this model"
    pair = (logits[1, :-PADDED], logits[0, :-PADDED])
    return compare_positions("padding", *pair, TOLERANCE[dtype][0], detail, remedy)


def _bos(model: HookedModel) -> Check:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return Check("bos", "not checked", detail="the model has no tokenizer")
    asked = bool(getattr(model.cfg, "default_prepend_bos", False))
    detail = f"cfg.default_prepend_bos={asked}"
    if asked and tokenizer.bos_token_id is None:
        return Check("bos", "failed", None, 0.0, 1.0, 1.0, 0.0, detail, "set model.cfg.default_prepend_bos = False")
    usual = hooks.prepends_bos(tokenizer)
    figures = (float(asked), float(usual), float(asked != usual), 0.0)
    if asked != usual:
        detail += f", though the tokenizer itself {'starts' if usual else 'does not start'} a text with BOS"
        return Check("bos", "limited", None, *figures, detail, "set it as intended; it is recorded")
    return Check("bos", "passed", None, *figures, detail + ", as the tokenizer does")


def _hooks(model: HookedModel, fired: set[str]) -> Check:
    silent = sorted(n for n in model.hook_dict if n not in fired and not n.endswith(_BY_FLAG))
    count = len(model.hook_dict)
    figures = (float(count - len(silent)), float(count), float(len(silent)), 0.0)
    if not silent:
        return Check("hooks", "passed", None, *figures, "every declared hook fires")
    names = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in silent})
    detail = f"never fire: {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Check("hooks", "limited", None, *figures, detail)


def _each_layer(model: HookedModel, seen: Seen, name: str) -> list[tuple[int, Tensor]]:
    named = ((layer, seen.get(f"blocks.{layer}.{name}")) for layer in hooks.attention_layers(model))
    return [(layer, value) for layer, value in named if value is not None]


def _by_head(model: HookedModel, z: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """z of each head; unchanged if its size is not a multiple of the number of heads."""
    heads = int(model.cfg.n_heads)
    return z if z[0, 0].numel() % heads else split_heads(z, heads)


def _shape(tensor: Float[Tensor, ...]) -> str:
    return str(list(tensor.shape))
