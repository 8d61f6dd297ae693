"""Records what some interventions apply: affine maps, mean head outputs, keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mechattn.analysis.affine_shift import split_rows
from mechattn.analysis.analysis import (
    Analysis,
    AnalysisBase,
    Captures,
    PairedRows,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
)
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.engine.batches import measure_batch
from mechattn.engine.engines import chosen_engine
from mechattn.engine.pending_sums import LayerValues
from mechattn.engine.request_checks import (
    AnyPrompts,
    ChosenLayers,
    checked_sequences,
    with_baseline,
)
from mechattn.errors import ModelError, OptionError, check_choice, check_counts
from mechattn.interventions.ablation import HeadMeans
from mechattn.interventions.recorded import Affine, KeysValues, RecordedAffine
from mechattn.model import hooks
from mechattn.model.head_parts import is_latent
from mechattn.model.hooked import HookedModel, alone, device_of, limit_of
from mechattn.model.load import load_model
from mechattn.model.patch.keys_values_z import Part, Z, changing_z
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import Batch, pad_right

_RECORDED = "recorded"  # the name of the recorded condition; the other one is the baseline
_NO_NULL = "it is recorded for an intervention and not compared"


@alone
def record_affine(
    model: Any,
    prompts: AnyPrompts,
    condition: Condition,
    *,
    layers: Iterable[int] | int = 0,
    seed: int = 0,
) -> RecordedAffine:
    """Record λ and Σσ of a condition for each original token, to apply them without inserting
    tokens.

    Keeps ``original tokens × heads × (d_head + 1)`` numbers per prompt and layer. For layer 0 the
    result is exact with ``condition.unshifted()``; elsewhere it lacks the re-routing and new values
    that ``AffineShift`` reports.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: As for ``run``; the intervention acts only on these.
        condition: The condition that inserts tokens.
        layers: The layers, from 0.
        seed: The seed of the condition's draws; use that of the run.

    Raises:
        OptionError: The condition inserts nothing into a prompt, a layer is out of range, or the
            seed is not a whole number from 0 on.
        ModelError: The model applies a gate or a norm between ``pattern · v`` and z.
    """
    model = load_model(model)
    limit_of_values = limit_of(model, "values")
    if limit_of_values:
        raise ModelError(
            f"{model.cfg.model_name}: {limit_of_values}; λ and Σσ describe pattern · v, so they"
            " cannot be applied to z here"
        )
    prompts = as_prompts(prompts)
    chosen_layers = hooks.chosen_layers(model, layers)

    maps: dict[str, dict[int, Affine]] = {}
    condition_names = (BASELINE, _RECORDED)
    passes = _passes(
        model,
        prompts,
        condition,
        _AffineParts(),
        layers=chosen_layers,
        seed=seed,
        condition_names=condition_names,
        segment="inserted",
    )
    row = condition_names.index(_RECORDED)
    for prompt, batch, values in passes:
        original = batch.original[row]
        maps[prompt.id] = {
            layer: Affine(
                layer_values["scale"][row, :, original], layer_values["shift"][row, :, original]
            )
            for layer, layer_values in values.items()
        }

    source = f"recorded from {condition}, {len(prompts)} prompts, seed {seed}"
    return RecordedAffine(maps, tuple(chosen_layers), source)


@alone
def record_keys_values(
    model: Any,
    prompts: AnyPrompts,
    condition: Condition,
    *,
    segment: str = "inserted",
    layers: ChosenLayers = None,
    seed: int = 0,
) -> KeysValues:
    """Record keys and values of one segment's tokens under a condition, for :class:`KVPatch`.

    They are recorded as projected, before any RoPE, in the model's precision: ``2 × tokens ×
    kv_heads × d_head`` numbers per prompt and layer.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: As for ``run``.
        condition: The condition that inserts tokens.
        segment: The segment whose keys and values are recorded.
        layers: The layers, from 0; all with attention by default.
        seed: The seed of the condition's draws; use that of the run.

    Raises:
        OptionError: A prompt has no such token under the condition, a layer is out of range, or the
            seed is not a whole number from 0 on.
        ModelError: The model has no keys and values before RoPE (latent attention).
    """
    check_choice(SEGMENTS, segment=segment)
    model = load_model(model)
    prompts = as_prompts(prompts)
    chosen_layers = hooks.chosen_layers(model, layers)
    for layer in chosen_layers:
        if is_latent(model, layer):
            raise ModelError(
                f"{model.cfg.model_name} keeps latents (MLA) in place of keys and values (layer"
                f" {layer})"
            )

    keys_values: dict[str, dict[int, dict[Part, Tensor]]] = {}
    passes = _passes(
        model,
        prompts,
        condition,
        _KeysValuesAnalysis(),
        layers=chosen_layers,
        seed=seed,
        condition_names=(_RECORDED,),
        segment=segment,
    )
    for prompt, batch, values in passes:
        in_segment = batch.of_segment(segment)[0]
        keys_values[prompt.id] = {
            layer: {"k": layer_values["k"][0, in_segment], "v": layer_values["v"][0, in_segment]}
            for layer, layer_values in values.items()
        }

    source = f"recorded from {condition}, {len(prompts)} prompts, seed {seed}"
    return KeysValues(keys_values, segment, source)


@alone
def head_means(
    model: Any,
    prompts: AnyPrompts,
    *,
    layers: ChosenLayers = None,
) -> HeadMeans:
    """Record each head's mean output over all tokens of some prompts, for mean ablation.

    The output is z, before W_O. Every token has the same weight, the first included.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: As for ``run``; use other prompts than those that are measured.
        layers: The layers, from 0; by default all that have attention.

    Raises:
        MechattnError: A layer is out of range, the model cannot read a prompt, or the outputs of
            its heads cannot be read.
    """
    model = load_model(model)
    prompts = as_prompts(prompts)
    chosen_layers = hooks.chosen_layers(model, layers)
    sequences = checked_sequences(with_baseline(None), prompts, model, seed=0)
    tokens_of_prompts = [by_condition[BASELINE].tokens for by_condition in sequences]
    sums: dict[int, Tensor] = {}

    def add_up(layer: int, z: Z) -> Z:
        sums[layer] = sums.get(layer, 0) + z.detach().double().sum((0, 1))
        return z

    with changing_z(model, {layer: partial(add_up, layer) for layer in chosen_layers}):
        for tokens in tokens_of_prompts:
            hooks.forward_to(model, tokens[None].to(device_of(model)), max(chosen_layers), [])

    token_count = sum(map(len, tokens_of_prompts))
    means = {layer: (total / token_count).float() for layer, total in sums.items()}
    return HeadMeans(means, len(prompts))


def _passes(
    model: HookedModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    analysis: Analysis,
    *,
    layers: Sequence[int],
    seed: int,
    condition_names: Sequence[str],
    segment: str,
) -> Iterator[tuple[Prompt, Batch, LayerValues]]:
    """Measure one prompt at a time under the condition, which is called "recorded".

    Args:
        model: The model.
        prompts: The prompts; each must have a token of the ``segment`` under the condition.
        condition: The condition.
        analysis: What is measured.
        layers: The layers.
        seed: The seed of the condition's draws.
        condition_names: The conditions in the batch: "recorded" last, and the baseline before it if
            the analysis compares the two.
        segment: The segment that is recorded.

    Yields:
        A prompt, its batch with a row for each of ``condition_names``, and the values by layer.
    """
    check_counts(0, seed=seed)
    engine = chosen_engine(model, "auto", [analysis], layers)
    windows = {layer: hooks.attention_window(model, layer) for layer in layers}
    conditions = with_baseline({_RECORDED: condition})

    sequences = checked_sequences(conditions, prompts, model, seed, [analysis])
    for prompt, prompt_sequences in zip(prompts, sequences, strict=True):
        if not prompt_sequences[_RECORDED].of_segment(segment).any():
            raise OptionError(
                f"prompt {prompt.id} has no {segment} token under {condition}, so nothing can be"
                " recorded"
            )

    for prompt, prompt_sequences in zip(prompts, sequences, strict=True):
        rows = [(0, name) for name in condition_names]
        batch = pad_right([prompt_sequences[name] for name in condition_names], rows, 0)
        (values,) = measure_batch(model, batch, engine.forward, windows, [analysis], [prompt.id])
        yield prompt, batch, values


class _AffineParts(AnalysisBase):
    """An analysis that keeps λ and Σσ of every query."""

    name = "affine_parts"
    quantities: ClassVar[Quantities] = {
        "scale": Quantity(("head", "key"), "probability", "lambda of each query", no_null=_NO_NULL),
        "shift": Quantity(
            ("head", "key", "d_head"), "value norm", "shift of each query", no_null=_NO_NULL
        ),
    }

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Append a block of queries."""
        split = split_rows(rows)
        blocks = {"scale": split.scale, "shift": split.shift}
        for name, block in blocks.items():
            if name in sums:
                block = torch.cat([sums[name], block], 2)
            sums[name] = block

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """The sums, which hold all queries."""
        return sums


class _KeysValuesAnalysis(AnalysisBase):
    """An analysis that keeps keys and values right after their projection."""

    name = "keys_values"
    captures = ("attn.hook_k", "attn.hook_v")
    quantities: ClassVar[Quantities] = {
        part: Quantity(("key", "width"), "value norm", "as projected", no_null=_NO_NULL)
        for part in ("k", "v")
    }

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Keep keys and values; some bridges show them by head, whose axes are joined."""
        for part, name in zip(("k", "v"), self.captures, strict=True):
            sums[part] = captures.tensors[name].flatten(2)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Copies, because the sums are the model's own tensors."""
        return {part: value.clone() for part, value in sums.items()}
