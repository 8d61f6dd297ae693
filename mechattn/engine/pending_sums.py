"""The sums of each analysis in each layer, which become values once all data of the layer has
arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mechattn.analysis.analysis import PROTOCOLS, Analysis, Sums, Values
from mechattn.axes import SEGMENTS
from mechattn.engine.nulls import Nulls
from mechattn.engine.placed_batch import PlacedBatch
from mechattn.errors import ModelError, OptionError
from mechattn.prompts.token_sequences import Batch
from mechattn.results.provenance import is_ours

LayerValues = dict[int, Values]  # of one analysis, by layer
_OF_ATTENTION = {"rows", "pairs"}  # the parts that come with the rows of attention


class AllArrived(BaseException):
    """Ends a forward pass once the last value has arrived.

    A ``BaseException``, so that no ``except Exception`` in a model's code catches it.
    """


@dataclass(eq=False)
class LayerState:
    """What one analysis has received of one layer."""

    sums: Sums
    missing_parts: set[str]  # those that are not complete
    # A reduction that runs once the rows are complete.
    waiting_reduction: Callable[[], None] | None = None


class PendingSums:
    """The sums of each analysis for each layer, until nothing is missing.

    The parts of a layer arrive in the order in which the model computes them: usually the rows
    before the layer's output, but in some bridges after it. A reduction that needs the rows is
    therefore stored until they have arrived.
    """

    def __init__(self, batch: PlacedBatch, analyses: Sequence[Analysis], nulls: Nulls) -> None:
        """Start without sums.

        Args:
            batch: The batch of this pass.
            analyses: The analyses, which are named by their indices here.
            nulls: The nulls of the batch, which are added to the values.
        """
        self.batch = batch
        self.analyses = analyses
        self.nulls = nulls

        # Determined once, because isinstance is slow for a protocol.
        self.parts = [
            {part for part, protocol in PROTOCOLS.items() if isinstance(analysis, protocol)}
            for analysis in analyses
        ]

        # By the index of the analysis and the layer; removed once the last part is complete.
        self.states: dict[tuple[int, int], LayerState] = {}
        self.values: list[LayerValues] = [{} for _ in analyses]

        # For each sum its analysis, its layer, and which rows of the batch are finite; read once,
        # at the end of the pass.
        self.finite_rows: list[tuple[Analysis, int, Tensor]] = []

    @property
    def last_layer(self) -> int:
        """The last layer that has to be computed."""
        if self.receivers("final"):
            return int(self.batch.model.cfg.n_layers) - 1
        return max(self.batch.windows)

    def receivers(self, part: str) -> list[tuple[int, Any]]:
        """The analyses that follow the protocol of a part, each with its index."""
        return [
            (analysis_index, analysis)
            for analysis_index, analysis in enumerate(self.analyses)
            if part in self.parts[analysis_index]
        ]

    def state_of(self, analysis_index: int, layer: int) -> LayerState:
        """The state of an analysis in a layer; the first call starts its sums."""
        key = (analysis_index, layer)
        if key not in self.states:
            sums = self.analyses[analysis_index].start(
                self.batch.layer_batches[layer], self.batch.heads
            )
            self.states[key] = LayerState(sums, set(self.parts[analysis_index]))
        return self.states[key]

    def after_rows(self, analysis_index: int, layer: int, reduce: Callable[[], None]) -> None:
        """Call ``reduce`` once all rows have arrived.

        This is usually at once, but some bridges fire hook_pattern after hook_z.
        """
        state = self.state_of(analysis_index, layer)
        if state.missing_parts & _OF_ATTENTION:
            state.waiting_reduction = reduce
        else:
            reduce()

    def complete(self, analysis_index: int, layer: int, part: str) -> None:
        """Note that a part is complete; after the last part, the sums become values.

        Raises:
            AllArrived: These were the last values of the pass.
        """
        state = self.state_of(analysis_index, layer)
        state.missing_parts.discard(part)

        reduce = state.waiting_reduction
        if reduce is not None and not state.missing_parts & _OF_ATTENTION:
            # The reduction completes its own part. Removed from the state before it runs, so that
            # its tensors can be freed.
            state.waiting_reduction = None
            reduce()
        elif not state.missing_parts:
            del self.states[analysis_index, layer]
            self._finish(analysis_index, layer, state.sums)

    def checked_values(self) -> list[LayerValues]:
        """The values of each analysis at the end of the pass.

        Raises:
            ModelError: An analysis did not receive all parts of a layer, or a sum is NaN or
                infinite.
        """
        for analysis_index, analysis in enumerate(self.analyses):
            for layer in self.batch.windows:
                if layer in self.values[analysis_index]:
                    continue
                missing_parts = sorted(self.state_of(analysis_index, layer).missing_parts)
                raise ModelError(
                    f"layer {layer} has run, but {analysis.name} has not received everything it"
                    f" needs ({', '.join(missing_parts)}), so there is nothing to report"
                )

        # The only place in a pass that waits for the GPUs; then all values have been copied.
        for device in {self.batch.input_batch.tokens.device, *self.batch.devices.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        self.refuse_nan()
        return self.values

    def refuse_nan(self) -> None:
        """Raise a ModelError if a sum has NaN or infinity."""
        if not self.finite_rows:
            return

        # Gathered on the model's first device, so that a single copy to the CPU is enough.
        device = self.batch.input_batch.tokens.device
        is_finite = torch.stack([rows.to(device) for _, _, rows in self.finite_rows]).cpu()
        if is_finite.all():
            return

        sum_index, row = (~is_finite).nonzero()[0].tolist()
        analysis, layer, _ = self.finite_rows[sum_index]

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

    def _finish(self, analysis_index: int, layer: int, sums: Sums) -> None:
        """Turn the sums of an analysis in a layer into values, and copy these to the CPU."""
        analysis = self.analyses[analysis_index]
        window = self.batch.windows[layer]

        row_count = len(self.batch.input_batch.rows)
        for name, value in sums.items():
            if not isinstance(value, Tensor):
                raise OptionError(
                    f"{analysis.name}: the sum {name!r} is a {type(value).__name__}; give a tensor"
                    f" whose first axis is that of the {row_count} sequences of the batch"
                )
            if tuple(value.shape[:1]) != (row_count,):
                raise OptionError(
                    f"{analysis.name}: the sum {name!r} has the shape {list(value.shape)}; its"
                    f" first axis must be that of the {row_count} sequences of the batch"
                )
            if value.is_floating_point() and value.numel():
                # NaN and infinity survive a maximum, which is six times as fast as isfinite of all.
                largest_of_rows = value.reshape(row_count, -1).abs().amax(1)
                self.finite_rows.append((analysis, layer, largest_of_rows.isfinite()))

        values = analysis.values(sums, self.batch.layer_batches[layer], window)
        _check_values(analysis, values, self.batch.input_batch, self.batch.heads)

        # Values on a GPU are copied without waiting for it; checked_values waits for all of them.
        values_and_nulls = values | self.nulls.of(analysis_index, layer, window)
        self.values[analysis_index][layer] = {
            name: value.to("cpu", non_blocking=value.is_cuda)
            for name, value in values_and_nulls.items()
        }
        if all(len(by_layer) == len(self.batch.windows) for by_layer in self.values):
            raise AllArrived


def _check_values(analysis: Analysis, values: Values, batch: Batch, heads: int) -> None:
    """Refuse values whose names or shapes differ from the quantities of an analysis."""
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
        # A dimension that only this analysis has may have any size, unless ``coords`` labels it.
        expected_shape = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        shape = list(getattr(value, "shape", ()))
        has_expected_shape = isinstance(value, Tensor) and len(shape) == len(expected_shape)
        if has_expected_shape:
            sizes_of_dims = zip(expected_shape, shape, strict=True)
            has_expected_shape = all(
                expected_size in (None, size) for expected_size, size in sizes_of_dims
            )
        if not has_expected_shape:
            dims = ", ".join(["batch", *quantity.dims])
            raise OptionError(
                f"{analysis.name}: {name!r} is a {type(value).__name__} of shape {shape}; its dims"
                f" promise a tensor [{dims}] = {expected_shape}"
            )
