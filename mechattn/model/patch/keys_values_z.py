"""Changes a layer's projected keys and values, and each head's output z before W_O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.model.head_parts import is_latent, split_heads
from mechattn.model.hooks import Needed, blocks_of, chosen_layers

_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")  # of attention, in transformers models
_ONE_AFTER_THE_OTHER = {
    "gpt2",
    "gpt_bigcode",
    "mpt",
    "phi3",
}  # a fused projection's columns: all q, all k, all v
_BY_GROUP = {"gpt_neox", "bloom", "falcon"}  # for each group: its queries, their key, their value
Part = Literal["k", "v"]
_PARTS: tuple[Part, Part] = ("k", "v")
# Receives the keys or values of all heads, concatenated; what it returns replaces them.
Change = Callable[[Part, Float[Tensor, "batch pos width"]], Float[Tensor, "batch pos width"]]
ChangeZ = Callable[[Float[Tensor, "batch pos head d_head"]], Float[Tensor, "batch pos head d_head"]]


def changing_z(model: Any, layers: Mapping[int, ChangeZ]) -> AbstractContextManager[None]:
    """Call a function with each head's output before W_O; what it returns replaces the output."""
    return _put(_put_at_z, model, layers)


def changing_keys_values(model: Any, layers: Mapping[int, Change]) -> AbstractContextManager[None]:
    """Call functions with the keys and the values of a layer; what they return replaces them."""
    return _put(_put_in_hooked if hasattr(model, "hook_dict") else _put_in_plain, model, layers)


@contextmanager
def _put(
    hooks: Callable[..., list[Any]], model: Any, layers: Mapping[int, Callable[..., Any]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for layer, change in layers.items():
            for handle in hooks(model, layer, change):
                stack.callback(handle.remove)
        yield


def heads_of(model: Any) -> int:
    """The number of heads in a layer of a hooked model or a transformers model."""
    if (cfg := getattr(model, "cfg", None)) is not None:
        return int(cfg.n_heads)
    return int(getattr(model.config, "text_config", model.config).num_attention_heads)


def check_layers(model: Any, layers: Iterable[int]) -> None:
    """Refuse layers that don't exist or have no attention."""
    if hasattr(model, "hook_dict"):
        chosen_layers(model, layers)
        return
    count = len(blocks_of(model))
    for layer in layers:
        if not 0 <= layer < count:
            raise OptionError(f"layer {layer} is out of range: there are layers 0 to {count - 1}")


def _put_at_z(model: Any, layer: int, change: ChangeZ) -> list[Any]:
    heads = heads_of(model)
    needed = Needed(
        f"layer {layer} has run without its hook_z, so the outputs of its heads cannot be changed"
    )

    def changed(z: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "batch pos ..."]:
        needed.called = True
        return change(split_heads(z, heads)).to(z.dtype).reshape(z.shape)

    block = blocks_of(model)[layer]
    if hasattr(model, "hook_dict"):
        if (point := model.hook_dict.get(name := f"blocks.{layer}.attn.hook_z")) is None:
            raise ModelError(
                f"{model.cfg.model_name} has no {name}, so the outputs of its heads cannot be changed"
            )
        handle = point.register_forward_hook(lambda module, given, z: changed(z))
    else:
        attention = [
            (p.rpartition(".")[2], m)
            for p, m in block.named_modules()
            if "attn" in p or "attention" in p
        ]
        if (
            projection := next((module for name, module in attention if name in _OUTPUT), None)
        ) is None:
            raise ModelError(
                f"no output projection of layer {layer} of a {type(model).__name__} is known to mechattn"
            )
        handle = projection.register_forward_pre_hook(lambda module, given: (changed(given[0]),))
    return [handle, block.register_forward_hook(needed.check)]


def _put_in_hooked(model: Any, layer: int, change: Change) -> list[Any]:
    if is_latent(model, layer):
        raise ModelError(
            f"{model.cfg.model_name} keeps latents (MLA) in place of keys and values: not known here"
        )

    def changed(part: Part, module: Any, given: Any, shown: Tensor) -> Tensor:
        return change(part, shown.flatten(2)).to(shown.dtype).reshape(shown.shape)

    names = {part: f"blocks.{layer}.attn.hook_{part}" for part in _PARTS}
    if missing := [name for name in names.values() if name not in model.hook_dict]:
        raise ModelError(
            f"{model.cfg.model_name} has no {missing[0]}, so its keys and values cannot be changed"
        )
    return [
        model.hook_dict[name].register_forward_hook(partial(changed, part))
        for part, name in names.items()
    ]


def _put_in_plain(model: Any, layer: int, change: Change) -> list[Any]:
    modules = {
        path.rpartition(".")[2]: module for path, module in blocks_of(model)[layer].named_modules()
    }

    def changed(part: Part, module: Any, given: Any, out: Tensor) -> Tensor:
        return change(part, out).to(out.dtype)

    if "k_proj" in modules and "v_proj" in modules:
        return [
            modules[f"{part}_proj"].register_forward_hook(partial(changed, part)) for part in _PARTS
        ]
    fused = next(
        (
            modules[name]
            for name in ("query_key_value", "c_attn", "Wqkv", "qkv_proj")
            if name in modules
        ),
        None,
    )
    columns = (
        None if fused is None else _columns(getattr(model.config, "text_config", model.config))
    )
    if fused is None or columns is None:
        raise ModelError(
            f"mechattn does not know where a {type(model).__name__} makes its keys and values"
        )

    def changed_columns(module: Any, given: Any, out: Tensor) -> Tensor:
        out = out.clone()
        for part in _PARTS:
            where = columns[part].to(out.device)
            out[..., where] = change(part, out[..., where]).to(out.dtype)
        return out

    return [fused.register_forward_hook(changed_columns)]


def _columns(config: Any) -> dict[Part, Int[Tensor, " width"]] | None:
    """Which outputs of a fused projection are keys, and which are values; None if unknown."""
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    if config.model_type == "falcon" and config.new_decoder_architecture:
        groups = int(config.num_kv_heads)
    elif config.model_type in ("falcon", "gpt_bigcode"):
        groups = 1 if config.multi_query else heads
    if config.model_type in _ONE_AFTER_THE_OTHER:
        first = torch.arange(groups * width)
        return {"k": heads * width + first, "v": (heads + groups) * width + first}
    if config.model_type in _BY_GROUP:
        places = torch.arange((heads + 2 * groups) * width).view(groups, heads // groups + 2, width)
        return {"k": places[:, -2].flatten(), "v": places[:, -1].flatten()}
    return None
