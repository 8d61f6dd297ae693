"""What figures say in words: models and quantities in titles, and the sentence with the main number under a figure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast, Verdict
from mechattn.contrast.means import overall_mean
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.results.result import Result, alike_words, units_of
from mechattn.stats.intervals import Interval


def quantity_words(quantity: str, segment: str) -> str:
    """The name of a segment's quantity in a title."""
    words = {
        "received": "attention received by the {}",
        "mass": "attention to all of the {}",
        "scale": "attention that the {} leaves to the original keys (λ)",
    }
    return words.get(quantity, quantity + " of the {}").format(segment)


def model_caption(result: Result) -> str:
    """The model's name and size; a toy is called a toy, and weights from a quantised file are called so."""
    model = result.provenance["model"]
    size = model["parameters"]
    words = f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
    toy = "toy, " if str(model["name"]).startswith("toy:") else ""
    stored = model.get("gguf", {}).get("words", "")
    comma = ", " if stored else ""
    return f"{model['name']} ({toy}{words} parameters{comma}{stored})"


def says(figure: go.Figure, *sentences: str) -> go.Figure:
    """The figure with its sentence, which plotly keeps as ``layout.meta`` (see :func:`said`)."""
    return figure.update_layout(meta={"says": " ".join(filter(None, sentences))})


def said(figure: go.Figure) -> str:
    """The sentence of a figure; empty if it was not drawn by this library."""
    meta: Any = figure.layout.meta
    return str(meta.get("says", "")) if isinstance(meta, dict) else ""


def percent(change: float | np.ndarray) -> str:
    """A relative change in percent, with its sign."""
    rounded = round(100 * float(change), 1) + 0.0  # no minus zero
    return f"{rounded:+.1f}\u00a0%".replace("-", "−")


def percent_words(interval: Interval) -> str:
    """A relative change with its interval."""
    return f"{percent(interval.estimate)} [{percent(interval.low)}, {percent(interval.high)}]"


def number_words(interval: Interval) -> str:
    """A number with its interval, to three digits."""
    shown = [f"{float(value):.3g}".replace("-", "−") for value in interval]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]" if np.isfinite(interval.low) else shown[0]


def count_words(result: Result) -> str:
    """The number of prompts of a result, such as "64 prompts" or "24 groups of 96 prompts"; and if they are alike."""
    words = units_of(result, result["sequences"].sizes["prompt"]).words
    return words + " (much alike, so intervals are too narrow)" * bool(alike_words(result))


def mean_words(result: Result, values: xr.DataArray) -> str:
    """The mean over prompts of each prompt's mean over everything else, with its 95 % t interval."""
    return number_words(overall_mean(result, values))


def change_words(
    result: Result, condition: str, layer: int | None = None, heads: Seq[int] | None = None,
    prompts: np.ndarray | None = None,
) -> str:  # fmt: skip
    """The relative change of what the question receives, with its interval, and that of its null; "" without one."""
    if condition == BASELINE:
        return ""
    try:
        return beside_null(*Contrast(_part(result, heads, prompts), condition).overall(layer))
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts for an interval, or not every prompt has the segment
        return ""


def beside_null(change: Interval, null: Interval | None) -> str:
    """A relative change with its interval, and that under uniform attention."""
    return percent_words(change) + (
        "" if null is None else f" (uniform attention: {percent(null.estimate)})"
    )


def band_words(result: Result) -> str:
    """A note on the bands at positions: they are from moments over prompts, which ignore groups."""
    alone = units_of(result, result["sequences"].sizes["prompt"]).of is None
    return "" if alone else ", which treat prompts as independent"


def choice_words(result: Result, condition: str, layer: int, top: int) -> str:
    """How much the data-driven choice of a layer's heads depends on the prompts; "" if unknown."""
    try:
        table = result.stability(condition, top=top, layer=layer)
    except MemoryOptionError:
        raise
    except OptionError:  # too few prompts, or every head is chosen
        return ""
    shared, chance = float(table.jaccard[0]), float(table.by_chance[0])
    return (
        f"Chosen on random halves of the prompts, {top} heads of layer {layer} have {100 * shared:.0f}\u00a0% of "
        f"both choices in common ({100 * chance:.0f}\u00a0% by chance)."
    )


def verdict_words(
    result: Result,
    condition: str | None = None,
    segment: str = "question",
    to: str | None = None,
    margin: float | None = None,
) -> str:
    """State the change of a segment's received attention from the baseline, and its uniform null, in words.

    Args:
        result: A result with received attention.
        condition: The condition; the first that isn't the baseline by default.
        segment: The segment that receives attention.
        to: A condition whose change is stated too, with the difference of both, such as a random sentence of as many
            tokens; ``result.compare(condition, to=to)`` has it by head.
        margin: The largest change that counts as none, such as 0.02, for heads that change as under uniform attention.

    Raises:
        OptionError: There is no such condition or segment, there are fewer than 3 prompts, or the two conditions insert
            different numbers of tokens.
    """
    condition = result.condition(condition)
    apart = None if to is None else result.verdict(condition, segment, to=to).change
    other = None if to is None or apart is None else (to, result.verdict(to, segment), apart)
    return stated(
        result, condition, result.verdict(condition, segment, margin=margin), segment, other
    )


def stated(
    result: Result,
    condition: str,
    verdict: Verdict,
    segment: str,
    other: tuple[str, Verdict, Interval] | None,
) -> str:
    """The sentences of a verdict; beside that of another condition, and the relative difference between both."""
    beside, sizes, null = "", result["received_attention"].sizes, percent(verdict.null.estimate)
    if other is not None:
        name, its, apart = other
        beside = f" and by {percent_words(its.change)} with “{name}” (“{condition}” relative to “{name}”: "
        beside += f"{percent_words(apart)})"
        null = " and ".join(dict.fromkeys((null, percent(its.null.estimate))))
    heads = heads_words(verdict)
    if other is not None:  # after the other condition
        heads = f"With “{condition}”, {heads[0].lower()}{heads[1:]}"
    same = ""
    if verdict.same is not None:
        within = f"± {100 * (verdict.margin or 0):g}\u00a0%"
        same = f"; in {int(verdict.same.sum())} the change is the same as its null's to within {within} (q_same < 0.05)"
    return (
        f"Attention received by the {segment} changes by {percent_words(verdict.change)} with “{condition}”{beside}; "
        f"under uniform attention it would change by {null} (changes of the mean over {_many(sizes, 'layer')} × "
        f"{_many(sizes, 'head')}, {units_of(result, sizes['prompt']).words}). {heads}{same}. {alike_words(result)}"
    ).rstrip()


def _many(sizes: Mapping[Any, int], dim: str) -> str:
    return f"{sizes[dim]} {dim}{'s' * (sizes[dim] != 1)}"


def heads_words(verdict: Verdict) -> str:
    """How many heads differ from uniform attention, and in which direction their own attention changes."""
    null, size = round(float(verdict.null.estimate), 5), verdict.above.size
    up = verdict.rises | (
        ~verdict.falls & (null > 0)
    )  # what does neither for sure is said to go the null's way
    down = verdict.falls | (~verdict.rises & (null < 0))
    kinds = {  # of heads above and below what uniform attention would do
        "lose less": verdict.above & ~up,
        "gain more" if null > 0 else "gain": verdict.above & up,
        "lose more" if null < 0 else "lose": verdict.beyond & down,
        "gain less": verdict.beyond & ~down,
    }
    counts = {words: int(mask.sum()) for words, mask in kinds.items() if mask.any()}
    if not counts and not verdict.findable:
        few = f"{verdict.n} {verdict.unit.partition(' ')[0]}"
        return f"With {few} no head could be shown to differ from uniform attention (q < 0.05)"
    if not counts:
        return "No head differs from uniform attention (q < 0.05)"
    would = "lose" if null < 0 else "gain" if null > 0 else "change nothing"
    said: list[str] = []
    for words, count in counts.items():
        verb, _, how = words.partition(" ")
        all_heads = f"All {size} heads" if size > 1 else "The only head"
        who = str(count) if said else all_heads if count == size else f"{count} of {size} heads"
        than = (
            ""
            if said
            else " than uniform attention would"
            if how
            else f", where uniform attention would {would}"
        )
        said.append(f"{who} {verb}{'s' * (count == 1)}{' ' * bool(how)}{how}{than}")
    return f"{', '.join(said)} (q < 0.05)"


def _part(result: Result, heads: Seq[int] | None, prompts: np.ndarray | None) -> Result:
    """The result restricted to some heads and prompts."""
    wanted = {"head": None if heads is None else list(heads), "prompt": prompts}
    chosen = {dim: at for dim, at in wanted.items() if at is not None}
    made = {
        name: data.isel(chosen, missing_dims="ignore") for name, data in result.datasets.items()
    }
    return replace(result, datasets=made)
