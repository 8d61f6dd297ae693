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
from mechattn.engine.attention_rows import Forward, Nulls, PairedLayer, paired_layer
from mechattn.engine.labelled_datasets import check_values
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
    placed = batch.to(device_of(model))
    paired = any(
        isinstance(analysis, (protocols.PairAnalysis, protocols.ActivationAnalysis))
        for analysis in analyses
    )
    where = {layer: device_of(model.blocks[layer]) for layer in windows}
    copies = {device: batch.to(device) for device in where.values()} | {
        placed.tokens.device: placed
    }
    pairs = {
        device: pairs_of(each, BASELINE) if paired else None for device, each in copies.items()
    }
    here = {layer: (copies[device], pairs[device]) for layer, device in where.items()}
    one = _Pass(model, batch, placed, windows, here, tuple(prompt_ids))
    sums = _Sums(one, analyses, Nulls(analyses, placed, pairs[placed.tokens.device], blind))
    rows = _Rows(one, sums)
    again = partial(
        measure_batch, model, batch, forward, windows, [ReceivedAttention("all")], prompt_ids, blind
    )
    try:
        with ExitStack() as stack:
            mlps = _at_mlps(
                one, sums
            )  # made before interventions on the nonlinearities, entered after: sees results
            acting = _acting(placed, prompt_ids)
            for intervention, target in acting:
                stack.enter_context(intervention.acting(model, lambda target=target: target))  # type: ignore[misc]
            if read_first(intervention for intervention, _ in acting):
                forward(model, placed, {}, rows.see, sums.last_layer)
            stack.enter_context(mlps)
            stack.enter_context(_captured(one, sums))
            with suppress(_Enough):
                forward(model, placed, windows if rows.wanted else {}, rows.see, sums.last_layer)
    except RowError as error:
        raise ModelError(f"{one.name(error.row)}: {error}") from error
    except Exception:
        _refuse_nan(one, sums.finite, again)  # the cause, if there is one
        raise
    return sums.checked(again)


class _Enough(BaseException):
    """Raised when all data has arrived, to skip the rest of the pass; error handlers must not catch it."""


def _acting(batch: Batch, prompt_ids: Sequence[str]) -> list[tuple[Intervention, Target]]:
    """Each intervention of each condition of a batch, in order, with the tokens that it acts on."""
    found: dict[tuple[str, int], tuple[Intervention, list[int]]] = {}
    for row, interventions in enumerate(batch.interventions):
        for order, intervention in enumerate(interventions):
            found.setdefault((batch.rows[row][1], order), (intervention, []))[1].append(row)
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    positions = torch.where(batch.origin >= 0, batch.origin, -1 - place)
    made = []
    for intervention, rows in found.values():
        index = torch.tensor(rows, device=batch.tokens.device)
        ids = tuple(prompt_ids[batch.rows[row][0]] for row in rows)
        made.append((intervention, Target(index, ids, positions[index], batch.segment[index])))
    return made


@dataclass(frozen=True)
class _Pass:
    """A forward pass of a batch: the batch as given, where the model takes it, and where each measured layer lies."""

    model: HookedModel
    batch: Batch
    placed: Batch
    windows: Mapping[int, int | None]
    here: Mapping[int, tuple[Batch, Pairs | None]]  # by layer, on its device
    prompt_ids: tuple[str, ...] = ()

    def name(self, row: int) -> str:
        """A row of the batch, for messages."""
        prompt, condition = self.batch.rows[row]
        known = self.prompt_ids[prompt] if prompt < len(self.prompt_ids) else f"number {prompt}"
        return f'prompt {known} with the condition "{condition}"'


class _Sums:
    """The sums of each analysis for each layer; they become values once all that the analysis needs has arrived."""

    # The model decides in which order the parts of a layer arrive: rows mostly before the layer's output, in some
    # bridges after it, MLP activations last. So a reduction that needs the rows is stored as a call until they arrive,
    # and sums stay open until no part is missing. The last value ends the pass (_Enough), so later layers and logits
    # are not computed.
    def __init__(self, one: _Pass, analyses: Sequence[Analysis], nulls: Nulls) -> None:
        self.one, self.analyses, self.nulls = one, analyses, nulls
        self.parts = [  # once, because isinstance is slow for a protocol
            {part for part, protocol in PROTOCOLS.items() if isinstance(analysis, protocol)}
            for analysis in analyses
        ]
        self.open: dict[tuple[int, int], tuple[Sums, set[str]]] = {}
        self.waiting: dict[tuple[int, int], Callable[[], None]] = {}
        self.values: list[LayerValues] = [{} for _ in analyses]
        self.finite: list[
            tuple[Analysis, int, Tensor]
        ] = []  # finite rows of whose sums; read once, at the end

    @property
    def last_layer(self) -> int:
        """The last layer that has to be computed."""
        return (
            int(self.one.model.cfg.n_layers) - 1
            if self.looking_at("final")
            else max(self.one.windows)
        )

    def looking_at(self, part: str) -> list[tuple[int, Any]]:
        """The analyses that need a part, and so have its protocol, with their indices."""
        return [(i, analysis) for i, analysis in enumerate(self.analyses) if part in self.parts[i]]

    def of(self, number: int, layer: int, heads: int | None = None) -> Sums:
        """The sums of an analysis."""
        if (number, layer) not in self.open:
            made = self.analyses[number].start(
                self.one.here[layer][0], heads or int(self.one.model.cfg.n_heads)
            )
            self.open[number, layer] = made, set(self.parts[number])
        return self.open[number, layer][0]

    def after_rows(self, number: int, layer: int, reduce: Callable[[], None]) -> None:
        """Call this when all rows have arrived: usually at once, but some bridges fire hook_pattern after hook_z."""
        self.of(number, layer)
        if "rows" in self.open[number, layer][1]:
            self.waiting[number, layer] = reduce
        else:
            reduce()

    def seen(self, number: int, layer: int, part: str) -> None:
        """Note that a part is complete; after the last part, the sums become values."""
        made, missing = self.open[number, layer]
        missing.discard(part)
        if part == "rows" and (number, layer) in self.waiting:
            self.waiting.pop((number, layer))()
            return
        if missing:
            return
        del self.open[number, layer]
        analysis, window = self.analyses[number], self.one.windows[layer]
        numbers = [value for value in made.values() if value.is_floating_point()]
        self.finite += [
            (analysis, layer, each.isfinite().reshape(len(each), -1).all(1)) for each in numbers
        ]
        values = analysis.values(made, self.one.here[layer][0].at(layer), window)
        if not self.values[number]:
            check_values(analysis, values, self.one.placed, int(self.one.model.cfg.n_heads))
        self.values[number][layer] = on_cpu(values | self.nulls.of(number, layer, window))
        if all(len(by_layer) == len(self.one.windows) for by_layer in self.values):
            raise _Enough

    def checked(self, again: Callable[[], object]) -> list[LayerValues]:
        """The values of each analysis, once everything has arrived."""
        for number, analysis in enumerate(self.analyses):
            for layer in self.one.windows:
                if layer not in self.values[number]:
                    missing = (
                        self.open[number, layer][1]
                        if (number, layer) in self.open
                        else self.parts[number]
                    )
                    raise ModelError(
                        f"layer {layer} has run, but {analysis.name} has not received everything it needs "
                        f"({', '.join(sorted(missing))}), so there is nothing to report"
                    )
        _refuse_nan(
            self.one, self.finite, again
        )  # the only place in a batch that waits for the GPU
        return self.values


class _Rows:
    """Receives blocks of attention rows, layer by layer."""

    def __init__(self, one: _Pass, sums: _Sums) -> None:
        self.one, self.sums = one, sums
        self.by_row, self.by_pair = sums.looking_at("rows"), sums.looking_at("pairs")
        self.wanted = bool(self.by_row or self.by_pair)
        self.paired: dict[int, PairedLayer] = {}

    def see(self, layer: int, rows: Rows | Fused) -> None:
        """Receive a block of a layer, or a whole layer."""
        one, window = self.one, self.one.windows[layer]
        if isinstance(rows, Fused):
            whole = protocols.WholeAttention(layer, rows, one.here[layer][0], window)
            for number, analysis in self.by_row:
                analysis.add_whole(self.sums.of(number, layer, rows.out.shape[1]), whole)
                self.sums.seen(number, layer, "rows")
            return
        heads = rows.pattern.shape[1]
        if self.by_pair and layer not in self.paired:
            self.paired[layer] = paired_layer(
                layer, rows.attention, cast(Pairs, one.here[layer][1]), window
            )
        v = None if rows.attention is None else rows.attention.v
        batch = one.here[layer][0]
        block = protocols.AttentionRows(
            layer, rows.pattern, rows.queries, rows.keys, batch, window, v, rows.attention
        )
        for number, analysis in self.by_row:
            analysis.add(self.sums.of(number, layer, heads), block)
        if self.by_pair:
            both = self.paired[layer].rows(rows)
            for number, analysis in self.by_pair:
                analysis.add_pairs(self.sums.of(number, layer, heads), both)
        if rows.queries.stop == one.batch.tokens.shape[1]:
            self.paired.pop(layer, None)
            for part, looking in (("rows", self.by_row), ("pairs", self.by_pair)):
                for number, _ in looking:
                    self.sums.seen(number, layer, part)


@contextmanager
def _captured(one: _Pass, sums: _Sums) -> Iterator[None]:
    """Hooks that keep one layer's tensors until the last hook that an analysis asked for has fired."""
    found, finals = sums.looking_at("hooks"), sums.looking_at("final")
    named = one.model.hook_dict if found or finals else {}

    def take_final(module: Any, given: Any, out: Float[Tensor, "batch pos d_model"]) -> None:
        for number, analysis in finals:
            for layer in one.windows:
                analysis.add_final(
                    sums.of(number, layer), out.detach().to(one.here[layer][0].tokens.device)
                )
                sums.seen(number, layer, "final")

    with ExitStack() as stack:
        for number, analysis in found:
            for layer in one.windows:
                held: dict[str, Tensor] = {}
                for name in analysis.captures:
                    take = partial(_take, one, sums, (number, layer), held, name)
                    stack.callback(
                        named[f"blocks.{layer}.{name}"].register_forward_hook(take).remove
                    )
        if finals:
            stack.callback(
                named[f"blocks.{sums.last_layer}.hook_resid_post"]
                .register_forward_hook(take_final)
                .remove
            )
        yield


def _take(
    one: _Pass, sums: _Sums, where: tuple[int, int], held: dict[str, Tensor], name: str,
    module: Any, given: Any, out: Tensor,
) -> None:  # fmt: skip
    number, layer = where
    analysis: Any = sums.analyses[number]
    shape = one.placed.tokens.shape
    flat = (
        out.shape[:2] != shape and len(out) == shape.numel()
    )  # OPT runs its MLP on one row of all tokens
    out = out.detach().to(
        one.here[layer][0].tokens.device
    )  # a layer's first input comes from the layer before
    held[name] = out.unflatten(0, shape) if flat else out
    if len(held) < len(analysis.captures):
        return
    captures = protocols.Captures(
        layer, dict(held), one.here[layer][0].at(layer), one.windows[layer]
    )
    held.clear()

    def reduce() -> None:
        analysis.add_captures(sums.of(number, layer), captures)
        sums.seen(number, layer, "hooks")

    sums.after_rows(number, layer, reduce)


def _at_mlps(one: _Pass, sums: _Sums) -> AbstractContextManager[None]:
    """Watch every MLP inside a ``with`` block; the nonlinearities are those of the time of this call."""
    taken, tokens = sums.looking_at("mlps"), one.placed.tokens
    minimum = {
        n: minimum_of(plain_nonlinearity(one.model, n)) for n in (one.windows if taken else {})
    }

    def see(
        layer: int, pre: Float[Tensor, "*token d_mlp"], post: Float[Tensor, "*token d_mlp"]
    ) -> None:
        if pre.numel() != pre.shape[-1] * tokens.numel():
            raise ModelError(
                f"the MLP of layer {layer} doesn't read every token, so its activations cannot be compared by token"
            )
        pre, post = (each.detach().reshape(*tokens.shape, pre.shape[-1]) for each in (pre, post))
        passed = protocols.Activations(
            layer, pre, post, minimum[layer], *cast(tuple[Batch, Pairs], one.here[layer])
        )
        for number, analysis in taken:
            analysis.add_activations(sums.of(number, layer), passed)
            sums.seen(number, layer, "mlps")

    return at_nonlinearity(one.model, dict.fromkeys(minimum, see))


def on_cpu(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's values on the CPU, in one copy for each dtype; valid once the GPU has done the work queued so far."""
    if all(value.device.type == "cpu" for value in found.values()):
        return dict(found)
    made: dict[str, Tensor] = {}
    for kind in {(value.dtype, value.device) for value in found.values()}:
        some = {name: value for name, value in found.items() if (value.dtype, value.device) == kind}
        flat = torch.cat([value.reshape(-1) for value in some.values()])
        flat = flat.to("cpu", non_blocking=flat.is_cuda)  # to pinned memory, without waiting
        parts = flat.split([value.numel() for value in some.values()])
        made |= {
            name: part.view(value.shape)
            for (name, value), part in zip(some.items(), parts, strict=True)
        }
    return {name: made[name] for name in found}


def _refuse_nan(
    one: _Pass, finite: Sequence[tuple[Analysis, int, Tensor]], again: Callable[[], object]
) -> None:
    """Refuse sums with NaN or infinity: the model's, or only those of a user's analysis if ``again`` is finite."""
    # To one device first, which waits for the copies of the others too, and only then for all of them.
    rows = (
        torch.stack([each.to(finite[0][2].device) for *_, each in finite]).cpu()
        if finite
        else torch.ones(1)
    )
    if rows.all():
        return
    at, row = (~rows).nonzero()[0].tolist()
    analysis, layer, _ = finite[at]
    if is_ours(type(analysis)):
        raise ModelError(
            f"layer {layer} of {one.model.cfg.model_name} gives NaN or infinity for {one.name(row)}; try "
            "another dtype, such as float32"
        )
    again()
    raise OptionError(
        f"the analysis {analysis.name} gives NaN or infinity in layer {layer} for {one.name(row)}, where the attention "
        "itself is finite; does it divide by 0, or take the logarithm of 0, at this prompt or at padding?"
    )
