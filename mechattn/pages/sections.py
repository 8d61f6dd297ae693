"""The sections of a page: the figures that stand open before the map, other figures with how to
read them, and a prompt as the model reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mechattn.contrast.means import choose_heads
from mechattn.errors import check_counts
from mechattn.pages.first_screen import shown_conditions
from mechattn.pages.page_data import measured_layers
from mechattn.render.attention_figures import received_attention
from mechattn.render.budget_figures import attention_budget
from mechattn.render.draw import take_heading
from mechattn.render.figure_declaration import FIGURES, PageTable, check_heads, several
from mechattn.render.html_views import in_script, tokens_in_segments
from mechattn.render.model_figures import received_by_model
from mechattn.render.words import model_caption, sentence_of
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST

Drawing = tuple[Callable, Mapping[str, Any]]  # a figure and its options
FIRST_LAYERS = 3  # the paper shows one head in its layers 1, 2 and 3
CITATION = """\
{title}. {runs}. Made with mechattn {mechattn}, transformer-lens {transformer_lens}.

@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, \
author = {{{{The mechattn developers}}}}, version = {{{mechattn}}}, year = {{{year}}}}}"""


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, how to read it, its main number, and a figure or tokens.

    Args:
        title: The heading.
        note: How to read it.
        says: Its main number in a sentence.
        figure: The figure as JSON that is safe in a script element.
        height: Of the figure, in pixels.
        tokens: The texts of a prompt's tokens, and their segments.
        leads: Whether it stands open before the map.
        results: What the figure shows.
        table: The numbers of the figure as a table, if it has one.
    """

    title: str
    note: str = ""
    says: str = ""
    figure: str = ""
    height: int = 0
    tokens: Sequence[tuple[str, str]] = ()
    leads: bool = False
    results: Sequence[Result] = ()
    table: PageTable | None = None


@dataclass(frozen=True)
class HeadChoice:
    """Which heads the lines that lead a page show: those that are named, or those that change most.

    Args:
        layer: The layer, from 0; None is the layer of the head that changes most.
        heads: The heads, from 0; None chooses ``top`` of the layer.
        top: How many heads to choose, or all of a layer that has fewer.
    """

    layer: int | None = None
    heads: Sequence[int] | None = None
    top: int = 3

    def named_head(self, result: Result) -> tuple[int, int] | None:
        """The layer, by default the first of the result, and the head that were named first; None
        if the data choose."""
        if not self.heads:
            return None
        layer = self.layer
        if layer is None:
            layer = measured_layers(result)[0]
        return layer, int(self.heads[0])


def lead_sections(result: Result, choice: HeadChoice) -> list[Section]:
    """The sections that stand open before the map: the budget, and the paper's lines.

    Heads are chosen by their change on one half of the prompts, and shown on the other half.
    """
    figures = _lead_figures(result, choice)
    return [replace(drawn_section(draw, result, options), leads=True) for draw, options in figures]


def _lead_figures(result: Result, choice: HeadChoice) -> list[Drawing]:
    """The figures that lead a page: of the first condition, and beside its control."""
    figures: list[Drawing] = []
    conditions = shown_conditions(result)  # two of them if there is a control
    if "attention_budget" in result.datasets:
        figures.append((attention_budget, {"conditions": conditions}))
    if "received_attention" not in result.datasets:
        return figures

    lines = _line_options(result, choice)
    figures.append((received_attention, lines))
    if not conditions:
        return figures

    # Of the listed heads the first, or else the one that the data choose.
    first_head: dict[str, Any] = {"heads": None, "top": 1}
    if lines["heads"] is not None:
        first_head = {"heads": lines["heads"][:1], "top": None}

    if len(conditions) == 2:
        options = {"layer": lines["layer"], "heads": first_head["heads"]}
        figures.append((received_by_model, options | {"conditions": tuple(conditions)}))

    first_layers = result["received_attention"].layer.values[:FIRST_LAYERS].tolist()
    if len(first_layers) > 1:
        figures.append((received_attention, lines | first_head | {"layer": first_layers}))

    return figures


def _line_options(result: Result, choice: HeadChoice) -> dict[str, Any]:
    """The options ``condition``, ``layer``, ``heads`` and ``top`` of the lines, as for
    ``received_attention``.

    The layer is that of the head that changes most, unless one is named. Without prompts to choose
    by, the first heads are shown.
    """
    dataset = result["received_attention"]
    measured = dataset["head"].values.tolist()
    condition = result.shown_condition()
    layer = choice.layer
    if layer is None:
        layer = int(dataset.layer.values[0])
    options = {"condition": condition, "layer": layer, "heads": None, "top": None}
    if choice.heads is not None:
        return options | {"heads": check_heads(choice.heads, measured, layer)}

    check_counts(top=choice.top)
    top = min(choice.top, len(measured))
    units = units_of(result)
    if "received_per_prompt" not in dataset or units.n < 2 * FEWEST:
        # Nothing to choose by: single prompts were not kept, or there are too few for two halves.
        return options | {"heads": measured[:top]}

    if choice.layer is None:
        choosing, _ = units.halves()
        ((layer, _),) = choose_heads(result, None, 1, condition, choosing)
    return options | {"layer": layer, "top": top}


def prompt_section(result: Result) -> Section:
    """The first prompt of a result as the model reads it, with each segment marked."""
    condition = result.shown_condition()
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    tokens = tokens_in_segments(result, condition)
    return Section(title, "The first of the prompts.", tokens=tokens)


def drawn_section(
    draw: Callable,
    results: Result | Sequence[Result],
    options: Mapping[str, Any],
) -> Section:
    """Turn a figure into a section, with what its declaration says beside it."""
    figure = draw(results, **options)
    result_list = several(results)
    words = FIGURES[draw.__name__].page_words(result_list[0], options)
    title = take_heading(figure) + words.title_end

    return Section(
        title,
        words.note,
        says=sentence_of(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        results=result_list,
        table=words.table,
    )


def citation(title: str, results: Sequence[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    versions = results[0].provenance["versions"]
    runs = []
    for result in results:
        count = result.provenance["prompts"]["count"]
        seed = result.provenance["seed"]
        runs.append(f"{model_caption(result)}, {count} prompts, seed {seed}")
    return CITATION.format(
        title=title,
        runs="; ".join(runs),
        mechattn=versions["mechattn"],
        transformer_lens=versions["transformer-lens"],
        year=time_words(results[0])[:4],
    )


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    if isinstance(time, str):
        return time
    return " to ".join(time)
