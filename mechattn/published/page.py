"""The page of a comparison: the table of statements and models, and three kinds of figure: what the
captions of the paper's figures say, and the same figure of each model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mechattn.contrast.means import choose_heads
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import About, write_page
from mechattn.pages.sections import PageSection, drawn_section
from mechattn.published.comparison import (
    AS_PUBLISHED,
    NOT_MEASURABLE,
    OPPOSITE,
    UNCLEAR,
    Comparison,
    rule_words,
)
from mechattn.render.attention_figures import received_attention
from mechattn.render.model_figures import received_by_model
from mechattn.render.words import model_caption
from mechattn.results.result import Result, units_of
from mechattn.stats.intervals import FEWEST

# The word of a cell as a class of the style sheet.
STYLES = {
    AS_PUBLISHED: "agrees",
    OPPOSITE: "opposes",
    UNCLEAR: "unclear",
    NOT_MEASURABLE: "absent",
}

HEAD_COUNT = 3  # heads in a figure of the paper
FEWEST_TO_HALVE = 2 * FEWEST  # prompts or groups: one half chooses heads, the other is described

# What automatic captions say of the paper's figures, by the name of our figure and in the order of
# the page; layers and heads are counted from 0.
CAPTIONS = {
    "heads": (
        "Published, by captions of figures 15 and 18. Llama-3.1-8B-Instruct, layer 0, heads 19, "
        "24, 25: peaks of 0.08 to 0.12 without the tokens, 0.06 to 0.10 with them; an inserted "
        "token gets 0.03 to 0.08, the others 0.01 to 0.02. Qwen2.5-Math-7B, layer 0, heads 16, 25, "
        "27: the other way, peaks of 0.04 to 0.06 without, 0.08 to 0.12 with."
    ),
    "sentence": (
        "Published, by a caption of figure 11. With “/” up to 0.12 (Qwen2.5-Math-7B head 0), 0.08 "
        "(Llama-3.1-8B-Instruct head 26), 0.55 (Gemma 3 4B head 7); with a random sentence up to "
        "0.08, 0.06 and 0.35."
    ),
    "layers": (
        "Published, by a caption of figure 9. Qwen2.5-Math-7B, head 21: in layer 0 the peaks fall "
        "from 0.07 and 0.08 to 0.04 and 0.05; in layer 1 a peak of 0.175 vanishes and another "
        "rises from 0.075 to 0.15; in layer 2 the peaks are higher with the tokens, 0.075 beside "
        "0.05."
    ),
}

CHOICE = (
    "Heads are those of layer 0 that change most on one half of the prompts; with fewer than "
    f"{FEWEST_TO_HALVE} prompts, or groups of prompts, the first heads. All prompts are drawn, so "
    "a change looks somewhat larger than it is."
)


def write_comparison(
    comparison: Comparison, results: Sequence[Result], path: Path, force: bool
) -> Path:
    """Write the page of a comparison.

    Args:
        comparison: The comparison.
        results: The results of the models whose figures are shown.
        path: The page.
        force: Whether to replace a file that mechattn did not write.
    """
    template_values = {
        "comparison": comparison,
        "models": comparison.models,
        "rule": rule_words,
        "styles": STYLES,
    }
    about = About(
        title="What was published, and what other models show",
        subtitle=(
            f"{'; '.join(comparison.statements.sources.values())}, beside "
            f"{', '.join(comparison.models)}."
        ),
        command=comparison.about["command"],
        lead=("paper.html.j2", template_values),
    )
    models = [ShownModel(result) for result in results]
    return write_page(path, about, models, figure_sections(results), force)


def figure_sections(results: Sequence[Result]) -> list[PageSection]:
    """The figures of every model, each with what was published, in the order of ``CAPTIONS``."""
    sections_of_models = [_model_sections(result) for result in results]
    sections = []
    for name, caption in CAPTIONS.items():
        for model_sections in sections_of_models:
            section = model_sections[name]
            sections.append(replace(section, note=f"{caption} {CHOICE} {section.note}"))
    return sections


def changing_heads(result: Result) -> list[int]:
    """The heads of layer 0 that change most on one half of the prompts.

    With too few prompts or groups to halve, they are the first heads.
    """
    count = min(HEAD_COUNT, result["received_attention"].sizes["head"])
    units = units_of(result)
    if units.n < FEWEST_TO_HALVE:
        return list(range(count))
    first_half, _ = units.halves()
    layers_and_heads = choose_heads(
        result, 0, count, "slash", prompts=np.asarray(first_half), by="difference"
    )
    return [head for _, head in layers_and_heads]


def _model_sections(result: Result) -> dict[str, PageSection]:
    """The figures of a model, by their names in ``CAPTIONS``."""
    heads = changing_heads(result)
    head = heads[0]
    layers = result["received_attention"].layer.values.tolist()
    listed_heads = ", ".join(map(str, heads))
    listed_layers = ", ".join(map(str, layers))

    def titled_section(title: str, figure: Callable, **options: Any) -> PageSection:
        section = drawn_section(figure, result, options)
        return replace(section, title=f"{model_caption(result)}: {title}")

    return {
        "heads": titled_section(
            f"layer 0, heads {listed_heads}, without and with “/”",
            received_attention,
            layer=0,
            heads=heads,
            condition="slash",
        ),
        "sentence": titled_section(
            f"layer 0, head {head}, “/” and a random sentence",
            received_by_model,
            layer=0,
            heads=head,
            conditions=("slash", "sentence"),
        ),
        "layers": titled_section(
            f"head {head} in layers {listed_layers}",
            received_attention,
            layer=layers,
            heads=[head],
            condition="slash",
        ),
    }
