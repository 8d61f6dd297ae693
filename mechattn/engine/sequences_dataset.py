"""The tokens that a model read, as a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.axes import PADDING, SEGMENTS
from mechattn.engine.request_checks import sides_of
from mechattn.errors import plain
from mechattn.model.hooked import HookedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence, token_texts

if TYPE_CHECKING:
    import xarray as xr

# Each variable: the attribute of a sequence, and its unit.
_OF_TOKENS = {
    "tokens": ("tokens", "token id"),
    "origin": ("origin", "position in the baseline"),
    "segment_index": ("segment", "index in segments"),
}


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
        token_ids = sequence.tokens.tolist()
        texts = list(map(str, token_ids))
        if model.tokenizer is not None:
            decoded = token_texts(model.tokenizer.decode, token_ids)
            texts = [plain(text) for text in decoded]  # without NUL, which NetCDF does not take
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
