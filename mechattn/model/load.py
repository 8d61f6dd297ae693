"""The only place where a model is made: from a name, a directory, a model of transformers or a hooked model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from mechattn.errors import ModelError, OptionError
from mechattn.model.toys import PREFIX, toy_folder, toy_names

_MARK = "mechattn_weights"
Dtype = torch.dtype | Literal["auto"]


def load_model(
    model: Any, *, tokenizer: Any = None, dtype: Dtype = "auto", device: str | torch.device | None = None
) -> Any:
    """Load a model as a hooked transformer, with HookedTransformer hook names and the raw weights.

    No weight is folded or centred: biases, residual norms and head updates are those of the model itself. Whether a
    BOS token stands first is what the tokenizer does (``cfg.default_prepend_bos``), not TransformerLens' default True.

    Args:
        model: "toy:llama"; a checkpoint directory; a hub name; a model object of transformers (changed in place); or
            a model that is hooked already, which is returned as it is.
        tokenizer: A tokenizer object of transformers, taken as it is, in place of the model's own.
        dtype: The type of the weights; "auto" takes the checkpoint's (float32 for the toys).
        device: Where the model goes; by default where TransformerLens puts it.

    Returns:
        A ``TransformerBridge`` in compatibility mode.

    Raises:
        ModelError: There is no such model, or it cannot be hooked.
    """
    if hasattr(model, "hook_dict") and hasattr(model, "cfg"):
        if tokenizer is not None or dtype != "auto" or device is not None:
            raise OptionError("a hooked model is taken as it is; pass tokenizer, dtype and device where it is made")
        return _hooked(model)
    if not isinstance(dtype, torch.dtype) and dtype != "auto":
        raise OptionError(f'dtype={dtype!r}: give a torch dtype such as torch.bfloat16, or "auto"')
    if isinstance(model, torch.nn.Module):
        return _from_object(model, tokenizer, dtype, device)
    if isinstance(model, (str, Path)):
        return _from_name(str(model), tokenizer, dtype, device)
    raise ModelError(
        f"a {type(model).__name__} is no model: give a name, a directory, a model of transformers or a hooked model"
    )


def _from_name(name: str, tokenizer: Any, dtype: Dtype, device: Any) -> Any:
    is_toy = name.startswith(PREFIX)
    place = str(toy_folder(name)) if is_toy else name
    if Path(place).is_dir() and not (Path(place) / "config.json").exists():
        raise ModelError(
            f"the directory {place} holds no config.json, so it is no checkpoint; save_pretrained writes one"
        )
    if dtype == "auto":
        dtype = torch.float32 if is_toy else _checkpoint_dtype(place)
    if tokenizer is None:
        tokenizer = _tokenizer_of(place)
    return _boot(place, tokenizer=tokenizer, dtype=dtype, device=device, shown=name)


def _tokenizer_of(place: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:
        raise ModelError(
            f"{place} holds no tokenizer that loads ({_reason(error)}); pass one: load_model(…, tokenizer=…)"
        ) from error


def _checkpoint_dtype(name: str) -> torch.dtype:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ModelError(
            f"there is no model {name!r}: not a toy ({', '.join(toy_names())}), not a checkpoint directory here, "
            f"and the hub did not give it ({_reason(error)})"
        ) from error
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _from_object(hf_model: Any, tokenizer: Any, dtype: Dtype, device: Any) -> Any:
    if not hasattr(hf_model, "config"):
        raise ModelError(f"a {type(hf_model).__name__} is no model of transformers: it has no config")
    if tokenizer is None:
        raise ModelError("a model object comes without a tokenizer; pass one: load_model(model, tokenizer=…)")
    hf_model.config.architectures = [type(hf_model).__name__]
    name = getattr(hf_model.config, "_name_or_path", "") or type(hf_model).__name__
    _refuse_doubled_alibi(hf_model.config)
    dtype = hf_model.dtype if dtype == "auto" else dtype
    return _boot(name, hf_model=hf_model.to(dtype).eval(), tokenizer=tokenizer, dtype=dtype, device=device, shown=name)


def _boot(name: str, *, shown: str, tokenizer: Any, **options: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    try:
        with _quiet():
            bridge = TransformerBridge.boot_transformers(name, tokenizer=copy.deepcopy(tokenizer), **options)
        bridge.enable_compatibility_mode(no_processing=True, disable_warnings=True)
    except Exception as error:
        raise ModelError(f"TransformerLens cannot load {shown!r} as a hooked model: {_reason(error)}") from error
    # The very object that was given: the public setter would make a copy that always prepends BOS.
    bridge._tokenizer = tokenizer
    bridge.cfg.default_prepend_bos = prepends_bos(tokenizer)
    bridge.cfg.model_name = shown
    _refuse_doubled_alibi(bridge.original_model.config)
    setattr(bridge, _MARK, "raw")
    return bridge.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar for the loading of weights, which transformers draws for a toy of a megabyte too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def weights_kind(model: Any) -> str:
    """ "raw" for a model that ``load_model`` made; a model that was hooked elsewhere may have folded weights."""
    return getattr(model, _MARK, "as given, perhaps processed")


def _refuse_doubled_alibi(config: Any) -> None:
    if getattr(config, "model_type", None) == "falcon" and getattr(config, "alibi", False):
        raise ModelError(
            "Falcon's eager attention, which hooks need, adds ALiBi twice in transformers 4.46 to 5.23, so its numbers "
            "would be those of another model; mechattn does not mend this yet"
        )


def _hooked(model: Any) -> Any:
    _refuse_doubled_alibi(getattr(getattr(model, "original_model", None), "config", None))
    if "blocks.0.attn.hook_pattern" not in model.hook_dict:
        raise ModelError(
            "this hooked model has no hook named blocks.0.attn.hook_pattern; "
            "call model.enable_compatibility_mode(no_processing=True) first"
        )
    return model


def prepends_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself starts a text with its BOS token."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
