"""Changes the keys and values of a layer, and the output z of each head before W_O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.model.head_parts import is_latent
from mechattn.model.hooked import config_of
from mechattn.model.hooks import RequiredCall, block_of, chosen_layers, split_heads

# The names of attention's output projection, and of a projection to q, k and v together.
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense")
_FUSED_PROJECTIONS = ("query_key_value", "c_attn", "Wqkv", "qkv_proj")

# The order of the outputs of a fused projection: all q, all k, all v; or, group by group, queries,
# key and value. GPT-BigCode has one group, or one for each head.
_ONE_AFTER_THE_OTHER = {"gpt2", "mpt", "phi3"}
_BY_GROUP = {"gpt_neox", "gpt_bigcode", "bloom", "falcon"}

Part = Literal["k", "v"]
PARTS: tuple[Part, Part] = ("k", "v")

# From the concatenated keys or values of all heads to those that replace them.
Change = Callable[[Part, Float[Tensor, "batch pos width"]], Float[Tensor, "batch pos width"]]
Projected = Float[Tensor, "batch pos ..."]  # a hooked tensor, with its heads apart or concatenated
Z = Float[Tensor, "batch pos head d_head"]  # each head's output before W_O
ChangeZ = Callable[[Z], Z]


def changing_z(model: Any, changes: Mapping[int, ChangeZ]) -> AbstractContextManager[None]:
    """Inside a ``with`` block, a function changes the output z of each head before W_O.

    Args:
        model: A hooked model or a transformers model.
        changes: By layer, the function from z to the z that replaces it.

    Raises:
        ModelError: It is not known where a layer has z; or, inside the block, a layer has run
            without it.
    """
    return _with_hooks(_hook_z, model, changes)


def changing_keys_values(model: Any, changes: Mapping[int, Change]) -> AbstractContextManager[None]:
    """Inside a ``with`` block, a function changes the keys and the values of a layer.

    Args:
        model: A hooked model or a transformers model.
        changes: By layer, a function that is called for the keys and for the values. Its result
            replaces them.

    Raises:
        ModelError: It is not known where a layer computes its keys and values.
    """
    if hasattr(model, "hook_dict"):
        return _with_hooks(_hook_k_v, model, changes)
    return _with_hooks(_hook_projections, model, changes)


def heads_of(model: Any) -> int:
    """The number of heads in a layer of a hooked model or a transformers model."""
    if hasattr(model, "hook_dict"):
        return model.cfg.n_heads
    return config_of(model).num_attention_heads


def check_layers(model: Any, layers: Iterable[int]) -> None:
    """Refuse layers that don't exist or, in a hooked model, have no attention.

    Raises:
        OptionError: ``layers`` is empty, or a layer is refused.
        ModelError: No layer of a hooked model has attention.
    """
    if hasattr(model, "hook_dict"):
        chosen_layers(model, layers)
        return
    numbers = list(layers)
    if not numbers or not all(isinstance(number, Integral) for number in numbers):
        raise OptionError(f"layers={numbers}: give one or several layers, from 0")
    for number in numbers:
        block_of(model, number)  # raises OptionError if there is no such layer


@contextmanager
def _with_hooks(
    add_hooks: Callable[..., list[Any]], model: Any, changes: Mapping[int, Callable[..., Any]]
) -> Iterator[None]:
    """Inside a ``with`` block, each of these layers has the hooks that ``add_hooks`` adds."""
    with ExitStack() as stack:
        for layer, change in changes.items():
            for handle in add_hooks(model, layer, change):
                stack.callback(handle.remove)
        yield


def _hook_z(model: Any, layer: int, change: ChangeZ) -> list[Any]:
    """Add the hooks that change z of a layer and refuse a layer that has run without it."""
    heads = heads_of(model)
    required_call = RequiredCall(
        f"layer {layer} has run without its hook_z, so the outputs of its heads cannot be changed"
    )

    def changed_z(z: Projected) -> Projected:
        required_call.called = True
        replacement = change(split_heads(z, heads))
        return replacement.to(z.dtype).reshape(z.shape)

    if hasattr(model, "hook_dict"):
        point = _hook_point(model, f"blocks.{layer}.attn.hook_z")
        handle = point.register_forward_hook(lambda module, args, z: changed_z(z))
    else:
        projection = _output_projection(model, layer)
        handle = projection.register_forward_pre_hook(lambda module, args: (changed_z(args[0]),))

    return [handle, block_of(model, layer).register_forward_hook(required_call.check)]


def _output_projection(model: Any, layer: int) -> Any:
    """The output projection of a layer in a transformers model, found by its name."""
    for path, module in block_of(model, layer).named_modules():
        is_attention = "attn" in path or "attention" in path
        if is_attention and path.rpartition(".")[2] in _OUTPUT_PROJECTIONS:
            return module
    raise ModelError(
        f"no output projection of layer {layer} of a {type(model).__name__} is known to mechattn"
    )


def _hook_k_v(model: Any, layer: int, change: Change) -> list[Any]:
    """Add hooks that change the keys and values of a hooked model, at hook_k and hook_v."""
    if is_latent(model, layer):
        raise ModelError(
            f"{model.cfg.model_name} keeps latents (MLA) in place of keys and values, and mechattn"
            " cannot change those"
        )

    points = {part: _hook_point(model, f"blocks.{layer}.attn.hook_{part}") for part in PARTS}
    return [_hook_output(point, part, change) for part, point in points.items()]


def _hook_point(model: Any, name: str) -> Any:
    """The hook point with this name in a hooked model."""
    point = model.hook_dict.get(name)
    if point is None:
        raise ModelError(f"{model.cfg.model_name} has no {name}, so nothing can be changed there")
    return point


def _hook_projections(model: Any, layer: int, change: Change) -> list[Any]:
    """Add hooks that change the keys and values of a transformers model, at its projections."""
    modules = {
        path.rpartition(".")[2]: module for path, module in block_of(model, layer).named_modules()
    }

    if "k_proj" in modules and "v_proj" in modules:
        return [_hook_output(modules[f"{part}_proj"], part, change) for part in PARTS]

    fused_projections = [modules[name] for name in _FUSED_PROJECTIONS if name in modules]
    columns = _columns(config_of(model))
    if not fused_projections or columns is None:
        raise ModelError(
            f"mechattn does not know where a {type(model).__name__} computes its keys and values"
        )
    return [_hook_output(fused_projections[0], part, change, columns[part]) for part in PARTS]


def _hook_output(
    module: Any, part: Part, change: Change, columns: Int[Tensor, " width"] | None = None
) -> Any:
    """Add a hook that changes the output of a module, or only these columns of it.

    Args:
        module: A hook point or a projection.
        part: Whether the output, or these columns, are keys or values.
        change: The function that changes them.
        columns: The columns to change; all by default.
    """

    def replaced_output(module: Any, args: Any, output: Projected) -> Tensor:
        projected = output.flatten(2)
        if columns is None:
            return change(part, projected).to(output.dtype).reshape(output.shape)
        index = columns.to(output.device)
        replacement = change(part, projected[..., index]).to(output.dtype)
        return projected.index_copy(-1, index, replacement)

    return module.register_forward_hook(replaced_output)


def _columns(config: Any) -> dict[Part, Int[Tensor, " width"]] | None:
    """The columns of a fused projection's output that are keys or values; None if unknown."""
    heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = _kv_heads(config, heads)
    columns = torch.arange((heads + 2 * kv_heads) * d_head)

    if config.model_type in _ONE_AFTER_THE_OTHER:
        sizes = [heads * d_head, kv_heads * d_head, kv_heads * d_head]
        _, key_columns, value_columns = columns.split(sizes)
        return {"k": key_columns, "v": value_columns}

    if config.model_type in _BY_GROUP:
        vectors_of_group = heads // kv_heads + 2  # queries, then a key and a value
        by_group = columns.view(kv_heads, vectors_of_group, d_head)
        return {"k": by_group[:, -2].flatten(), "v": by_group[:, -1].flatten()}
    return None


def _kv_heads(config: Any, heads: int) -> int:
    """The number of key-value heads of a transformers model, that is of groups of its heads."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return config.num_kv_heads
    if config.model_type in ("falcon", "gpt_bigcode") and config.multi_query:
        return 1
    return getattr(config, "num_key_value_heads", None) or heads
