"""The checks of a hooked model against the model itself, with a few forward passes of a short probe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.rows import Tokens
from mechattn.model import hooks
from mechattn.model.checkpoint import prepends_bos
from mechattn.model.hooked import HookedModel, ModelFacts, config_of, original_of
from mechattn.model.scores_and_positions import boundary_of
from mechattn.model.verify.config_fields import check_config
from mechattn.model.verify.kernels import attention_of, check_kernel, run_native
from mechattn.model.verify.layer_checks import Shown, check_layers, is_read
from mechattn.model.verify.verification import (
    ANOTHER_VERSION,
    AT_LOADING,
    TOLERANCE,
    Check,
    Report,
    compare_positions,
    dtype_of,
    probe_tokens,
)

PADDED = 3
# Input hooks that TransformerLens fires only if a flag of cfg is set.
_BY_FLAG = ("hook_mlp_in", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_result")


def check_model(model: HookedModel, facts: ModelFacts, length: int) -> Report:
    """Compare a hooked model with the model behind it and with itself.

    The probe is a row of ``length`` random tokens, and its beginning padded on the right. Checked, at each layer that
    has attention: logits and patterns against native attention; every configuration field about attention is known;
    rows of the pattern sum to 1; no mass on keys that a query cannot see, some mass at every distance that it can see;
    softmax of the scores = pattern; pattern · v = z; Σ_h z W_O + b_O = attention output; residual + parts = residual;
    padded = unpadded; alone = batched with a longer row; BOS; every declared hook fires.
    """
    tokens, dtype = probe_tokens(model, length), dtype_of(model)
    tolerance = TOLERANCE[dtype][0]
    seen, logits, fired = _forward(model, tokens)
    native, kernel = None, Check("kernel", "not checked", detail=facts.why_not_native)
    if facts.native is not None:
        native, patterns, how = run_native(facts.native, tokens.to(next(facts.native.parameters()).device))
        native, kernel = native.float().cpu(), check_kernel(model, seen, patterns, how, dtype)
    checks = [
        _logits(facts, logits[:1], native, tolerance),
        kernel,
        check_config(model, facts.native),
        *_weights(facts, native, tolerance),
        *check_layers(Shown(model, seen, dtype, tokens.shape[1])),
        _padding(logits, tolerance),
        check_neighbours(model, facts.native, tokens, logits[:1] if native is None else native, tolerance),
        _bos(model),
        _hooks(model, fired),
    ]
    return Report(
        model=str(model.cfg.model_name),
        architecture=str(getattr(model.cfg, "architecture", None) or getattr(model.cfg, "original_architecture", None)),
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
    device = next(model.parameters()).device
    real = torch.ones(2, tokens.shape[1], dtype=torch.long, device=device)
    real[1, -PADDED:] = 0
    padding = getattr(getattr(model, "tokenizer", None), "pad_token_id", None) or 0
    both = torch.cat([tokens, tokens]).to(device).masked_fill(real == 0, padding)
    with torch.no_grad():
        options = {"attention_mask": real, **hooks.keeping_nothing(model)}
        logits = model.run_with_hooks(both, fwd_hooks=named, return_type="logits", **options)
    return {name: value.float().cpu() for name, value in captured.items()}, logits.detach().float().cpu(), fired


def _logits(
    facts: ModelFacts,
    hooked: Float[Tensor, "1 pos d_vocab"],
    native: Float[Tensor, "1 pos d_vocab"] | None,
    tolerance: float,
) -> Check:
    if native is None:
        why = f"{facts.why_not_native}; give the transformers model as native=…"
        return Check("logits", "not checked", detail=why)
    detail = f"logits against the model's own attention ({attention_of(facts.native)}), worst position"
    remedy = f"the hooked model differs from the transformers model; {ANOTHER_VERSION}"
    return compare_positions("logits", hooked[0], native[0], tolerance, detail, remedy)


def _weights(facts: ModelFacts, native: Float[Tensor, "1 pos d_vocab"] | None, tolerance: float) -> list[Check]:
    """Check that the weights are those of the first verification: a longer probe begins with the same tokens."""
    if native is None:
        return []
    now = native[0, AT_LOADING - 1]
    if facts.probe_logits is None:
        facts.probe_logits = now.clone()
    remedy = "weights were changed after loading; load the model again, or give verify=False if the change is intended"
    detail = f"native logits of position {AT_LOADING - 1} against those when the model was first verified"
    return [compare_positions("weights", now[None], facts.probe_logits[None], tolerance, detail, remedy)]


def _padding(logits: Float[Tensor, "two pos vocabulary"], tolerance: float) -> Check:
    detail = "logits of a sequence padded on the right against those without padding"
    remedy = "run prompts of one length together; padding changes this model"
    return compare_positions("padding", logits[1, :-PADDED], logits[0, :-PADDED], tolerance, detail, remedy)


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
    boundary, length = boundary_of(model), tokens.shape[1]
    own = getattr(config_of(model), "max_position_embeddings", None)
    most = min((int(number) for number in (own, model.cfg.n_ctx) if number), default=1)  # the model has at least those
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
        return Check("bos", "failed", None, 0.0, 1.0, 1.0, 0.0, detail, "set model.cfg.default_prepend_bos = False")
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
    names = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in silent})
    detail = f"never fire: {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Check("hooks", "limited", None, *figures, detail)
