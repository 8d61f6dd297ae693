"""What figures say in words: models and quantities in titles, and the sentence with the main number
under a figure.
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
UNSURE = ", which cannot be distinguished from 0"  # ends what is said of a change
_QUANTITY_WORDS = {
    "received": "attention received by the {segment}",
    "mass": "attention to all of the {segment}",
    "scale": "attention that the {segment} leaves to the original keys (λ)",
}
# Whose queries received attention is measured over.
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
    """The name of a segment's quantity in a title."""
    words = _QUANTITY_WORDS.get(quantity, f"{quantity} of the {{segment}}")
    return words.format(segment=segment)


def model_caption(result: Result) -> str:
    """The model's name and size; of a toy, that it is one, and of weights from a quantised file, how
    they were stored.
    """
    model = result.provenance["model"]
    size = model["parameters"]
    parameters = f"{size / 1e6:.1f} M parameters"
    if size >= 1e9:
        parameters = f"{size / 1e9:.1f} B parameters"

    details = [parameters]
    if str(model["name"]).startswith("toy:"):
        details.insert(0, "toy")
    bits = model.get("gguf", {}).get("quantised_bits")
    if bits:
        details.append(f"{'- and '.join(map(str, bits))}-bit weights, dequantised")
    return f"{model['name']} ({', '.join(details)})"


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number where a name stands for several results."""
    numbered_names = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            number = names[: index + 1].count(name)
            name = f"{name}, result {number}"
        numbered_names.append(name)

    return numbered_names


def model_sentence(result: Result, phrases: Sequence[str]) -> str:
    """A sentence on a model, from phrases on its conditions."""
    return f"{model_caption(result)}: {'; '.join(phrases)}."


def says(figure: go.Figure, *sentences: str) -> go.Figure:
    """The figure with its sentence, which plotly keeps as ``layout.meta`` (see
    :func:`sentence_of`)."""
    return figure.update_layout(meta={"says": " ".join(filter(None, sentences))})


def sentence_of(figure: go.Figure) -> str:
    """The sentence of a figure; empty if it was not drawn by this library."""
    meta: Any = figure.layout.meta
    if not isinstance(meta, dict):
        return ""
    return str(meta.get("says", ""))


def in_digits(value: float | np.ndarray, form: str) -> str:
    """A number with a minus sign, which is longer than a hyphen."""
    number = float(value) + 0.0  # not "-0"
    return f"{number:{form}}".replace("-", "−")


def percent(change: float | np.ndarray) -> str:
    """A relative change in percent, with its sign."""
    return f"{percent_number(change)}\u00a0%"


def percent_number(change: float | np.ndarray, form: str = "+.1f") -> str:
    """The number of a relative change in percent; with its sign and one decimal place by
    default."""
    rounded = round(100 * float(change), 1)
    return in_digits(rounded, form)


def interval_of(rows: pd.Series | pd.DataFrame, name: str) -> Interval:
    """A number of a table with the ends of its interval: such as ``effect``, ``effect_low`` and
    ``effect_high``, of one row or of several."""
    return Interval(rows[name], rows[f"{name}_low"], rows[f"{name}_high"])


def percent_words(interval: Interval) -> str:
    """A relative change with its interval."""
    estimate, low, high = map(percent, interval)
    return f"{estimate} [{low}, {high}]"


def number_words(interval: Interval, form: str = ".3g") -> str:
    """A number with its interval, if it has one; to three digits by default."""
    estimate, low, high = (in_digits(number, form) for number in interval)
    if not np.isfinite(interval.low):
        return estimate
    return f"{estimate} [{low}, {high}]"


def count_words(result: Result) -> str:
    """The number of prompts of a result, such as "64 prompts" or "24 groups of 96 prompts"; and if
    they are alike.
    """
    words = units_of(result).words
    if alike_words(result):
        words += " (much alike, so intervals are too narrow)"
    return words


def counts_words(results: Sequence[Result]) -> str:
    """The number of prompts of several results, or the numbers where they differ."""
    return " or ".join(dict.fromkeys(map(count_words, results)))


def mean_words(result: Result, values: xr.DataArray) -> str:
    """The mean over prompts of each prompt's mean over everything else, with its 95 % t
    interval."""
    return number_words(overall_mean(result, values))


def change_words(
    result: Result,
    condition: str,
    layer: int,
    heads: Sequence[int],
    prompts: np.ndarray,
    null: Null | None = None,
) -> str:
    """The relative change of what the question receives, with its interval, and that of its null;
    "" without one.

    Args:
        result: A result with received attention.
        condition: The condition.
        layer: The layer, from 0.
        heads: The heads whose mean it is.
        prompts: The indices of the prompts.
        null: As for :class:`mechattn.Contrast`.
    """
    if condition == BASELINE:
        return ""

    drawn_part = part_of(result, "prompt", prompts).sel(head=list(heads))
    try:
        contrast = Contrast(drawn_part, condition, null=null)
        change, null_change = contrast.overall(layer)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts for an interval, or not every prompt has the segment
        return ""

    return change_beside_null(change, null_change, contrast.null_used)


def change_beside_null(change: Interval, null_change: Interval | None, null_kind: Null) -> str:
    """A relative change with its interval, and that under the null."""
    if null_change is None:
        return percent_words(change)
    null_words = f"{NULL_NAMES[null_kind]}: {percent(null_change.estimate)}"
    return f"{percent_words(change)} ({null_words})"


def band_words(result: Result) -> str:
    """A note on the bands at positions: they are from moments over prompts, which ignore groups."""
    units = units_of(result)
    if units.group_of_prompt is None:
        return ""
    return ", which treat prompts as independent"


def choice_words(
    result: Result, condition: str, layer: int | None, top: int, by: Ranking | None = None
) -> str:
    """How much the data-driven choice of heads, of a layer or of all, depends on the prompts; "" if
    unknown."""
    try:
        table = result.stability(condition, top=top, layer=layer, by=by)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts, or every head is chosen
        return ""

    heads = "the heads"
    if layer is not None:
        heads = f"the heads of layer {layer}"
    shared = f"{100 * float(table.jaccard[0]):.0f}\u00a0%"
    by_chance = f"{100 * float(table.by_chance[0]):.0f}\u00a0%"
    return (
        f"Of {heads} that either of two random halves of the prompts chooses,"
        f" both choose {shared} ({by_chance} by chance)."
    )


def received_title_end(result: Result, options: Mapping[str, Any]) -> str:
    """What the title of received attention has on a page: layers, choice of heads, condition."""
    condition = result.shown_condition(options.get("condition"))
    layers = "any layer"
    if options["layer"] is not None:
        layers = f"layer {', '.join(map(str, np.atleast_1d(options['layer'])))}"
    choice = "chosen"
    if options.get("heads") is not None:
        # They are named, or the first ones, where there are too few prompts to choose by.
        choice = "not chosen"
    return f", {layers}, heads {choice} by the data, condition “{condition}”"


def received_note(result: Result, options: Mapping[str, Any]) -> str:
    """How to read a figure of received attention, and by what its heads were chosen."""
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

    First the change over all layers and heads, in percent and in points of 100 of the attention;
    then the layer where it is largest; that of a control; what the dilution null would give; the
    number of heads that fall and that rise; and where a condition takes the sink from the first
    token, that.

    Args:
        result: A result with received attention.
        condition: The condition; the first that isn't the baseline by default.
        segment: The segment that receives attention.
        to: A condition whose change is stated too, with the difference of both, such as a random
            sentence of as many tokens; ``result.compare(condition, to=to)`` has it by head.
        margin: The largest change that counts as none, such as 0.02; by default 0.05, for heads
            that fall or rise.

    Raises:
        OptionError: There is no such condition or segment, there are fewer than 3 prompts, or the
            two conditions insert different numbers of tokens.
    """
    condition = result.condition(condition)
    verdict = result.verdict(condition, segment, margin=margin)
    if to is None:
        return verdict_in_words(result, condition, verdict, segment)

    difference = result.verdict(condition, segment, to=to).change
    other = OtherCondition(to, result.verdict(to, segment), difference)
    return verdict_in_words(result, condition, verdict, segment, other)


class OtherCondition(NamedTuple):
    """A condition that another is told beside."""

    name: str
    verdict: Verdict
    difference: Interval  # the change from it to the other


def verdict_in_words(
    result: Result,
    condition: str,
    verdict: Verdict,
    segment: str = "question",
    other: OtherCondition | None = None,
) -> str:
    """The sentences of a verdict that is known.

    Args:
        result: A result with received attention.
        condition: The condition of the verdict.
        verdict: The verdict.
        segment: The segment that it is about.
        other: A condition that is told beside it.
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


def _change_sentence(result: Result, condition: str, verdict: Verdict, segment: str) -> str:
    """The change of received attention in percent, and of the segment's mass, where it was measured,
    in points of 100."""
    dataset = result["received_attention"]
    layers = _count_of("layer", dataset.sizes["layer"])
    heads = _count_of("head", dataset.sizes["head"])
    words = (
        f"With “{condition}”, attention received by the {segment} changes by"
        f" {percent_words(verdict.change)} over {layers} × {heads}"
    )

    if "mass_by_segment" in dataset:
        masses = dataset.mass_by_segment.sel(segment=segment)
        change = masses.sel(condition=condition) - masses.sel(condition=BASELINE)
        points = overall_mean(result, 100 * change)
        if np.isfinite(points.estimate):
            words += f", and all of it by {number_words(points, '+.1f')} points of 100"

    return f"{words} ({units_of(result).words})"


def largest_layer_words(result: Result, condition: str, segment: str) -> str:
    """The layer in which a segment's attention changes most, chosen on one half of the prompts and
    measured on the other.

    With too few prompts for halves it is said to be a maximum. "" for one layer.
    """
    layers = result["received_attention"].layer.values.tolist()
    if len(layers) < 2:
        return ""

    units = units_of(result)
    if units.n >= 2 * FEWEST:
        choosing, measuring = units.halves()
        choice = "chosen on one half of the prompts, measured on the other"
    else:
        choosing = np.arange(units.prompts)
        measuring = choosing
        choice = f"the largest of {len(layers)}, on the prompts that made it so"

    # All layers at once; a Contrast of each would copy the result as often as there are layers.
    received = result["received_attention"].received_by_segment.sel(segment=segment)
    head_means = received.isel(prompt=choosing).mean("head")
    ratios = np.log(head_means.sel(condition=condition) / head_means.sel(condition=BASELINE))
    layer_changes = np.expm1(over_units(result, ratios.transpose("prompt", "layer")).mean(0))
    layer = layers[int(np.argmax(np.abs(layer_changes)))]

    contrast = Contrast(part_of(result, "prompt", measuring), condition, segment=segment)
    change, _ = contrast.overall(layer)

    unsure = UNSURE if change.low <= 0 <= change.high else ""
    return f"It changes most in layer {layer}: {percent_words(change)} ({choice}){unsure}"


def _count_of(name: str, count: int) -> str:
    """A number of layers or heads, such as "1 layer" or "9 heads"."""
    plural = "" if count == 1 else "s"
    return f"{count} {name}{plural}"


def heads_words(verdict: Verdict) -> str:
    """How many heads fall and how many rise by more than the margin and not by chance, in words."""
    if not verdict.findable:
        return f"With {verdict.n} {verdict.unit} no head could be shown to change (q < 0.05)"

    margin = verdict.margin
    if margin is None:
        margin = DEFAULT_MARGINS["log-ratio"]
    by_more = f"by more than {100 * margin:g}\u00a0% (q < 0.05)"
    heads = _count_of("head", verdict.falls.size)
    falling, rising = heads_that_change(verdict)
    if not falling and not rising:
        return f"Of {heads}, none changes {by_more}"
    return f"Of {heads}, {falling} fall and {rising} rise {by_more}"


def heads_that_change(verdict: Verdict) -> tuple[int, int]:
    """How many heads fall, and how many rise, by more than the margin and not by chance."""
    falling = int((verdict.falls & verdict.marked).sum())
    rising = int((verdict.rises & verdict.marked).sum())
    return falling, rising
