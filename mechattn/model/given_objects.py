"""Model objects as people bring them: unwrapped, refused by what they are, or the text model of a
multimodal one by itself, as questions here are texts."""

from __future__ import annotations

from typing import Any

import torch

from mechattn.errors import ModelError, warn
from mechattn.model.hooks import few_tokens

_WHAT_TO_LOAD = (
    "mechattn measures models that predict the next token from the earlier ones: load this with"
    " AutoModelForCausalLM"
)
_OTHER_INPUTS = ("vision_config", "audio_config", "image_config", "speech_config")
_PROBE_LENGTH = 8  # tokens
_TOLERANCE = 1e-2  # in root mean squares of the logits; both run the same code on the same weights
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def unwrapped_model(model: Any) -> Any:
    """The model inside ``torch.compile`` or a data-parallel wrapper; its forward passes are not
    compiled any more.

    Raises:
        ModelError: It is no causal language model, or has adapters; says what it is.
    """
    model = getattr(model, "_orig_mod", model)
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
        # What model.compile() has set, which would compile our hooks as well.
        module._compiled_call_impl = None
    return model


def refuse_other_kinds(class_name: str, config: Any) -> None:
    """Refuse encoders, models without a head and classifiers, by the name of their class.

    Raises:
        ModelError: Says what it is, and what to give.
    """
    from transformers.models.auto import modeling_auto

    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder, whose decoder also reads an encoder's output"
    elif class_name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        kind = "an encoder, whose tokens see those after them"
    elif class_name.endswith(_CLASSIFIERS):
        kind = "a classifier, which predicts no tokens"
    elif class_name in modeling_auto.MODEL_MAPPING_NAMES.values():
        kind = "a model without its head, which predicts no tokens"

    if kind is not None:
        raise ModelError(f"a {class_name} is {kind}; {_WHAT_TO_LOAD}")


def moved(hf_model: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """The model on a device, with parameters of a dtype; what it computes at loading, such as the
    frequencies of RoPE, stays in float32, as ``from_pretrained(dtype=…)`` leaves it.
    """
    computed = []
    for module in hf_model.modules():
        for name in module._non_persistent_buffers_set:
            values = module._buffers[name]
            if values is not None:
                computed.append((module, name, values))

    hf_model = hf_model.to(device=device, dtype=dtype)
    for module, name, values in computed:
        module._buffers[name] = values.to(device=device)
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


def is_multimodal(config: Any) -> bool:
    """Whether a configuration has a text model beside one of images or sounds."""
    other_inputs = (getattr(config, name, None) for name in _OTHER_INPUTS)
    return getattr(config, "text_config", None) is not None and any(other_inputs)


def multimodal_model(place: str, config: Any, **options: Any) -> Any:
    """A multimodal checkpoint, loaded by its class.

    Raises:
        ModelError: transformers has no such class.
    """
    import transformers

    architecture = (config.architectures or [""])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ModelError(
            f"{place} is multimodal, and transformers has no class {architecture!r} for it"
        )
    return model_class.from_pretrained(place, **options)


def text_model_of(model: Any) -> Any:
    """The text model of a multimodal one, with the same parameters, and checked on a few tokens.

    Any other model, and one whose text part is no class of its own, is returned as it is.

    Raises:
        ModelError: The text model has other parameters or gives other logits, or lies on several
            devices.
    """
    if not is_multimodal(model.config):
        return model
    text_class = _text_class(model.config.text_config)
    if text_class is None:
        return model
    name = type(model).__name__
    if getattr(model, "hf_device_map", None):
        raise ModelError(
            f"{name} is multimodal, and its text model is loaded by itself, which is not possible "
            "with device_map; load it onto one device"
        )

    text = _text_model(model, text_class)
    tokens = few_tokens(model, _PROBE_LENGTH)
    model.eval()
    text.eval()

    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        logits = text(input_ids=tokens, use_cache=False).logits.float()

    difference = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"{name} is multimodal, and its text model by itself ({text_class.__name__}) gives"
            f" other logits ({float(difference):.2g} of their root mean square apart), so it is not"
            " measured"
        )

    return text


def _text_class(text_config: Any) -> Any | None:
    """The causal language model of a text configuration, if TransformerLens can hook it."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if text_class is None or text_class.__name__ not in SUPPORTED_ARCHITECTURES:
        return None
    return text_class


def _text_model(model: Any, text_class: Any) -> Any:
    """The text model, made without weights of its own and given those of the multimodal one."""
    from accelerate import init_empty_weights

    config = model.config.text_config
    config._name_or_path = getattr(model.config, "_name_or_path", "")

    with init_empty_weights(include_buffers=False):
        text = text_class(config)

    decoder = model.get_decoder().state_dict(keep_vars=True)
    weights = {f"{text.base_model_prefix}.{name}": values for name, values in decoder.items()}
    weights["lm_head.weight"] = model.get_output_embeddings().weight
    text.load_state_dict(weights, strict=False, assign=True)
    text.tie_weights()
    absent = [name for name, values in text.named_parameters() if values.is_meta]
    if absent:
        raise ModelError(
            f"{type(model).__name__} is multimodal, and its text model by itself "
            f"({text_class.__name__}) lacks the parameter {absent[0]}"
        )

    text.generation_config = model.generation_config
    return text.to(model.device)
