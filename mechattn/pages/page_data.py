"""The data of a page as JSON: the numbers of all heads in each condition and their changes; and for
each head its curves over positions, the coloured text, and its patterns.

The scripts of the page (``templates/data.js``) read what is returned here. Arrays are packed by
``embedded.packed``. Arrays with a number for each head are [layer, head]. If a part of the page has
nothing to show, its ``missing`` says why.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mechattn.axes import BASELINE, INSERTED, PADDING, SEGMENTS
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.means import at_shared_positions, shares_by_position
from mechattn.contrast.quantities import (
    has_dilution,
    head_quantities,
    layer_blocks,
    segment_of,
    variable_of,
)
from mechattn.contrast.table import DEFAULT_MARGINS, comparison_table, marked
from mechattn.errors import MemoryOptionError, OptionError, visible
from mechattn.pages.embedded import kind_for, packed
from mechattn.pages.first_screen import ShownModel, captioned
from mechattn.render.attention_figures import shared_inserted_span
from mechattn.render.html_views import (
    prompt_tokens,
    received_by_prompt,
    squeezed,
    tokens_in_segments,
)
from mechattn.render.words import NULL_NAMES, band_words, quantity_words
from mechattn.results.result import Result
from mechattn.stats.intervals import Moments
from mechattn.stats.units import RESAMPLES

JsonObject = dict[str, Any]
# The columns of a comparison on the map. A t interval is symmetric, so half its width is enough.
CHANGE_COLUMNS = (
    "difference",
    "half",
    "null",
    "beyond",
    "beyond_half",
    "q_difference",
    "q_beyond",
    "marked",
)

RECEIVED = "received_attention"
MOST_PATTERN_NUMBERS = 3_000_000  # numbers in all patterns together: 8 MB of the page
MOST_PROMPTS = 3  # whose patterns a page holds
# Why a part of a page is empty.
MISSING = {
    "curves": "The run did not measure received attention by position (ma.ReceivedAttention()).",
    "text": (
        "The text is not coloured: the run has not kept single prompts' positions"
        ' (keep="prompts").'
    ),
    "patterns": (
        "There are no attention patterns: run with ma.analyses.AttentionMap() on a few short"
        " prompts."
    ),
    "large": (
        "The attention patterns are too large for a page; ma.pattern(model, prompt, layer) shows"
        " one."
    ),
}


def page_json(models: Sequence[ShownModel]) -> str:
    """The data of all models of a page, each with its caption, as compressed JSON."""
    data = [{"name": caption} | shown_model_data(model) for caption, model in captioned(models)]
    text = json.dumps({"models": data}, separators=(",", ":"), allow_nan=False)
    return squeezed(text)


def check_result(result: Result) -> None:
    """Check, before anything is read, that a page can compare the conditions of a result.

    Raises:
        OptionError: The result lacks the baseline.
        MemoryOptionError: One layer of a quantity does not fit in memory.
    """
    if BASELINE not in result.conditions:
        raise OptionError(
            "a page compares conditions with the baseline, which this result lacks: select it too,"
            ' as in result.sel(condition=["baseline", "slash"])'
        )
    for name in head_quantities(result):
        layer_blocks(result, name, "question", RESAMPLES)


def shown_model_data(model: ShownModel) -> JsonObject:
    """The data of one model.

    Returns:
        The ``conditions``, ``layers`` and number of ``heads`` of the map, and ``start``: the layer
        and head that are selected when the page opens, or None for the head that differs most.
        ``quantities`` has what :func:`head_values` returns for each quantity, and
        ``without_values`` the reason for each quantity that has no values. Then ``curves``,
        ``texts`` and ``patterns``; the last has ``from_separate_run``, whether another run measured
        them.
    """
    result = model.result
    layers = measured_layers(result)
    quantity_names = head_quantities(result)
    heads = result.provenance["model"]["heads"]

    start = model.start
    if start is not None:
        start_layer, start_head = start
        if start_layer not in layers or start_head >= heads:
            start = None  # the map has no such head

    quantities = []
    without_values = {}
    with warnings.catch_warnings():
        # Comparisons warn of heads that are left out, which are empty on the map. ``errors.warn``
        # gives a UserWarning; warnings of other packages are shown.
        warnings.simplefilter("ignore", UserWarning)
        for name in quantity_names:
            quantity = head_values(result, name, layers, heads)
            if quantity["values"]:
                quantities.append(quantity)
            else:
                without_values[name] = next(iter(quantity["missing"].values()))

    patterns = head_patterns(result if model.maps is None else model.maps)
    patterns["from_separate_run"] = model.maps is not None
    return {
        "conditions": result["sequences"].condition.values.tolist(),  # in the order of the arrays
        "layers": layers,
        "heads": heads,
        "start": start,
        "quantities": quantities,
        "without_values": without_values,
        "curves": head_curves(result),
        "texts": head_texts(result),
        "patterns": patterns,
    }


def measured_layers(result: Result) -> list[int]:
    """The layers of a result, which all of its analyses share; empty if no analysis has layers."""
    for dataset in result.datasets.values():
        if "layer" in dataset.dims:
            return dataset.layer.values.tolist()
    return []


def head_values(result: Result, quantity: str, layers: list[int], heads: int) -> JsonObject:
    """The numbers of one quantity, as ``result.heads`` and ``result.compare`` give them.

    Args:
        result: The result.
        quantity: The quantity. If it has segments, the numbers are those of the question.
        layers: The layers of the map.
        heads: The number of heads in each layer.

    Returns:
        The ``name``, ``segment``, ``words`` and ``units`` of the quantity, and in ``about`` its
        description. By condition, its ``values`` and its ``changes`` from the baseline. In
        ``missing``, the reason for each condition that lacks one of them.
    """
    variable = variable_of(result, quantity)
    segment = segment_of(variable, "question")

    values: JsonObject = {}
    changes: JsonObject = {}
    missing: dict[str, str] = {}
    for condition in result.conditions:
        try:
            values[condition] = _values(result, quantity, condition, layers, heads)
            if condition != BASELINE:
                contrast = Contrast(result, condition, quantity=quantity)
                changes[condition] = _changes(contrast, layers, heads)
        except MemoryOptionError:
            raise
        except OptionError as error:
            missing[condition] = str(error)

    return {
        "name": quantity,
        "segment": segment,
        "words": quantity_words(quantity, segment).replace("_", " "),
        "units": str(variable.attrs.get("units", "")),
        "about": str(variable.attrs.get("description", "")),
        "values": values,
        "changes": changes,
        "missing": missing,
    }


def head_curves(result: Result) -> JsonObject:
    """Received attention of every head by original position, in each condition, with its null.

    Returns:
        ``mean`` has the means over prompts, and ``relative_half_width`` half the widths of their
        intervals as fractions of the means, both [condition, layer, head, key]. ``n`` has the
        number of prompts and ``null`` uniform attention, both [condition, layer, key]. ``shares``
        has, for each condition with a dilution null, that null as a fraction of the baseline's mean
        [layer, head, key], and ``inserted``, by condition, what inserted tokens receive.
        ``segments`` has the segments of the baseline, ``question`` the start of its question,
        ``prompts`` the number of prompts, and ``bands`` says what the intervals are.
    """
    dataset = result.datasets.get(RECEIVED)
    if dataset is None or "received_by_origin_variance" not in dataset:
        return {"missing": MISSING["curves"]}

    dims = ("condition", "layer", "head", "original_key")
    mean, relative_half_width = _means(dataset, "received_by_origin", dims)
    counts = dataset["received_by_origin_n"].max("head").transpose("condition", "layer", ...).values
    null = dataset["received_uniform_by_origin"].transpose("condition", "layer", "original_key")

    # Leave out the last keys, which too few prompts have.
    has_mean = np.isfinite(mean).any(axis=(0, 1, 2))
    key_count = int(np.flatnonzero(has_mean).max(initial=0)) + 1
    mean = mean[..., :key_count]
    relative_half_width = relative_half_width[..., :key_count]
    kind = kind_for(mean.size)

    shares = {}
    inserted = {}
    for condition in result.conditions:
        if condition == BASELINE:
            continue
        inserted[condition] = _inserted_curves(result, condition)
        if has_dilution((result, condition), "received", "question"):
            condition_shares = shares_by_position(result, condition)[..., :key_count]
            shares[condition] = packed(condition_shares, kind_for(condition_shares.size))

    return {
        "shares": shares,
        "mean": packed(mean, kind),
        "relative_half_width": packed(relative_half_width, kind),
        "n": packed(counts[..., :key_count]),
        "null": packed(null.values[..., :key_count]),
        "segments": _segments(result, key_count),
        "question": _question_start(result),
        "inserted": inserted,
        "prompts": dataset.sizes["prompt"],
        "bands": f"pointwise 95 % intervals over prompts{band_words(result)}",
    }


def head_texts(result: Result) -> JsonObject:
    """The first prompt in each condition: its tokens, and what they receive from every head.

    Returns:
        By condition, ``tokens`` has each token with its segment, and ``received`` the received
        attention [layer, head, key]. If the run did not keep single prompts, ``missing`` replaces
        ``received``.
    """
    tokens = {condition: tokens_in_segments(result, condition) for condition in result.conditions}
    of_prompts = received_by_prompt(result.datasets.get(RECEIVED, xr.Dataset()))
    if of_prompts is None:
        return {"tokens": tokens, "missing": MISSING["text"]}

    of_first_prompt = of_prompts.isel(prompt=0).transpose("condition", "layer", "head", "key")
    received = {}
    for condition, condition_tokens in tokens.items():
        of_condition = of_first_prompt.sel(condition=condition)
        values = of_condition.values[..., : len(condition_tokens)]
        kind = kind_for(values.size * len(tokens))  # as if all conditions were one array
        received[condition] = packed(values, kind)

    return {"tokens": tokens, "received": received}


def head_patterns(result: Result) -> JsonObject:
    """The attention maps of a few prompts.

    Returns:
        Their ``layers``, and in ``prompts`` for each prompt, by condition: its ``tokens``, the
        number of ``inserted`` tokens, and in ``rows`` the lower triangles of the maps, row by row
        [layer, head, query and key], as whole numbers from 0 to 65,535. Maps beyond
        ``MOST_PATTERN_NUMBERS`` are left out.
    """
    if "attention_map" not in result.datasets:
        return {"missing": MISSING["patterns"]}
    maps = result["attention_map"].pattern
    maps = maps.transpose("prompt", "condition", "layer", "head", "query", "target")
    inserted = (result["sequences"].origin == INSERTED).sum("pos")

    heads = maps.sizes["layer"] * maps.sizes["head"]
    numbers_left = MOST_PATTERN_NUMBERS
    prompts: list[JsonObject] = []
    for prompt_index in range(min(MOST_PROMPTS, maps.sizes["prompt"])):
        patterns = {}
        of_prompt = maps.isel(prompt=prompt_index)
        inserted_counts = inserted.isel(prompt=prompt_index)
        for condition in result.conditions:
            tokens = prompt_tokens(result, condition, prompt_index)
            queries, keys = np.tril_indices(len(tokens))
            numbers_left -= heads * len(queries)
            if numbers_left < 0:
                break
            lower_triangle = of_prompt.sel(condition=condition).values[..., queries, keys]
            patterns[condition] = {
                "tokens": [visible(token) for token in tokens],
                "inserted": int(inserted_counts.sel(condition=condition)),
                "rows": packed(np.round(65535 * lower_triangle.astype(np.float64)), "u2"),
            }
        if patterns:
            prompts.append(patterns)
        if numbers_left < 0:
            break

    if not prompts:
        return {"missing": MISSING["large"]}
    return {"layers": maps.layer.values.tolist(), "prompts": prompts}


def _values(
    result: Result, quantity: str, condition: str, layers: list[int], heads: int
) -> JsonObject:
    """The means over prompts in a condition with half the widths of their intervals, and the means
    under uniform attention."""
    table = result.heads(quantity, None, condition=condition)
    table["half"] = table.high - table[quantity]
    return {
        "mean": _by_layer_and_head(table, quantity, layers, heads),
        "half": _by_layer_and_head(table, "half", layers, heads),
        "null": _by_layer_and_head(table, "uniform", layers, heads),
        "n": int(table.n.iloc[0]),
        "unit": table.attrs["unit"],
    }


def _changes(contrast: Contrast, layers: list[int], heads: int) -> JsonObject:
    """The changes from the baseline, those of the null and those beyond the null, with half the
    widths of intervals and what was tested."""
    table = comparison_table(contrast, bootstrap_ends=False)
    table["half"] = table.difference_high - table.difference
    table["beyond_half"] = table.beyond_high - table.beyond
    table["marked"] = marked(table)

    scale = str(table.scale.iloc[0])
    unit = table.attrs["unit"]
    if "resampled" in table.attrs:
        unit += f", tested by {table.attrs['resampled']}"
    columns = {name: _by_layer_and_head(table, name, layers, heads) for name in CHANGE_COLUMNS}
    return {
        **columns,
        "scale": scale,
        "against": table.attrs["null"],
        "predicts_no_change": table.attrs["predicts_no_change"],
        "null_name": NULL_NAMES[contrast.null_used],
        "margin": DEFAULT_MARGINS[scale],
        "n": int(table.n.iloc[0]),
        "unit": unit,
        "known": bool(table.null.notna().any()),
    }


def _by_layer_and_head(
    table: pd.DataFrame, column: str, layers: list[int], heads: int
) -> JsonObject | None:
    """A column of a table as [layer, head], with NaN for heads without a row.

    None if the column is empty.
    """
    # Result.sel(layer=[1, 0]) keeps this order, so layers need not be sorted.
    row_of_layer = {layer: row for row, layer in enumerate(layers)}
    values = np.full((len(layers), heads), np.nan)
    values[table.layer.map(row_of_layer), table["head"]] = table[column]
    if np.isnan(values).all():
        return None
    return packed(values)


def _means(
    dataset: xr.Dataset, quantity: str, dims: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The means over prompts of a quantity by position, and half the widths of their intervals as
    fractions of the means.

    Both are NaN at positions that too few prompts have.

    Args:
        dataset: The dataset, with the count and the variance of the quantity.
        quantity: The quantity, such as "received".
        dims: The dimensions of the quantity, the position last.
    """
    # The positions of all heads are put into one dimension.
    stored = dataset[[quantity, f"{quantity}_variance", f"{quantity}_n"]].astype(np.float64)
    stacked = stored.stack(cell=dims, create_index=False)
    moments = Moments.from_statistics(
        stacked[f"{quantity}_n"].values,
        stacked[quantity].values,
        stacked[f"{quantity}_variance"].values,
    )
    statistics = at_shared_positions(moments, dataset.sizes["prompt"])
    with np.errstate(invalid="ignore", divide="ignore"):
        relative_half_width = statistics.high / statistics.mean - 1

    shape = [dataset.sizes[dim] for dim in dims]
    means = np.full(shape, np.nan)
    means.flat[statistics.positions] = statistics.mean
    half_widths = np.full(shape, np.nan)
    half_widths.flat[statistics.positions] = np.where(statistics.mean > 0, relative_half_width, 0.0)
    return means, half_widths


def _inserted_curves(result: Result, condition: str) -> JsonObject | None:
    """Where the inserted tokens are, and what they receive [layer, head, key].

    None if they are not one span that all prompts share.
    """
    span = shared_inserted_span(result, condition)
    if span is None:
        return None
    start, last = span
    dataset = result[RECEIVED].isel(key=slice(start, last + 1)).sel(condition=condition)
    mean, relative_half_width = _means(dataset, "received", ("layer", "head", "key"))
    null = dataset["received_uniform"].transpose("layer", "key").values
    kind = kind_for(mean.size)
    return {
        "start": start,
        "count": last + 1 - start,
        "mean": packed(mean, kind),
        "relative_half_width": packed(relative_half_width, kind),
        "null": packed(null),
    }


def _segments(result: Result, key_count: int) -> list[tuple[str, int, int]]:
    """The segments of the baseline in their order: the name, and the first and last position.

    A position belongs to the segment that it has in most prompts. The last segment ends at the last
    position that any prompt has.

    Args:
        result: The result.
        key_count: The number of positions.
    """
    sequences = result["sequences"].sel(condition=BASELINE)
    segment_names = []
    for indices in sequences.segment_index.values[:, :key_count].T:
        indices_of_tokens = indices[indices != PADDING]
        if not len(indices_of_tokens):
            break
        segment_names.append(SEGMENTS[int(np.bincount(indices_of_tokens).argmax())])

    segments = []
    first = 0
    for name, names_in_a_row in groupby(segment_names):
        last = first + len(list(names_in_a_row)) - 1
        segments.append((name, first, last))
        first = last + 1

    return segments


def _question_start(result: Result) -> int | None:
    """The position in the baseline at which the question starts.

    None if prompts differ, or if one has no question.
    """
    segment_indices = result["sequences"].segment_index.sel(condition=BASELINE).values
    in_question = segment_indices == SEGMENTS.index("question")
    starts = set(in_question.argmax(axis=1).tolist())
    if len(starts) != 1 or not in_question.any(axis=1).all():
        return None
    return int(starts.pop())
