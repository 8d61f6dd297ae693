"""One forward pass of a batch, in which analyses reduce each block of rows as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis import analysis as protocols
from mechattn.analysis.analysis import Analysis, Sums
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.axes import BASELINE
from mechattn.engine.engines import Forward
from mechattn.engine.labelled_datasets import check_values
from mechattn.engine.nulls import Nulls
from mechattn.engine.pairing import PairedLayer, paired_layer
from mechattn.engine.request_checks import PROTOCOLS
from mechattn.errors import ModelError, OptionError, RowError
from mechattn.functional.activations import minimum_of
from mechattn.functional.attention import Fused, Rows
from mechattn.interventions.intervention import Intervention, Target, read_first
from mechattn.model.hooked import HookedModel
from mechattn.model.patch.nonlinearities import at_nonlinearity, plain_nonlinearity
from mechattn.model.scores import BlindScores
from mechattn.model.several_devices import device_of
from mechattn.prompts.token_sequences import Batch, Pairs, pairs_of
from mechattn.results.provenance import is_ours

LayerValues = dict[int, dict[str, Tensor]]  # for one analysis: each quantity, batch first, by layer


def measure_batch(
    model: HookedModel,
    batch: Batch,
    forward: Forward,
    windows: Mapping[int, int | None],
    analyses: Sequence[Analysis],
    prompt_ids: Sequence[str] = (),
    blind: BlindScores = BlindScores(),  # noqa: B008, a frozen value
) -> list[LayerValues]:
    """Run the model on a batch and return the values of each analysis in each layer, on the CPU."""
    needs_pairs = any(
        isinstance(analysis, (protocols.PairAnalysis, protocols.ActivationAnalysis))
        for analysis in analyses
    )
    batch_pass = _Pass.of(model, batch, windows, prompt_ids, needs_pairs)
    placed = batch_pass.placed
    nulls = Nulls(analyses, placed, batch_pass.pairs[placed.tokens.device], blind)
    pending = _PendingSums(batch_pass, analyses, nulls, when_complete=_stop_pass)
    receiver = _RowReceiver(batch_pass, pending)

    # Tells whether the model's own attention is finite, where an analysis gives NaN.
    measure_again = partial(
        measure_batch, model, batch, forward, windows, [ReceivedAttention("all")], prompt_ids, blind
    )
    try:
        with ExitStack() as stack:
            # Made before interventions on the nonlinearities, but entered after them: it sees their
            # results.
            watching_mlps = _at_mlps(batch_pass, pending)
            interventions = _interventions(placed, prompt_ids)
            for intervention, target in interventions:
                stack.enter_context(intervention.acting(model, partial(_constant, target)))
            if read_first(intervention for intervention, _ in interventions):
                forward(model, placed, {}, receiver.see, pending.last_layer)
            stack.enter_context(watching_mlps)
            stack.enter_context(_captured(batch_pass, pending))
            with suppress(_Enough):
                seen_windows = windows if receiver.is_needed else {}
                forward(model, placed, seen_windows, receiver.see, pending.last_layer)
    except RowError as error:
        raise ModelError(f"{batch_pass.name_of_row(error.row)}: {error}") from error
    except Exception:
        _refuse_nan(batch_pass, pending.finite_rows, measure_again)  # the cause, if there is one
        raise
    return pending.checked_values(measure_again)


class _Enough(BaseException):
    """Raised when all data has arrived, to skip the rest of the pass; error handlers must not catch
    it."""


def _stop_pass() -> None:
    raise _Enough


def _constant(target: Target) -> Target:
    return target


def _interventions(batch: Batch, prompt_ids: Sequence[str]) -> list[tuple[Intervention, Target]]:
    """Each intervention of each condition of a batch, in order, with the tokens that it acts on."""
    interventions: dict[tuple[str, int], Intervention] = {}
    rows: dict[tuple[str, int], list[int]] = {}
    for row, of_row in enumerate(batch.interventions):
        _, condition = batch.rows[row]
        for order, intervention in enumerate(of_row):
            interventions.setdefault((condition, order), intervention)
            rows.setdefault((condition, order), []).append(row)

    # An original token by its place in the baseline, an inserted one by −1 − its place in the
    # sequence.
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    positions = torch.where(batch.origin >= 0, batch.origin, -1 - places)

    with_targets = []
    for key, intervention in interventions.items():
        index = torch.tensor(rows[key], device=batch.tokens.device)
        ids = tuple(prompt_ids[batch.rows[row][0]] for row in rows[key])
        target = Target(index, ids, positions[index], batch.segment[index])
        with_targets.append((intervention, target))
    return with_targets


@dataclass(frozen=True)
class _Pass:
    """A forward pass of a batch, which is copied to each device that holds a measured layer."""

    model: HookedModel
    batch: Batch  # as given
    placed: Batch  # where the model takes it
    windows: Mapping[int, int | None]  # of the measured layers
    copies: Mapping[torch.device, Batch]
    pairs: Mapping[torch.device, Pairs | None]  # of a condition with the baseline, if needed
    devices: Mapping[int, torch.device]  # of the measured layers
    prompt_ids: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: HookedModel,
        batch: Batch,
        windows: Mapping[int, int | None],
        prompt_ids: Sequence[str],
        needs_pairs: bool,
    ) -> _Pass:
        placed = batch.to(device_of(model))
        devices = {layer: device_of(model.blocks[layer]) for layer in windows}
        # One copy for each device, as a copy waits for a GPU.
        home = placed.tokens.device
        copies = {device: batch.to(device) for device in {*devices.values()} - {home}}
        copies[home] = placed
        pairs = {
            device: pairs_of(copy, BASELINE) if needs_pairs else None
            for device, copy in copies.items()
        }
        return cls(model, batch, placed, windows, copies, pairs, devices, tuple(prompt_ids))

    @property
    def heads(self) -> int:
        return int(self.model.cfg.n_heads)

    def batch_at(self, layer: int) -> Batch:
        """The batch on the layer's device."""
        return self.copies[self.devices[layer]]

    def pairs_at(self, layer: int) -> Pairs:
        """The pairs on the layer's device."""
        return cast(Pairs, self.pairs[self.devices[layer]])

    def name_of_row(self, row: int) -> str:
        """A row of the batch, for messages."""
        prompt, condition = self.batch.rows[row]
        name = f"number {prompt}"
        if prompt < len(self.prompt_ids):
            name = self.prompt_ids[prompt]
        return f'prompt {name} with the condition "{condition}"'


class _PendingSums:
    """The sums of each analysis for each layer; they become values once all that the analysis needs
    has arrived."""

    # The model decides in which order the parts of a layer arrive: rows mostly before the layer's
    # output, in some bridges after it, MLP activations last. So a reduction that needs the rows is
    # stored as a call until they arrive, and sums stay open until no part is missing. With the last
    # value ``when_complete`` is called.
    def __init__(
        self,
        batch_pass: _Pass,
        analyses: Sequence[Analysis],
        nulls: Nulls,
        when_complete: Callable[[], None],
    ) -> None:
        self.batch_pass = batch_pass
        self.when_complete = when_complete
        self.analyses = analyses
        self.nulls = nulls
        self.parts = [_parts_of(analysis) for analysis in analyses]

        # By the number of the analysis and the layer.
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
            return int(self.batch_pass.model.cfg.n_layers) - 1
        return max(self.batch_pass.windows)

    def receivers(self, part: str) -> list[tuple[int, Any]]:
        """The analyses that need a part, and so have its protocol, with their numbers."""
        return [
            (number, analysis)
            for number, analysis in enumerate(self.analyses)
            if part in self.parts[number]
        ]

    def of(self, number: int, layer: int, heads: int | None = None) -> Sums:
        """The sums of an analysis."""
        key = (number, layer)
        if key not in self.sums:
            batch = self.batch_pass.batch_at(layer)
            self.sums[key] = self.analyses[number].start(batch, heads or self.batch_pass.heads)
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
            reduce = self.waiting.pop(key)
            reduce()
        elif not self.missing[key]:
            del self.missing[key]
            self._finish(number, layer, self.sums.pop(key))

    def _finish(self, number: int, layer: int, sums: Sums) -> None:
        """Turn sums into values, and copy these to the CPU."""
        analysis = self.analyses[number]
        window = self.batch_pass.windows[layer]
        for value in sums.values():
            if value.is_floating_point():
                # NaN and infinity survive a maximum, which is six times as fast as isfinite of all.
                largest = value.reshape(len(value), -1).abs().amax(1)
                self.finite_rows.append((analysis, layer, largest.isfinite()))

        values = analysis.values(sums, self.batch_pass.batch_at(layer).at(layer), window)
        if not self.values[number]:
            check_values(analysis, values, self.batch_pass.placed, self.batch_pass.heads)
        self.values[number][layer] = on_cpu(values | self.nulls.of(number, layer, window))
        if all(len(by_layer) == len(self.batch_pass.windows) for by_layer in self.values):
            self.when_complete()

    def checked_values(self, measure_again: Callable[[], object]) -> list[LayerValues]:
        """The values of each analysis, once everything has arrived."""
        for number, analysis in enumerate(self.analyses):
            for layer in self.batch_pass.windows:
                if layer not in self.values[number]:
                    missing = self.missing.get((number, layer), self.parts[number])
                    raise ModelError(
                        f"layer {layer} has run, but {analysis.name} has not received everything it"
                        f" needs ({', '.join(sorted(missing))}), so there is nothing to report"
                    )
        # The only place in a batch that waits for the GPU.
        _refuse_nan(self.batch_pass, self.finite_rows, measure_again)
        return self.values


def _parts_of(analysis: Analysis) -> set[str]:
    """What an analysis receives, by its protocols; called once, as isinstance is slow for a
    protocol."""
    return {part for part, protocol in PROTOCOLS.items() if isinstance(analysis, protocol)}


class _RowReceiver:
    """Receives blocks of attention rows, layer by layer."""

    def __init__(self, batch_pass: _Pass, pending: _PendingSums) -> None:
        self.batch_pass = batch_pass
        self.pending = pending
        self.of_rows = pending.receivers("rows")
        self.of_pairs = pending.receivers("pairs")
        self.paired_layers: dict[int, PairedLayer] = {}

    @property
    def is_needed(self) -> bool:
        return bool(self.of_rows or self.of_pairs)

    def see(self, layer: int, rows: Rows | Fused) -> None:
        """Receive a block of a layer, or a whole layer."""
        if isinstance(rows, Fused):
            self._see_whole(layer, rows)
            return

        self._see_rows(layer, rows)
        if self.of_pairs:
            self._see_pairs(layer, rows)
        is_last_block = rows.queries.stop == self.batch_pass.batch.tokens.shape[1]
        if is_last_block:
            self.paired_layers.pop(layer, None)
            for number, _ in self.of_rows:
                self.pending.complete(number, layer, "rows")
            for number, _ in self.of_pairs:
                self.pending.complete(number, layer, "pairs")

    def _see_whole(self, layer: int, fused: Fused) -> None:
        batch = self.batch_pass.batch_at(layer)
        window = self.batch_pass.windows[layer]
        attention = protocols.WholeAttention(layer, fused, batch, window)
        for number, analysis in self.of_rows:
            analysis.add_whole(self.pending.of(number, layer, fused.out.shape[1]), attention)
            self.pending.complete(number, layer, "rows")

    def _see_rows(self, layer: int, rows: Rows) -> None:
        batch = self.batch_pass.batch_at(layer)
        window = self.batch_pass.windows[layer]
        v = None if rows.attention is None else rows.attention.v
        block = protocols.AttentionRows(
            layer, rows.pattern, rows.queries, rows.keys, batch, window, v, rows.attention
        )
        heads = rows.pattern.shape[1]
        for number, analysis in self.of_rows:
            analysis.add(self.pending.of(number, layer, heads), block)

    def _see_pairs(self, layer: int, rows: Rows) -> None:
        if layer not in self.paired_layers:
            pairs = self.batch_pass.pairs_at(layer)
            window = self.batch_pass.windows[layer]
            self.paired_layers[layer] = paired_layer(layer, rows.attention, pairs, window)
        block = self.paired_layers[layer].rows(rows)
        heads = rows.pattern.shape[1]
        for number, analysis in self.of_pairs:
            analysis.add_pairs(self.pending.of(number, layer, heads), block)


@contextmanager
def _captured(batch_pass: _Pass, pending: _PendingSums) -> Iterator[None]:
    """Hooks that keep one layer's tensors until the last hook that an analysis asked for has
    fired."""
    capturing = pending.receivers("hooks")
    of_final = pending.receivers("final")
    # Listing the hooks takes a while.
    hook_dict = batch_pass.model.hook_dict if capturing or of_final else {}

    def see_final(module: Any, args: Any, resid_post: Float[Tensor, "batch pos d_model"]) -> None:
        for number, analysis in of_final:
            for layer, device in batch_pass.devices.items():
                on_device = resid_post.detach().to(device)
                analysis.add_final(pending.of(number, layer), on_device)
                pending.complete(number, layer, "final")

    with ExitStack() as stack:
        for number, analysis in capturing:
            for layer in batch_pass.windows:
                capture = _Capture(batch_pass, pending, number, analysis, layer)
                for name in analysis.captures:
                    hook = partial(capture.see, name)
                    handle = hook_dict[f"blocks.{layer}.{name}"].register_forward_hook(hook)
                    stack.callback(handle.remove)
        if of_final:
            last = hook_dict[f"blocks.{pending.last_layer}.hook_resid_post"]
            stack.callback(last.register_forward_hook(see_final).remove)
        yield


class _Capture:
    """The tensors at the hooks of a layer that an analysis asked for, until all have fired."""

    def __init__(
        self, batch_pass: _Pass, pending: _PendingSums, number: int, analysis: Any, layer: int
    ) -> None:
        self.batch_pass = batch_pass
        self.pending = pending
        self.number = number
        self.analysis = analysis
        self.layer = layer
        self.tensors: dict[str, Tensor] = {}

    def see(self, name: str, module: Any, args: Any, out: Tensor) -> None:
        """Keep the tensor of a hook; with the last one, pass all on."""
        batch = self.batch_pass.batch_at(self.layer)
        shape = batch.tokens.shape
        # A layer's first input comes from the layer before, which may lie on another device.
        out = out.detach().to(batch.tokens.device)
        # OPT runs its MLP on one row of all tokens.
        is_one_row = out.shape[:2] != shape and len(out) == batch.tokens.numel()
        self.tensors[name] = out.unflatten(0, shape) if is_one_row else out
        if len(self.tensors) < len(self.analysis.captures):
            return

        window = self.batch_pass.windows[self.layer]
        captures = protocols.Captures(self.layer, dict(self.tensors), batch.at(self.layer), window)
        self.tensors.clear()
        self.pending.after_rows(self.number, self.layer, partial(self._pass_on, captures))

    def _pass_on(self, captures: protocols.Captures) -> None:
        self.analysis.add_captures(self.pending.of(self.number, self.layer), captures)
        self.pending.complete(self.number, self.layer, "hooks")


def _at_mlps(batch_pass: _Pass, pending: _PendingSums) -> AbstractContextManager[None]:
    """Watch every MLP inside a ``with`` block; the nonlinearities are those of the time of this
    call."""
    watching = pending.receivers("mlps")
    layers = batch_pass.windows if watching else {}
    minimums = {layer: minimum_of(plain_nonlinearity(batch_pass.model, layer)) for layer in layers}

    def see(
        layer: int, pre: Float[Tensor, "*token d_mlp"], post: Float[Tensor, "*token d_mlp"]
    ) -> None:
        tokens = batch_pass.placed.tokens
        d_mlp = pre.shape[-1]
        if pre.numel() != d_mlp * tokens.numel():
            raise ModelError(
                f"the MLP of layer {layer} doesn't read every token, so its activations cannot be"
                " compared by token"
            )
        activations = protocols.Activations(
            layer,
            pre.detach().reshape(*tokens.shape, d_mlp),
            post.detach().reshape(*tokens.shape, d_mlp),
            minimums[layer],
            batch_pass.batch_at(layer),
            batch_pass.pairs_at(layer),
        )
        for number, analysis in watching:
            analysis.add_activations(pending.of(number, layer), activations)
            pending.complete(number, layer, "mlps")

    return at_nonlinearity(batch_pass.model, dict.fromkeys(minimums, see))


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's values on the CPU, in one copy for each dtype; valid once the GPU has done the work
    queued so far."""
    if all(value.device.type == "cpu" for value in values.values()):
        return dict(values)

    copies: dict[str, Tensor] = {}
    for kind in {(value.dtype, value.device) for value in values.values()}:
        names = [name for name, value in values.items() if (value.dtype, value.device) == kind]
        flat = torch.cat([values[name].reshape(-1) for name in names])
        flat = flat.to("cpu", non_blocking=flat.is_cuda)  # to pinned memory, without waiting
        parts = flat.split([values[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            copies[name] = part.view(values[name].shape)
    return {name: copies[name] for name in values}


def _refuse_nan(
    batch_pass: _Pass,
    finite_rows: Sequence[tuple[Analysis, int, Tensor]],
    measure_again: Callable[[], object],
) -> None:
    """Refuse sums with NaN or infinity: the model's, or only those of a user's analysis if
    ``measure_again`` passes."""
    if not finite_rows:
        return
    # To one device first, which waits for the copies of the others too, and only then for all of
    # them.
    device = finite_rows[0][2].device
    is_finite = torch.stack([rows.to(device) for _, _, rows in finite_rows]).cpu()
    if is_finite.all():
        return

    index, row = (~is_finite).nonzero()[0].tolist()
    analysis, layer, _ = finite_rows[index]
    name = batch_pass.name_of_row(row)
    if is_ours(type(analysis)):
        raise ModelError(
            f"layer {layer} of {batch_pass.model.cfg.model_name} gives NaN or infinity for {name};"
            " try another dtype, such as float32"
        )
    measure_again()
    raise OptionError(
        f"the analysis {analysis.name} gives NaN or infinity in layer {layer} for {name}, where the"
        " attention itself is finite; does it divide by 0, or take the logarithm of 0, at this"
        " prompt or at padding?"
    )
