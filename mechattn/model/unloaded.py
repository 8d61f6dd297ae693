"""A tokenizer in place of a model, for sequences and servers' answers, which need no weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechattn.errors import ModelError
from mechattn.hub_access import asked_once
from mechattn.model import checkpoint
from mechattn.model.hooked import original_of
from mechattn.model.load import known_facts, load_model

NO_LIMIT = 2**31  # the context length, in tokens, of a model whose configuration states none


@dataclass(frozen=True)
class Sizes:
    """The part of ``model.cfg`` that prompts and conditions need.

    ``n_ctx`` is ``NO_LIMIT`` if it is unknown.
    """

    model_name: str
    d_vocab: int
    n_ctx: int
    default_prepend_bos: bool


@dataclass(frozen=True)
class UnloadedModel:
    """A tokenizer in place of a model: enough to make sequences, and to decode answers."""

    tokenizer: Any
    cfg: Any  # Sizes, or the cfg of the loaded model
    end: frozenset[int]  # the tokens that end an answer
    loaded: Any = None  # the hooked model, if one was given


def unloaded(model: Any) -> UnloadedModel:
    """The tokenizer and sizes of a model, without reading its weights.

    A transformers model or hooked model is loaded and verified, and is included as ``loaded``.

    Args:
        model: A tokenizer, or anything that ``load_model`` accepts.

    Raises:
        ModelError: There is no such model, or it has no tokenizer.
    """
    if isinstance(model, (str, Path)):
        return _unloaded_checkpoint(str(model))
    if hasattr(model, "decode") and hasattr(model, "eos_token_id"):  # a tokenizer
        name = getattr(model, "name_or_path", None) or type(model).__name__
        return unloaded_tokenizer(model, name)
    hooked = load_model(model)
    if hooked.tokenizer is None:
        raise ModelError(
            f"{hooked.cfg.model_name} has no tokenizer; pass one to load_model(model, tokenizer=…)"
        )

    hf_model = known_facts(hooked).native
    if hf_model is None:  # a quantised model has no twin
        hf_model = original_of(hooked)
    generation_config = getattr(hf_model, "generation_config", None)
    end = end_tokens(generation_config, hooked.tokenizer)
    return UnloadedModel(hooked.tokenizer, hooked.cfg, end, loaded=hooked)


def unloaded_tokenizer(
    tokenizer: Any, name: str, n_ctx: int = NO_LIMIT, generation_config: Any = None
) -> UnloadedModel:
    """A tokenizer as an unloaded model, with a name, a context length in tokens and a configuration
    of generation."""
    sizes = Sizes(
        model_name=name,
        d_vocab=len(tokenizer),
        n_ctx=n_ctx,
        default_prepend_bos=checkpoint.prepends_bos(tokenizer),
    )
    return UnloadedModel(tokenizer, sizes, end_tokens(generation_config, tokenizer))


def end_tokens(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: those that the configuration of generation names, and the
    tokenizer's EOS."""
    end_ids = getattr(generation_config, "eos_token_id", None)
    if not isinstance(end_ids, (list, tuple)):
        end_ids = [end_ids]
    return frozenset(int(i) for i in [*end_ids, tokenizer.eos_token_id] if i is not None)


def _unloaded_checkpoint(name: str) -> UnloadedModel:
    """The tokenizer, context length and configuration of generation of a checkpoint."""
    from transformers import GenerationConfig

    n_ctx = getattr(checkpoint.text_config(name), "max_position_embeddings", None)
    if not isinstance(n_ctx, int):
        n_ctx = NO_LIMIT
    place = checkpoint.model_place(name)
    generation_config = None
    # A GGUF file has no configuration: only its tokenizer names the token that ends an answer.
    with suppress(OSError), asked_once(place):
        generation_config = GenerationConfig.from_pretrained(place)

    tokenizer = checkpoint.tokenizer_named(name)
    return unloaded_tokenizer(tokenizer, name, n_ctx, generation_config)
