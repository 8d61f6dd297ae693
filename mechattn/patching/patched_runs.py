"""Forward passes of a prompt's sequences that are recorded, or patched with other activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.head_parts import is_latent, kv_heads_of
from mechattn.model.hooked import HookedModel, attribute_set, device_of
from mechattn.model.hooks import blocks_of, split_heads, without_cache
from mechattn.model.patch.keys_values_z import changing_z
from mechattn.patching.answer_metrics import Logits
from mechattn.prompts.token_sequences import TokenSequence

# Each head's output before W_O; its queries; the keys and values of the key-value heads, all before
# RoPE and norms; its pattern [pos head key]; and, as if of one head, the residual stream after a
# layer and what attention or the MLP adds to it.
Part = Literal["z", "q", "k", "v", "pattern", "resid_post", "attn_out", "mlp_out"]
LAYER_PARTS = ("resid_post", "attn_out", "mlp_out")  # parts without heads
Activation = Float[Tensor, "pos head d_head"]  # the activation of a part of a layer in one run
LayerHead = tuple[int, int]  # a layer and a head; (layer, 0) for a part without heads
# A number for each original token that both runs have, such as its position.
SharedTokens = Int[Tensor, " shared"]
HeadOutput = Float[Tensor, "shared d_head"]  # the activation of a part of one head at these tokens
# A function of an activation [batch pos head d_head] that returns what replaces it.
ActivationChange = Callable[[Tensor], Tensor]


class HeadChange(NamedTuple):
    """The value that replaces the activation of a part of a head at some positions."""

    part: Part
    where: LayerHead
    positions: Int[Tensor, " change"]
    value: Float[Tensor, "change d_head"]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One run of a sequence that ends in the reference answer.

    Args:
        sequence: The sequence.
        activations: The activation of the recorded part, by layer.
        logits: The logits that predict the answer.
        origins: The original tokens that the other run has too, in ascending order.
        inputs_of: What the block before a layer returned, for each layer at which patched passes
            may start.
    """

    sequence: TokenSequence
    activations: Mapping[int, Activation]
    logits: Float[Tensor, "1 answer d_vocab"]
    origins: SharedTokens
    inputs_of: Mapping[int, Any]

    @property
    def positions(self) -> SharedTokens:
        """The position of each original token that both runs have, in the order of ``origins``."""
        return positions_of(self.sequence, self.origins)

    def output_of(self, where: LayerHead, positions: SharedTokens) -> HeadOutput:
        """The activation of a head at some positions."""
        layer, head = where
        activation = self.activations[layer]
        return activation[positions.to(activation.device), head]


def positions_of(sequence: TokenSequence, origins: SharedTokens) -> SharedTokens:
    """The positions of tokens with these origins.

    Args:
        sequence: A sequence that has all of these tokens.
        origins: The indices of these tokens in the baseline.

    Returns:
        Positions in the sequence, in the order of ``origins``.
    """
    order = sequence.origin.argsort()  # inserted tokens, whose origin is −1, come first
    return order[torch.searchsorted(sequence.origin[order], origins)]


def head_count(model: HookedModel, part: Part) -> int:
    """The number of heads of a part; 1 for a part without heads."""
    if part in LAYER_PARTS:
        return 1
    if part in ("k", "v"):
        return kv_heads_of(model)
    return model.cfg.n_heads


@contextmanager
def changing(
    model: HookedModel, part: Part, changes: Mapping[int, ActivationChange]
) -> Iterator[None]:
    """Replace the activation of a part in some layers by a function of it, inside a ``with`` block.

    Args:
        model: The hooked model.
        part: The part whose activation is replaced.
        changes: The function for each layer to change. It gets an activation [batch pos head
            d_head]; a part without heads comes as one head, and a pattern as [batch query head
            key].

    Raises:
        ModelError: A layer has no hook for this part.
    """
    if part == "z":
        with changing_z(model, changes):
            yield
        return

    count = head_count(model, part)
    with ExitStack() as stack:
        for layer, change in changes.items():
            change_output = partial(_with_heads_changed, change, count)
            if part == "pattern":
                change_output = partial(_with_queries_changed, change)
            hook = hook_of(model, part, layer)
            stack.enter_context(hook.register_forward_hook(partial(on_output, change_output)))
        yield


def on_output(function: Callable[[Tensor], Any], module: Any, inputs: Any, out: Tensor) -> Any:
    """A forward hook that calls a function of a module's output.

    If the function returns something, that replaces the output.
    """
    return function(out)


def hook_of(model: HookedModel, part: Part, layer: int) -> Any:
    """The hook of a part other than z in a layer.

    Raises:
        ModelError: The layer has no such hook, or it has latents (MLA) instead of keys and values.
    """
    block: Any = model.blocks[layer]
    name = f"hook_{part}" if part in LAYER_PARTS else f"attn.hook_{part}"
    if part in ("attn_out", "mlp_out") and hasattr(block, "residual_contribution_scale"):
        # Such a block (Granite) fires these hooks only for functions that were added through
        # TransformerLens (``ScaledResidualBlockBridge``). Its submodules always fire hook_out.
        # Their outputs are not multiplied by the residual scale yet, but that is so in both runs.
        # Where several submodules make up the MLP, there is no name, and so no hook.
        submodule = block.scaled_mlp_submodule
        if part == "attn_out":
            submodule = block.scaled_attn_submodule
        name = f"{submodule}.hook_out"

    hook = model.hook_dict.get(f"blocks.{layer}.{name}")
    if hook is None or (part in ("k", "v") and is_latent(model, layer)):
        raise ModelError(
            f"layer {layer} of {model.cfg.model_name} has no hook of {part}, so it cannot be "
            "patched there"
        )
    return hook


def recorded_runs(
    model: HookedModel,
    sequences: Sequence[tuple[TokenSequence, SharedTokens]],
    layers: Sequence[int],
    part: Part,
    starts: Sequence[int] = (),
) -> list[RecordedRun]:
    """Run sequences without patching, and record a part's activations.

    Sequences of the same shape share a pass.

    Args:
        model: The hooked model.
        sequences: Sequences that end in the reference answer, each with the original tokens that
            the other run has too.
        layers: The layers to record.
        part: The part whose activations are recorded.
        starts: The layers at which patched passes may start.
    """
    batch_activations: dict[int, Tensor] = {}
    batch_inputs_of: dict[int, Any] = {}

    def record(layer: int, activation: Tensor) -> Tensor:
        batch_activations[layer] = activation.detach()
        return activation

    def record_block(layer: int, module: Any, inputs: Any, out: Any) -> None:
        batch_inputs_of[layer] = out

    blocks = blocks_of(model)
    records = {layer: partial(record, layer) for layer in layers}
    runs: dict[int, RecordedRun] = {}
    with ExitStack() as stack:
        stack.enter_context(changing(model, part, records))
        for layer in starts:
            block_before = blocks[layer - 1]
            recorder = partial(record_block, layer)
            stack.enter_context(block_before.register_forward_hook(recorder))

        token_sequences = [sequence for sequence, _ in sequences]
        for indices in of_one_shape(token_sequences):
            logits = logits_of(model, [token_sequences[index] for index in indices])
            for row, index in enumerate(indices):
                sequence, origins = sequences[index]
                activations = {layer: batch[row] for layer, batch in batch_activations.items()}
                inputs_of = {layer: _row(out, row) for layer, out in batch_inputs_of.items()}
                runs[index] = RecordedRun(sequence, activations, logits[[row]], origins, inputs_of)
    return [runs[index] for index in range(len(sequences))]


def of_one_shape(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Group the indices of sequences that can be rows of one pass.

    The sequences of a group have the same length and the answer at the same positions.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        shape = (len(sequence), *answer_positions(sequence).tolist())
        by_shape.setdefault(shape, []).append(index)
    return list(by_shape.values())


def answer_positions(sequence: TokenSequence) -> Int[Tensor, " answer"]:
    """The positions of the answer."""
    is_answer = sequence.of_segment("answer")
    return is_answer.nonzero()[:, 0]


def possible_starts(
    model: HookedModel, sequence: TokenSequence, layers: Iterable[int]
) -> list[int]:
    """The layers among the given ones at which a pass may start, with the outputs of the block
    before it.

    They are all given layers except the first of the model, if a pass from each of them gives
    exactly the logits of a whole pass. Otherwise there are none, because a layer uses more than
    what the block before it returns. One sequence is enough for this test, since the answer depends
    only on how the blocks are connected. It is read twice, because a single row would not show
    whether rows can be separated and joined.

    Args:
        model: The hooked model.
        sequence: Any sequence that ends in an answer.
        layers: The layers that will be changed.
    """
    starts = sorted(set(layers) - {0})
    if not starts:
        return []

    runs = recorded_runs(model, [(sequence, sequence.origin)] * 2, (), "z", starts)
    whole_pass_logits = torch.cat([run.logits for run in runs])
    for layer in starts:
        try:
            with _starting_at(model, layer, runs):
                logits = logits_of(model, [sequence] * 2)
        except (LookupError, AttributeError, TypeError, NameError):
            # A block lacks what an earlier block stores for it, such as shared keys.
            return []
        if not torch.equal(logits, whole_pass_logits):
            return []
    return starts


def logits_of(
    model: HookedModel, sequences: Sequence[TokenSequence], gradients: bool = False
) -> Logits:
    """The logits that predict each token of the answer, for sequences of the same shape.

    The sequences are the rows of one pass.

    Args:
        model: The hooked model.
        sequences: Sequences that end in the reference answer.
        gradients: Whether the pass keeps what gradients of activations need.
    """
    device = device_of(model)
    tokens = torch.stack([sequence.tokens for sequence in sequences]).to(device)
    position_ids = torch.stack([sequence.position_ids for sequence in sequences])
    options: dict[str, Any] = dict(without_cache(model))

    # Positions that simply count from 0 are the model's own, and are not given.
    if (position_ids != torch.arange(tokens.shape[1])).any():
        options["position_ids"] = position_ids.to(device)
        options["attention_mask"] = torch.ones_like(tokens)

    # The logits at a token predict the next one.
    predicting_positions = answer_positions(sequences[0]) - 1

    def select_positions(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stream, *other_inputs = inputs
        return (stream[:, predicting_positions.to(stream.device)], *other_inputs)

    with ExitStack() as stack:
        # The logits of all tokens would take as much memory as many rows.
        unembed: Any = getattr(model, "unembed", None)
        if unembed is not None:
            stack.enter_context(unembed.register_forward_pre_hook(select_positions))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(_without_gradients_of_weights(model))
        logits = model(tokens, return_type="logits", **options)

    if logits.shape[1] == tokens.shape[1]:  # those of all tokens: this model calls no unembed
        logits = logits[:, predicting_positions]
    return logits


def patched_logits(
    model: HookedModel,
    runs: Sequence[RecordedRun],
    changes_by_row: Sequence[Sequence[HeadChange]],
) -> Logits:
    """The logits that predict the answer in a pass whose rows are patched runs of the same shape.

    The pass starts at the first layer that is changed, if the runs may start there.

    Args:
        model: The hooked model.
        runs: The run that is patched in each row. A run may be in several rows.
        changes_by_row: The changes of each row.
    """
    # A hook changes a part of a layer in all rows at once.
    rows_of_part: dict[tuple[Part, int], list[tuple[int, HeadChange]]] = {}
    for row, changes in enumerate(changes_by_row):
        for change in changes:
            layer, _ = change.where
            rows_of_part.setdefault((change.part, layer), []).append((row, change))

    def replace_values(row_changes: list[tuple[int, HeadChange]], activation: Tensor) -> Tensor:
        activation = activation.clone()
        for row, change in row_changes:
            _, head = change.where
            positions = change.positions.to(activation.device)
            activation[row, positions, head] = change.value.to(activation)
        return activation

    first_layer = min(layer for _, layer in rows_of_part)
    with ExitStack() as stack:
        if first_layer in runs[0].inputs_of:  # all runs were recorded for the same starts
            stack.enter_context(_starting_at(model, first_layer, runs))
        for (part, layer), row_changes in rows_of_part.items():
            replacement = partial(replace_values, row_changes)
            stack.enter_context(changing(model, part, {layer: replacement}))
        return logits_of(model, [run.sequence for run in runs])


def gradients_of(
    model: HookedModel,
    sequence: TokenSequence,
    layers: Sequence[int],
    metric: Callable[[Tensor], Float[Tensor, " row"]],
) -> dict[int, Activation]:
    """The gradient of a metric with respect to the output of each head at each token.

    Args:
        model: The hooked model.
        sequence: A sequence that ends in the reference answer.
        layers: The layers of the heads.
        metric: A function of logits that returns one number per row.

    Returns:
        The gradients by layer, in units of the metric per unit of the output.
    """
    outputs: dict[int, Tensor] = {}

    def record(layer: int, z: Tensor) -> Tensor:
        outputs[layer] = z
        return z

    def begin_graph(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    # Nothing before the first of the layers needs gradients.
    first_layer = min(layers)
    first_stream = model.hook_dict[f"blocks.{first_layer}.hook_resid_pre"]
    records = {layer: partial(record, layer) for layer in layers}
    with ExitStack() as stack:
        stack.enter_context(first_stream.register_forward_hook(begin_graph))
        stack.enter_context(changing_z(model, records))
        logits = logits_of(model, [sequence], gradients=True)

    [metric_value] = metric(logits)
    gradients = torch.autograd.grad(metric_value, list(outputs.values()))
    return {layer: gradient[0] for layer, gradient in zip(outputs, gradients, strict=True)}


def _with_heads_changed(change: ActivationChange, count: int, x: Tensor) -> Tensor:
    """Apply a change to an activation of some number of heads, and return it in the same shape."""
    changed = change(split_heads(x, count))
    return changed.reshape(x.shape)


def _with_queries_changed(change: ActivationChange, pattern: Tensor) -> Tensor:
    """Apply a change to a pattern whose axes are in the order of other parts: [batch query head
    key].
    """
    by_query = rearrange(pattern, "batch head query key -> batch query head key")
    changed = change(by_query)
    return rearrange(changed, "batch query head key -> batch head query key")


def _row(out: Any, row: int) -> Any:
    """What a block returned for one row of a pass, as a batch of one row."""
    if isinstance(out, tuple):
        return tuple(_row(member, row) for member in out)
    if isinstance(out, Tensor):
        return out[row : row + 1]
    return out


@contextmanager
def _starting_at(model: HookedModel, layer: int, runs: Sequence[RecordedRun]) -> Iterator[None]:
    """Let passes with these runs as rows skip the blocks before a layer.

    Each skipped block returns what the last of them returned when the runs were recorded.
    """
    out = _joined([run.inputs_of[layer] for run in runs])

    def return_out(*inputs: Any, **options: Any) -> Any:
        return out

    with ExitStack() as stack:
        for block in blocks_of(model)[:layer]:
            skipped_block = attribute_set(block, "forward", return_out)
            stack.enter_context(skipped_block)
        yield


def _joined(rows: Sequence[Any]) -> Any:
    """What a block would return for a batch of these rows."""
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(_joined(members) for members in zip(*rows, strict=True))
    if isinstance(first, Tensor):
        return torch.cat([*rows])
    return first


@contextmanager
def _without_gradients_of_weights(model: HookedModel) -> Iterator[None]:
    """Let passes keep nothing for the gradients of weights, which would take most of the memory."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
