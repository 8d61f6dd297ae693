"""Compares a hooked model with the model itself, and other computations of attention with its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mechattn.functional.attention import Fused, Pattern, Rows, Tokens
from mechattn.model import hooks
from mechattn.model.checkpoint import prepends_bos
from mechattn.model.hooked import HookedModel, ModelFacts, config_of, original_of
from mechattn.model.patch.streaming import streaming, why_not
from mechattn.model.scores_and_positions import boundary_of
from mechattn.model.several_devices import device_of
from mechattn.model.verify import verification as probe
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.layer_checks import Shown, check_layers, is_read
from mechattn.model.verify.verification import Check, Report, compare, compare_positions, limited

Logits = Float[Tensor, "1 pos d_vocab"]
PADDED = 3
_PADDING = (
    "logits of a sequence padded on the right against those without padding",
    "run prompts of one length together; padding changes this model",
)
# Input hooks that TransformerLens fires only if a flag of cfg is set.
_BY_FLAG = (
    "hook_mlp_in",
    "hook_attn_in",
    "hook_q_input",
    "hook_k_input",
    "hook_v_input",
    "hook_result",
)


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model behind it and with itself, on random tokens and their padded beginning."""
    tokens, dtype = probe.probe_tokens(model, length), probe.dtype_of(model)
    tolerance = probe.TOLERANCE[dtype][0]
    seen, logits, fired = _forward(model, tokens)
    native, kernel = None, Check("kernel", "not checked", detail=facts.why_not_native)
    if facts.native is not None:
        native, patterns, how = run_native(facts.native, tokens.to(device_of(facts.native)))
        native, kernel = native.float().cpu(), check_kernel(model, seen, patterns, how, dtype)
    checks = [
        _logits(facts, logits[:1], native, tolerance),
        kernel,
        check_config(model, facts.native),
        *_weights(facts, native, tolerance),
        *check_layers(Shown(model, seen, dtype, tokens.shape[1])),
        compare_positions(
            "padding", logits[1, :-PADDED], logits[0, :-PADDED], tolerance, *_PADDING
        ),
        check_neighbours(
            model, facts.native, tokens, logits[:1] if native is None else native, tolerance
        ),
        _bos(model),
        _hooks(model, fired),
    ]
    return Report(
        model=str(model.cfg.model_name),
        architecture=str(
            getattr(model.cfg, "architecture", None)
            or getattr(model.cfg, "original_architecture", None)
        ),
        dtype=str(dtype).removeprefix("torch."),
        versions=f"transformer-lens {version('transformer-lens')}, transformers {version('transformers')}",
        checks=tuple(checks),
        mended=facts.mended,
    )


def _forward(
    model: HookedModel, tokens: Int[Tensor, "1 pos"]
) -> tuple[dict[str, Tensor], Float[Tensor, "batch pos d_vocab"], set[str]]:
    """Activations and logits of the probe and of its beginning (padded), and the names of the hooks that fired."""
    captured: dict[str, Tensor] = {}
    fired: set[str] = set()

    def keep(value: Any, hook: Any, name: str, wanted: bool) -> None:
        fired.add(name)
        if wanted and isinstance(value, Tensor):
            captured[name] = value.detach().clone()

    named: list[tuple[str, Callable[..., Any]]] = []
    for name in model.hook_dict:
        if not name.endswith(_BY_FLAG):
            wanted = name.startswith("blocks.") and is_read(name.split(".", 2)[2])
            named.append((name, partial(keep, name=name, wanted=wanted)))
    device = device_of(model)
    real = torch.ones(2, tokens.shape[1], dtype=torch.long, device=device)
    real[1, -PADDED:] = 0
    padding = getattr(getattr(model, "tokenizer", None), "pad_token_id", None) or 0
    both = torch.cat([tokens, tokens]).to(device).masked_fill(real == 0, padding)
    with torch.no_grad():
        options = {"attention_mask": real, **hooks.keeping_nothing(model)}
        logits = model.run_with_hooks(both, fwd_hooks=named, return_type="logits", **options)
    return (
        {name: value.float().cpu() for name, value in captured.items()},
        logits.detach().float().cpu(),
        fired,
    )


def _logits(facts: ModelFacts, hooked: Logits, native: Logits | None, tolerance: float) -> Check:
    if native is None:
        return Check(
            "logits",
            "not checked",
            detail=f"{facts.why_not_native}; give the transformers model as native=…",
        )
    detail = (
        f"logits against the model's own attention ({attention_of(facts.native)}), worst position"
    )
    remedy = f"the hooked model differs from the transformers model; {probe.ANOTHER_VERSION}"
    return compare_positions("logits", hooked[0], native[0], tolerance, detail, remedy)


def _weights(facts: ModelFacts, native: Logits | None, tolerance: float) -> list[Check]:
    """Check that the weights are those of the first verification: a longer probe begins with the same tokens."""
    if native is None:
        return []
    now = native[0, probe.AT_LOADING - 1]
    if facts.probe_logits is None:
        facts.probe_logits = now.clone()
    remedy = "weights were changed after loading; load the model again, or give verify=False if the change is intended"
    detail = f"native logits of position {probe.AT_LOADING - 1} against those when the model was first verified"
    return [
        compare_positions("weights", now[None], facts.probe_logits[None], tolerance, detail, remedy)
    ]


def check_neighbours(
    model: HookedModel, native: Any, tokens: Int[Tensor, "1 pos"], alone: Logits, tolerance: float
) -> Check:
    """Compare the probe alone with the probe beside a row half as long again and, if possible, at far positions."""
    asked: Any = native or model
    device = device_of(asked)
    boundary, length = boundary_of(model), tokens.shape[1]
    own = getattr(config_of(model), "max_position_embeddings", None)
    most = min(
        (int(number) for number in (own, model.cfg.n_ctx) if number), default=1
    )  # the model has at least those
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
        options["position_ids"] = torch.arange(longer, device=device) + torch.tensor(
            [[0], [far]], device=device
        )
    try:
        beside = _logits_of(asked, both, **options)[:, :length]
    except Exception as error:
        why = f"the probe batched with a longer row raises {type(error).__name__}"
        return Check("neighbours", "not checked", detail=why)
    where = f" at positions {far:,} to {far + longer - 1:,}" if far else ""
    detail = f"logits of the probe batched with a row of {longer} tokens{where} against those alone"
    detail += "" if boundary is None else f"; {boundary}: no batch holds both"
    remedy = (
        "its logits depend on the batch in a way that mechattn does not know, so conditions cannot be compared; please "
        "report it"
    )
    return compare_positions("neighbours", beside[0], alone[0], tolerance, detail, remedy)


def _logits_of(model: Any, tokens: Tokens, **options: Any) -> Float[Tensor, "batch pos d_vocab"]:
    with torch.no_grad():
        if hasattr(model, "hook_dict"):
            return model(tokens, return_type="logits", **options).float().cpu()
        return model(tokens, use_cache=False, **options).logits.float().cpu()


def _bos(model: HookedModel) -> Check:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return Check("bos", "not checked", detail="the model has no tokenizer")
    asked = bool(getattr(model.cfg, "default_prepend_bos", False))
    detail = f"cfg.default_prepend_bos={asked}"
    if asked and tokenizer.bos_token_id is None:
        return Check(
            "bos",
            "failed",
            None,
            0.0,
            1.0,
            1.0,
            0.0,
            detail,
            "set model.cfg.default_prepend_bos = False",
        )
    usual = prepends_bos(tokenizer)
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
    names = sorted(
        {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in silent}
    )
    detail = f"never fire: {', '.join(names[:6])}" + (
        f" and {len(names) - 6} more" if len(names) > 6 else ""
    )
    return Check("hooks", "limited", None, *figures, detail)


# In a probability. In float32, deeper layers accumulate rounding errors: 4e-5 seen with scores in the hundreds; a wrong
# mask, scale or head gives at least 0.01. In half precision they usually differ by 0.05, and by 0.18 (0.03 in float16)
# with large scores.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-1, torch.bfloat16: 3e-1}
# In row blocks: scores in the hundreds, as in large models, are rounded by 3e-5 in float32, and later layers enlarge
# the effect of a layer's rounding: 4e-5 seen in the third of three wide layers. A wrong mask or scale gives 0.01.
_STREAMED = 2e-4
# In half precision the hooks' own scores are rounded to 8 or 11 bits, so that one probability may differ by 0.15
# (0.04 in float16) where nothing is wrong: judged by the root mean square of a layer's differences, in that of its
# pattern. With 30 architectures and four toys it is at most 0.042 (0.0085); a wrong window, sink, slope, head or
# rotation gives 0.12 and more, but a scale that is 5 % off only 0.03, which a check in float32 notices.
_IN_HALF = {torch.float16: 2e-2, torch.bfloat16: 8e-2}
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # its arguments in order


def attention_of(native: Any) -> str:
    """The attention that a model of transformers runs: "sdpa" or "eager"."""
    return str(getattr(native.config, "_attn_implementation", None) or "eager")


def run_native(
    native: Any, tokens: Tokens
) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Pattern], str]:
    """Logits of the model itself, the pattern of each of its attention calls, and how the patterns were obtained."""
    # If the model calls SDPA, the same call, with whichever kernel torch chooses, is repeated with blocks of identity
    # matrices as values: since A · I = A, the output is that kernel's pattern. Eager attention returns its weights.
    eager = attention_of(native) == "eager"
    with torch.no_grad(), _ThroughIdentity() as seen:
        out = native(tokens, use_cache=False, **({"output_attentions": True} if eager else {}))
    if seen.patterns:
        return out.logits, seen.patterns, "SDPA with identity values"
    shown = [pattern for pattern in getattr(out, "attentions", None) or () if pattern is not None]
    return out.logits, shown, "the weights of eager attention"


class _ThroughIdentity(TorchFunctionMode):
    """Repeats each call of SDPA in this thread with identity values."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(_SDPA, args)) | given
            value, blocks = named["value"], []
            for start in range(0, value.shape[-2], value.shape[-1]):
                identity = value.new_zeros(value.shape)  # V[k, c] = 1 where k = start + c
                identity[..., start : start + value.shape[-1], :].diagonal(dim1=-2, dim2=-1).fill_(
                    1
                )
                blocks.append(func(**named | {"value": identity}))
            self.patterns.append(torch.cat(blocks, -1)[..., : value.shape[-2]])
        return func(*args, **given)


def check_kernel(
    model: HookedModel,
    shown: dict[str, Tensor],
    patterns: list[Pattern],
    how: str,
    dtype: torch.dtype,
) -> Check:
    """Compare the pattern of each layer at the hooks with that of the model's own attention."""
    layers = hooks.attention_layers(model)
    if len(patterns) != len(layers):
        calls = f"{len(patterns)} calls of attention were seen in {len(layers)} layers"
        return Check(
            "kernel", "not checked", detail=f"the model's own attention cannot be read: {calls}"
        )
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, pattern in zip(layers, patterns, strict=True):
        hooked = shown.get(hooks.pattern_hook(layer))
        if hooked is not None and hooked[:1].shape == pattern.shape:
            pairs[layer] = (hooked[0], pattern[0].float().cpu())
    detail = f"hook_pattern against the pattern of the model's own attention, by {how}"
    remedy = "the hooks' pattern differs from the one that the model uses; try another version, or report it"
    return compare("kernel", pairs, _TOLERANCE[dtype], detail, remedy, scale=1.0)


def check_streaming(model: HookedModel) -> Check:
    """Check that attention in blocks of rows gives the same logits and patterns as the hooks, on the probe."""
    return _against_hooks(model, "streaming", "attention in row blocks", fused=False)


def check_fused(model: HookedModel) -> Check:
    """Check that a fused kernel gives the hooks' logits, and the sums of their patterns over queries, on the probe."""
    return _against_hooks(model, "fused", "sums over queries of a fused kernel", fused=True)


def _against_hooks(model: HookedModel, name: str, how: str, fused: bool) -> Check:
    """Compare a pass without hooks with one through them, layer by layer: patterns, or with ``fused`` their sums."""
    if reason := why_not(model):
        return Check(name, "limited", detail=reason)
    tokens = probe.probe_tokens(model, probe.PROBE).to(device_of(model))
    windows = {
        layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)
    }
    expected, shown = hooks.logits_and_values(model, tokens, map(hooks.pattern_hook, windows))
    patterns = {layer: shown[hooks.pattern_hook(layer)].float().cpu() for layer in windows}
    found: dict[int, Tensor] = {}
    blocks: dict[int, list[Rows]] = {}

    def see(layer: int, seen: Rows | Fused) -> None:
        if isinstance(seen, Fused):
            found[layer] = seen.column_sums(_groups(seen.own.shape[-1]).to(seen.own)).cpu()
        else:
            blocks.setdefault(layer, []).append(replace(seen, pattern=seen.pattern.clone()))

    try:
        with torch.no_grad(), streaming(model, windows, see, block=8, fused=fused):
            got = model(tokens, return_type="logits", **hooks.keeping_nothing(model))[0].float()
    except Exception as error:
        return Check(name, "limited", detail=f"it raises {type(error).__name__}: {error}")
    found |= {
        layer: _sums(_assembled(rows)) if fused else _assembled(rows)
        for layer, rows in blocks.items()
    }
    if silent := [layer for layer in windows if layer not in found]:
        return Check(name, "limited", silent[0], detail="its attention function cannot be replaced")
    pairs = {
        n: (found[n], _sums(patterns[n]) if fused else patterns[n]) for n in windows if n in found
    }
    dtype = probe.dtype_of(model)
    overall = dtype in _IN_HALF and not fused
    tolerance = (
        _IN_HALF[dtype]
        if overall
        else _STREAMED
        if dtype is torch.float32
        else probe.PROBABILITY[dtype]
    )
    tolerance *= tokens.shape[1] if fused else 1
    detail, logits = f"{how} against the hooks", (got.cpu(), expected[0].float().cpu())
    about = detail + ("" if fused else ": patterns" + ", root mean square" * overall)
    checks = (
        compare(name, pairs, tolerance, about, "", 0.0 if overall else 1.0, overall),
        compare_positions(name, *logits, probe.TOLERANCE[dtype][0], f"{detail}: logits", ""),
    )
    return next(
        (limited(check, str(check)) for check in checks if check.outcome != "passed"), checks[0]
    )


def _assembled(blocks: list[Rows]) -> Pattern:
    """The whole pattern, assembled from its blocks."""
    length = max(rows.keys.stop for rows in blocks)
    whole = blocks[0].pattern.new_zeros((*blocks[0].pattern.shape[:2], length, length))
    for rows in blocks:
        whole[:, :, rows.queries, rows.keys] = rows.pattern
    return whole.cpu()


def _sums(pattern: Pattern) -> Float[Tensor, "batch head key 2"]:
    """What the keys receive from all queries, and from every second one."""
    turned = rearrange(pattern, "batch head query key -> batch head key query")
    return turned @ _groups(pattern.shape[-1])[:, None].to(pattern)


def _groups(queries: int) -> Float[Tensor, "1 query 2"]:
    every = torch.ones(queries)
    return torch.stack([every, every.cumsum(0) % 2], -1)[None]
