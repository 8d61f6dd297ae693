"""Passes on to analyses what a forward pass shows: attention, tensors at hooks, activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import Activations, AttentionRows, Captures, WholeAttention
from mechattn.engine.pending_sums import PendingSums
from mechattn.engine.placed_batch import PairedLayer, paired_layer
from mechattn.errors import ModelError
from mechattn.functional.activations import minimum_of
from mechattn.functional.attention import Attention, Rows, Stream
from mechattn.functional.fused import Fused
from mechattn.model.patch.nonlinearities import at_nonlinearity, plain_nonlinearity

Neurons = Float[Tensor, "*token d_mlp"]  # activations of an MLP


class RowReceiver:
    """Adds the attention of each layer to the sums of the analyses."""

    def __init__(self, pending: PendingSums) -> None:
        """Find the analyses that read attention.

        Args:
            pending: The analyses and their sums.
        """
        self.batch = pending.batch
        self.pending = pending

        # The analyses that need rows or pairs, each with its index.
        self.row_receivers = pending.receivers("rows")
        self.pair_receivers = pending.receivers("pairs")

        # What blocks share, by layer, while the blocks of a layer are arriving.
        self.paired_layers: dict[int, PairedLayer] = {}

    @property
    def is_needed(self) -> bool:
        """Whether any analysis reads attention."""
        return bool(self.row_receivers or self.pair_receivers)

    def see_rows(self, layer: int, rows: Rows) -> None:
        """Add a block of query rows to the sums; the next block reuses its memory."""
        attention = rows.attention
        if self.row_receivers:
            block = AttentionRows(
                layer=layer,
                pattern=rows.pattern,
                queries=rows.queries,
                keys=rows.keys,
                batch=self.batch.layer_batches[layer],
                window=self.batch.windows[layer],
                v=None if attention is None else attention.v,
                queries_and_keys=attention if isinstance(attention, Attention) else None,
            )
            for analysis_index, analysis in self.row_receivers:
                analysis.add(self.pending.state_of(analysis_index, layer).sums, block)

        if self.pair_receivers:
            if layer not in self.paired_layers:
                # At the layer's first block.
                pairs = self.batch.layer_pairs(layer)
                window = self.batch.windows[layer]
                self.paired_layers[layer] = paired_layer(layer, attention, pairs, window)
            paired_rows = self.paired_layers[layer].rows(rows)
            for analysis_index, analysis in self.pair_receivers:
                analysis.add_pairs(self.pending.state_of(analysis_index, layer).sums, paired_rows)

        # Blocks arrive in the order of the queries.
        is_last_block = rows.queries.stop == self.batch.input_batch.tokens.shape[1]
        if not is_last_block:
            return

        self.paired_layers.pop(layer, None)  # it holds the baselines' attention
        for analysis_index, _ in self.row_receivers:
            self.pending.complete(analysis_index, layer, "rows")
        for analysis_index, _ in self.pair_receivers:
            self.pending.complete(analysis_index, layer, "pairs")

    def see_whole(self, layer: int, fused: Fused) -> None:
        """Add a whole layer from a fused kernel, chosen only if all analyses can take it."""
        attention = WholeAttention(
            layer, fused, self.batch.layer_batches[layer], self.batch.windows[layer]
        )
        for analysis_index, analysis in self.row_receivers:
            analysis.add_whole(self.pending.state_of(analysis_index, layer).sums, attention)
            self.pending.complete(analysis_index, layer, "rows")


@contextmanager
def receiving_captures(pending: PendingSums) -> Iterator[None]:
    """Pass on the captured tensors of each layer, and the final residual stream.

    A layer's tensors are kept until the last hook that an analysis captures has fired. The hooks
    are removed at the end of the ``with`` block, also after an error.

    Args:
        pending: The analyses and their sums; those with ``captures`` or ``add_final`` are served.
    """
    batch = pending.batch
    capture_receivers = pending.receivers("hooks")
    final_receivers = pending.receivers("final")
    if not capture_receivers and not final_receivers:
        yield
        return

    def see_final(module: Any, args: Any, resid_post: Stream) -> None:
        """Give the final stream to every layer's sums, on the layer's device."""
        for analysis_index, analysis in final_receivers:
            for layer, device in batch.devices.items():
                sums = pending.state_of(analysis_index, layer).sums
                analysis.add_final(sums, resid_post.detach().to(device))
                pending.complete(analysis_index, layer, "final")

    hook_dict = batch.model.hook_dict  # listing the hooks takes a while
    with ExitStack() as stack:
        for analysis_index, analysis in capture_receivers:
            for layer in batch.windows:
                # A layer's tensors are passed on together, so that an analysis can relate them.
                capture = _Capture(pending, analysis_index, analysis, layer)
                for name in analysis.captures:
                    hook = hook_dict[f"blocks.{layer}.{name}"]
                    handle = hook.register_forward_hook(partial(capture.see, name))
                    stack.callback(handle.remove)

        if final_receivers:
            last_hook = hook_dict[f"blocks.{pending.last_layer}.hook_resid_post"]
            handle = last_hook.register_forward_hook(see_final)
            stack.callback(handle.remove)

        yield


def receiving_activations(pending: PendingSums) -> AbstractContextManager[None]:
    """Pass on the activations of each measured MLP inside a ``with`` block.

    The minimum of each nonlinearity is determined at this call, before interventions replace it.

    Args:
        pending: The analyses and their sums; those with ``add_activations`` are served.

    Returns:
        A context in which each MLP passes on its activations.

    Raises:
        ModelError: A layer has no MLP whose activations can be read; or, raised while it runs, an
            MLP does not read every token.
    """
    batch = pending.batch
    activation_receivers = pending.receivers("mlps")
    if not activation_receivers:
        return nullcontext()

    # Once per pass, because the minimum is searched on a fine grid.
    minimums = {
        layer: minimum_of(plain_nonlinearity(batch.model, layer)) for layer in batch.windows
    }

    def see(layer: int, pre: Neurons, post: Neurons) -> None:
        """Give the analyses a layer's activations [batch pos d_mlp]."""
        tokens = batch.input_batch.tokens
        d_mlp = pre.shape[-1]
        if pre.numel() != d_mlp * tokens.numel():
            raise ModelError(
                f"the MLP of layer {layer} doesn't read every token, so its activations cannot be"
                " compared by token"
            )

        activations = Activations(
            layer=layer,
            pre=pre.detach().reshape(*tokens.shape, d_mlp),
            post=post.detach().reshape(*tokens.shape, d_mlp),
            minimum=minimums[layer],
            batch=batch.layer_batches[layer],
            pairs=batch.layer_pairs(layer),
        )

        for analysis_index, analysis in activation_receivers:
            analysis.add_activations(pending.state_of(analysis_index, layer).sums, activations)
            pending.complete(analysis_index, layer, "mlps")

    return at_nonlinearity(batch.model, dict.fromkeys(batch.windows, see))


@dataclass(eq=False)
class _Capture:
    """The tensors of a layer that an analysis captures, until all of its hooks have fired."""

    pending: PendingSums
    analysis_index: int
    analysis: Any
    layer: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def see(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        """Keep the tensor of a hook, and pass all on after the last."""
        batch = self.pending.batch.layer_batches[self.layer]

        # hook_resid_pre shows the output of the layer before, which may be on another device.
        output = output.detach().to(batch.tokens.device)
        # OPT joins batch and positions before its MLP: OPTDecoderLayer.forward in transformers.
        if output.shape[:2] != batch.tokens.shape and len(output) == batch.tokens.numel():
            output = output.unflatten(0, batch.tokens.shape)

        self.tensors[name] = output
        if len(self.tensors) < len(self.analysis.captures):
            return

        window = self.pending.batch.windows[self.layer]
        captures = Captures(self.layer, self.tensors, batch, window)

        # Only the captures hold the tensors now, so they are freed once passed on.
        self.tensors = {}
        self.pending.after_rows(self.analysis_index, self.layer, partial(self._pass_on, captures))

    def _pass_on(self, captures: Captures) -> None:
        """Give the tensors to the analysis, once it has its rows."""
        sums = self.pending.state_of(self.analysis_index, self.layer).sums
        self.analysis.add_captures(sums, captures)
        self.pending.complete(self.analysis_index, self.layer, "hooks")
