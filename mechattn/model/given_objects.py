"""Model objects as people bring them: unwrapped, or refused by what they are."""

from __future__ import annotations

from typing import Any

import torch

from mechattn.errors import ModelError, warn

_CAUSAL = (
    "mechattn measures models that predict the next token from the earlier ones: load this with"
    " AutoModelForCausalLM"
)
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def unwrapped_model(model: Any) -> Any:
    """The model inside ``torch.compile`` or a data-parallel wrapper, whose forward passes are not
    compiled.

    Raises:
        ModelError: It is something else than a causal language model, and this says what.
    """
    if hasattr(model, "_orig_mod"):
        model = model._orig_mod
    if type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
        model = model.module
    if hasattr(model, "merge_and_unload"):
        raise ModelError(
            f"a {type(model).__name__} has adapters beside its weights: merge them, and pass "
            "model.merge_and_unload()"
        )

    if not hasattr(model, "config"):
        raise ModelError(f"a {type(model).__name__} is not a transformers model: it has no config")
    refuse_other_kinds(type(model).__name__, model.config)
    for module in model.modules():
        module._compiled_call_impl = (
            None  # of model.compile(), which would compile our hooks as well
        )

    return model


def refuse_other_kinds(class_name: str, config: Any) -> None:
    """Refuse encoders, models without a head and classifiers, by the name of their class.

    Raises:
        ModelError: Says what it is, and what to give.
    """
    from transformers.models.auto import modeling_auto

    kind = ""
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder, whose decoder also reads an encoder's output"
    elif class_name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        kind = "an encoder, whose tokens see those after them"
    elif class_name.endswith(_HEADS):
        kind = "a classifier, which predicts no tokens"
    elif class_name in modeling_auto.MODEL_MAPPING_NAMES.values():
        kind = "a model without its head, which predicts no tokens"

    if kind:
        raise ModelError(f"a {class_name} is {kind}; {_CAUSAL}")


def moved(hf_model: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """The model on a device, with parameters of a dtype; what it computes at loading, such as the
    frequencies of RoPE, stays in float32, as ``from_pretrained(dtype=…)`` leaves it.
    """
    computed = {
        (module, name): module._buffers[name]
        for module in hf_model.modules()
        for name in module._non_persistent_buffers_set
    }
    hf_model = hf_model.to(device=device, dtype=dtype)
    for (module, name), values in computed.items():
        module._buffers[name] = values if values is None else values.to(device=device)
    return hf_model


def warn_of_rounded_frequencies(hf_model: Any) -> None:
    """Warn of rotary frequencies that were rounded before the model came here."""
    for name, values in hf_model.named_buffers():
        if name.endswith("inv_freq") and values.dtype in (torch.float16, torch.bfloat16):
            warn(
                f"the rotary frequencies of this {type(hf_model).__name__} are rounded to"
                f" {values.dtype}, as model.to(dtype) does, so far positions are turned by wrong"
                " angles; give the dtype to from_pretrained or to load_model instead"
            )
            return
