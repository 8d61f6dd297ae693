"""The dataset of the tokens that a model read."""

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

# For each variable, the attribute of a sequence that it holds, and its unit.
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

    conditions = list(sequences[0])
    longest = max(len(sequence) for by_condition in sequences for sequence in by_condition.values())
    shape = (len(prompts), len(conditions), longest)

    variables: dict[str, Any] = {}
    for name, (attribute, unit) in _OF_TOKENS.items():
        array = np.full(shape, PADDING, dtype=np.int32)
        for row, by_condition in enumerate(sequences):
            for column, sequence in enumerate(by_condition.values()):
                array[row, column, : len(sequence)] = getattr(sequence, attribute)
        variables[name] = (("prompt", "condition", "pos"), array, {"units": unit})

    # The first prompt shows what the conditions do; the texts of all would take much space.
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

    # Empty unless the model's RoPE depends on the length.
    sides = sides_of(model, sequences)
    if sides:
        variables["rope_factors"] = _text_variable(("prompt",), sides)

    # Groups become clusters in the statistics, which need the group of every prompt.
    groups = [prompt.group for prompt in prompts]
    if None not in groups:
        variables["group"] = _text_variable(("prompt",), groups)

    indices = np.asarray(places, dtype=np.int64)
    variables["place"] = (("prompt",), indices, {"units": "index in the whole run"})

    coords = {"prompt": [prompt.id for prompt in prompts], "condition": conditions}
    attributes = {"segments": ", ".join(SEGMENTS), "padding": PADDING}
    return xr.Dataset(variables, coords=coords, attrs=attributes)


def _text_variable(dims: tuple[str, ...], texts: Any) -> tuple[Any, ...]:
    """A variable of texts of any length, in numpy's type of strings, which Zarr can store."""
    array = np.array(texts, dtype=object).astype(np.dtypes.StringDType())
    return dims, array, {"units": "text"}
