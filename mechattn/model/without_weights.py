"""A model without its weights: its tokenizer, context length, and the tokens that end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.errors import ModelError
from mechattn.model.hooks import prepends_bos
from mechattn.model.load import as_hooked, load_model, model_place, text_config, tokenizer_named
from mechattn.model.model_facts import ModelFacts, facts_of

_NO_LIMIT = 2**31


@dataclass(frozen=True)
class Sizes:
    """The part of ``model.cfg`` that prompts and conditions need.

    Args:
        model_name: The model's name.
        d_vocab: The size of its vocabulary.
        n_ctx: The length of its context in tokens, if known.
        default_prepend_bos: Whether a BOS token is prepended.
    """

    model_name: str
    d_vocab: int
    n_ctx: int
    default_prepend_bos: bool


@dataclass(frozen=True)
class UnloadedModel:
    """A tokenizer in place of a model: enough to make sequences, and to decode answers.

    Args:
        tokenizer: The transformers tokenizer.
        cfg: Sizes.
        end: The tokens that end an answer.
        loaded: The hooked model, if one was given.
    """

    tokenizer: Any
    cfg: Any
    end: frozenset[int]
    loaded: Any = None


def unloaded(model: Any) -> UnloadedModel:
    """A model without its weights; if the given model is loaded, it is included."""
    if isinstance(model, (str, Path)):
        return _named(str(model))
    if callable(getattr(model, "decode", None)) and hasattr(model, "eos_token_id"):
        name = getattr(model, "name_or_path", "") or type(model).__name__
        return _of_tokenizer(model, str(name), _NO_LIMIT, None)
    hooked = load_model(as_hooked(model))
    if getattr(hooked, "tokenizer", None) is None:
        raise ModelError(f"{hooked.cfg.model_name} has no tokenizer; pass one to load_model(model, tokenizer=…)")
    settings = getattr((facts_of(hooked) or ModelFacts()).native, "generation_config", None)
    return UnloadedModel(hooked.tokenizer, hooked.cfg, end_tokens(settings, hooked.tokenizer), hooked)


def end_tokens(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, by a model's generation settings and by its tokenizer."""
    found = getattr(generation_config, "eos_token_id", None)
    found = found if isinstance(found, (list, tuple)) else [found]
    return frozenset(int(token) for token in [*found, tokenizer.eos_token_id] if token is not None)


def _named(name: str) -> UnloadedModel:
    from transformers import GenerationConfig

    longest = getattr(text_config(name), "max_position_embeddings", None)
    try:
        settings = GenerationConfig.from_pretrained(model_place(name))
    except OSError:  # there are no generation settings
        settings = None
    return _of_tokenizer(tokenizer_named(name), name, longest if isinstance(longest, int) else _NO_LIMIT, settings)


def _of_tokenizer(tokenizer: Any, name: str, longest: int, settings: Any) -> UnloadedModel:
    sizes = Sizes(name, len(tokenizer), longest, prepends_bos(tokenizer))
    return UnloadedModel(tokenizer, sizes, end_tokens(settings, tokenizer))
