"""Loads and verifies models: from a name, a directory, a transformers model or a hooked model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from mechattn.errors import ModelError, OptionError, check_choice, check_counts
from mechattn.hub_access import asked_once, hub_commit
from mechattn.model import checkpoint
from mechattn.model.checkpoint import UnloadedModel, as_trusted, reason
from mechattn.model.gguf_files import (
    as_plain,
    gguf_header,
    gguf_of,
    gguf_place,
    is_gguf,
    load_dequantised,
    read_once,
)
from mechattn.model.given_objects import (
    is_multimodal,
    moved,
    multimodal_model,
    refuse_other_kinds,
    text_model_of,
    unwrapped_model,
    warn_of_rounded_frequencies,
)
from mechattn.model.hooked import (
    FACTS_NAME,
    alone,
    model_creation_lock,
    original_of,
)
from mechattn.model.verified_models import (
    known_facts,
    state_of,
    tried,
    unhooked,
    verified,
)
from mechattn.model.verify.checks import check_model, check_streaming
from mechattn.model.verify.verification import AT_LOADING, PROBE, Report

Dtype = torch.dtype | Literal["auto"]
_PLACING = ("device_map", "max_memory", "offload_folder")  # where transformers puts the weights
_REPLACED_BY_TRANSFORMER_LENS = (  # modules whose eager_attention_forward booting replaces
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gemma3.modeling_gemma3",
)


@alone
def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    verify: bool = True,
    gguf_file: str | None = None,
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
        if tokenizer is not None or dtype != "auto" or device is not None or gguf_file or options:
            raise OptionError(
                "a hooked model is used unchanged; set tokenizer, dtype and device where it is made"
            )
        return verified(model, verify)

    if not isinstance(dtype, torch.dtype) and dtype != "auto":
        raise OptionError(f'dtype={dtype!r}: give a torch dtype such as torch.bfloat16, or "auto"')
    check_device(device)
    if gguf_file is not None:
        if not isinstance(model, (str, Path)):
            raise OptionError(
                "gguf_file=…: name the directory or the hub's repository that holds the file"
            )
        model = gguf_place(str(model), gguf_file, options.get("revision"))

    if isinstance(model, torch.nn.Module):
        model = unwrapped_model(model)
        if tokenizer is None:
            raise ModelError(
                "a model object has no tokenizer; pass one to load_model(model, tokenizer=…)"
            )
        new_dtype = None if dtype == "auto" else dtype
        with model_creation_lock, as_trusted(checkpoint.is_of_own_code(model)):
            hooked = hooked_object(model, tokenizer, new_dtype, device, **options)
    elif isinstance(model, (str, Path)):
        own_code = options.get("trust_remote_code")
        place = checkpoint.model_place(str(model))
        with model_creation_lock, as_trusted(own_code), asked_once(place), read_once():
            commit = hub_commit(place, options.get("revision"))
            hooked = _hooked_checkpoint(str(model), tokenizer, dtype, device, options)
            known_facts(hooked).revision = commit
    else:
        raise ModelError(
            f"{model!r:.60} is not a model: give a name, a directory, a transformers model or a"
            " hooked model"
        )

    return verified(hooked, verify)


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
        OptionError: The probe is too short, or its length is no whole number.
    """
    check_counts(AT_LOADING, length=length)
    hooked = load_model(model, verify=False, **options)
    facts = known_facts(hooked)
    if native is not None:
        facts = replace(facts, native=native.eval(), why_not_native="")
    facts.streaming = tried(check_streaming, hooked)
    facts.fused = None
    report = tried(check_model, hooked, facts, length)
    facts.report = replace(report, checks=(*report.checks, facts.streaming))
    facts.state = state_of(hooked)
    setattr(hooked, FACTS_NAME, facts)  # only now, as a wrong ``native`` ends in an error above
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


def unloaded(model: Any) -> UnloadedModel:
    """A model without its weights; if the given model is loaded, it is included.

    Args:
        model: A name or place, a tokenizer by itself, or what else ``load_model`` takes.

    Raises:
        ModelError: There is no such model, or it has no tokenizer.
    """
    if isinstance(model, (str, Path)):
        return _unloaded_checkpoint(str(model))
    if callable(getattr(model, "decode", None)) and hasattr(model, "eos_token_id"):
        name = getattr(model, "name_or_path", None) or type(model).__name__
        return checkpoint.unloaded_tokenizer(model, name)
    hooked = load_model(model)
    if getattr(hooked, "tokenizer", None) is None:
        raise ModelError(
            f"{hooked.cfg.model_name} has no tokenizer; pass one to load_model(model, tokenizer=…)"
        )

    # A quantised model has no native twin.
    source = known_facts(hooked).native or original_of(hooked)
    settings = getattr(source, "generation_config", None)
    end = checkpoint.end_tokens(settings, hooked.tokenizer)
    return UnloadedModel(hooked.tokenizer, hooked.cfg, end, hooked)


def _unloaded_checkpoint(name: str) -> UnloadedModel:
    """The tokenizer, context length and generation settings of a checkpoint."""
    from transformers import GenerationConfig

    longest = getattr(checkpoint.text_config(name), "max_position_embeddings", None)
    if not isinstance(longest, int):
        longest = checkpoint.NO_LIMIT
    place = checkpoint.model_place(name)
    try:
        with asked_once(place):
            settings = GenerationConfig.from_pretrained(place)
    except OSError:  # there are none, as in a GGUF file, whose tokenizer has the end
        settings = None

    tokenizer = checkpoint.tokenizer_named(name)
    return checkpoint.unloaded_tokenizer(tokenizer, name, longest, settings)


def _hooked_checkpoint(
    name: str, tokenizer: Any, dtype: Dtype, device: Any, options: dict[str, Any]
) -> Any:
    """A hooked model from a place: booted from there, or from an object that we load ourselves."""
    from transformer_lens.utilities import get_device

    place = checkpoint.model_place(name)
    is_toy = name.startswith(checkpoint.PREFIX)
    on_hub = {"trust_remote_code": False}  # the options that transformers' other loaders take too
    on_hub |= _named(options, ("revision", "trust_remote_code"))

    config = checkpoint.config_of_place(place, **on_hub)
    checkpoint.check_weights_are_whole(place)
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    refuse_other_kinds(architectures[0], config)

    if dtype == "auto":
        on_cpu = torch.device(device or get_device()).type == "cpu"
        stored = getattr(config, "dtype", None)
        dtype = torch.float32
        if isinstance(stored, torch.dtype) and not (is_toy or on_cpu):
            dtype = stored

    if tokenizer is None and is_toy:
        tokenizer = checkpoint.load_tokenizer(name)
    elif tokenizer is None:
        tokenizer = checkpoint.tokenizer_of(place, **on_hub)

    if not is_gguf(place) and not is_multimodal(config):
        return _boot(place, tokenizer=tokenizer, dtype=dtype, device=device, shown=name, **options)

    placing = _named(options, _PLACING)
    others = {option: value for option, value in options.items() if option not in placing}
    if device is None and not placing:
        device = get_device()
    if not is_gguf(place):
        hf_model = multimodal_model(place, config, dtype=dtype, **placing, **on_hub)
        return hooked_object(hf_model, tokenizer, None, device, name, **others)

    with classes_left_alone():
        hf_model = load_dequantised(place, config, dtype, **placing)
    hooked = hooked_object(hf_model, tokenizer, None, device, name, **others)
    known_facts(hooked).gguf = gguf_header(place).provenance()
    return hooked


def _named(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the options that have one of these names."""
    return {name: options[name] for name in names if name in options}


def hooked_object(
    hf_model: Any,
    tokenizer: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    name: str | None = None,
    **options: Any,
) -> Any:
    """A hooked model from a transformers model, moved and converted first.

    Args:
        hf_model: The transformers model, which is changed in place.
        tokenizer: Its tokenizer, or None.
        dtype: The dtype of its parameters; as they are by default.
        device: Where to move it; nowhere by default.
        name: What it is called; by default after its place, or its class.
        **options: For ``TransformerBridge.boot_transformers``.

    Raises:
        OptionError: A quantised or dispatched model is to be moved or converted.
        ModelError: TransformerLens cannot hook it.
    """
    gguf = gguf_of(hf_model)
    name = name or getattr(hf_model.config, "_name_or_path", None) or type(hf_model).__name__
    hf_model = unhooked(text_model_of(as_plain(hf_model)))
    hf_model.config.architectures = [type(hf_model).__name__]
    placed = getattr(hf_model, "is_quantized", False) or getattr(hf_model, "hf_device_map", None)
    if placed and (dtype is not None or device is not None):
        raise OptionError(
            "the dtype and devices of a quantised or dispatched model cannot be changed; set them"
            " where it is made"
        )

    if not placed:
        hf_model = moved(hf_model, device, dtype)
    warn_of_rounded_frequencies(hf_model)
    hooked = _boot(
        name,
        shown=name,
        tokenizer=tokenizer,
        device=device,
        hf_model=hf_model.eval(),
        dtype=hf_model.dtype,
        **options,
    )
    known_facts(hooked).gguf = gguf
    return hooked


def _boot(name: str, *, shown: str, tokenizer: Any, **options: Any) -> Any:
    """The bridge, in compatibility mode, with raw weights and the given tokenizer."""
    from transformer_lens.model_bridge import TransformerBridge

    try:
        with classes_left_alone():
            # TransformerLens looks for a tokenizer if given none, so a model without one is given a
            # stand-in.
            stand_in = copy.deepcopy(tokenizer)
            if tokenizer is None:
                stand_in = checkpoint.lettered_tokenizer(1)
            bridge = TransformerBridge.boot_transformers(name, tokenizer=stand_in, **options)
            bridge.enable_compatibility_mode(no_processing=True, disable_warnings=True)
    except Exception as error:
        raise ModelError(
            f"TransformerLens cannot load {shown!r} as a hooked model: {reason(error)}"
        ) from error

    # The given object itself: the public setter would make a copy that always prepends BOS.
    bridge._tokenizer = tokenizer
    bridge.cfg.default_prepend_bos = checkpoint.prepends_bos(tokenizer)
    bridge.cfg.model_name = shown
    bridge.eval()
    known_facts(bridge).weights = "raw"
    return bridge


@contextmanager
def classes_left_alone() -> Iterator[None]:
    """Leave transformers as it is while a model is booted."""
    with _attention_restored(), _no_progress_bar(), _no_image_processor():
        yield


@contextmanager
def _attention_restored() -> Iterator[None]:
    """Undo what booting changes in attention functions (TransformerLens issue 1795)."""
    modules: list[Any] = [importlib.import_module(name) for name in _REPLACED_BY_TRANSFORMER_LENS]
    functions = [module.eager_attention_forward for module in modules]
    try:
        yield
    finally:
        for module, function in zip(modules, functions, strict=True):
            module.eager_attention_forward = function


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar, which transformers shows even for a toy of one megabyte."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()


@contextmanager
def _no_image_processor() -> Iterator[None]:
    """Load no processor of images, for which TransformerLens would run pip where torchvision is
    absent."""
    import transformers

    processor: Any = transformers.AutoProcessor
    load_processor = vars(processor)["from_pretrained"]  # the class method, not bound
    processor.from_pretrained = lambda *_, **__: None
    try:
        yield
    finally:
        processor.from_pretrained = load_processor
