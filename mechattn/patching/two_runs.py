"""A prompt's two runs, with and without inserted tokens, and patching from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.model.devices import device_of
from mechattn.model.heads import kv_heads_of, split_heads
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import keeping_nothing
from mechattn.model.patch.keys_values_z import changing_keys_values, changing_z
from mechattn.prompts.sequences import Sequence

# Each head's output before W_O; its values before RoPE and norms (for heads with their own values); its pattern
# [pos head key]; the residual stream after a layer, treated as one head.
Part = Literal["z", "v", "pattern", "resid_post"]
Z = Float[Tensor, "pos head d_head"]
Where = tuple[int, int]  # layer, head
Change = tuple[Where, Int[Tensor, " some"], Float[Tensor, "some d_head"]]  # a head, positions, and what to put there


@dataclass(frozen=True)
class Run:
    """One run of a sequence that ends in the reference answer: a part by layer, and the logits before the answer."""

    sequence: Sequence
    z: Mapping[int, Z]
    logits: Float[Tensor, "1 answer d_vocab"]

    @property
    def answer(self) -> Int[Tensor, " answer"]:
        """The tokens of the answer."""
        return self.sequence.tokens[self.sequence.of_segment("answer")]

    @property
    def places(self) -> Int[Tensor, " original"]:
        """The position of each original token, in baseline order."""
        return (~self.sequence.inserted).nonzero()[:, 0]


@contextmanager
def changing(model: HookedModel, part: Part, layers: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace a part of each layer [batch pos head d_head] by a function of it during forward passes."""
    with ExitStack() as stack:
        if part == "z":
            stack.enter_context(changing_z(model, layers))
        elif part == "v":
            values = {n: partial(_values_only, change, kv_heads_of(model)) for n, change in layers.items()}
            stack.enter_context(changing_keys_values(model, values))
        else:
            name, shape, by_head = _HOOKS[part]
            for layer, change in layers.items():
                put = partial(_reshaped, change, f"{shape} -> {by_head}", f"{by_head} -> {shape}")
                stack.callback(model.hook_dict[name.format(layer)].register_forward_hook(put).remove)
        yield


# Hooks whose values have other axes than [batch pos head d_head], and those axes in that order.
_HOOKS = {
    "pattern": ("blocks.{}.attn.hook_pattern", "batch head query key", "batch query head key"),
    "resid_post": ("blocks.{}.hook_resid_post", "batch pos d_model", "batch pos 1 d_model"),
}


def _values_only(change: Callable[[Tensor], Tensor], heads: int, which: str, shown: Tensor) -> Tensor:
    return change(split_heads(shown, heads)).reshape(shown.shape) if which == "v" else shown


def _reshaped(change: Callable[[Tensor], Tensor], there: str, back: str, module: Any, given: Any, x: Tensor) -> Tensor:
    return rearrange(change(rearrange(x, there)), back)


def read(model: HookedModel, sequence: Sequence, layers: Seq[int], part: Part = "z") -> Run:
    """Run a sequence without patching."""
    seen: dict[int, Z] = {}

    def keep(layer: int, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        seen[layer] = z[0].detach()
        return z

    with changing(model, part, {layer: partial(keep, layer) for layer in layers}):
        logits = logits_of(model, sequence, 1)
    return Run(sequence, seen, logits)


def logits_of(
    model: HookedModel, sequence: Sequence, rows: int, gradients: bool = False
) -> Float[Tensor, "row answer d_vocab"]:
    """Logits before each token of the answer, for several copies of a sequence in a batch."""
    device = device_of(model)
    tokens = sequence.tokens.to(device).expand(rows, -1)
    options: dict[str, Any] = dict(keeping_nothing(model))
    if sequence.position_ids is not None and not torch.equal(sequence.position_ids, torch.arange(len(sequence))):
        options["position_ids"] = sequence.position_ids.to(device).expand(rows, -1)
        options["attention_mask"] = torch.ones_like(tokens)
    with torch.set_grad_enabled(gradients):
        logits = model(tokens, return_type="logits", **options)
    before = sequence.of_segment("answer").nonzero()[:, 0].to(device) - 1
    return logits[:, before]


def patched_logits(
    model: HookedModel, sequence: Sequence, put: Seq[Seq[Change]], part: Part = "z"
) -> Float[Tensor, "row answer d_vocab"]:
    """Logits of a sequence with a part replaced in each row; row i makes the changes ``put[i]``."""
    of_layer: dict[int, list[tuple[int, int, Tensor, Tensor]]] = {}
    for row, changes in enumerate(put):
        for (layer, head), places, value in changes:
            of_layer.setdefault(layer, []).append((row, head, places, value))

    def change(changes: list[tuple[int, int, Tensor, Tensor]], z: Tensor) -> Tensor:
        z = z.clone()
        for row, head, places, value in changes:
            z[row, places.to(z.device), head] = value.to(z)
        return z

    with changing(model, part, {layer: partial(change, changes) for layer, changes in of_layer.items()}):
        return logits_of(model, sequence, len(put))


def read_with_gradients(
    model: HookedModel, sequence: Sequence, layers: Seq[int], metric: Callable[[Run], Float[Tensor, " row"]]
) -> tuple[Run, dict[int, Z]]:
    """Run a sequence and compute the gradient of a metric with respect to every head's output at every token."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int, z: Tensor) -> Tensor:
        outputs[layer] = z
        return z

    def begin(module: Any, given: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    with ExitStack() as stack:
        stack.callback(model.hook_dict[f"blocks.{min(layers)}.hook_resid_pre"].register_forward_hook(begin).remove)
        stack.enter_context(changing_z(model, {layer: partial(keep, layer) for layer in layers}))
        logits = logits_of(model, sequence, 1, gradients=True)
    value = metric(Run(sequence, {}, logits))[0]
    found = torch.autograd.grad(value, [outputs[layer] for layer in layers])
    run = Run(sequence, {layer: z[0].detach() for layer, z in outputs.items()}, logits.detach())
    return run, {layer: each[0] for layer, each in zip(layers, found, strict=True)}
