"""The words of figures: models and quantities in titles, numbers with their intervals, and the
sentences under a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
from mechattn.contrast.means import over_units, overall_mean
from mechattn.contrast.quantities import Null
from mechattn.contrast.question import first_token_words
from mechattn.contrast.table import DEFAULT_MARGINS, Ranking
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.results.result import Result, alike_words, part_of, units_of
from mechattn.stats.intervals import FEWEST, Interval

NULL_NAMES: dict[Null, str] = {
    "dilution": "dilution",
    "uniform": "uniform attention",
    "blind": "attention by position alone",
}
UNSURE = ", which cannot be distinguished from 0"  # follows a change in a sentence
_QUANTITY_WORDS = {
    "received": "attention received by the {segment}",
    "mass": "attention to all of the {segment}",
    "scale": "attention that the {segment} leaves to the original keys (λ)",
}
# The queries over which received attention is measured.
_QUERY_WORDS = {"original": "the original tokens", "all": "all tokens"}
# How to read a figure of received attention.
_READING = {
    "measure": (
        "Received attention of a key is the mean attention that {queries} after it pay to it{own}."
    ),
    "baseline": (
        "Blue: the unchanged prompts; dotted: uniform attention. A key's value falls with its"
        " position by definition, as fewer tokens come after it; compare with uniform attention."
    ),
    "condition": (
        "Blue: the unchanged prompt; orange: with the inserted tokens. Top row: the original"
        " tokens, aligned; bottom row: the whole sequence with the inserted span shaded. Part of a"
        " fall is there by definition, as attention is positive and sums to 1; compare with the"
        " dotted line, {null}."
    ),
    "bands": (
        "Bands are pointwise (not simultaneous) 95 % intervals over prompts; keys that too few"
        " prompts have are hidden."
    ),
}
_DOTTED_MEANS = {
    "dilution": (
        "what the original tokens would receive if they kept their attention to each other "
        "(dilution; the same share for all tokens of a segment)"
    ),
    "uniform": "what uniform attention would give",
}


def quantity_words(quantity: str, segment: str) -> str:
    """The name of a quantity in a title.

    Args:
        quantity: The quantity, such as "received".
        segment: The segment that it is about; empty for a quantity without segments.
    """
    if not segment:
        return quantity
    words = _QUANTITY_WORDS.get(quantity, f"{quantity} of the {{segment}}")
    return words.format(segment=segment)


def model_caption(result: Result) -> str:
    """The model's name and details, such as "toy:llama (toy, 1.0 M parameters)"."""
    return f"{result.provenance['model']['name']} ({model_details(result)})"


def model_details(result: Result) -> str:
    """The model's number of parameters, such as "toy, 1.0 M parameters".

    A toy is marked as one, and weights from a quantised file with the bits they were stored in.
    """
    model = result.provenance["model"]
    parameter_count = model["parameters"]
    size_words = f"{parameter_count / 1e6:.1f} M parameters"
    if parameter_count >= 1e9:
        size_words = f"{parameter_count / 1e9:.1f} B parameters"

    details = [size_words]
    if str(model["name"]).startswith("toy:"):
        details.insert(0, "toy")
    bits = model.get("gguf", {}).get("quantised_bits")
    if bits:
        bit_words = "- and ".join(map(str, bits))
        details.append(f"{bit_words}-bit weights, dequantised")
    return ", ".join(details)


def numbered(names: Sequence[str]) -> list[str]:
    """The names; one that occurs several times is followed by "result 1", "result 2" and so on."""
    numbered_names = []
    for index, name in enumerate(names):
        label = name
        if names.count(name) > 1:
            number = names[: index + 1].count(name)
            label = f"{name}, result {number}"
        numbered_names.append(label)

    return numbered_names


def model_sentence(result: Result, phrases: Sequence[str]) -> str:
    """A sentence of the model's caption and a phrase for each of its conditions."""
    return f"{model_caption(result)}: {'; '.join(phrases)}."


def says(figure: go.Figure, *sentences: str) -> go.Figure:
    """Set the sentences of a figure, which :func:`sentence_of` reads, and return the figure.

    plotly does not draw ``layout.meta``, in which they are kept. Empty sentences are left out.
    """
    return figure.update_layout(meta={"says": " ".join(filter(None, sentences))})


def sentence_of(figure: go.Figure) -> str:
    """The sentences of a figure as one text; empty if it was not drawn by this library."""
    meta: Any = figure.layout.meta
    if not isinstance(meta, dict):
        return ""
    return str(meta.get("says", ""))


def in_digits(value: float | np.ndarray, form: str) -> str:
    """A number as text, with a minus sign instead of a hyphen.

    Args:
        value: The number.
        form: The format specification, such as "+.1f".
    """
    number = float(value) + 0.0  # turns −0.0 into 0.0
    return f"{number:{form}}".replace("-", "−")


def percent(change: float | np.ndarray) -> str:
    """A relative change in percent, with its sign and one decimal place."""
    return f"{percent_number(change)}\u00a0%"


def percent_number(change: float | np.ndarray, form: str = "+.1f") -> str:
    """A relative change in percent without the percent sign, rounded to one decimal place.

    Args:
        change: The change as a fraction.
        form: The format of the rounded number. By default it has a sign and one decimal place.
    """
    rounded = round(100 * float(change), 1)
    return in_digits(rounded, form)


def interval_of(rows: pd.Series | pd.DataFrame, name: str) -> Interval:
    """A column of a table with the ends of its interval, for one row or for several.

    For "effect" these are the columns ``effect``, ``effect_low`` and ``effect_high``.
    """
    return Interval(rows[name], rows[f"{name}_low"], rows[f"{name}_high"])


def percent_words(interval: Interval) -> str:
    """A relative change with its interval, in percent."""
    estimate, low, high = map(percent, interval)
    return f"{estimate} [{low}, {high}]"


def number_words(interval: Interval, form: str = ".3g") -> str:
    """A number with its interval, by default to three significant digits.

    The number stands alone if the ends of its interval are NaN.
    """
    estimate, low, high = (in_digits(number, form) for number in interval)
    if not np.isfinite(interval.low):
        return estimate
    return f"{estimate} [{low}, {high}]"


def count_words(result: Result) -> str:
    """The number of prompts of a result, such as "64 prompts" or "24 groups of 96 prompts".

    If the prompts are much alike, a warning that intervals are too narrow follows.
    """
    words = units_of(result).words
    if alike_words(result):
        words += " (much alike, so intervals are too narrow)"
    return words


def counts_words(results: Sequence[Result]) -> str:
    """The number of prompts of each of several results; numbers that differ are joined by "or"."""
    return " or ".join(dict.fromkeys(map(count_words, results)))


def mean_words(result: Result, values: xr.DataArray) -> str:
    """The mean over prompts of each prompt's mean, with its 95 % t interval."""
    return number_words(overall_mean(result, values))


def change_words(
    result: Result,
    condition: str,
    layer: int,
    heads: Sequence[int],
    prompts: np.ndarray,
    null: Null | None = None,
) -> str:
    """The relative change of the question's received attention with its interval, and the change
    under the null if that is known.

    Empty for the baseline, and if the change cannot be computed from these prompts.

    Args:
        result: A result with received attention.
        condition: The condition.
        layer: The layer, from 0.
        heads: The heads over which the attention is averaged.
        prompts: The indices of the prompts.
        null: As for :class:`mechattn.Contrast`.
    """
    if condition == BASELINE:
        return ""

    selection = part_of(result, "prompt", prompts).sel(head=list(heads))
    try:
        contrast = Contrast(selection, condition, null=null)
        change, null_change = contrast.overall(layer)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts for an interval, or not every prompt has the segment
        return ""

    return change_beside_null(change, null_change, contrast.null_used)


def change_beside_null(change: Interval, null_change: Interval | None, null_kind: Null) -> str:
    """A relative change with its interval, and the change under the null if that is known."""
    if null_change is None:
        return percent_words(change)
    null_words = f"{NULL_NAMES[null_kind]}: {percent(null_change.estimate)}"
    return f"{percent_words(change)} ({null_words})"


def band_words(result: Result) -> str:
    """A note on bands at positions, for a result whose prompts have groups; otherwise empty.

    The bands come from moments over prompts, which ignore groups.
    """
    units = units_of(result)
    if units.group_of_prompt is None:
        return ""
    return ", which treat prompts as independent"


def choice_words(
    result: Result, condition: str, layer: int | None, top: int, by: Ranking | None = None
) -> str:
    """How much the choice of heads by the data depends on the prompts, as a sentence.

    Empty if there are too few prompts, or if every head is chosen.

    Args:
        result: A result with received attention.
        condition: The condition.
        layer: The layer whose heads are chosen; None for heads of all layers.
        top: The number of heads.
        by: What ranks the heads, as for ``result.stability``.
    """
    try:
        table = result.stability(condition, top=top, layer=layer, by=by)
    except MemoryOptionError:
        raise
    except OptionError:
        return ""

    head_words = "the heads"
    if layer is not None:
        head_words = f"the heads of layer {layer}"
    overlap = 100 * float(table.jaccard[0])
    chance_overlap = 100 * float(table.by_chance[0])
    return (
        f"Of {head_words} that either of two random halves of the prompts chooses,"
        f" both choose {overlap:.0f}\u00a0% ({chance_overlap:.0f}\u00a0% by chance)."
    )


def received_title_end(result: Result, options: Mapping[str, Any]) -> str:
    """The end of the title of received attention on a page: layers, choice of heads, condition."""
    condition = result.shown_condition(options.get("condition"))
    layer_words = "any layer"
    if options["layer"] is not None:
        numbers = ", ".join(map(str, np.atleast_1d(options["layer"])))
        layer_words = f"layer {numbers}"
    choice = "chosen"
    if options.get("heads") is not None:
        # The user named them, or a page with too few prompts for a choice lists the first ones.
        choice = "not chosen"
    return f", {layer_words}, heads {choice} by the data, condition “{condition}”"


def received_note(result: Result, options: Mapping[str, Any]) -> str:
    """How to read a figure of received attention, and how much the choice of its heads depends on
    the prompts."""
    analysis = result.provenance["analyses"]["received_attention"]
    queries = _QUERY_WORDS.get(analysis["queries"], f"the {analysis['queries']}")
    own_position = " (its own position counts)" if analysis["include_self"] else ""
    sentences = [_READING["measure"].format(queries=queries, own=own_position)]

    condition = result.shown_condition(options.get("condition"))
    if condition == BASELINE:
        return " ".join([*sentences, _READING["baseline"], _READING["bands"]])

    null_kind = Contrast(result, condition, null=options.get("null")).null_used
    sentences.append(_READING["condition"].format(null=_DOTTED_MEANS[null_kind]))
    sentences.append(_READING["bands"])
    top = options.get("top")
    if top is not None:
        # A layer of None becomes [None]: heads of all layers, with one sentence.
        for layer in np.atleast_1d(options["layer"]).tolist():
            words = choice_words(result, condition, layer, top, options.get("by"))
            sentences.append(words)

    return " ".join(filter(None, sentences))


def verdict_words(
    result: Result,
    condition: str | None = None,
    segment: str = "question",
    to: str | None = None,
    margin: float | None = None,
) -> str:
    """State in words how the attention that a segment receives changes from the baseline.

    The sentences give the change over all layers and heads, in percent and in points of 100 of the
    attention, and the layer with the largest change. With ``to`` they give the change in that
    condition. Then follow the change under the dilution null, if that is known, and the number of
    heads that fall and rise; with ``margin`` also the number of heads whose change is that of the
    null. The last sentences say what happens to the first token, if the condition inserts tokens
    before it or takes its sink, and whether the prompts are much alike.

    Args:
        result: A result with received attention.
        condition: The condition; by default the first that isn't the baseline.
        segment: The segment that receives attention.
        to: Another condition, such as a random sentence of equal length. Its change is stated too,
            and the difference of both; ``result.compare(condition, to=to)`` gives it by head.
        margin: The largest change that counts as none, such as 0.02. Heads that change by more
            fall or rise; for these the default is 0.05.

    Raises:
        OptionError: There is no such condition or segment, there are fewer than 3 prompts or
            groups, or the two conditions insert different numbers of tokens.
    """
    condition = result.condition(condition)
    verdict = result.verdict(condition, segment, margin=margin)
    if to is None:
        return verdict_in_words(result, condition, verdict, segment)

    difference = result.verdict(condition, segment, to=to).change
    other = OtherCondition(to, result.verdict(to, segment), difference)
    return verdict_in_words(result, condition, verdict, segment, other)


class OtherCondition(NamedTuple):
    """A condition that is stated next to the condition of a verdict, such as its control."""

    name: str
    verdict: Verdict
    difference: Interval  # the relative change from this condition to that of the verdict


def verdict_in_words(
    result: Result,
    condition: str,
    verdict: Verdict,
    segment: str = "question",
    other: OtherCondition | None = None,
) -> str:
    """The sentences of :func:`verdict_words`, from a verdict that was computed before.

    Args:
        result: A result with received attention.
        condition: The condition of the verdict.
        verdict: The verdict.
        segment: The segment that receives attention.
        other: Another condition whose change is stated too.
    """
    sentences = [
        _change_sentence(result, condition, verdict, segment),
        largest_layer_words(result, condition, segment),
    ]
    if other is not None:
        sentences.append(
            f"With “{other.name}” it changes by {percent_words(other.verdict.change)}"
            f" (“{condition}” relative to “{other.name}”: {percent_words(other.difference)})"
        )

    if verdict.null_kind == "dilution":
        sentences.append(
            f"If the original tokens kept their attention to each other, “{condition}” would change"
            f" it by {percent(verdict.null.estimate)}"
        )

    sentences.append(heads_words(verdict))
    if verdict.same is not None and verdict.margin is not None:
        sentences.append(
            f"In {int(verdict.same.sum())} of {verdict.same.size} heads the change is that of the"
            f" null to within ± {100 * verdict.margin:g}\u00a0% (q_same < 0.05)"
        )

    text = ". ".join(filter(None, sentences))
    remarks = [f"{text}.", first_token_words(result, condition), alike_words(result)]
    return " ".join(filter(None, remarks))


def largest_layer_words(result: Result, condition: str, segment: str) -> str:
    """The layer in which a segment's attention changes most, as a sentence without its full stop.

    The layer is chosen on one half of the prompts and its change is measured on the other. With too
    few prompts for halves both use all prompts, and the sentence says so. Empty for a result with
    one layer.
    """
    layers = result["received_attention"].layer.values.tolist()
    if len(layers) < 2:
        return ""

    units = units_of(result)
    if units.n >= 2 * FEWEST:
        choice_prompts, measured_prompts = units.halves()
        choice = "chosen on one half of the prompts, measured on the other"
    else:
        choice_prompts = measured_prompts = np.arange(units.prompts)
        choice = f"the largest of {len(layers)}, on the prompts that made it so"

    # All layers at once, as a Contrast for each layer would copy the result each time.
    received = result["received_attention"].received_by_segment.sel(segment=segment)
    head_means = received.isel(prompt=choice_prompts).mean("head")
    ratios = np.log(head_means.sel(condition=condition) / head_means.sel(condition=BASELINE))
    layer_changes = np.expm1(over_units(result, ratios.transpose("prompt", "layer")).mean(0))
    layer = layers[int(np.argmax(np.abs(layer_changes)))]

    selection = part_of(result, "prompt", measured_prompts)
    change, _ = Contrast(selection, condition, segment=segment).overall(layer)

    unsure = UNSURE if change.low <= 0 <= change.high else ""
    return f"It changes most in layer {layer}: {percent_words(change)} ({choice}){unsure}"


def heads_words(verdict: Verdict) -> str:
    """How many heads fall and how many rise, as a sentence without its full stop.

    With too few prompts for any head to pass q < 0.05, the sentence says that instead.
    """
    if not verdict.findable:
        return f"With {verdict.n} {verdict.unit} no head could be shown to change (q < 0.05)"

    margin = verdict.margin
    if margin is None:
        margin = DEFAULT_MARGINS["log-ratio"]
    by_more = f"by more than {100 * margin:g}\u00a0% (q < 0.05)"
    head_words = _count_of("head", verdict.falls.size)
    falling, rising = heads_that_change(verdict)
    if not falling and not rising:
        return f"Of {head_words}, none changes {by_more}"
    return f"Of {head_words}, {falling} fall and {rising} rise {by_more}"


def heads_that_change(verdict: Verdict) -> tuple[int, int]:
    """How many heads fall, and how many rise, by more than the margin and with q < 0.05."""
    falling = int((verdict.falls & verdict.marked).sum())
    rising = int((verdict.rises & verdict.marked).sum())
    return falling, rising


def _change_sentence(result: Result, condition: str, verdict: Verdict, segment: str) -> str:
    """The change of received attention in percent, and that of the segment's mass in points of 100
    if it was measured."""
    dataset = result["received_attention"]
    layer_words = _count_of("layer", dataset.sizes["layer"])
    head_words = _count_of("head", dataset.sizes["head"])
    words = (
        f"With “{condition}”, attention received by the {segment} changes by"
        f" {percent_words(verdict.change)} over {layer_words} × {head_words}"
    )

    if "mass_by_segment" in dataset:
        masses = dataset.mass_by_segment.sel(segment=segment)
        change = masses.sel(condition=condition) - masses.sel(condition=BASELINE)
        mean_change = overall_mean(result, 100 * change)
        if np.isfinite(mean_change.estimate):
            words += f", and all of it by {number_words(mean_change, '+.1f')} points of 100"

    return f"{words} ({units_of(result).words})"


def _count_of(name: str, count: int) -> str:
    """A number of layers or heads, such as "1 layer" or "9 heads"."""
    plural = "" if count == 1 else "s"
    return f"{count} {name}{plural}"
