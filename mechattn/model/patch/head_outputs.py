"""Changes each head's output before W_O during a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.model.hooks import blocks_of, chosen_layers
from mechattn.model.split_heads import split_heads

_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")  # of attention, in transformers models
ChangeZ = Callable[[Float[Tensor, "batch pos head d_head"]], Float[Tensor, "batch pos head d_head"]]


@contextmanager
def changing_z(model: Any, layers: Mapping[int, ChangeZ]) -> Iterator[None]:
    """Call a function with each head's output before W_O; what it returns replaces the output."""
    with ExitStack() as stack:
        for layer, change in layers.items():
            changed = _Changed(change, layer, heads_of(model))
            stack.callback(_hook_z(model, layer, changed).remove)
            stack.callback(blocks_of(model)[layer].register_forward_hook(changed.check).remove)
        yield


def heads_of(model: Any) -> int:
    """The number of heads in a layer of a hooked model or a transformers model."""
    cfg = getattr(model, "cfg", None)
    if cfg is not None:
        return int(cfg.n_heads)
    config = getattr(model.config, "text_config", model.config)
    return int(config.num_attention_heads)


def check_layers(model: Any, layers: Iterable[int]) -> None:
    """Refuse layers that don't exist or have no attention."""
    if hasattr(model, "hook_dict"):
        chosen_layers(model, layers)
        return
    count = len(blocks_of(model))
    for layer in layers:
        if not 0 <= layer < count:
            raise OptionError(f"layer {layer} is out of range: there are layers 0 to {count - 1}")


def _hook_z(model: Any, layer: int, changed: _Changed) -> Any:
    if not hasattr(model, "hook_dict"):
        projection = _output_projection(model, layer)
        return projection.register_forward_pre_hook(lambda module, given: (changed(given[0]),))
    name = f"blocks.{layer}.attn.hook_z"
    if name not in model.hook_dict:
        raise ModelError(f"{model.cfg.model_name} has no {name}, so the outputs of its heads cannot be changed")
    return model.hook_dict[name].register_forward_hook(lambda module, given, z: changed(z))


def _output_projection(model: Any, layer: int) -> Any:
    """W_O of a layer of a transformers model."""
    for path, module in blocks_of(model)[layer].named_modules():
        if path.rpartition(".")[2] in _OUTPUT and ("attn" in path or "attention" in path):
            return module
    raise ModelError(f"no output projection of layer {layer} of a {type(model).__name__} is known to mechattn")


class _Changed:
    """A change of z that records whether it was made."""

    def __init__(self, change: ChangeZ, layer: int, heads: int) -> None:
        self.change, self.layer, self.heads = change, layer, heads
        self.called = False

    def __call__(self, z: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "batch pos ..."]:
        self.called = True
        return self.change(split_heads(z, self.heads)).to(z.dtype).reshape(z.shape)

    def check(self, block: Any, given: Any, out: Any) -> None:
        """After the layer has run, raise an error if this was not called."""
        if not self.called:
            raise ModelError(
                f"layer {self.layer} has run without its hook_z, so the outputs of its heads cannot be changed"
            )
        self.called = False
