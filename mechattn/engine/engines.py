"""The engines, which compute attention: in blocks of query rows, by a fused kernel, or at hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import (
    OF_ROWS,
    Analysis,
    CaptureAnalysis,
    PairAnalysis,
    WholeAnalysis,
)
from mechattn.engine.placed_batch import Windows
from mechattn.errors import ModelError, OptionError
from mechattn.functional.attention import EdgeMask, Pattern, PatternRows, Rows
from mechattn.functional.fused import Fused
from mechattn.model import hooks, patterns_at_hooks
from mechattn.model.hooked import HookedModel, ModelFacts, device_of, facts_of
from mechattn.model.patch.streaming import fires_while_streamed, streaming
from mechattn.model.verify.checks import check_fused, check_streaming
from mechattn.prompts.token_sequences import Batch

Engine = Literal["auto", "streaming", "fused", "hooks"]


@runtime_checkable
class LayerReceiver(Protocol):
    """Receives the attention of the measured layers during a pass."""

    def see_rows(self, layer: int, rows: Rows) -> None:
        """Receive a block of query rows, whose memory the next block reuses."""

    def see_whole(self, layer: int, fused: Fused) -> None:
        """Receive a whole layer from a fused kernel."""


# Runs a model on a batch and passes the attention of the measured layers to a receiver. The number
# is the last layer that is computed.
Forward = Callable[[HookedModel, Batch, Windows, LayerReceiver, int], None]


@dataclass(frozen=True)
class ChosenEngine:
    """The engine of a run, and why it was chosen."""

    name: str  # "streaming", "fused" or "hooks"
    forward: Forward
    reason: str


def chosen_engine(
    model: HookedModel, engine: Engine, analyses: Sequence[Analysis], layers: Sequence[int]
) -> ChosenEngine:
    """Choose the engine for a model and its analyses.

    Streaming is compared with the hooks before it is used: once for a model that came from
    ``load_model``, and in every run for any other.

    Args:
        model: The model.
        engine: The engine that the user requested, or "auto".
        analyses: The analyses of the run, which may need rows or hooks.
        layers: The layers that they measure.

    Raises:
        OptionError: An analysis needs what the requested engine does not give, or captures a hook
            that a layer does not have.
        ModelError: The requested engine does not give the model's own numbers.
    """
    captured_names = _captured_hooks(model, analyses, layers)
    if engine == "hooks":
        return ChosenEngine("hooks", forward_through_hooks, "asked for")

    # Some hooks, such as hook_pattern, do not fire while attention is streamed.
    silent_hooks = [name for name in captured_names if not fires_while_streamed(name)]
    if silent_hooks:
        if engine == "auto":
            return ChosenEngine(
                "hooks",
                forward_through_hooks,
                f"not streamed: {silent_hooks[0]} fires only with hooks",
            )
        raise OptionError(
            f"an analysis captures {silent_hooks[0]!r}, which doesn't fire while attention is"
            ' streamed; choose engine="hooks" or "auto"'
        )

    # A model that mechattn did not load has no place for facts, so it is checked in every run.
    facts = facts_of(model) or ModelFacts()
    if facts.streaming is None:
        facts.streaming = check_streaming(model)

    streaming_check = facts.streaming
    if streaming_check.outcome != "passed":
        if engine != "auto":
            raise ModelError(
                f"{model.cfg.model_name} cannot be streamed: {streaming_check}; choose"
                ' engine="hooks" or "auto"'
            )
        return ChosenEngine(
            "hooks", forward_through_hooks, f"not streamed: {streaming_check.detail}"
        )
    return _fused_or_in_blocks(model, facts, engine, analyses)


def forward_in_blocks(
    model: HookedModel,
    batch: Batch,
    windows: Windows,
    receiver: LayerReceiver,
    last_layer: int,
) -> None:
    """Run the model, computing attention in blocks of query rows, and pass on each block.

    Padding needs no mask, because it is on the right.

    Args:
        model: The model.
        batch: Sequences, padded on the right.
        windows: The measured layers, each with the number of keys that its queries see; None for
            all.
        receiver: Receives each block of each measured layer.
        last_layer: The last layer that is computed.
    """
    edge_masks = _edge_masks(model, batch, last_layer)
    with streaming(model, windows, receiver.see_rows, edge_masks=edge_masks):
        hooks.forward_to(model, batch.tokens, last_layer, [], batch.position_ids)


def forward_fused(
    model: HookedModel,
    batch: Batch,
    windows: Windows,
    receiver: LayerReceiver,
    last_layer: int,
) -> None:
    """Run the model, computing attention with a fused kernel, and pass on whole layers.

    A layer that the kernel cannot compute comes in blocks of rows. The arguments are those of
    :func:`forward_in_blocks`.
    """
    edge_masks = _edge_masks(model, batch, last_layer)
    with streaming(model, windows, receiver.see_rows, receiver.see_whole, edge_masks=edge_masks):
        hooks.forward_to(model, batch.tokens, last_layer, [], batch.position_ids)


def forward_through_hooks(
    model: HookedModel,
    batch: Batch,
    windows: Windows,
    receiver: LayerReceiver,
    last_layer: int,
) -> None:
    """Run the model, and pass on each layer's whole pattern from its hook as one block.

    Args:
        model: The model.
        batch: Sequences, padded on the right.
        windows: The measured layers, each with the number of keys that its queries see; None for
            all.
        receiver: Receives the whole pattern of each measured layer.
        last_layer: The last layer that is computed.

    Raises:
        ModelError: What a hook shows is not a pattern: it has NaN, rows that do not sum to 1, or a
            wrong mask.
    """
    edge_masks = _edge_masks(model, batch, last_layer)
    all_positions = slice(0, batch.tokens.shape[1])

    def see_pattern(
        layer: int, pattern: Pattern, v: Float[Tensor, "batch kv_head pos d_head"] | None
    ) -> None:
        window = hooks.attention_window(model, layer)
        patterns_at_hooks.check_pattern(
            model, layer, pattern, batch.real, window, edge_masks.get(layer)
        )
        if layer not in windows:
            return

        attention = None
        pattern = pattern.float()
        if v is not None:
            attention = PatternRows(pattern, v)
        receiver.see_rows(layer, Rows(pattern, all_positions, all_positions, attention))

    # The patterns of all layers with cut edges are checked, because some models ignore changes to
    # the scores at their hooks.
    layers = sorted({*windows, *edge_masks})
    patterns_at_hooks.forward_with_patterns(
        model,
        batch.tokens,
        batch.real,
        layers,
        see=see_pattern,
        edge_masks=edge_masks,
        position_ids=batch.position_ids,
        last_layer=last_layer,
    )


def _captured_hooks(
    model: HookedModel, analyses: Sequence[Analysis], layers: Sequence[int]
) -> list[str]:
    """The names of the hooks that analyses capture, after checking that each layer has them."""
    capture_analyses = [analysis for analysis in analyses if isinstance(analysis, CaptureAnalysis)]
    if not capture_analyses:
        return []

    hook_dict = model.hook_dict  # listing the hooks takes a while
    captured_names: list[str] = []
    for analysis in capture_analyses:
        captured_names += analysis.captures
        for name, layer in product(analysis.captures, layers):
            if f"blocks.{layer}.{name}" not in hook_dict:
                raise OptionError(
                    f"{analysis.name} captures {name!r}, which layer {layer} of"
                    f" {model.cfg.model_name} doesn't have; model.hook_dict lists all hooks"
                )
    return captured_names


def _fused_or_in_blocks(
    model: HookedModel, facts: ModelFacts, engine: Engine, analyses: Sequence[Analysis]
) -> ChosenEngine:
    """Choose between a fused kernel and blocks of rows.

    "auto" chooses the kernel on a GPU, where it is faster, if no analysis needs rows and the kernel
    passes its check.
    """
    row_analyses = [analysis for analysis in analyses if isinstance(analysis, OF_ROWS)]
    names_needing_rows = [
        analysis.name
        for analysis in row_analyses
        if isinstance(analysis, PairAnalysis) or not isinstance(analysis, WholeAnalysis)
    ]
    if engine == "fused" and names_needing_rows:
        raise OptionError(
            f"{', '.join(names_needing_rows)} needs rows, which a fused kernel does not give;"
            ' choose engine="streaming" or "auto", or measure analyses without rows in a separate'
            " run"
        )

    streaming_engine = ChosenEngine(
        "streaming", forward_in_blocks, "its numbers are those of the hooks"
    )
    if engine == "fused" and not row_analyses:
        return replace(
            streaming_engine, reason="not fused: no analysis takes a fused kernel's sums"
        )

    if engine == "streaming" or not row_analyses or names_needing_rows:
        return streaming_engine
    # Without a GPU the two calls of the kernel take longer than the rows.
    if engine == "auto" and device_of(model).type != "cuda":
        return streaming_engine

    if facts.fused is None:
        facts.fused = check_fused(model)
    fused_check = facts.fused
    if fused_check.outcome == "passed":
        return ChosenEngine(
            "fused",
            forward_fused,
            "no analysis needs rows, and two calls of a fused kernel give the numbers of the hooks",
        )
    if engine == "fused":
        raise ModelError(
            f'{model.cfg.model_name}: {fused_check}; choose engine="streaming" or "auto"'
        )
    return replace(
        streaming_engine, reason=f"{streaming_engine.reason}; not fused: {fused_check.detail}"
    )


def _edge_masks(model: HookedModel, batch: Batch, last_layer: int) -> dict[int, EdgeMask]:
    """The edges that are cut in each computed layer, on the layer's device."""
    if batch.edge_mask is None:
        return {}
    edge_masks = {}
    for layer in hooks.attention_layers(model):
        edge_mask = batch.as_read_by(layer).edge_mask
        if edge_mask is not None and layer <= last_layer:
            edge_masks[layer] = edge_mask.to(device_of(model.blocks[layer]))
    return edge_masks
