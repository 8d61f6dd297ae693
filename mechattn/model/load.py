"""Loads models, verifies them, and notices changes after a verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mechattn.errors import (
    MechattnError,
    ModelError,
    OptionError,
    check_choice,
    check_counts,
    reason,
)
from mechattn.hub_access import asked_once, hub_commit
from mechattn.model.booting import Dtype, examine, hooked_checkpoint, hooked_object
from mechattn.model.checkpoint import model_place
from mechattn.model.gguf_files import gguf_place, read_once
from mechattn.model.given_objects import unwrapped_model
from mechattn.model.hooked import (
    FACTS_NAME,
    HookedModel,
    ModelFacts,
    alone,
    facts_of,
    model_creation_lock,
)
from mechattn.model.native_twin import WRAPPED, keep_twin
from mechattn.model.own_code import as_trusted, is_of_own_code
from mechattn.model.verify.checks import check_model, check_streaming
from mechattn.model.verify.verification import ANOTHER_VERSION, AT_LOADING, PROBE, Report
from mechattn.model.weights import State, refuse_changes, state_of

Outcome = TypeVar("Outcome")


@alone
def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    verify: bool | None = None,
    gguf_file: str | Path | None = None,
    **options: Any,
) -> Any:
    """Load a hooked model with raw weights, and verify it against the model's own attention.

    No weights are folded or centred, so biases, residual norms and head updates are those of the
    model itself. A BOS token is prepended only if the tokenizer prepends one
    (``cfg.default_prepend_bos``), whereas TransformerLens prepends one by default.

    Args:
        model: "toy:llama"; "real:smollm2", a trained model whose file `make figures` fetches; a
            checkpoint directory; a GGUF file ("model.gguf"), whose weights are dequantised; a hub
            name; a transformers model; or a ``TransformerBridge`` or ``HookedTransformer``.
            A transformers model is hooked in place; one that was hooked before is rebuilt with the
            same weights. It may be dispatched over several devices, offloaded to memory or disk, or
            quantised. A hooked model is returned itself, after its known faults are corrected in
            place.
        tokenizer: A transformers tokenizer to use in place of the model's own. A checkpoint
            directory without a tokenizer gives a model without one, whose prompts must be token
            ids.
        dtype: The dtype of the weights. "auto" leaves that of a transformers model as it is.
            Otherwise it is the checkpoint's on a GPU, and float32 on a CPU, for GGUF files and for
            toys.
        device: The device; by default TransformerLens's choice. A transformers model stays where it
            is by default.
        verify: True compares the hooked model with the model itself (``verify_model``) and refuses
            it if they differ. False leaves it unverified, which its results record, but a model
            that was verified and has not changed since stays verified. By default a model is
            verified, except a hooked model that was left unverified before.
        gguf_file: The name of a GGUF file in the directory, or in the hub's repository.
        **options: Other options of ``TransformerBridge.boot_transformers``, such as ``n_ctx``,
            ``revision`` or ``trust_remote_code`` (which runs the checkpoint's own code).
            ``device_map`` ("auto", or a dict of modules with devices, "cpu" or "disk") and
            ``offload_folder`` dispatch the model with accelerate.

    Returns:
        A ``TransformerBridge`` in compatibility mode, or the given hooked model.

    Raises:
        ModelError: There is no such model, it cannot be hooked, or the hooked model differs from
            the model itself.
        OptionError: A dtype, device or GGUF file cannot be used, or an option cannot be applied to
            a model that already exists.
    """
    check_choice((True, False, None), verify=verify)
    hooked = _as_hooked_model(
        model, tokenizer=tokenizer, dtype=dtype, device=device, gguf_file=gguf_file, **options
    )
    facts = known_facts(hooked)
    if verify is not None and not verify:
        _leave_unverified(hooked, facts)
        return hooked
    if verify:
        facts.to_verify = True
    keep_verified(hooked)
    return hooked


@alone
def verify_model(model: Any, *, native: Any = None, length: int = PROBE, **options: Any) -> Report:
    """Verify a hooked model against the model itself: a table of checks, with their tolerances.

    The outcome is kept on the model. If a check failed, the model is refused until it passes a
    verification or is given to ``load_model(model, verify=False)``. A model given as ``native`` is
    kept as well, even if the check of the logits failed, and later verifications compare with it.
    If it was the wrong one, verify again with the right one as ``native``; ``verify=False`` drops
    it.

    Args:
        model: Anything that ``load_model`` accepts.
        native: The transformers model that a ``HookedTransformer`` was made from, for comparing
            logits. It is put into eval mode.
        length: The number of tokens in the probe. The probe is longer if a window of at most 128
            tokens would not fit, and at most as long as the model's context. Loading uses 8.
        **options: Options of ``load_model`` other than ``verify``.

    Returns:
        The report. ``report.passed`` is True if no check failed; ``print(report)`` shows all
        checks.

    Raises:
        ModelError: There is no such model, it cannot be hooked, or a forward pass fails.
        OptionError: The length is not a whole number of at least 8, ``native`` is not a module, or
            an option cannot be used.
    """
    check_counts(AT_LOADING, length=length)
    if native is not None and not isinstance(native, torch.nn.Module):
        raise OptionError(f"native={native!r:.60}: give the transformers model")

    hooked = _as_hooked_model(model, **options)
    facts = replace(known_facts(hooked))  # a copy, which is kept only if no check raises
    facts.to_verify = True
    if native is not None:
        facts.native = native.eval()
        facts.native_is_given = True
    facts.streaming = _outcome_of(check_streaming, hooked)
    facts.fused = None
    report = _outcome_of(check_model, hooked, facts, length)
    facts.report = replace(report, checks=(*report.checks, facts.streaming))
    facts.state = None
    if facts.report.passed:
        facts.state = state_of(hooked)
    setattr(hooked, FACTS_NAME, facts)
    return facts.report


def keep_verified(model: Any) -> None:
    """Verify a hooked model unless its verification was turned off.

    One that passed before is verified again only if it was moved or its hooks have changed.

    Raises:
        ModelError: The hooked model differs from the model itself, or it was edited after it was
            verified.
    """
    facts = known_facts(model)
    if facts.state is not None:
        _notice_changes(model, facts, facts.state)
    elif facts.to_verify:
        length = AT_LOADING
        if facts.report is not None:  # it failed, and a shorter probe might not show it
            length = facts.report.probe_length
        _verify(model, facts, length)


def known_facts(model: Any) -> ModelFacts:
    """The facts about a hooked model.

    A model that was hooked elsewhere has none yet: it is examined, and its known faults are
    corrected.
    """
    facts = facts_of(model)
    if facts is None:
        facts = ModelFacts()
        examine(model, facts)
    return facts


def check_device(device: str | torch.device | None) -> None:
    """Refuse a device that cannot be used, before a model is read for it.

    Raises:
        OptionError: The device is invalid, holds no values ("meta"), or is not on this machine.
    """
    try:
        torch.zeros(1, device=device).item()  # fails on "meta", whose tensors have no values
    except (AssertionError, RuntimeError, TypeError) as error:
        raise OptionError(
            f"device={str(device)!r} is not on this machine ({reason(error)}); give a torch device"
            ' such as "cpu", "cuda", "cuda:1" or "mps"'
        ) from None


def dtype_named(name: str) -> Dtype:
    """The dtype with a name such as "bfloat16", for configs and the command line.

    Raises:
        OptionError: It is not "auto" or one of the dtypes that weights can be loaded in.
    """
    check_choice(("auto", "float32", "bfloat16", "float16"), dtype=name)
    if name == "auto":
        return "auto"
    return getattr(torch, name)


def _as_hooked_model(
    model: Any,
    tokenizer: Any = None,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    gguf_file: str | Path | None = None,
    **options: Any,
) -> Any:
    """The given hooked model, or one made from a name, a place or a transformers model."""
    if hasattr(model, "hook_dict") and hasattr(model, "cfg"):
        if (
            tokenizer is not None
            or dtype != "auto"
            or device is not None
            or gguf_file is not None
            or options
        ):
            raise OptionError(
                "a hooked model keeps its tokenizer, dtype, device and options; set them where it"
                " is made"
            )
        return model

    if not isinstance(dtype, torch.dtype) and dtype != "auto":
        raise OptionError(f'dtype={dtype!r}: give a torch dtype such as torch.bfloat16, or "auto"')
    check_device(device)
    if gguf_file is not None:
        model = gguf_place(model, gguf_file, options.get("revision"))

    if isinstance(model, torch.nn.Module):
        model = unwrapped_model(model)
        if tokenizer is None:
            raise ModelError(
                "a model object has no tokenizer; pass one to load_model(model, tokenizer=…)"
            )
        weights_dtype = None if dtype == "auto" else dtype
        with model_creation_lock, as_trusted(is_of_own_code(model)):
            return hooked_object(model, tokenizer, weights_dtype, device, **options)

    if not isinstance(model, (str, Path)):
        raise ModelError(
            f"{model!r:.60} is not a model: give a name, a directory, a transformers model or a"
            " hooked model"
        )

    trust_remote_code = options.get("trust_remote_code")
    place = model_place(str(model))
    with model_creation_lock, as_trusted(trust_remote_code), asked_once(place), read_once():
        commit = hub_commit(place, options.get("revision"))
        hooked = hooked_checkpoint(str(model), tokenizer, dtype, device, options)
    known_facts(hooked).revision = commit
    return hooked


def _leave_unverified(model: Any, facts: ModelFacts) -> None:
    """Turn verification off for a model, unless it passed and has not changed since.

    A native model that the user gave is dropped if the verification with it failed.
    """
    if facts.state is not None:
        if facts.state == state_of(model):
            return
        # What was known of the model before it changed does not hold any more.
        keep_twin(model, facts)
        facts.report = None
        facts.state = None
        facts.streaming = None
        facts.fused = None
    elif facts.native_is_given:
        # The verification with it failed, so it must not generate answers in the model's place.
        keep_twin(model, facts)
    facts.to_verify = False


def _outcome_of(check: Callable[..., Outcome], model: HookedModel, *arguments: Any) -> Outcome:
    """The outcome of a check.

    Raises:
        ModelError: A forward pass raises an error.
    """
    try:
        return check(model, *arguments)
    except MechattnError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} cannot be used as a hooked model: a forward pass of a few"
            f" tokens raises {reason(error)}; {ANOTHER_VERSION}"
        ) from error


def _notice_changes(model: Any, facts: ModelFacts, verified_state: State) -> None:
    """Refuse a model that was edited; verify it again if it was moved or has other hooks.

    Raises:
        ModelError: Says what was edited, or which check failed.
    """
    current_state = state_of(model)
    refuse_changes(model, verified_state, current_state)
    is_moved = verified_state["device"] != current_state["device"]
    if is_moved:
        keep_twin(model, facts)
    if is_moved or verified_state["hooks"] != current_state["hooks"]:
        _verify(model, facts, AT_LOADING)
    facts.state = current_state


def _verify(model: Any, facts: ModelFacts, length: int) -> None:
    """Verify a model now, on a probe of this many tokens.

    Raises:
        ModelError: A check failed. If the model has hooks, their places are named.
    """
    report = _outcome_of(check_model, model, facts, length)
    state = state_of(model)
    try:
        report.require()
    except ModelError as error:
        if not state["hooks"]:
            raise
        hook_places = ", ".join(WRAPPED.sub("", name) for name in state["hooks"])
        raise ModelError(
            f"{model.cfg.model_name} has hooks at {hook_places} that change its "
            f"values; remove them, or give an intervention instead. {error}"
        ) from error

    facts.report = report
    facts.state = state
    # These held for the model before: where it was, and with the hooks that it had.
    facts.streaming = None
    facts.fused = None
