"""The graph of a model: what writes into the residual stream, what reads from it, and a pass in
which edges change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.direct_logits import POST, norms_after
from mechattn.errors import ModelError
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers
from mechattn.model.unembedding import FrozenNorm
from mechattn.patching.answer_metrics import Logits
from mechattn.patching.patched_runs import ActivationChange, logits_of
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results.result import head_named

# Which edges, such as those that exist or those of a circuit.
EdgeSet = Bool[np.ndarray, "writer reader"]
# What every writer adds to the residual stream at every token.
Written = Float[Tensor, "writer pos d_model"]
# Where readers read, such as ("q", 3): a part and a layer.
Place = tuple[str, int]
# From a reading place and what the readers there read to what they read instead.
Reading = Callable[[Place, Float[Tensor, "row pos reader d_model"]], Tensor]
# Receives what some writers write.
Writing = Callable[[slice, Float[Tensor, "row pos writer d_model"]], None]
# What showing edges needs; TransformerLens refuses the first beside the third.
_SWITCHES = {
    "use_attn_in": False,
    "use_attn_result": True,
    "use_split_qkv_input": True,
    "use_hook_mlp_in": True,
}


@dataclass(frozen=True, eq=False)
class Graph:
    """A model's writers (embedding, heads, MLPs), readers (q, k, v of heads, MLPs, logits), and the
    edges between them.
    """

    # "embedding", "L0H1", "L0MLP"
    writers: tuple[str, ...]
    # "L1H0.q", "L1H0.k", "L1H0.v" (of heads with keys of their own), "L1MLP", "logits"
    readers: tuple[str, ...]
    exists: EdgeSet  # which writers come before which readers
    # The readers of each reading place, in the order of a forward pass.
    places: dict[Place, slice]
    # Norms between attention and the residual stream, by layer (Gemma 2 and 3, OLMo 2).
    norms: Mapping[int, FrozenNorm] = field(default_factory=dict)

    def before(self, place: Place) -> int:
        """How many writers come before a reading place."""
        first_reader = self.places[place].start
        return int(self.exists[:, first_reader].sum())

    def read_by(self, reader: str) -> list[str]:
        """The writers that go on from a reader: its head or MLP, or all heads that share these keys
        or values.
        """
        node, _, part = reader.partition(".")
        layer_and_head = head_named(node)
        if part not in ("k", "v") or layer_and_head is None:
            return [node]

        layer, key_head = layer_and_head
        counts = {}
        for name in ("q", part):
            place = self.places[name, layer]
            counts[name] = place.stop - place.start

        sharing = counts["q"] // counts[part]
        first_head = key_head * sharing
        return [f"L{layer}H{first_head + index}" for index in range(sharing)]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """All edges as pairs of numbers."""
        return [(writer, reader) for writer, reader in np.argwhere(self.exists).tolist()]


def graph_of(model: HookedModel) -> Graph:
    """The graph of a model.

    Raises:
        ModelError: Its hooks don't give the inputs of single heads.
    """
    cfg = model.cfg
    layers = range(cfg.n_layers)
    lacks_attention = len(attention_layers(model)) < len(layers)
    if lacks_attention or not hasattr(model, "set_use_split_qkv_input"):
        raise _no_inputs(model)

    key_heads = kv_heads_of(model)
    counts = {"q": cfg.n_heads, "k": key_heads, "v": key_heads}
    parallel = bool(getattr(cfg, "parallel_attn_mlp", False))
    writers = ["embedding"]
    readers: list[str] = []
    before: list[int] = []
    places: dict[Place, slice] = {}

    def reads(part: str, layer: int, names: list[str], writers_before: int) -> None:
        places[part, layer] = slice(len(readers), len(readers) + len(names))
        readers.extend(names)
        before.extend([writers_before] * len(names))

    for layer in layers:
        start = len(writers)
        for part, count in counts.items():
            names = [f"L{layer}H{head}.{part}" for head in range(count)]
            reads(part, layer, names, start)
        writers.extend(f"L{layer}H{head}" for head in range(counts["q"]))

        if has_mlp(model, layer):
            # Beside attention, an MLP does not read what this layer's heads write.
            writers_before = start if parallel else len(writers)
            reads("mlp", layer, [f"L{layer}MLP"], writers_before)
            writers.append(f"L{layer}MLP")
    reads("logits", layers[-1], ["logits"], len(writers))

    writer_numbers = np.arange(len(writers))
    exists = writer_numbers[:, None] < np.array(before)
    norms = norms_after(model, layers)
    return Graph(tuple(writers), tuple(readers), exists, places, norms)


def _no_inputs(model: HookedModel) -> ModelError:
    """The error for a model whose edges cannot be seen."""
    return ModelError(
        f"TransformerLens gives no inputs of single heads of {model.cfg.model_name}, so it has no "
        "edges here: patch nodes with ma.patch, or paths between heads with ma.paths"
    )


def has_mlp(model: HookedModel, layer: int) -> bool:
    """Whether a layer has an MLP that TransformerLens shows."""
    return (
        f"blocks.{layer}.hook_mlp_in" in model.hook_dict
        and f"blocks.{layer}.hook_mlp_out" in model.hook_dict
    )


@contextmanager
def showing_edges(model: HookedModel) -> Iterator[None]:
    """Let TransformerLens compute each head's result and inputs by themselves, during a ``with``
    block.
    """
    before = {name: bool(getattr(model.cfg, name, False)) for name in _SWITCHES}
    changed = [name for name, is_on in _SWITCHES.items() if is_on != before[name]]

    try:
        for name in changed:
            getattr(model, f"set_{name}")(_SWITCHES[name])
        yield
    finally:
        # Back in the other order, as TransformerLens refuses some of them together.
        for name in reversed(changed):
            getattr(model, f"set_{name}")(before[name])


def run_edges(
    model: HookedModel,
    graph: Graph,
    sequence: TokenSequence,
    rows: int,
    *,
    reading: Reading | None = None,
    writing: Writing | None = None,
    embedded: ActivationChange | None = None,
    gradients: bool = False,
) -> Logits:
    """Logits before the answer, in a pass that may change what is read.

    Where a norm follows attention, a head writes its share of what comes after it,
    ``γ · result / σ`` with the σ of this pass.

    Args:
        model: The hooked model, while it shows its edges.
        graph: Its graph.
        sequence: A sequence that ends in the reference answer.
        rows: The number of copies of it.
        reading: Gives what the readers at a place read in place of what they would.
        writing: Receives what each writer writes.
        embedded: From the embeddings [row pos d_model] to what replaces them.
        gradients: Whether the pass keeps what gradients of activations need.
    """
    results: dict[int, Tensor] = {}  # of heads, until the norm after them is at work

    def embeds(module: Any, inputs: Any, x: Tensor) -> Tensor:
        if embedded is not None:
            x = embedded(x)
        writes(slice(0, 1), module, inputs, x)
        return x

    def writes(writers: slice, module: Any, inputs: Any, x: Tensor) -> None:
        if writing is not None:
            writing(writers, _with_readers(x))

    def keep_result(layer: int, module: Any, inputs: Any, x: Tensor) -> None:
        results[layer] = x

    def writes_after_norm(layer: int, writers: slice, module: Any, inputs: Any, x: Tensor) -> None:
        norm = graph.norms[layer]
        sigma = norm.scale(x)[..., None, None]
        share = norm.of_part(results.pop(layer)) / sigma
        writes(writers, module, inputs, share.to(x))

    def reads(place: Place, module: Any, inputs: Any, x: Tensor) -> Tensor:
        assert reading is not None
        return reading(place, _with_readers(x)).reshape(x.shape)

    hooks: dict[str, Callable[..., Any]] = {"blocks.0.hook_resid_pre": embeds}
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        first = graph.writers.index(f"L{layer}H0")
        heads = slice(first, first + model.cfg.n_heads)

        if layer in graph.norms:
            hooks[f"{block}.attn.hook_result"] = partial(keep_result, layer)
            hooks[f"{block}.{POST}"] = partial(writes_after_norm, layer, heads)
        else:
            hooks[f"{block}.attn.hook_result"] = partial(writes, heads)

        if ("mlp", layer) in graph.places:
            mlp = slice(heads.stop, heads.stop + 1)
            hooks[f"{block}.hook_mlp_out"] = partial(writes, mlp)

    if reading is not None:
        for place in graph.places:
            kind, layer = place
            hook_name = _HOOKS[kind].format(layer)
            hooks[hook_name] = partial(reads, place)

    with ExitStack() as stack:
        for hook_name, function in hooks.items():
            hook = model.hook_dict[hook_name]
            stack.enter_context(hook.register_forward_hook(function))
        return logits_of(model, [sequence] * rows, gradients)


_HOOKS = {
    "q": "blocks.{}.attn.hook_q_input",
    "k": "blocks.{}.attn.hook_k_input",
    "v": "blocks.{}.attn.hook_v_input",
    "mlp": "blocks.{}.hook_mlp_in",
    "logits": "blocks.{}.hook_resid_post",
}


def _with_readers(x: Tensor) -> Tensor:
    """An activation [row pos reader d_model], also where it has no axis of heads."""
    if x.ndim == 4:
        return x
    return x[:, :, None]


@dataclass(frozen=True, eq=False)
class EdgeRun:
    """An unchanged run: its logits, what every writer writes, and the stream that the logits
    read."""

    logits: Float[Tensor, "1 answer d_vocab"]
    written: Written
    stream: Float[Tensor, "pos d_model"]


def read_edges(model: HookedModel, graph: Graph, sequence: TokenSequence) -> EdgeRun:
    """Run a sequence and record what is written.

    Args:
        model: The hooked model, while it shows its edges.
        graph: Its graph.
        sequence: A sequence that ends in the reference answer.

    Raises:
        ModelError: Some writers are not seen.
    """
    written: Tensor | None = None
    writer_count = 0
    streams: list[Tensor] = []

    def record(writers: slice, x: Tensor) -> None:
        nonlocal written, writer_count
        _, length, count, width = x.shape
        if written is None:
            written = x.new_empty(len(graph.writers), length, width)
        by_writer = x[0].transpose(0, 1)
        written[writers] = by_writer.to(written.device)
        writer_count += count

    def read(place: Place, x: Tensor) -> Tensor:
        kind, _ = place
        if kind == "logits":
            streams.append(x[0, :, 0])
        return x

    logits = run_edges(model, graph, sequence, 1, reading=read, writing=record)
    if written is None or writer_count < len(graph.writers):
        raise _no_inputs(model)
    return EdgeRun(logits, written, streams[0])


class Replacing:
    """Edges that a row does not keep carry ``replacement`` in place of what was written.

    ``input of v = Σ_u written_u + Σ_{u not kept} (replacement_u − written_u)``, exact because the
    residual stream is a sum. The steps ``replacement_u − written_u`` of all writers are in one
    buffer that is filled as they write, so that a place needs one product with it and nothing is
    copied again.

    Args:
        kept_edges: The edges that each row keeps.
        graph: The graph of the model.
        replacement: What all other edges carry.
    """

    def __init__(
        self,
        kept_edges: Bool[Tensor, "row writer reader"],
        graph: Graph,
        replacement: Written,
    ) -> None:
        cut = ~kept_edges & torch.as_tensor(graph.exists)
        cut_by_reader = rearrange(cut, "row writer reader -> row reader writer")
        rows = len(kept_edges)

        self._graph = graph
        self._replacement = replacement
        self._cut = cut_by_reader.to(replacement)
        self._steps = replacement.new_empty(rows, *replacement.shape)

    def write(self, writers: slice, x: Float[Tensor, "row pos some d_model"]) -> None:
        """Keep the steps of some writers."""
        written = rearrange(x.to(self._replacement), "row pos some d_model -> row some pos d_model")
        torch.sub(self._replacement[writers], written, out=self._steps[:, writers])

    def read(
        self, place: Place, x: Float[Tensor, "row pos reader d_model"]
    ) -> Float[Tensor, "row pos reader d_model"]:
        """What the readers at a place read, with the steps of the edges that are cut."""
        before = self._graph.before(place)
        readers = self._graph.places[place]
        cut = self._cut[:, readers, :before]
        if not cut.any():
            return x

        steps = self._steps[:, :before].flatten(2)  # a view: the last two axes are contiguous
        change = torch.bmm(cut, steps)
        change = change.unflatten(2, self._steps.shape[2:])
        change = rearrange(change, "row reader pos d_model -> row pos reader d_model")
        return x + change.to(x)
