"""A prompt's two runs, one with and one without inserted tokens, and what one run's heads do in the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import keeping_nothing
from mechattn.model.patch.head_outputs import changing_z
from mechattn.prompts.sequences import Sequence

Z = Float[Tensor, "pos head d_head"]
Where = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Run:
    """One reading of a sequence that ends in the reference answer.

    Args:
        sequence: What is read.
        z: Each head's output before W_O, by layer.
        logits: Before each token of the answer.
    """

    sequence: Sequence
    z: Mapping[int, Z]
    logits: Float[Tensor, "1 answer d_vocab"]

    @property
    def answer(self) -> Int[Tensor, " answer"]:
        """The tokens of the answer."""
        return self.sequence.tokens[self.sequence.of_segment("answer")]

    @property
    def places(self) -> Int[Tensor, " original"]:
        """Where each original token stands, in their order in the baseline."""
        return (~self.sequence.inserted).nonzero()[:, 0]


def read(model: HookedModel, sequence: Sequence, layers: Seq[int]) -> Run:
    """Read a sequence as it is."""
    seen: dict[int, Z] = {}

    def keep(layer: int, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        seen[layer] = z[0].detach()
        return z

    with changing_z(model, {layer: partial(keep, layer) for layer in layers}):
        logits = logits_of(model, sequence, 1)
    return Run(sequence, seen, logits)


def logits_of(
    model: HookedModel, sequence: Sequence, rows: int, gradients: bool = False
) -> Float[Tensor, "row answer d_vocab"]:
    """Logits before each token of the answer, of so many copies of a sequence in one batch."""
    device = next(model.parameters()).device
    tokens = sequence.tokens.to(device).expand(rows, -1)
    options: dict[str, Any] = dict(keeping_nothing(model))
    if sequence.position_ids is not None and not torch.equal(sequence.position_ids, torch.arange(len(sequence))):
        options["position_ids"] = sequence.position_ids.to(device).expand(rows, -1)
        options["attention_mask"] = torch.ones_like(tokens)
    with torch.set_grad_enabled(gradients):
        logits = model(tokens, return_type="logits", **options)
    before = sequence.of_segment("answer").nonzero()[:, 0].to(device) - 1
    return logits[:, before]


def patched_logits(model: HookedModel, receiver: Run, put: Mapping[Where, Z]) -> Float[Tensor, "row answer d_vocab"]:
    """Logits of the receiver with one head's output exchanged in each row: row i has the i-th of ``put``.

    Args:
        model: A hooked model.
        receiver: The run that is changed.
        put: For each (layer, head), what its output is at the receiver's original tokens [original d_head].
    """
    places = receiver.places
    of_layer: dict[int, list[tuple[int, int, Tensor]]] = {}
    for row, ((layer, head), value) in enumerate(put.items()):
        of_layer.setdefault(layer, []).append((row, head, value))

    def change(changes: list[tuple[int, int, Tensor]], z: Tensor) -> Tensor:
        z = z.clone()
        for row, head, value in changes:
            z[row, places.to(z.device), head] = value.to(z)
        return z

    with changing_z(model, {layer: partial(change, changes) for layer, changes in of_layer.items()}):
        return logits_of(model, receiver.sequence, len(put))


def gradients(
    model: HookedModel, receiver: Run, layers: Seq[int], metric: Callable[[Tensor], Float[Tensor, " row"]]
) -> tuple[Float[Tensor, ""], dict[int, Z]]:
    """The metric of a run, and its gradient by the output of every head at every token: one pass and its backward.

    Args:
        model: A hooked model.
        receiver: The run.
        layers: Of the heads.
        metric: A number from the logits before the answer.
    """
    outputs: dict[int, Tensor] = {}

    def keep(layer: int, z: Tensor) -> Tensor:
        outputs[layer] = z
        return z

    def begin(module: Any, given: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    with ExitStack() as stack:
        stack.callback(model.hook_dict[f"blocks.{min(layers)}.hook_resid_pre"].register_forward_hook(begin).remove)
        stack.enter_context(changing_z(model, {layer: partial(keep, layer) for layer in layers}))
        value = metric(logits_of(model, receiver.sequence, 1, gradients=True))[0]
    found = torch.autograd.grad(value, [outputs[layer] for layer in layers])
    return value.detach(), {layer: each[0] for layer, each in zip(layers, found, strict=True)}
