"""The figures that stand open on a page, before the map: the budget, and the paper's lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mechattn.axes import BASELINE
from mechattn.contrast.means import choose_heads
from mechattn.render.attention_figures import received_attention, received_by_model
from mechattn.render.budget_figures import attention_budget
from mechattn.render.figure_declaration import check_heads, listed_or_chosen
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST

FIRST_LAYERS = 3  # the paper shows one head in its layers 1, 2 and 3
Drawing = tuple[Callable, Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """Which heads the lines of a page show: those of a layer or list, or those that change most.

    Args:
        layer: The layer, from 0; None is the layer of the head that changes most.
        heads: The heads, from 0; None chooses ``top`` of the layer.
        top: How many heads to choose, or all of a layer that has fewer.
    """

    layer: int | None = None
    heads: Sequence[int] | None = None
    top: int = 3

    @property
    def named_head(self) -> tuple[int, int] | None:
        """The layer and head that were named first; None if the data choose."""
        if not self.heads:
            return None
        return self.layer or 0, int(self.heads[0])


CHANGING_MOST = Shown()


def lead_figures(result: Result, lines: Shown) -> list[Drawing]:
    """The figures of one result that stand open on its page, with their options.

    Heads are chosen by their change on one half of the prompts, and shown on the other half.
    """
    figures: list[Drawing] = []
    condition = result.shown_condition()
    compares = condition != BASELINE
    control = matched_control(result, condition) if compares else None
    if "attention_budget" in result.datasets:
        compared = [name for name in (condition, control) if name not in (None, BASELINE)]
        figures.append((attention_budget, {"conditions": compared}))
    if "received_attention" not in result.datasets:
        return figures

    layer, heads, top = shown_heads(result, condition, lines)
    options = {"layer": layer, "condition": condition, "heads": heads, "top": top}
    figures.append((received_attention, options))
    if not compares:
        return figures

    if control is not None:
        of_control = {
            "layer": layer,
            "conditions": (condition, control),
            "heads": heads and heads[0],
        }
        figures.append((received_by_model, of_control))

    measured_layers = [int(number) for number in result["received_attention"].layer.values]
    first_layers = measured_layers[:FIRST_LAYERS]
    if len(first_layers) > 1:
        of_layers = options | {
            "layer": first_layers,
            "heads": heads and heads[:1],
            "top": top and 1,
        }
        figures.append((received_attention, of_layers))

    return figures


def shown_heads(
    result: Result, condition: str, lines: Shown
) -> tuple[int, list[int] | None, int | None]:
    """The layer of the lines, and their heads, or how many heads of it the data choose.

    The layer is that of the head that changes most, unless one is named. Without prompts to choose
    by, the first heads are shown.
    """
    head_count = int(result.provenance["model"]["heads"])
    dataset = result["received_attention"]
    first_measured = int(dataset.layer.values[0])
    layer = first_measured if lines.layer is None else lines.layer
    if lines.heads is not None:
        listed, _ = listed_or_chosen(lines.heads, None)
        return layer, check_heads(listed, head_count, layer), None

    listed_or_chosen(None, lines.top)
    top = min(lines.top, head_count)
    units = units_of(result, dataset.sizes["prompt"])
    if "received_per_prompt" not in dataset or units.n < 2 * FEWEST:
        # Nothing to choose by: single prompts were not kept, or there are too few for two halves.
        return layer, list(range(top)), None
    if lines.layer is None:
        choosing, _ = units.halves()
        ((layer, _),) = choose_heads(result, None, 1, condition, choosing, "difference")

    return layer, None, top
