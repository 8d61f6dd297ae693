"""What a pass gives to the analyses (rows of attention, tensors at hooks, activations of MLPs), and
their sums, which become values once all data of a layer has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    PROTOCOLS,
    Activations,
    Analysis,
    AttentionRows,
    Captures,
    Sums,
    Values,
    WholeAttention,
)
from mechattn.axes import SEGMENTS
from mechattn.engine.nulls import Nulls
from mechattn.engine.placed_batch import PairedLayer, PlacedBatch, paired_layer
from mechattn.errors import ModelError, OptionError
from mechattn.functional.activations import minimum_of
from mechattn.functional.attention import Rows, Stream
from mechattn.functional.fused import Fused
from mechattn.model.patch.nonlinearities import at_nonlinearity, plain_nonlinearity
from mechattn.prompts.token_sequences import Batch
from mechattn.results.provenance import is_ours

LayerValues = dict[int, Values]  # of one analysis, by layer
Neurons = Float[Tensor, "*token d_mlp"]  # activations of an MLP
_OF_ATTENTION = {"rows", "pairs"}  # the parts that come with the rows of attention


@dataclass(eq=False)
class LayerState:
    """What one analysis has received of one layer."""

    sums: Sums
    missing: set[str]  # the parts that have not arrived
    waiting: Callable[[], None] | None = None  # a reduction that needs the rows first


class PendingSums:
    """The sums of each analysis for each layer, until nothing is missing.

    The model decides in which order the parts of a layer arrive: rows mostly before the layer's
    output, in some bridges after it, MLP activations last. So a reduction that needs the rows is
    stored as a call until they arrive.
    """

    def __init__(
        self,
        batch: PlacedBatch,
        analyses: Sequence[Analysis],
        nulls: Nulls,
        all_arrived: Callable[[], None],
    ) -> None:
        """Start without sums.

        Args:
            batch: The batch of this pass.
            analyses: The analyses; an analysis is known by its number in this order.
            nulls: The nulls of the batch, which become values too.
            all_arrived: Called with the last value, inside the pass.
        """
        self.batch = batch
        self.analyses = analyses
        self.nulls = nulls
        self.all_arrived = all_arrived

        # Asked once, as isinstance is slow for a protocol.
        self.parts = [
            {part for part, protocol in PROTOCOLS.items() if isinstance(analysis, protocol)}
            for analysis in analyses
        ]

        # By the number of the analysis and the layer, from the first part to the last.
        self.states: dict[tuple[int, int], LayerState] = {}
        self.values: list[LayerValues] = [{} for _ in analyses]

        # Of each sum, which rows of the batch are finite; read once, at the end.
        self.finite_rows: list[tuple[Analysis, int, Tensor]] = []

    @property
    def last_layer(self) -> int:
        """The last layer that has to be computed."""
        if self.receivers("final"):
            return int(self.batch.model.cfg.n_layers) - 1
        return max(self.batch.windows)

    def receivers(self, part: str) -> list[tuple[int, Any]]:
        """The analyses that need a part, and so have its protocol, with their numbers."""
        return [
            (number, analysis)
            for number, analysis in enumerate(self.analyses)
            if part in self.parts[number]
        ]

    def state_of(self, number: int, layer: int) -> LayerState:
        """The state of an analysis in a layer, started with the first part that arrives."""
        key = (number, layer)
        if key not in self.states:
            sums = self.analyses[number].start(self.batch.batches[layer], self.batch.heads)
            self.states[key] = LayerState(sums, set(self.parts[number]))
        return self.states[key]

    def after_rows(self, number: int, layer: int, reduce: Callable[[], None]) -> None:
        """Call this when all rows have arrived: usually at once, but some bridges fire hook_pattern
        after hook_z."""
        state = self.state_of(number, layer)
        if state.missing & _OF_ATTENTION:
            state.waiting = reduce
        else:
            reduce()

    def complete(self, number: int, layer: int, part: str) -> None:
        """Note that a part is complete; after the last part, the sums become values."""
        state = self.state_of(number, layer)
        state.missing.discard(part)

        reduce = state.waiting
        if reduce is not None and not state.missing & _OF_ATTENTION:
            # What waited for the rows completes its own part; the state no longer keeps its
            # tensors alive.
            state.waiting = None
            reduce()
        elif not state.missing:
            del self.states[number, layer]
            self._finish(number, layer, state.sums)

    def _finish(self, number: int, layer: int, sums: Sums) -> None:
        """Turn sums into values, and copy these to the CPU."""
        analysis = self.analyses[number]
        window = self.batch.windows[layer]

        for value in sums.values():
            if value.is_floating_point():
                # NaN and infinity survive a maximum, which is six times as fast as isfinite of all.
                largest = value.reshape(len(value), -1).abs().amax(1)
                self.finite_rows.append((analysis, layer, largest.isfinite()))

        values = analysis.values(sums, self.batch.batches[layer], window)

        # What an analysis gives, it gives of every layer: the first is enough to check.
        if not self.values[number]:
            _check_values(analysis, values, self.batch.placed, self.batch.heads)

        # To pinned memory of a GPU's values, without waiting; valid once its work is done.
        measured = values | self.nulls.of(number, layer, window)
        self.values[number][layer] = {
            name: value.to("cpu", non_blocking=value.is_cuda) for name, value in measured.items()
        }
        if all(len(by_layer) == len(self.batch.windows) for by_layer in self.values):
            self.all_arrived()

    def checked_values(self) -> list[LayerValues]:
        """The values of each analysis, once everything has arrived."""
        for number, analysis in enumerate(self.analyses):
            for layer in self.batch.windows:
                if layer in self.values[number]:
                    continue
                missing = self.state_of(number, layer).missing
                raise ModelError(
                    f"layer {layer} has run, but {analysis.name} has not received everything it"
                    f" needs ({', '.join(sorted(missing))}), so there is nothing to report"
                )

        # The only place in a batch that waits for the GPUs: the values are copied by then.
        for device in {self.batch.placed.tokens.device, *self.batch.devices.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        self.refuse_nan()
        return self.values

    def refuse_nan(self) -> None:
        """Refuse sums with NaN or infinity."""
        if not self.finite_rows:
            return

        # To the model's first device, and then all in one copy.
        device = self.batch.placed.tokens.device
        is_finite = torch.stack([rows.to(device) for _, _, rows in self.finite_rows]).cpu()
        if is_finite.all():
            return

        index, row = (~is_finite).nonzero()[0].tolist()
        analysis, layer, _ = self.finite_rows[index]

        hint = "try another dtype, such as float32"
        if not is_ours(type(analysis)):
            hint += (
                f"; if it is finite without {analysis.name}, this analysis divides by 0 or takes"
                " the logarithm of 0, at this prompt or at padding"
            )
        raise ModelError(
            f"layer {layer} of {self.batch.model.cfg.model_name} gives NaN or infinity for"
            f" {self.batch.name_of_row(row)}; {hint}"
        )


def _check_values(analysis: Analysis, values: Values, batch: Batch, heads: int) -> None:
    """Refuse values that are not those that the quantities of an analysis declare."""
    quantities = analysis.quantities
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{analysis.name}: values() gives a {type(values).__name__}; give a mapping from the"
            f" quantities {list(quantities)} to tensors"
        )
    if set(values) != set(quantities):
        raise OptionError(
            f"{analysis.name}: values() gives {list(values)}; its quantities are {list(quantities)}"
        )

    sizes = {
        "head": heads,
        "key": batch.tokens.shape[1],
        "segment": len(SEGMENTS),
        "to_segment": len(SEGMENTS),
    }
    for dim, labels in getattr(analysis, "coords", {}).items():
        sizes[dim] = len(labels)

    for name, quantity in quantities.items():
        value = values[name]
        # A dimension of the analysis's own that has no labels may have any size.
        expected = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        shape = list(getattr(value, "shape", ()))
        same_sizes = [size in (None, actual) for size, actual in zip(expected, shape, strict=False)]
        if not isinstance(value, Tensor) or len(shape) != len(expected) or not all(same_sizes):
            dims = ", ".join(["batch", *quantity.dims])
            raise OptionError(
                f"{analysis.name}: {name!r} is a {type(value).__name__} of shape {shape}; its dims"
                f" promise a tensor [{dims}] = {expected}"
            )


class RowReceiver:
    """Receives blocks of attention rows, layer by layer."""

    def __init__(self, pending: PendingSums) -> None:
        """Receive for these sums.

        Args:
            pending: The sums of the analyses, to which blocks are added.
        """
        self.batch = pending.batch
        self.pending = pending

        # Numbers and analyses, see PendingSums.receivers.
        self.row_receivers = pending.receivers("rows")
        self.pair_receivers = pending.receivers("pairs")

        # Of the layers whose blocks are arriving.
        self.paired_layers: dict[int, PairedLayer] = {}

    @property
    def is_needed(self) -> bool:
        """Whether any analysis reads attention."""
        return bool(self.row_receivers or self.pair_receivers)

    def see_rows(self, layer: int, rows: Rows) -> None:
        """Receive a block of query rows, whose memory the next block reuses."""
        if self.row_receivers:
            self._add_rows(layer, rows)

        if self.pair_receivers:
            if layer not in self.paired_layers:
                # The layer's first block: what its blocks have in common is made once.
                pairs = self.batch.layer_pairs(layer)
                window = self.batch.windows[layer]
                self.paired_layers[layer] = paired_layer(layer, rows.attention, pairs, window)
            paired_rows = self.paired_layers[layer].rows(rows)
            for number, analysis in self.pair_receivers:
                analysis.add_pairs(self.pending.state_of(number, layer).sums, paired_rows)

        # Blocks arrive in the order of the queries.
        is_last_block = rows.queries.stop == self.batch.placed.tokens.shape[1]
        if not is_last_block:
            return

        self.paired_layers.pop(layer, None)  # it holds the baselines' attention
        for number, _ in self.row_receivers:
            self.pending.complete(number, layer, "rows")
        for number, _ in self.pair_receivers:
            self.pending.complete(number, layer, "pairs")

    def see_whole(self, layer: int, fused: Fused) -> None:
        """Receive a whole layer from a fused kernel: the analyses that take one need no rows."""
        batch = self.batch.batches[layer]
        window = self.batch.windows[layer]
        attention = WholeAttention(layer, fused, batch, window)

        for number, analysis in self.row_receivers:
            analysis.add_whole(self.pending.state_of(number, layer).sums, attention)
            self.pending.complete(number, layer, "rows")

    def _add_rows(self, layer: int, rows: Rows) -> None:
        """Pass a block on to the analyses of rows."""
        v = None
        if rows.attention is not None:
            v = rows.attention.v

        block = AttentionRows(
            layer=layer,
            pattern=rows.pattern,
            queries=rows.queries,
            keys=rows.keys,
            batch=self.batch.batches[layer],
            window=self.batch.windows[layer],
            v=v,
            attention=rows.attention,
        )

        for number, analysis in self.row_receivers:
            analysis.add(self.pending.state_of(number, layer).sums, block)


@contextmanager
def receiving_captures(pending: PendingSums) -> Iterator[None]:
    """Hooks that keep one layer's tensors until the last hook that an analysis asked for has
    fired, and the final residual stream.

    Args:
        pending: The sums of the analyses; those with ``captures`` or ``add_final`` are served.

    Yields:
        With the hooks set; they are removed at the end of the ``with`` block, also after an error.
    """
    batch = pending.batch
    capturing = pending.receivers("hooks")
    final_receivers = pending.receivers("final")
    if not capturing and not final_receivers:
        yield
        return

    def see_final(module: Any, args: Any, resid_post: Stream) -> None:
        """Give the final stream to every layer's sums, on the layer's device."""
        for number, analysis in final_receivers:
            for layer, device in batch.devices.items():
                sums = pending.state_of(number, layer).sums
                analysis.add_final(sums, resid_post.detach().to(device))
                pending.complete(number, layer, "final")

    hook_dict = batch.model.hook_dict  # listing the hooks takes a while
    with ExitStack() as stack:
        for number, analysis in capturing:
            for layer in batch.windows:
                # Its tensors are passed on together, so that an analysis can relate them.
                capture = _Capture(pending, number, analysis, layer)
                for name in analysis.captures:
                    hook = hook_dict[f"blocks.{layer}.{name}"]
                    handle = hook.register_forward_hook(partial(capture.see, name))
                    stack.callback(handle.remove)

        if final_receivers:
            last_hook = hook_dict[f"blocks.{pending.last_layer}.hook_resid_post"]
            handle = last_hook.register_forward_hook(see_final)
            stack.callback(handle.remove)

        yield


@dataclass(eq=False)
class _Capture:
    """The tensors at the hooks of a layer that an analysis asked for, until all have fired."""

    pending: PendingSums
    number: int  # of the analysis
    analysis: Any
    layer: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def see(self, name: str, module: Any, args: Any, out: Tensor) -> None:
        """Keep the tensor of a hook; with the last one, pass all on."""
        batch = self.pending.batch.batches[self.layer]

        # A layer's first input comes from the layer before, which may lie on another device.
        out = out.detach().to(batch.tokens.device)
        # OPT runs its MLP on one row of all tokens.
        if out.shape[:2] != batch.tokens.shape and len(out) == batch.tokens.numel():
            out = out.unflatten(0, batch.tokens.shape)

        self.tensors[name] = out
        if len(self.tensors) < len(self.analysis.captures):
            return

        window = self.pending.batch.windows[self.layer]
        captures = Captures(self.layer, self.tensors, batch, window)

        # The captures hold the tensors now, and free them once they are passed on.
        self.tensors = {}
        self.pending.after_rows(self.number, self.layer, partial(self._pass_on, captures))

    def _pass_on(self, captures: Captures) -> None:
        """Give the tensors to the analysis, once it has its rows."""
        sums = self.pending.state_of(self.number, self.layer).sums
        self.analysis.add_captures(sums, captures)
        self.pending.complete(self.number, self.layer, "hooks")


def receiving_activations(pending: PendingSums) -> AbstractContextManager[None]:
    """Watch every MLP inside a ``with`` block; the nonlinearities are those of the time of this
    call.

    Args:
        pending: The sums of the analyses; those with ``add_activations`` are served.

    Returns:
        A context in which each MLP passes its activations on.

    Raises:
        ModelError: An MLP reads some tokens only, found when it runs.
    """
    batch = pending.batch
    watching = pending.receivers("mlps")
    layers = batch.windows if watching else {}

    # Once for the pass: a minimum is looked for on a fine grid.
    minimums = {layer: minimum_of(plain_nonlinearity(batch.model, layer)) for layer in layers}

    def see(layer: int, pre: Neurons, post: Neurons) -> None:
        """Give the activations of a layer to the analyses, by sequence and token."""
        tokens = batch.placed.tokens
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
            batch=batch.batches[layer],
            pairs=batch.layer_pairs(layer),
        )

        for number, analysis in watching:
            analysis.add_activations(pending.state_of(number, layer).sums, activations)
            pending.complete(number, layer, "mlps")

    return at_nonlinearity(batch.model, dict.fromkeys(layers, see))
