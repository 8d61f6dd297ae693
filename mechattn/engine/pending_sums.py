"""The sums of a pass, which become the values of each analysis once all its data has arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class AllArrived(BaseException):
    """Raised with the last value, to skip the rest of the pass; error handlers must not catch it."""


class PendingSums:
    """The sums of each analysis for each layer, until nothing is missing.

    The model decides in which order the parts of a layer arrive: rows mostly before the layer's
    output, in some bridges after it, MLP activations last. So a reduction that needs the rows is
    stored as a call until they arrive. With the last value ``AllArrived`` is raised.
    """

    def __init__(self, batch: PlacedBatch, analyses: Sequence[Analysis], nulls: Nulls) -> None:
        """Start without sums.

        Args:
            batch: The batch of this pass.
            analyses: The analyses; an analysis is known by its number in this order.
            nulls: The nulls of the batch, which become values too.
        """
        self.batch = batch
        self.analyses = analyses
        self.nulls = nulls

        # Asked once, as isinstance is slow for a protocol.
        self.parts = [
            {part for part, protocol in PROTOCOLS.items() if isinstance(analysis, protocol)}
            for analysis in analyses
        ]

        # By the number of the analysis and the layer: the sums so far, the parts that have not
        # arrived, and the reduction that waits for the rows.
        self.sums: dict[tuple[int, int], Sums] = {}
        self.missing: dict[tuple[int, int], set[str]] = {}
        self.waiting: dict[tuple[int, int], Callable[[], None]] = {}

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

    def of(self, number: int, layer: int) -> Sums:
        """The sums of an analysis in a layer, started with the first part that arrives."""
        key = (number, layer)
        if key not in self.sums:
            self.sums[key] = self.analyses[number].start(self.batch.at(layer), self.batch.heads)
            self.missing[key] = set(self.parts[number])

        return self.sums[key]

    def after_rows(self, number: int, layer: int, reduce: Callable[[], None]) -> None:
        """Call this when all rows have arrived: usually at once, but some bridges fire hook_pattern
        after hook_z."""
        self.of(number, layer)
        if "rows" in self.missing[number, layer]:
            self.waiting[number, layer] = reduce
        else:
            reduce()

    def complete(self, number: int, layer: int, part: str) -> None:
        """Note that a part is complete; after the last part, the sums become values."""
        key = (number, layer)
        self.missing[key].discard(part)

        if part == "rows" and key in self.waiting:
            # What waited for the rows completes its own part.
            reduce = self.waiting.pop(key)
            reduce()
        elif not self.missing[key]:
            del self.missing[key]
            self._finish(number, layer, self.sums.pop(key))

    def _finish(self, number: int, layer: int, sums: Sums) -> None:
        """Turn sums into values, and copy these to the CPU."""
        analysis = self.analyses[number]
        window = self.batch.windows[layer]

        for value in sums.values():
            if value.is_floating_point():
                # NaN and infinity survive a maximum, which is six times as fast as isfinite of all.
                largest = value.reshape(len(value), -1).abs().amax(1)
                self.finite_rows.append((analysis, layer, largest.isfinite()))

        # The batch on the layer's device, with the edges that are cut in this layer.
        batch = self.batch.at(layer).at(layer)
        values = analysis.values(sums, batch, window)

        # The first layer's values tell what an analysis gives.
        if not self.values[number]:
            _check_values(analysis, values, self.batch.placed, self.batch.heads)

        nulls = self.nulls.of(number, layer, window)
        self.values[number][layer] = on_cpu(values | nulls)
        if all(len(by_layer) == len(self.batch.windows) for by_layer in self.values):
            raise AllArrived

    def checked_values(self) -> list[LayerValues]:
        """The values of each analysis, once everything has arrived."""
        for number, analysis in enumerate(self.analyses):
            for layer in self.batch.windows:
                if layer in self.values[number]:
                    continue
                # If nothing has arrived, not even its first part is noted.
                missing = self.missing.get((number, layer), self.parts[number])
                raise ModelError(
                    f"layer {layer} has run, but {analysis.name} has not received everything it"
                    f" needs ({', '.join(sorted(missing))}), so there is nothing to report"
                )

        self.refuse_nan()
        return self.values

    def refuse_nan(self) -> None:
        """Refuse sums with NaN or infinity: the only place in a batch that waits for the GPU."""
        if not self.finite_rows:
            return

        # To one device first, which waits for the copies of the others too, and only then for all
        # of them.
        device = self.finite_rows[0][2].device
        is_finite = torch.stack([rows.to(device) for _, _, rows in self.finite_rows]).cpu()
        if is_finite.all():
            return

        # The first of them that is not finite.
        index, row = (~is_finite).nonzero()[0].tolist()
        analysis, layer, _ = self.finite_rows[index]

        hint = "try another dtype, such as float32"
        if not is_ours(type(analysis)):
            hint += (
                f"; if it is finite without {analysis.name}, this analysis divides by 0 or takes the"
                " logarithm of 0, at this prompt or at padding"
            )
        raise ModelError(
            f"layer {layer} of {self.batch.model.cfg.model_name} gives NaN or infinity for"
            f" {self.batch.name_of_row(row)}; {hint}"
        )


def _check_values(analysis: Analysis, values: Values, batch: Batch, heads: int) -> None:
    """Refuse values that are not those that the quantities of an analysis declare."""
    quantities = analysis.quantities
    if not isinstance(values, Mapping) or set(values) != set(quantities):
        names = list(values) if isinstance(values, Mapping) else type(values).__name__
        raise OptionError(
            f"{analysis.name}: values() gives {names}; its quantities are {list(quantities)}"
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
        shape = list(getattr(value, "shape", ()))
        # A dimension of the analysis's own that has no labels may have any size.
        expected = [len(batch.rows), *(sizes.get(dim) for dim in quantity.dims)]
        fitting = [size if size is not None else actual for size, actual in zip(expected, shape)]
        if shape != fitting or len(shape) != len(expected) or not isinstance(value, Tensor):
            dims = ", ".join(["batch", *quantity.dims])
            raise OptionError(
                f"{analysis.name}: {name!r} is a {type(value).__name__} of shape {shape}; its dims"
                f" promise a tensor [{dims}] = {expected}"
            )


def on_cpu(values: Values) -> Values:
    """A layer's values on the CPU; valid once the GPU has done the work queued so far."""
    # Of a GPU to pinned memory, without waiting.
    return {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in values.items()}
