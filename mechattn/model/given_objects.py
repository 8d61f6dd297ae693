"""Model objects as people bring them: unwrapped, or refused by what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mechattn.errors import ModelError

_CAUSAL = "mechattn measures models that predict the next token from the earlier ones: load this with AutoModelForCausalLM"
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def unwrapped_model(model: Any) -> Any:
    """The model inside ``torch.compile`` or a data-parallel wrapper, whose forward passes are not compiled.

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
    for part in model.modules():
        part._compiled_call_impl = None  # of model.compile(), which would compile our hooks as well
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


@contextmanager
def configs_restored(model: Any) -> Iterator[None]:
    """If the ``with`` block raises, the configurations of a model are as they were."""
    configs = {
        id(part.config): part.config
        for part in model.modules()
        if hasattr(getattr(part, "config", None), "__dict__")
    }
    before = [(config, dict(vars(config))) for config in configs.values()]
    try:
        yield
    except BaseException:
        for config, attributes in before:
            vars(config).clear()
            vars(config).update(attributes)
        raise
