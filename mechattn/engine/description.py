"""What a result records of its run, as data: the model, the conditions and the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import PADDING, SEGMENTS
from mechattn.engine.request_checks import sides_of
from mechattn.errors import plain
from mechattn.model.hooked import (
    HookedModel,
    ModelFacts,
    architecture_of,
    device_of,
    facts_of,
    innermost,
)
from mechattn.model.positions import boundary_of
from mechattn.model.weights import weights_hash
from mechattn.prompts.conditions import Baseline, Condition, Marks, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence, token_texts
from mechattn.results import provenance

if TYPE_CHECKING:
    import xarray as xr

# For each variable, the attribute of a sequence that it holds, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


def model_data(model: HookedModel, paths: bool) -> dict[str, Any]:
    """A model as data: its shapes, precision, weights and verification.

    Args:
        model: A hooked model. If mechattn did not load it, its revision and verification are
            unknown.
        paths: Whether the full path of a checkpoint is recorded too.

    Returns:
        Plain values, for JSON.
    """
    cfg = model.cfg
    facts = facts_of(model) or ModelFacts()
    native = model if facts.native is None else facts.native

    data: dict[str, Any] = {"name": provenance.name_of(str(cfg.model_name))}
    if paths:
        data["path"] = str(cfg.model_name)
    data |= {
        "architecture": architecture_of(model),
        "parameters": sum(parameter.numel() for parameter in innermost(native).parameters()),
        "heads": int(cfg.n_heads),
        "layers": int(cfg.n_layers),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": str(device_of(model)),
        "prepends_bos": bool(getattr(cfg, "default_prepend_bos", False)),
        "hooked_by": type(model).__name__,
        "revision": facts.revision,
        "weights": facts.weights,
        "random_weights": facts.random_weights,
        "weights_hash": weights_hash(model),
        "verified": facts.verified,
        "not_verified": [],
        "mended": list(facts.mended),
    }

    if facts.report is not None:
        data["not_verified"] = facts.report.not_checked
    if facts.gguf is not None:
        data["gguf"] = dict(facts.gguf)
    boundary = boundary_of(model)
    if boundary is not None:
        data["rope"] = f"{boundary}; of each prompt: sequences.rope_factors"
    return data


def condition_data(condition: Condition, sequence: TokenSequence | None = None) -> dict[str, Any]:
    """A condition as data: its kind and options, whether tokens are masked or unshifted, its
    interventions, and the condition as text ("written").

    A condition that a user wrote may mask, keep positions and intervene by itself. Only a
    ``sequence`` shows this.

    Args:
        condition: A condition, perhaps inside variants such as ``unshifted()``.
        sequence: A sequence that ``condition`` returned for a prompt.

    Returns:
        Plain values, for JSON.
    """
    # From the outermost variant to the innermost, whose interventions act first.
    inner: Any = condition
    masked = False
    unshifted = False
    interventions: tuple[Any, ...] = ()
    while isinstance(inner, Variant):
        masked = masked or inner.hides
        unshifted = unshifted or inner.keeps_positions
        interventions = (*inner.interventions, *interventions)
        inner = inner.condition

    if isinstance(inner, Baseline):
        interventions = (*inner.interventions, *interventions)
    elif sequence is not None:
        marking_interventions = [
            intervention for intervention in interventions if isinstance(intervention, Marks)
        ]
        masked = masked or (sequence.cut_edges is not None and not marking_interventions)
        unshifted = sequence.keeps_positions

        # The sequence holds its condition's own interventions first, and no marking ones.
        own_count = len(sequence.interventions) - len(interventions) + len(marking_interventions)
        interventions = (*sequence.interventions[:own_count], *interventions)

    return {
        **_kind_and_options(inner),
        "masked": masked,
        "unshifted": unshifted,
        "interventions": [_kind_and_options(intervention) for intervention in interventions],
        "written": provenance.identity(condition),
    }


def sequences_dataset(
    model: HookedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    places: Sequence[int],
) -> xr.Dataset:
    """The tokens that the model read, with their origins and segments.

    The dataset also has the texts of the first prompt's tokens, the groups of the prompts if all
    have one, and the RoPE factors of each prompt if they depend on its length.

    Args:
        model: The model, whose tokenizer gives the texts.
        prompts: The prompts, in the order of the dataset.
        sequences: The sequence of each prompt under each condition.
        places: The index of each prompt in the whole run.

    Returns:
        Variables [prompt condition pos], padded on the right; "first_prompt_text" [condition pos];
        and variables [prompt].
    """
    # Imported here, because it takes a while.
    import xarray as xr

    condition_names = list(sequences[0])
    longest_length = max(
        len(sequence) for by_condition in sequences for sequence in by_condition.values()
    )
    shape = (len(prompts), len(condition_names), longest_length)

    variables: dict[str, Any] = {}
    for name, (attribute, unit) in _OF_TOKENS.items():
        values = np.full(shape, PADDING, dtype=np.int32)
        for row, by_condition in enumerate(sequences):
            for column, sequence in enumerate(by_condition.values()):
                values[row, column, : len(sequence)] = getattr(sequence, attribute)
        variables[name] = (("prompt", "condition", "pos"), values, {"units": unit})

    # The first prompt shows what the conditions do; the texts of all would take much space.
    first_texts = []
    for sequence in sequences[0].values():
        token_ids = sequence.tokens.tolist()
        texts = list(map(str, token_ids))
        if model.tokenizer is not None:
            decoded_texts = token_texts(model.tokenizer.decode, token_ids)
            # Without NUL, which NetCDF does not take.
            texts = [plain(text) for text in decoded_texts]
        padding = [""] * (longest_length - len(texts))
        first_texts.append(texts + padding)
    variables["first_prompt_text"] = _text_variable(("condition", "pos"), first_texts)

    # Only of a model whose RoPE depends on the length.
    sides = sides_of(model, sequences)
    if None not in sides:
        variables["rope_factors"] = _text_variable(("prompt",), sides)

    # Groups become clusters in the statistics, which need the group of every prompt.
    groups = [prompt.group for prompt in prompts]
    if None not in groups:
        variables["group"] = _text_variable(("prompt",), groups)

    place_values = np.asarray(places, dtype=np.int64)
    variables["place"] = (("prompt",), place_values, {"units": "index in the whole run"})

    coords = {"prompt": [prompt.id for prompt in prompts], "condition": condition_names}
    attributes = {"segments": ", ".join(SEGMENTS), "padding": PADDING}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


def _kind_and_options(instance: Any) -> dict[str, Any]:
    """The kind of a condition or an intervention, and its options.

    The options are the fields of a dataclass, as text if they are not plain values.
    """
    options = {}
    if is_dataclass(instance):
        for field in fields(instance):
            if field.name != "intervention":  # recorded separately, under "interventions"
                options[field.name] = _stored(getattr(instance, field.name))
    return {"kind": provenance.kind_of(instance), "options": options}


def _stored(value: Any) -> Any:
    """The value if JSON can hold it, and otherwise its identity as text."""
    if isinstance(value, (tuple, list)):
        return [_stored(part) for part in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    return provenance.identity(value)


def _text_variable(dims: tuple[str, ...], texts: Any) -> tuple[Any, ...]:
    """A variable of texts of any length, in numpy's type of strings, which Zarr can store."""
    array = np.array(texts, dtype=object).astype(np.dtypes.StringDType())
    return dims, array, {"units": "text"}
