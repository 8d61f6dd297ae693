"""The graph of a model: what writes into the residual stream, what reads from it, and forward
passes that change single edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.analysis.direct_logits import NORM_INPUT, norms_after
from mechattn.errors import ModelError
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers
from mechattn.model.unembedding import FrozenNorm
from mechattn.patching.answer_metrics import Logits
from mechattn.patching.patched_runs import ActivationChange, Part, head_count, logits_of, on_output
from mechattn.prompts.token_sequences import TokenSequence

# A set of edges, such as those that exist or those of a circuit.
EdgeSet = Bool[np.ndarray, "writer reader"]
# What each writer adds to the residual stream at each token.
Written = Float[Tensor, "writer pos d_model"]
# The readers of one kind in a layer, which share a hook, such as ("q", 3).
Component = tuple[str, int]
# A function of a component and the inputs of its readers that returns what they read instead.
ChangeRead = Callable[[Component, Float[Tensor, "row pos reader d_model"]], Tensor]
# A function that receives the outputs of some writers.
SeeWritten = Callable[[slice, Float[Tensor, "row pos writer d_model"]], None]
# The name of a hook, and a function of its activation that may return a replacement.
Hook = tuple[str, Callable[[Tensor], Any]]
_HEAD_PARTS: tuple[Part, ...] = ("q", "k", "v")  # in the order of readers
_HOOKS = {
    "q": "blocks.{}.attn.hook_q_input",
    "k": "blocks.{}.attn.hook_k_input",
    "v": "blocks.{}.attn.hook_v_input",
    "mlp": "blocks.{}.hook_mlp_in",
    "logits": "blocks.{}.hook_resid_post",
}
# The switches that showing edges needs. ``use_attn_in`` must be off, because TransformerLens
# refuses it together with ``use_split_qkv_input``.
_SWITCHES = {
    "use_attn_in": False,
    "use_attn_result": True,
    "use_split_qkv_input": True,
    "use_hook_mlp_in": True,
}


@dataclass(frozen=True, eq=False)
class Graph:
    """A model's writers (embedding, heads, MLPs), its readers (q, k and v of heads, MLPs, logits),
    and the edges between them.
    """

    # "embedding", "L0H1", "L0MLP"
    writers: tuple[str, ...]
    # "L1H0.q", "L1H0.k", "L1H0.v" (of heads with keys of their own), "L1MLP", "logits"
    readers: tuple[str, ...]
    exists: EdgeSet  # an edge exists if its writer comes before its reader
    # The indices of each component's readers. Components are in the order of a forward pass.
    components: Mapping[Component, slice]
    # The nodes that each reader is an input of: its head or MLP, or all heads that share these keys
    # or values.
    nodes_after: Mapping[str, list[str]]
    # Norms between attention and the residual stream, by layer (Gemma 2 and 3, OLMo 2).
    norms: Mapping[int, FrozenNorm]

    @property
    def edges(self) -> Int[np.ndarray, "edge 2"]:
        """The index of the writer and the index of the reader, for each edge."""
        return np.argwhere(self.exists)


def graph_of(model: HookedModel) -> Graph:
    """The graph of a model.

    Raises:
        ModelError: The model has no hooks for the inputs of single heads.
    """
    cfg = model.cfg
    layers = range(cfg.n_layers)
    lacks_attention = len(attention_layers(model)) < len(layers)
    if lacks_attention or not hasattr(model, "set_use_split_qkv_input"):
        raise _unreadable_edges(model)

    is_parallel = getattr(cfg, "parallel_attn_mlp", False)
    writers = ["embedding"]
    nodes_after: dict[str, list[str]] = {}
    writer_counts: list[int] = []  # of the writers before each reader
    components: dict[Component, slice] = {}

    def add_readers(component: Component, nodes: dict[str, list[str]], writer_count: int) -> None:
        first_reader = len(nodes_after)
        components[component] = slice(first_reader, first_reader + len(nodes))
        nodes_after.update(nodes)
        writer_counts.extend([writer_count] * len(nodes))

    for layer in layers:
        writers_before_attention = len(writers)
        heads = [f"L{layer}H{head}" for head in range(cfg.n_heads)]
        for part in _HEAD_PARTS:
            count = head_count(model, part)
            names = [f"L{layer}H{head}.{part}" for head in range(count)]
            # Successive heads may share keys and values.
            heads_by_reader = np.reshape(heads, (count, -1)).tolist()
            nodes = dict(zip(names, heads_by_reader, strict=True))
            add_readers((part, layer), nodes, writers_before_attention)
        writers.extend(heads)

        hooks_of_mlp = {f"blocks.{layer}.hook_mlp_in", f"blocks.{layer}.hook_mlp_out"}
        if hooks_of_mlp <= model.hook_dict.keys():
            # An MLP parallel to attention does not read what this layer's heads write.
            writers_before_mlp = writers_before_attention if is_parallel else len(writers)
            mlp = f"L{layer}MLP"
            add_readers(("mlp", layer), {mlp: [mlp]}, writers_before_mlp)
            writers.append(mlp)
    add_readers(("logits", layers[-1]), {"logits": ["logits"]}, len(writers))

    exists = np.arange(len(writers))[:, None] < np.array(writer_counts)
    return Graph(
        writers=tuple(writers),
        readers=tuple(nodes_after),
        exists=exists,
        components=components,
        nodes_after=nodes_after,
        norms=norms_after(model, layers),
    )


@contextmanager
def showing_edges(model: HookedModel) -> Iterator[None]:
    """Let TransformerLens compute the inputs and the result of each head separately inside a
    ``with`` block.
    """
    changed_names = []
    for name, value in _SWITCHES.items():
        if bool(getattr(model.cfg, name, False)) != value:
            changed_names.append(name)

    try:
        for name in changed_names:
            getattr(model, f"set_{name}")(_SWITCHES[name])
        yield
    finally:
        # In reverse order, because TransformerLens refuses some of them together.
        for name in reversed(changed_names):
            getattr(model, f"set_{name}")(not _SWITCHES[name])


def run_edges(
    model: HookedModel,
    graph: Graph,
    sequence: TokenSequence,
    rows: int,
    *,
    change_read: ChangeRead | None = None,
    see_written: SeeWritten | None = None,
    change_embedding: ActivationChange | None = None,
    gradients: bool = False,
) -> Logits:
    """The logits that predict the answer, in a pass that may change what is read.

    Where a norm follows attention, a head writes its share of the norm's output,
    ``γ · result / σ``, with the σ of this pass. Call this function inside a ``showing_edges``
    block.

    Args:
        model: The hooked model.
        graph: The graph of the model.
        sequence: A sequence that ends in the reference answer.
        rows: The number of copies of the sequence in the batch.
        change_read: Returns what the readers of a component read instead of their inputs.
        see_written: Receives what each writer writes.
        change_embedding: Returns what replaces the embeddings [row pos d_model].
        gradients: Whether the pass keeps what gradients of activations need.
    """
    hooks: list[Hook] = []
    hook_embedding = "blocks.0.hook_resid_pre"
    if change_embedding is not None:
        hooks.append((hook_embedding, change_embedding))
    if see_written is not None:
        hooks.append((hook_embedding, lambda x: see_written(slice(0, 1), _by_node(x))))
        for layer in range(model.cfg.n_layers):
            hooks += _hooks_of_writers(model, graph, layer, see_written)
    if change_read is not None:
        for component in graph.components:
            kind, layer = component
            name = _HOOKS[kind].format(layer)
            hooks.append((name, partial(_changed_inputs, change_read, component)))

    with ExitStack() as stack:
        for name, function in hooks:
            handle = model.hook_dict[name].register_forward_hook(partial(on_output, function))
            stack.enter_context(handle)
        return logits_of(model, [sequence] * rows, gradients)


@dataclass(frozen=True, eq=False)
class UnchangedRun:
    """The logits of an unchanged run, what each writer writes, and the residual stream that the
    logits read.
    """

    logits: Float[Tensor, "1 answer d_vocab"]
    written: Written
    stream: Float[Tensor, "pos d_model"]


def read_edges(model: HookedModel, graph: Graph, sequence: TokenSequence) -> UnchangedRun:
    """Run a sequence and record what each writer writes, inside a ``showing_edges`` block.

    Args:
        model: The hooked model.
        graph: The graph of the model.
        sequence: A sequence that ends in the reference answer.

    Raises:
        ModelError: The hooks of some writers did not fire.
    """
    # Outputs are copied at once, as a block may add to them in place (Falcon's in transformers).
    written: Tensor | None = None
    writer_count = 0
    streams: list[Tensor] = []  # the only one is what the logits read

    def record_written(writers: slice, x: Tensor) -> None:
        nonlocal written, writer_count
        _, length, count, width = x.shape
        if written is None:
            written = x.new_empty(len(graph.writers), length, width)
        by_writer = x[0].transpose(0, 1)
        written[writers] = by_writer.to(written.device)
        writer_count += count

    def record_stream(component: Component, x: Tensor) -> Tensor:
        kind, _ = component
        if kind == "logits":
            streams.append(x[0, :, 0])
        return x

    logits = run_edges(
        model, graph, sequence, 1, change_read=record_stream, see_written=record_written
    )
    if written is None or writer_count < len(graph.writers):
        raise _unreadable_edges(model)
    [stream] = streams
    return UnchangedRun(logits, written, stream)


class ReplacedEdges:
    """Replaces what edges carry in a pass, except along the edges that each row keeps.

    ``input of v = Σ_u written_u + Σ_{u not kept} (replacement_u − written_u)``

    This is exact because the residual stream is a sum. One buffer holds the steps
    ``replacement_u − written_u`` of all writers, and is filled as they write. The inputs of a
    component then take a single matrix product with the buffer, without a copy of it.

    Args:
        kept_edges: The edges that each row keeps.
        graph: The graph of the model.
        replacement: What the other edges carry instead of what is written.
    """

    def __init__(
        self,
        kept_edges: Bool[Tensor, "row writer reader"],
        graph: Graph,
        replacement: Written,
    ) -> None:
        cut_edges = ~kept_edges & torch.as_tensor(graph.exists)
        self._graph = graph
        self._replacement = replacement
        by_reader = rearrange(cut_edges, "row writer reader -> row reader writer")
        self._cut_edges = by_reader.to(replacement)
        self._steps = replacement.new_empty(len(kept_edges), *replacement.shape)

    def see_written(self, writers: slice, x: Float[Tensor, "row pos writer d_model"]) -> None:
        """Store the steps of some writers in the buffer."""
        written = rearrange(
            x.to(self._replacement), "row pos writer d_model -> row writer pos d_model"
        )
        torch.sub(self._replacement[writers], written, out=self._steps[:, writers])

    def change_read(
        self, component: Component, x: Float[Tensor, "row pos reader d_model"]
    ) -> Float[Tensor, "row pos reader d_model"]:
        """The inputs of a component's readers, plus the steps along the edges that are cut."""
        readers = self._graph.components[component]
        writer_count = int(self._graph.exists[:, readers.start].sum())  # those before the readers
        cut_edges = self._cut_edges[:, readers, :writer_count]
        if not cut_edges.any():
            return x

        steps = self._steps[:, :writer_count].flatten(2)  # a view: the last two axes are contiguous
        change = torch.bmm(cut_edges, steps).unflatten(2, self._steps.shape[2:])
        change = rearrange(change, "row reader pos d_model -> row pos reader d_model")
        return x + change.to(x)


def _unreadable_edges(model: HookedModel) -> ModelError:
    """The error for a model whose edges cannot be read."""
    return ModelError(
        f"TransformerLens has no hooks for the inputs of single heads of {model.cfg.model_name}, "
        "so its edges cannot be read: patch nodes with ma.patch, or paths between heads with "
        "ma.paths"
    )


def _by_node(x: Tensor) -> Tensor:
    """An activation as [row pos node d_model], with a new axis if it has no axis of heads."""
    if x.ndim == 4:
        return x
    return x[:, :, None]


def _hooks_of_writers(
    model: HookedModel, graph: Graph, layer: int, see_written: SeeWritten
) -> list[Hook]:
    """Hooks that pass on to ``see_written`` what the heads and the MLP of a layer write."""
    first_head = graph.writers.index(f"L{layer}H0")
    heads = slice(first_head, first_head + model.cfg.n_heads)
    hook_result = f"blocks.{layer}.attn.hook_result"
    hooks: list[Hook] = []

    if layer in graph.norms:
        norm = graph.norms[layer]
        results: list[Tensor] = []  # the heads' results, until the hook at the norm needs them

        def see_share(x: Tensor) -> None:
            sigma = norm.scale(x)[..., None, None]
            share = norm.of_part(results.pop()) / sigma
            see_written(heads, share.to(x))

        hooks.append((hook_result, results.append))
        hooks.append((f"blocks.{layer}.{NORM_INPUT}", see_share))
    else:
        hooks.append((hook_result, partial(see_written, heads)))

    if ("mlp", layer) in graph.components:
        mlp = slice(heads.stop, heads.stop + 1)  # ``graph_of`` lists it after the heads
        hook_mlp_out = f"blocks.{layer}.hook_mlp_out"
        hooks.append((hook_mlp_out, lambda x: see_written(mlp, _by_node(x))))
    return hooks


def _changed_inputs(change_read: ChangeRead, component: Component, x: Tensor) -> Tensor:
    """The changed inputs of a component's readers, in the shape of the activation."""
    return change_read(component, _by_node(x)).reshape(x.shape)
