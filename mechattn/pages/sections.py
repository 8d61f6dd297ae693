"""The sections of a page: the figures that lead it, other figures with how to read them, and a
prompt as the model reads it.
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
from mechattn.render.figure_declaration import FIGURES, PageTable, check_heads, head_list, several
from mechattn.render.html_views import in_script, tokens_in_segments
from mechattn.render.model_figures import received_by_model
from mechattn.render.words import model_caption, sentence_of
from mechattn.results.result import Result, head_named, units_of
from mechattn.stats.intervals import FEWEST

Drawing = tuple[Callable, Mapping[str, Any]]  # a figure and its options
FIRST_LAYERS = 3  # arXiv:2510.01032 shows one head in its layers 1, 2 and 3
CITATION = """\
{title}. {runs}. Made with mechattn {mechattn}, transformer-lens {transformer_lens}.

@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, \
author = {{{{The mechattn developers}}}}, version = {{{mechattn}}}, year = {{{year}}}}}"""


@dataclass(frozen=True)
class PageSection:
    """A part of a page: its heading, how to read it, its main number, and a figure or tokens.

    Args:
        title: The heading.
        note: How to read the figure or the tokens.
        says: A sentence with the main number of the figure.
        figure: The figure as JSON that is safe in a script element; empty for tokens.
        height: The height of the figure, in pixels.
        tokens: The text and the segment of each token of a prompt; empty for a figure.
        leads: Whether the section is shown open before the map.
        results: The results that the figure shows.
        table: The numbers of the figure as a table, if there is one.
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
    """The heads that the leading figure of received attention shows: the named heads, or those that
    change most.

    Args:
        layer: The layer, from 0. By default it is the layer in the first head's name, or of the
            head that changes most; it is the first layer if heads are given by number or too few
            prompts are stored to choose by.
        heads: One or several heads, from 0, or by name, such as "L1H2". By default heads of the
            layer are chosen.
        top: The number of heads to choose. A layer with fewer heads shows all.
    """

    layer: int | None = None
    heads: Sequence[int | str] | int | str | None = None
    top: int = 3

    def named_head(self, result: Result) -> tuple[int, int] | None:
        """The layer and the number of the first named head; None if no heads are named.

        Without a layer, a number is a head of the result's first layer.

        Raises:
            OptionError: The head is neither the name nor the number of a head, or the list of heads
                is empty.
        """
        if self.heads is None:
            return None
        first_head = head_list(self.heads)[0]
        layer_and_head = head_named(first_head)
        if layer_and_head is not None:
            return layer_and_head
        layer = self.layer
        if layer is None:
            layer = measured_layers(result)[0]
        heads = range(result.provenance["model"]["heads"])
        [head] = check_heads([first_head], heads, layer)
        return layer, head


def lead_sections(result: Result, choice: HeadChoice) -> list[PageSection]:
    """The sections that are shown open before the map: the attention budget, and received attention
    by position as in arXiv:2510.01032.

    If the data choose the heads, they do so on one half of the prompts, and the figures show the
    other half.
    """
    figures = _lead_figures(result, choice)
    return [replace(drawn_section(draw, result, options), leads=True) for draw, options in figures]


def prompt_section(result: Result) -> PageSection:
    """The section with the first prompt of a result as the model reads it, with its segments."""
    condition = result.shown_condition()
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    tokens = tokens_in_segments(result, condition)
    return PageSection(title, "The first of the prompts.", tokens=tokens)


def drawn_section(
    draw: Callable,
    results: Result | Sequence[Result],
    options: Mapping[str, Any],
) -> PageSection:
    """Draw a figure as a section of a page, with the words of its declaration.

    Args:
        draw: The function that draws the figure, which must be in ``FIGURES``.
        results: The result or the results that it draws.
        options: Its options.
    """
    figure = draw(results, **options)
    result_list = several(results)
    words = FIGURES[draw.__name__].page_words(result_list[0], options)
    title = take_heading(figure) + words.title_end

    return PageSection(
        title,
        words.note,
        says=sentence_of(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        results=result_list,
        table=words.table,
    )


def citation(title: str, results: Sequence[Result]) -> str:
    """How to cite a figure of some results: a caption and a BibTeX entry.

    The versions and the year are those of the first result.
    """
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
        year=_times(results[0])[0][:4],  # the times are in ISO 8601
    )


def time_words(result: Result) -> str:
    """The time at which the numbers were computed, or from when to when if runs were merged."""
    return " to ".join(_times(result))


def _times(result: Result) -> Sequence[str]:
    """The time of a run, or the times of the first and the last of merged runs."""
    time = result.provenance["time"]
    return [time] if isinstance(time, str) else time


def _lead_figures(result: Result, choice: HeadChoice) -> list[Drawing]:
    """The figures that lead a page, of the first condition and its control."""
    figures: list[Drawing] = []
    conditions = shown_conditions(result)
    if "attention_budget" in result.datasets:
        figures.append((attention_budget, {"conditions": conditions}))
    if "received_attention" not in result.datasets:
        return figures

    options = _received_options(result, choice)
    figures.append((received_attention, options))
    if not conditions:
        return figures

    # A single head: the first of the listed ones, or the one that the data choose.
    single_head: dict[str, Any] = {"heads": None, "top": 1}
    if options["heads"] is not None:
        single_head = {"heads": options["heads"][:1], "top": None}

    _, *controls = conditions
    if controls:
        control_options = {
            "layer": options["layer"],
            "heads": single_head["heads"],
            "conditions": tuple(conditions),
        }
        figures.append((received_by_model, control_options))

    first_layers = result["received_attention"].layer.values[:FIRST_LAYERS].tolist()
    if len(first_layers) > 1:
        figures.append((received_attention, options | single_head | {"layer": first_layers}))

    return figures


def _received_options(result: Result, choice: HeadChoice) -> dict[str, Any]:
    """The options ``condition``, ``layer``, ``heads`` and ``top`` of ``received_attention``.

    Either ``heads`` or ``top`` is None. If there are too few prompts to choose heads by, ``heads``
    are the first of the layer.

    Raises:
        OptionError: A named head does not exist, or the number of heads to choose is not a positive
            whole number.
    """
    dataset = result["received_attention"]
    measured_heads = dataset["head"].values.tolist()
    condition = result.shown_condition()
    layer = choice.layer
    if layer is None:
        layer = int(dataset.layer.values[0])
        named_head = choice.named_head(result)
        if named_head is not None:
            layer, _ = named_head
    options = {"condition": condition, "layer": layer, "heads": None, "top": None}
    if choice.heads is not None:
        return options | {"heads": check_heads(choice.heads, measured_heads, layer)}

    check_counts(top=choice.top)
    top = min(choice.top, len(measured_heads))
    units = units_of(result)
    if "received_per_prompt" not in dataset or units.n < 2 * FEWEST:
        # Heads cannot be chosen: single prompts were not kept, or there are too few for two halves.
        return options | {"heads": measured_heads[:top]}

    if choice.layer is None:
        choosing_half, _ = units.halves()
        ((layer, _),) = choose_heads(result, None, 1, condition, choosing_half)
    return options | {"layer": layer, "top": top}
