"""Loads models, verifies them, and verifies them again after a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    verify: bool = True,
    gguf_file: str | Path | None = None,
    **options: Any,
) -> Any:
    """Load a hooked model with raw weights, and verify it against the model's own attention.

    No weights are folded or centred, so biases, residual norms and head updates are those of the
    model itself. A BOS token is prepended if the tokenizer does so (``cfg.default_prepend_bos``),
    unlike TransformerLens's default of True.

    Args:
        model: "toy:llama"; "real:smollm2", a trained model whose file `make figures` fetches; a
            checkpoint directory; a GGUF file ("model.gguf"), whose weights are dequantised; a hub
            name; a transformers model (changed in place, or hooked again), which may be dispatched
            over several devices, offloaded to memory or disk, or quantised; or a
            ``TransformerBridge`` or ``HookedTransformer``, which is verified, corrected in place if
            it is a Falcon with ALiBi, and returned.
        tokenizer: A transformers tokenizer to use in place of the model's own. A checkpoint
            directory without a tokenizer gives a model without one, whose prompts must be token
            ids.
        dtype: The dtype of the weights; "auto" uses the checkpoint's on a GPU, float32 on a CPU and
            for GGUF files, and leaves that of a transformers model as it is.
        device: The device; by default TransformerLens's choice.
        verify: Compare the hooked model with the model itself (``verify_model``) and refuse it if
            they differ. With False the model stays unverified, and its results record this.
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
        OptionError: A dtype, device or GGUF file cannot be used, or an option does not go with a
            model that is made already.
    """
    if hasattr(model, "hook_dict") and hasattr(model, "cfg"):
        if (
            tokenizer is not None
            or dtype != "auto"
            or device is not None
            or gguf_file is not None
            or options
        ):
            raise OptionError(
                "a hooked model is used unchanged; set tokenizer, dtype and device where it is made"
            )
        hooked = model
    else:
        if not isinstance(dtype, torch.dtype) and dtype != "auto":
            raise OptionError(
                f'dtype={dtype!r}: give a torch dtype such as torch.bfloat16, or "auto"'
            )
        check_device(device)
        if gguf_file is not None:
            model = gguf_place(model, gguf_file, options.get("revision"))
        hooked = _hooked(model, tokenizer, dtype, device, options)

    if verify:
        keep_verified(hooked)
    else:
        _take_as_it_is(hooked, known_facts(hooked))
    return hooked


def _hooked(
    model: Any,
    tokenizer: Any,
    dtype: Dtype,
    device: str | torch.device | None,
    options: Mapping[str, Any],
) -> Any:
    """A hooked model from a name, a place or a transformers model."""
    if isinstance(model, torch.nn.Module):
        model = unwrapped_model(model)
        if tokenizer is None:
            raise ModelError(
                "a model object has no tokenizer; pass one to load_model(model, tokenizer=…)"
            )
        new_dtype = None if dtype == "auto" else dtype
        with model_creation_lock, as_trusted(is_of_own_code(model)):
            return hooked_object(model, tokenizer, new_dtype, device, **options)

    if not isinstance(model, (str, Path)):
        raise ModelError(
            f"{model!r:.60} is not a model: give a name, a directory, a transformers model or a"
            " hooked model"
        )

    own_code = options.get("trust_remote_code")
    place = model_place(str(model))
    with model_creation_lock, as_trusted(own_code), asked_once(place), read_once():
        commit = hub_commit(place, options.get("revision"))
        hooked = hooked_checkpoint(str(model), tokenizer, dtype, device, options)
    known_facts(hooked).revision = commit
    return hooked


def check_device(device: str | torch.device | None) -> None:
    """Refuse a device before a model is read for it.

    Raises:
        OptionError: It is invalid, or not on this machine.
    """
    try:
        torch.zeros(1, device=device).item()  # which a device without numbers ("meta") refuses
    except (AssertionError, RuntimeError, TypeError) as error:
        raise OptionError(
            f"device={str(device)!r} is not on this machine ({reason(error)}); give a torch device"
            ' such as "cpu", "cuda", "cuda:1" or "mps"'
        ) from None


@alone
def verify_model(model: Any, *, native: Any = None, length: int = PROBE, **options: Any) -> Report:
    """Verify a hooked model against the model itself: a table of checks, with their tolerances.

    Args:
        model: Anything that ``load_model`` accepts.
        native: The transformers model that a ``HookedTransformer`` was made from, for comparing
            logits.
        length: The number of tokens in the probe; more if needed to exceed a window of at most 128.
            Loading uses 8.
        **options: Passed to ``load_model``, but for ``verify``.

    Returns:
        The report: ``report.passed`` is True if results of this model are verified;
        ``print(report)`` shows all checks.

    Raises:
        ModelError: There is no such model, or it cannot be hooked.
        OptionError: The probe is too short, its length is no whole number, or ``native`` is no
            module.
    """
    check_counts(AT_LOADING, length=length)
    hooked = load_model(model, verify=False, **options)
    facts = replace(known_facts(hooked))  # a copy, which is kept if no check raises
    if native is not None:
        if not isinstance(native, torch.nn.Module):
            raise OptionError(f"native={native!r:.60}: give the transformers model")
        facts.native = native.eval()
        facts.why_not_native = ""
    facts.streaming = tried(check_streaming, hooked)
    facts.fused = None
    report = tried(check_model, hooked, facts, length)
    facts.report = replace(report, checks=(*report.checks, facts.streaming))
    facts.state = None
    if facts.report.passed:
        facts.state = state_of(hooked)
    setattr(hooked, FACTS_NAME, facts)
    return facts.report


def dtype_named(name: str) -> Dtype:
    """The dtype with a name such as "bfloat16", for configs and the command line.

    Raises:
        OptionError: It is none of those that weights are loaded in.
    """
    check_choice(("auto", "float32", "bfloat16", "float16"), dtype=name)
    if name == "auto":
        return "auto"
    return getattr(torch, name)


def keep_verified(model: Any) -> None:
    """Verify a hooked model, unless that was done since it last changed or was turned off.

    Raises:
        ModelError: It is not the model itself, or was changed since it was verified.
    """
    facts = known_facts(model)
    if facts.state is not None:
        _notice_changes(model, facts, facts.state)
    elif facts.report is None and facts.to_verify:
        _verify(model, facts)


def known_facts(model: Any) -> ModelFacts:
    """The facts about a hooked model; one that was hooked elsewhere is examined and mended now."""
    facts = facts_of(model)
    if facts is None:
        facts = ModelFacts()
        examine(model, facts)
    return facts


def _verify(model: Any, facts: ModelFacts) -> None:
    """Verify a model now; hooks that change its values are named."""
    report = tried(check_model, model, facts, AT_LOADING)
    state = state_of(model)
    try:
        report.require()
    except ModelError as error:
        if not state["hooks"]:
            raise
        hooked = ", ".join(WRAPPED.sub("", name) for name in state["hooks"])
        raise ModelError(
            f"{model.cfg.model_name} has hooks at {hooked} that change its "
            f"values; remove them, or give an intervention instead. {error}"
        ) from error

    facts.report = report
    facts.state = state


def _take_as_it_is(model: Any, facts: ModelFacts) -> None:
    """Verify a model no more, and forget the verification of one that was changed since."""
    if facts.report is None:
        facts.to_verify = False
        return
    if facts.state is None or facts.state == state_of(model):
        return

    keep_twin(model, facts)
    facts.to_verify = False
    facts.report = None
    facts.state = None
    facts.streaming = None
    facts.fused = None


def _notice_changes(model: Any, facts: ModelFacts, before: State) -> None:
    """Refuse a changed model; verify it again if it was moved, or has other hooks.

    Raises:
        ModelError: Says what was changed, or what the new verification found.
    """
    now = state_of(model)
    refuse_changes(model, before, now)
    is_moved = before["device"] != now["device"]
    if is_moved:
        keep_twin(model, facts)
    if is_moved or before["hooks"] != now["hooks"]:
        _verify(model, facts)
    facts.state = now


def tried(check: Callable[..., Outcome], model: HookedModel, *arguments: Any) -> Outcome:
    """The outcome of a check.

    Raises:
        ModelError: A forward pass failed, in whatever way.
    """
    try:
        return check(model, *arguments)
    except MechattnError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} cannot be used as a hooked model: a forward pass of a few"
            f" tokens raises {reason(error)}. {ANOTHER_VERSION.capitalize()}"
        ) from error
