"""What a result records of its run: the model, the conditions, and the tokens that were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import SEGMENTS
from mechattn.engine.request_checks import sides_of
from mechattn.markup import plain
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel, ModelFacts, architecture_of, facts_of
from mechattn.model.positions import boundary_of
from mechattn.model.several_devices import device_of
from mechattn.model.weights import revision, weights_hash
from mechattn.prompts.conditions import Baseline, Condition, Variant
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import PADDING, TokenSequence, token_texts
from mechattn.results import provenance

if TYPE_CHECKING:
    import xarray as xr

# Each variable: the attribute of a sequence, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


def model_data(model: HookedModel, paths: bool) -> dict[str, Any]:
    """A model as data: its shapes, precision, weights and verification; with ``paths`` also where
    it is.

    Args:
        model: A hooked model; of one that mechattn did not load, less is known.
        paths: Whether the full path of a checkpoint is recorded too.

    Returns:
        Plain values, for JSON.
    """
    cfg = model.cfg
    facts = facts_of(model) or ModelFacts()
    parameters = next(model.parameters())

    described: dict[str, Any] = {"name": provenance.name_of(str(cfg.model_name))}
    if paths:
        described["path"] = str(cfg.model_name)
    described |= {
        "architecture": architecture_of(model),
        "parameters": hooks.count_parameters(model if facts.native is None else facts.native),
        "heads": int(cfg.n_heads),
        "layers": int(cfg.n_layers),
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "device": str(device_of(model)),
        "prepends_bos": bool(getattr(cfg, "default_prepend_bos", False)),
        "hooked_by": type(model).__name__,
        "revision": revision(model),
        "weights": facts.weights,
        "random_weights": facts.random_weights,
    }

    if facts.gguf is not None:
        described["gguf"] = dict(facts.gguf)
    described |= {
        "weights_hash": weights_hash(model),
        "verified": facts.verified,
        "not_verified": facts.report.not_checked if facts.report else [],
        "mended": list(facts.mended),
    }

    boundary = boundary_of(model)
    if boundary is not None:
        described["rope"] = f"{boundary}; of each prompt: sequences.rope_factors"
    return described


def condition_data(condition: Condition, sequence: TokenSequence | None = None) -> dict[str, Any]:
    """A condition as data: kind, options, marks and interventions; and as text.

    Of a condition that a user wrote, the marks and interventions are those of a ``sequence`` that
    it made.

    Args:
        condition: A condition, perhaps inside variants such as ``unshifted()``.
        sequence: A sequence that it made.

    Returns:
        Plain values, for JSON.
    """
    # Variants from the outermost to the innermost; an inner one's interventions act first.
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
        own = inner.intervention
        if not isinstance(own, (tuple, list)):
            own = (own,)
        interventions = (*own, *interventions)
    elif sequence is not None and not interventions:
        masked = sequence.edge_mask is not None
        unshifted = sequence.keeps_positions
        interventions = sequence.interventions

    return {
        **_kind_and_options(inner),
        "masked": masked,
        "unshifted": unshifted,
        "interventions": [_kind_and_options(intervention) for intervention in interventions],
        "written": provenance.identity(condition),
    }


def _kind_and_options(instance: Any) -> dict[str, Any]:
    """The kind of an object and its options: the fields of a dataclass, as text if they are not
    plain values."""
    options = {}
    if is_dataclass(instance):
        for field in fields(instance):
            if field.repr and field.name != "intervention":
                options[field.name] = _stored(getattr(instance, field.name))
    return {"kind": provenance.kind_of(instance), "options": options}


def _stored(value: Any) -> Any:
    """A value that JSON can hold; the identity of any other object."""
    if isinstance(value, (tuple, list)):
        return [_stored(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return provenance.identity(value)


def sequences_dataset(
    model: HookedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    places: Sequence[int],
) -> xr.Dataset:
    """The tokens that the model read, their segments and origins, the prompts' groups, and the
    first prompt's texts.

    Args:
        model: The model, whose tokenizer gives the texts.
        prompts: The prompts, in the order of the dataset.
        sequences: The sequence of each prompt under each condition.
        places: The index of each prompt in the whole run.

    Returns:
        Variables [prompt condition pos], padded on the right, and some of each prompt alone.
    """
    # Here, because its import takes a while.
    import xarray as xr

    conditions = list(sequences[0])
    longest = max(len(sequence) for own in sequences for sequence in own.values())
    shape = (len(prompts), len(conditions), longest)

    variables: dict[str, Any] = {}
    for name, (attribute, unit) in _OF_TOKENS.items():
        array = np.full(shape, PADDING, dtype=np.int32)
        for row, own in enumerate(sequences):
            for column, sequence in enumerate(own.values()):
                array[row, column, : len(sequence)] = getattr(sequence, attribute)
        variables[name] = (("prompt", "condition", "pos"), array, {"units": unit})

    # Of one prompt only, for a glance at what the conditions do: texts take much room.
    first_texts = []
    for sequence in sequences[0].values():
        texts = _token_texts(model, sequence)
        padding = [""] * (longest - len(texts))
        first_texts.append(texts + padding)
    variables["first_prompt_text"] = _text_variable(("condition", "pos"), first_texts)

    # Only of a model whose RoPE depends on the length.
    sides = sides_of(model, sequences)
    if sides:
        variables["rope_factors"] = _text_variable(("prompt",), sides)

    # Groups are for clusters in the statistics, which need one of every prompt.
    groups = [prompt.group for prompt in prompts]
    if None not in groups:
        variables["group"] = _text_variable(("prompt",), groups)

    indices = np.asarray(places, dtype=np.int64)
    variables["place"] = (("prompt",), indices, {"units": "index in the whole run"})

    coords = {"prompt": [prompt.id for prompt in prompts], "condition": conditions}
    attributes = {"segments": ", ".join(SEGMENTS), "padding": PADDING}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


def _text_variable(dims: tuple[str, ...], texts: Any) -> tuple[Any, ...]:
    """Texts of any length, as Zarr stores them."""
    array = np.array(texts, dtype=object).astype(np.dtypes.StringDType())
    return dims, array, {"units": "text"}


def _token_texts(model: HookedModel, sequence: TokenSequence) -> list[str]:
    """The text of each token, or its id if the model has no tokenizer.

    Control characters are escaped, as NetCDF takes no NUL.
    """
    ids = sequence.tokens.tolist()
    if model.tokenizer is None:
        return list(map(str, ids))

    return [plain(text) for text in token_texts(model.tokenizer.decode, ids)]
