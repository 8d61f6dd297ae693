"""Line plots of single heads' received attention, across models or across layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.means import at_positions
from mechattn.contrast.quantities import check_layer
from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.received_figures import NAME, band_words, check_heads, line_and_band
from mechattn.render.theme import THIRD, WITH, WITHOUT, headed, model_caption
from mechattn.render.words import change_words, says
from mechattn.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

_BANDS = "bands: pointwise 95 % intervals"


class _Panel(NamedTuple):
    result: Result
    layer: int
    head: int
    title: str


@declare(NAME, compares=True)
def meaningless_and_sentence(
    results: Seq[Result] | Result,
    layer: int = 0,
    heads: Seq[int] | int = 0,
    conditions: tuple[str, str] = ("slash", "sentence"),
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention by position of the sequence under two conditions, for one head per model.

    Args:
        results: One result per model.
        layer: The layer, from 0.
        heads: The head of each model, from 0; or one number for all.
        conditions: The two conditions, the first in blue and the second in orange.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition, or the numbers of heads and models differ.
    """
    results = [results] if isinstance(results, Result) else list(results)
    chosen = [heads] * len(results) if isinstance(heads, int) else list(heads)
    if len(chosen) != len(results):
        raise OptionError(f"heads={chosen} for {len(results)} models: give one head per model, or one for all")
    panels = [
        _Panel(r, layer, head, f"{model_caption(r)}<br>layer {layer + one_based} head {head + one_based}")
        for r, head in zip(results, chosen, strict=True)
    ]
    figure = _lines(panels, "received", list(conditions), (WITHOUT, THIRD))
    figure.update_xaxes(title_text="position in the sequence")
    over = _prompts(results)
    words = " and ".join(conditions)
    about = f"mean over {over} prompts, {_BANDS}{band_words(results[0])}"
    figure.update_layout(title_text=f"{words}: received attention<br><sup>{about}</sup>")
    said = [
        f"{model_caption(panel.result)}, layer {panel.layer + one_based} head {panel.head + one_based}, "
        f"“{name}”: {change}."
        for panel in panels
        for name in conditions
        if (change := change_words(panel.result, name, layer=panel.layer, heads=[panel.head]))
    ]
    return says(figure, "Change of the attention received by the question's tokens.", *said)


@declare(NAME)
def across_layers(
    result: Result,
    layers: Seq[int] = (0, 1, 2),
    head: int = 0,
    condition: str | None = None,
    *,
    one_based: bool = False,
) -> go.Figure:
    """Plot received attention of the original tokens without (blue) and with (orange) insertion, by layer for one head.

    Args:
        result: A result.
        layers: The layers, from 0.
        head: The head, from 0.
        condition: The condition in orange; by default the first that isn't the baseline, if there is one.
        one_based: Count layers and heads from 1 in the titles, as the paper does.

    Raises:
        OptionError: There is no such layer, head or condition.
    """
    condition = result.shown_condition(condition)
    panels = [_Panel(result, n, head, f"Layer {n + one_based} head {head + one_based}") for n in layers]
    figure = _lines(panels, "received_by_origin", list(dict.fromkeys((BASELINE, condition))), (WITHOUT, WITH))
    figure.update_xaxes(title_text="original token position")
    about = f"mean over {_prompts([result])} prompts, {_BANDS}{band_words(result)}"
    figure.update_layout(title_text=f"{model_caption(result)}: received attention by layer<br><sup>{about}</sup>")
    said = [
        f"layer {n + one_based}: {change}"
        for n in layers
        if (change := change_words(result, condition, layer=n, heads=[head]))
    ]
    words = f"Head {head + one_based}, the question's tokens with “{condition}”: {'; '.join(said)}."
    return says(figure, words if said else "")  # with only the baseline, nothing has changed


def _lines(panels: list[_Panel], quantity: str, conditions: list[str], colours: Seq[str]) -> go.Figure:
    """Panels side by side, each with a line and its band for each condition."""
    figure = draw.panels([panel.title for panel in panels], horizontal_spacing=0.07)
    for column, panel in enumerate(panels, 1):
        dataset = panel.result[NAME]
        check_layer(panel.layer, dataset)
        check_heads([panel.head], dataset.sizes["head"])
        prompts = np.arange(dataset.sizes["prompt"])
        for name, colour in zip(conditions, colours, strict=False):
            if name != BASELINE:
                panel.result.condition(name)
            at = {"condition": name, "layer": panel.layer, "head": panel.head}
            line_and_band(figure, at_positions(dataset, quantity, at, prompts), name, colour, 1, column, column == 1)
    figure.update_yaxes(title_text="average attention weight<br>(probability)", col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(**headed(150, 450), hovermode="x unified")
    return figure


def _prompts(results: Seq[Result]) -> str:
    return ", ".join(sorted({str(result["sequences"].sizes["prompt"]) for result in results}))
