"""Boots hooked models from checkpoints, GGUF files and transformers models, with raw weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from mechattn.errors import ModelError, OptionError, reason
from mechattn.model import checkpoint
from mechattn.model.architectures import particulars_of
from mechattn.model.gguf_files import as_plain, gguf_of, gguf_provenance, is_gguf, load_dequantised
from mechattn.model.given_objects import (
    is_multimodal,
    moved,
    multimodal_model,
    refuse_other_kinds,
    text_model_of,
    warn_of_rounded_frequencies,
)
from mechattn.model.hooked import FACTS_NAME, ModelFacts
from mechattn.model.native_twin import keep_twin, unhooked

Dtype = torch.dtype | Literal["auto"]
_PLACING = ("device_map", "max_memory", "offload_folder")  # where transformers puts the weights
_REPLACED_BY_TRANSFORMER_LENS = (  # modules whose eager_attention_forward booting replaces
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gemma3.modeling_gemma3",
)


def hooked_checkpoint(
    name: str, tokenizer: Any, dtype: Dtype, device: Any, options: Mapping[str, Any]
) -> Any:
    """A hooked model from a name or a place.

    TransformerLens loads an ordinary checkpoint itself. Multimodal checkpoints and GGUF files are
    first loaded with transformers.
    """
    from transformer_lens.utilities import get_device

    place = checkpoint.model_place(name)
    # The options that the loaders of configurations and tokenizers take too.
    hub_options = {"trust_remote_code": False} | _named(options, ("revision", "trust_remote_code"))

    config = checkpoint.config_of_place(place, **hub_options)
    checkpoint.check_weights_are_whole(place)
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    refuse_other_kinds(architectures[0], config)

    if dtype == "auto":
        is_on_cpu = torch.device(device or get_device()).type == "cpu"
        # A toy is stored in float16 only to make its file small.
        is_toy = name.startswith(checkpoint.TOY_PREFIX)
        stored_dtype = getattr(config, "dtype", None)
        dtype = torch.float32
        if isinstance(stored_dtype, torch.dtype) and not is_toy and not is_on_cpu:
            dtype = stored_dtype

    if tokenizer is None:
        tokenizer = checkpoint.tokenizer_of(name, place, **hub_options)

    if not is_gguf(place) and not is_multimodal(config):
        return _boot(
            place, shown_name=name, tokenizer=tokenizer, dtype=dtype, device=device, **options
        )

    placing = _named(options, _PLACING)
    boot_options = {option: value for option, value in options.items() if option not in placing}
    if device is None and not placing:
        device = get_device()
    gguf = None
    if is_gguf(place):
        with transformers_restored():
            hf_model = load_dequantised(place, config, dtype, **placing)
        gguf = gguf_provenance(place)
    else:
        hf_model = multimodal_model(place, config, dtype=dtype, **placing, **hub_options)
    return hooked_object(hf_model, tokenizer, device=device, name=name, gguf=gguf, **boot_options)


def hooked_object(
    hf_model: Any,
    tokenizer: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    name: str | None = None,
    gguf: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A hooked model from a transformers model, which is moved and converted first.

    Args:
        hf_model: The transformers model. It is changed in place, unless it was hooked before.
        tokenizer: Its tokenizer, or None.
        dtype: The dtype of its parameters; by default unchanged.
        device: The device to move it to; by default it stays.
        name: The name of the hooked model; by default the place that it was loaded from, or its
            class.
        gguf: The provenance of the GGUF file that it was read from; by default the file that its
            configuration names.
        **options: Options of ``TransformerBridge.boot_transformers``.

    Raises:
        OptionError: A quantised or dispatched model cannot be moved or converted.
        ModelError: TransformerLens cannot hook it.
    """
    if gguf is None:
        gguf = gguf_of(hf_model)
    name = name or getattr(hf_model.config, "_name_or_path", None) or type(hf_model).__name__
    hf_model = unhooked(text_model_of(as_plain(hf_model)))
    hf_model.config.architectures = [type(hf_model).__name__]

    is_quantised = getattr(hf_model, "is_quantized", False)
    if not is_quantised and getattr(hf_model, "hf_device_map", None) is None:
        hf_model = moved(hf_model, device, dtype)
    elif dtype is not None or device is not None:
        raise OptionError(
            "the dtype and devices of a quantised or dispatched model cannot be changed; set them"
            " where it is made"
        )

    warn_of_rounded_frequencies(hf_model)
    return _boot(
        name,
        shown_name=name,
        tokenizer=tokenizer,
        gguf=gguf,
        device=device,
        hf_model=hf_model.eval(),
        dtype=hf_model.dtype,
        **options,
    )


def examine(model: Any, facts: ModelFacts) -> None:
    """Add the twin of a newly hooked model to the facts, correct its known faults, and keep the
    facts on it."""
    keep_twin(model, facts)
    correction = particulars_of(model).mend(model)
    if correction is not None:
        facts.mended = (correction,)
    setattr(model, FACTS_NAME, facts)


@contextmanager
def transformers_restored() -> Iterator[None]:
    """Inside a ``with`` block, transformers shows no progress bar and loads no processor of images;
    afterwards it is as before, with its own attention functions.

    Booting replaces these functions (TransformerLens issue 1795). To load a processor of images,
    TransformerLens would install torchvision with pip if it is absent (``_ensure_torchvision`` in
    its ``model_bridge/sources/transformers/helpers.py``).
    """
    import transformers
    from transformers.utils import logging

    with ExitStack() as undo:
        for name in _REPLACED_BY_TRANSFORMER_LENS:
            module: Any = importlib.import_module(name)
            attention = module.eager_attention_forward
            undo.callback(setattr, module, "eager_attention_forward", attention)

        processor: Any = transformers.AutoProcessor
        class_method = vars(processor)["from_pretrained"]  # unbound, so that it can be put back
        undo.callback(setattr, processor, "from_pretrained", class_method)
        processor.from_pretrained = lambda *_, **__: None

        if logging.is_progress_bar_enabled():  # it appears even for a toy of one megabyte
            undo.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        yield


def _named(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The options that have one of these names."""
    return {name: options[name] for name in names if name in options}


def _boot(
    name: str,
    *,
    shown_name: str,
    tokenizer: Any,
    gguf: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A bridge in compatibility mode, with raw weights and the given tokenizer.

    Args:
        name: The place from which TransformerLens loads the model, unless ``hf_model`` is given.
        shown_name: The name of the hooked model, for messages and results.
        tokenizer: The tokenizer, or None.
        gguf: The provenance of the GGUF file, if the weights come from one.
        **options: Options of ``TransformerBridge.boot_transformers``.

    Raises:
        ModelError: TransformerLens cannot hook the model.
    """
    from transformer_lens.model_bridge import TransformerBridge

    try:
        with transformers_restored():
            # TransformerLens changes the tokenizer that it is given, and looks for one if it is
            # given none. So it gets a copy, or for a model without a tokenizer a stand-in.
            if tokenizer is None:
                boot_tokenizer = checkpoint.lettered_tokenizer(1)
            else:
                boot_tokenizer = copy.deepcopy(tokenizer)
            bridge = TransformerBridge.boot_transformers(name, tokenizer=boot_tokenizer, **options)
            bridge.enable_compatibility_mode(no_processing=True, disable_warnings=True)
    except Exception as error:
        raise ModelError(
            f"TransformerLens cannot load {shown_name!r} as a hooked model: {reason(error)}"
        ) from error

    # Set without the public setter, which would make a copy that always prepends BOS.
    bridge._tokenizer = tokenizer
    bridge.cfg.default_prepend_bos = checkpoint.prepends_bos(tokenizer)
    bridge.cfg.model_name = shown_name
    bridge.eval()
    examine(bridge, ModelFacts(weights="raw", gguf=gguf))
    return bridge
