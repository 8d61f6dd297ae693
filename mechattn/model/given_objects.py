"""Model objects that a user gives: unwrapped, refused if they are of another kind, and reduced to
their text model if they are multimodal."""

from __future__ import annotations

from copy import deepcopy
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
# The largest allowed difference, in root mean squares of the logits. Both models run the same code
# on the same weights, so they should differ by rounding alone.
_LOGIT_TOLERANCE = 1e-2
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def unwrapped_model(model: Any) -> Any:
    """The model inside ``torch.compile`` and data-parallel wrappers.

    Its forward passes are no longer compiled.

    Raises:
        ModelError: It is not a causal language model of transformers, or it has adapters.
    """
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
        model = getattr(model.module, "_orig_mod", model.module)
    if hasattr(model, "merge_and_unload"):
        raise ModelError(
            f"a {type(model).__name__} has adapters besides its weights: merge them, and pass "
            "model.merge_and_unload()"
        )

    from transformers import PretrainedConfig

    if not isinstance(getattr(model, "config", None), PretrainedConfig):
        raise ModelError(
            f"a {type(model).__name__} is not a transformers model: it has no configuration of"
            " transformers"
        )
    refuse_other_kinds(type(model).__name__, model.config)
    for module in model.modules():
        # Set by model.compile(): it would compile our hooks as well. torch.nn.Module (module.py) has
        # no public way to undo that; None is its own value before compile().
        module._compiled_call_impl = None
    return model


def refuse_other_kinds(class_name: str, config: Any) -> None:
    """Refuse encoders, encoder-decoders, classifiers and models without a head.

    Raises:
        ModelError: The class name or the configuration is that of one of these.
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
    """The model on a device, with parameters of a dtype. None leaves either as it is.

    Buffers that the model computes when it is made, such as the frequencies of RoPE, keep their
    dtype, as with ``from_pretrained(dtype=…)``.
    """
    computed_buffers = []
    for module in hf_model.modules():
        # torch.nn.Module (module.py) has no public way to ask which buffers were registered with
        # persistent=False.
        for name in module._non_persistent_buffers_set:
            buffer = getattr(module, name)
            if buffer is not None:
                computed_buffers.append((module, name, buffer))

    hf_model = hf_model.to(device=device, dtype=dtype)
    for module, name, buffer in computed_buffers:
        setattr(module, name, buffer.to(device=device))
    return hf_model


def warn_of_rounded_frequencies(hf_model: Any) -> None:
    """Warn if the user has rounded the model's rotary frequencies to half precision."""
    for name, buffer in hf_model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype in (torch.float16, torch.bfloat16):
            warn(
                f"the rotary frequencies of this {type(hf_model).__name__} are rounded to"
                f" {buffer.dtype}, as model.to(dtype) does, so far positions are turned by wrong"
                " angles; give the dtype to from_pretrained or to load_model instead"
            )
            return


def is_multimodal(config: Any) -> bool:
    """Whether a configuration has a text model and one of images or sounds."""
    has_other_inputs = any(getattr(config, name, None) for name in _OTHER_INPUTS)
    return has_other_inputs and getattr(config, "text_config", None) is not None


def multimodal_model(place: str, config: Any, **options: Any) -> Any:
    """The transformers model of a multimodal checkpoint.

    Raises:
        ModelError: transformers does not have the class that the configuration names.
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
    """The text model of a multimodal model, with the same parameters, checked on a few tokens.

    Any other model is returned as it is, and so is one whose text part has no class that
    TransformerLens can hook.

    Raises:
        ModelError: The text model lacks a parameter or gives other logits, or the model is
            dispatched over several devices.
    """
    if not is_multimodal(model.config):
        return model
    text_class = _text_class(model.config.text_config)
    if text_class is None:
        return model
    class_name = type(model).__name__
    if getattr(model, "hf_device_map", None):
        raise ModelError(
            f"{class_name} is multimodal, and its text model is loaded by itself, which is not"
            " possible with device_map; load it onto one device"
        )

    text_model = _text_model(model, text_class)
    tokens = few_tokens(model, _PROBE_LENGTH)
    model.eval()
    text_model.eval()

    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        logits = text_model(input_ids=tokens, use_cache=False).logits.float()

    difference = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    if not difference <= _LOGIT_TOLERANCE:  # also refuses NaN
        raise ModelError(
            f"{class_name} is multimodal, and its text model by itself ({text_class.__name__})"
            f" gives other logits ({float(difference):.2g} of their root mean square apart), so it"
            " is not measured"
        )

    return text_model


def _text_class(text_config: Any) -> Any | None:
    """The class of a text configuration's causal language model; None if TransformerLens cannot
    hook it."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if text_class is None or text_class.__name__ not in SUPPORTED_ARCHITECTURES:
        return None
    return text_class


def _text_model(model: Any, text_class: Any) -> Any:
    """The text model of a multimodal model, with the same parameters.

    Raises:
        ModelError: The multimodal model lacks one of its parameters.
    """
    from accelerate import init_empty_weights

    config = deepcopy(model.config.text_config)
    # Where from_pretrained (PreTrainedConfig of transformers) keeps the name of the checkpoint, which
    # only the whole configuration has. ``booting`` reads it.
    config._name_or_path = getattr(model.config, "_name_or_path", "")

    with init_empty_weights(include_buffers=False):
        text_model = text_class(config)

    prefix = text_model.base_model_prefix
    decoder_weights = model.get_decoder().state_dict(keep_vars=True)
    weights = {f"{prefix}.{name}": tensor for name, tensor in decoder_weights.items()}
    weights["lm_head.weight"] = model.get_output_embeddings().weight
    text_model.load_state_dict(weights, strict=False, assign=True)
    text_model.tie_weights()
    for name, parameter in text_model.named_parameters():
        if parameter.is_meta:  # it got no weights
            raise ModelError(
                f"{type(model).__name__} is multimodal, and its text model by itself "
                f"({text_class.__name__}) lacks the parameter {name}"
            )

    text_model.generation_config = model.generation_config
    return text_model.to(model.device)
