"""The graph of a model: what writes into the residual stream, what reads from it, and a pass in which edges change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers
from mechattn.patching.patched_runs import logits_of
from mechattn.prompts.token_sequences import Sequence

Written = Float[Tensor, "row pos writer d_model"]
# Receives a reading place (such as ("q", 3)), what the readers there read, and a function for what was written before.
Reading = Callable[
    [tuple[str, int], Float[Tensor, "row pos reader d_model"], Callable[[], Written]], Tensor
]
# What showing edges needs; TransformerLens refuses the first beside the third.
_SWITCHES = {
    "use_attn_in": False,
    "use_attn_result": True,
    "use_split_qkv_input": True,
    "use_hook_mlp_in": True,
}


@dataclass(frozen=True)
class Graph:
    """A model's writers (embedding, heads, MLPs), readers (q, k, v of heads, MLPs, logits), and edges between them."""

    writers: tuple[str, ...]  # "embedding", "L0H1", "L0MLP"
    readers: tuple[
        str, ...
    ]  # "L1H0.q", "L1H0.k", "L1H0.v" (of heads with keys of their own), "L1MLP", "logits"
    exists: Bool[np.ndarray, "writer reader"]  # which writers come before which readers
    places: dict[
        tuple[str, int], slice
    ]  # the readers of each reading place, in the order of a forward pass

    def before(self, place: tuple[str, int]) -> int:
        """How many writers come before a reading place."""
        return int(self.exists[:, self.places[place].start].sum())

    @property
    def edges(self) -> list[tuple[int, int]]:
        """All edges as pairs of numbers."""
        return [(int(w), int(r)) for w, r in np.argwhere(self.exists)]


def graph_of(model: HookedModel) -> Graph:
    """The graph of a model, refused if its hooks don't give the inputs of single heads."""
    cfg = model.cfg
    layers = range(int(cfg.n_layers))
    if len(attention_layers(model)) < len(layers) or not hasattr(model, "set_use_split_qkv_input"):
        raise _no_inputs(model)
    counts = {"q": int(cfg.n_heads), "k": kv_heads_of(model), "v": kv_heads_of(model)}
    parallel, writers = bool(getattr(cfg, "parallel_attn_mlp", False)), ["embedding"]
    readers: list[str] = []
    before: list[int] = []
    places: dict[tuple[str, int], slice] = {}

    def reads(place: str, layer: int, names: list[str], seen: int) -> None:
        places[place, layer] = slice(len(readers), len(readers) + len(names))
        readers.extend(names)
        before.extend([seen] * len(names))

    for layer in layers:
        start = len(writers)
        for part, count in counts.items():
            reads(part, layer, [f"L{layer}H{head}.{part}" for head in range(count)], start)
        writers.extend(f"L{layer}H{head}" for head in range(counts["q"]))
        if has_mlp(model, layer):
            reads("mlp", layer, [f"L{layer}MLP"], start if parallel else len(writers))
            writers.append(f"L{layer}MLP")
    reads("logits", layers[-1], ["logits"], len(writers))
    exists = np.arange(len(writers))[:, None] < np.array(before)
    return Graph(tuple(writers), tuple(readers), exists, places)


def _no_inputs(model: HookedModel) -> ModelError:
    return ModelError(
        f"TransformerLens gives no inputs of single heads of {model.cfg.model_name}, so it has no edges here: patch "
        "nodes with ma.patch, or paths between heads with ma.paths"
    )


def has_mlp(model: HookedModel, layer: int) -> bool:
    """Whether a layer has an MLP that TransformerLens shows."""
    return (
        f"blocks.{layer}.hook_mlp_in" in model.hook_dict
        and f"blocks.{layer}.hook_mlp_out" in model.hook_dict
    )


@contextmanager
def showing_edges(model: HookedModel) -> Iterator[None]:
    """Let TransformerLens compute each head's result and inputs by themselves, during a ``with`` block."""
    before = {name: bool(getattr(model.cfg, name, False)) for name in _SWITCHES}
    changed = [name for name, on in _SWITCHES.items() if on != before[name]]
    try:
        for name in changed:
            getattr(model, f"set_{name}")(_SWITCHES[name])
        yield
    finally:
        for name in reversed(changed):
            getattr(model, f"set_{name}")(before[name])


def run_edges(
    model: HookedModel,
    graph: Graph,
    sequence: Sequence,
    rows: int,
    reading: Reading | None = None,
    embedded: Callable[[Tensor], Tensor] | None = None,
    gradients: bool = False,
) -> tuple[Float[Tensor, "row answer d_vocab"], Written]:
    """Logits before the answer and what every writer writes; ``reading`` and ``embedded`` may replace what is read."""
    written: dict[
        str, Tensor
    ] = {}  # by the name of the first writer, as a parallel MLP may come before the heads

    def all_written() -> Tensor:
        return torch.cat([written[name] for name in graph.writers if name in written], 2)

    def wrote(first: str, module: Any, given: Any, x: Tensor) -> Tensor:
        x = embedded(x) if embedded is not None and first == graph.writers[0] else x
        written[first] = x if x.ndim == 4 else x[:, :, None]
        return x

    def reads(place: tuple[str, int], module: Any, given: Any, x: Tensor) -> Tensor:
        assert reading is not None
        made = reading(
            place,
            x if x.ndim == 4 else x[:, :, None],
            lambda: all_written()[:, :, : graph.before(place)],
        )
        return made.reshape(x.shape)

    with ExitStack() as stack:

        def at(name: str, function: Callable[..., Any]) -> None:
            stack.callback(model.hook_dict[name].register_forward_hook(function).remove)

        at("blocks.0.hook_resid_pre", partial(wrote, graph.writers[0]))
        for layer in range(int(model.cfg.n_layers)):
            at(f"blocks.{layer}.attn.hook_result", partial(wrote, f"L{layer}H0"))
            if ("mlp", layer) in graph.places:
                at(f"blocks.{layer}.hook_mlp_out", partial(wrote, f"L{layer}MLP"))
        for place in graph.places if reading is not None else ():
            at(_HOOKS[place[0]].format(place[1]), partial(reads, place))
        logits = logits_of(model, sequence, rows, gradients)
    if all_written().shape[2] < len(graph.writers):
        raise _no_inputs(model)
    return logits, all_written().detach()


_HOOKS = {
    **{part: "blocks.{}.attn.hook_" + part + "_input" for part in "qkv"},
    "mlp": "blocks.{}.hook_mlp_in",
    "logits": "blocks.{}.hook_resid_post",
}


def replaced(
    kept: Bool[Tensor, "row writer reader"], graph: Graph, put: Float[Tensor, "pos writer d_model"]
) -> Reading:
    """A reading in which every edge that a row does not keep carries ``put`` in place of what was written.

    ``input of v = Σ_u written_u + Σ_{u not kept} (put_u − written_u)``, exact because the residual stream is a sum.
    """
    cut = ~torch.as_tensor(kept) & torch.as_tensor(graph.exists)

    def reading(place: tuple[str, int], x: Tensor, written: Callable[[], Written]) -> Tensor:
        there = cut[:, : graph.before(place), graph.places[place]]
        if not there.any():
            return x
        step = put[None, :, : there.shape[1]].to(x) - written()
        return x + torch.einsum("nwr,npwd->nprd", there.to(x), step)

    return reading
