"""Writes a self-contained page: the main change, a map of all heads, figures, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mechattn.errors import MemoryOptionError, OptionError, plain, visible
from mechattn.pages.embedded import packed_plotly, page_script, template
from mechattn.pages.first_screen import (
    ShownModel,
    answer_sentences,
    captioned,
    picture,
    picture_rows,
    shown_conditions,
    verdict_sentences,
)
from mechattn.pages.page_data import check_result, page_json
from mechattn.pages.sections import (
    Drawing,
    HeadChoice,
    PageSection,
    citation,
    drawn_section,
    lead_sections,
    prompt_section,
    time_words,
)
from mechattn.render.figure_declaration import FIGURES
from mechattn.render.html_views import View, check_page_place, save_page
from mechattn.render.words import heads_that_change, model_caption, percent, percent_words
from mechattn.results.provenance import stored_condition
from mechattn.results.result import Result, alike_words

CHANGING_MOST = HeadChoice()
Results = Sequence[Result]
Figures = Sequence[Drawing]
SectionsAndRefusals = tuple[list[PageSection], list[str]]
LabelledTexts = list[tuple[str, str]]  # rows of a table: a label and a text
# The pages of docs/concepts, with the analyses that they explain.
CONCEPTS = {
    "received-attention": ("received_attention", "attention_map"),
    "attention-focus": ("attention_focus", "score_decomposition"),
    "attention-sinks": ("attention_sinks",),
    "affine-shift": ("affine_shift",),
    "segment-flow": ("segment_flow",),
    "attention-budget": ("attention_budget",),
    "head-updates": (
        "head_updates",
        "top_target_updates",
        "block_updates",
        "direct_logits",
        "segment_logits",
    ),
    "mlp-activations": ("mlp_activations",),
}
# Where a condition inserts tokens, in words.
PLACES = {
    "before_question": "before the question",
    "start": "at the start",
    "middle": "in the middle of the question",
    "after_question": "after the question",
    "before_answer": "before the answer",
    "random": "at a random place in the question",
}
# What the conditions that draw tokens at random insert, in words.
RANDOM_TOKENS = {
    "RandomTokens": "random tokens",
    "RandomSentence": "random sentences",
    "ShuffledSentence": "shuffled sentences",
}


@dataclass(frozen=True)
class About:
    """The title of a page and how it was made.

    Args:
        title: The heading.
        subtitle: The line below the heading.
        command: The command line that wrote the page, which is shown with the provenance.
        lead: The file of a template that replaces the first screen, and the values for it.
    """

    title: str
    subtitle: str
    command: str = ""
    lead: tuple[str, Mapping[str, Any]] | None = None


def browse(result: Result, maps: Result | None = None) -> View:
    """Show the map of all heads in a notebook.

    Args:
        result: A result.
        maps: A result with attention maps of a few prompts; by default ``result`` itself.

    Raises:
        OptionError: The result lacks the baseline.
        MemoryOptionError: One layer of a quantity does not fit in memory.
    """
    check_result(result)
    about = About(f"mechattn: {model_caption(result)}", subtitle([result]))
    values = _template_values(about, [ShownModel(result, maps)], [])
    body = _environment().get_template("main.html.j2").render(values)
    style = f"<style>{values['style']}</style>"
    scripts = f"""<script type="text/plain" data-packed="data">{values["data"]}</script>
<script type="module">{values["script"]}</script>"""
    return View(style + body + scripts, height=900, script=None)


def results_page(
    results: Results,
    path: str | Path,
    figures: Figures,
    command: str = "",
    force: bool = False,
    choice: HeadChoice = CHANGING_MOST,
) -> Path:
    """Write a page of some results.

    A figure of one result is drawn once for each of them, and a figure that compares results once.

    Args:
        results: The results. Each has its verdicts and a tab on the map.
        path: The HTML file.
        figures: Figures with their options, besides those that lead the page.
        command: The command line, which is shown with the provenance.
        force: Replace a file that mechattn did not write.
        choice: The heads that the figures at the top of the page show.

    Returns:
        The path.

    Raises:
        OptionError: A result lacks the baseline, or a figure cannot be drawn.
        MemoryOptionError: The page needs more memory than is allowed.
        OutputError: The page cannot be written.
    """
    check_page_place(path, force)
    sections, refusals = sections_of(results, figures, choice)
    if refusals:
        raise OptionError(refusals[0])
    return write_results(results, path, sections, command, force, choice)


def sections_of(results: Results, figures: Figures, choice: HeadChoice) -> SectionsAndRefusals:
    """The sections of a page, and a refusal for each figure that cannot be drawn: a sentence that
    says why.

    Figures that draw neither a result nor several are left out.

    Raises:
        OptionError: A result lacks the baseline, or a figure that leads the page cannot be drawn.
        MemoryOptionError: The page needs more memory than is allowed.
    """
    for result in results:
        check_result(result)

    sections: list[PageSection] = []
    refusals: list[str] = []
    for result in results:
        sections += lead_sections(result, choice)
        sections.append(prompt_section(result))
        result_sections, result_refusals = _drawn_sections("result", result, figures)
        sections += result_sections
        refusals += result_refusals

    joint_sections, joint_refusals = _drawn_sections("results", results, figures)
    return sections + joint_sections, refusals + joint_refusals


def write_results(
    results: Results,
    path: str | Path,
    sections: Sequence[PageSection],
    command: str,
    force: bool,
    choice: HeadChoice,
) -> Path:
    """Write a page of some results with sections that were drawn before. Returns the path."""
    names = ", ".join(map(model_caption, results))
    about = About(f"mechattn: {names}", subtitle(results), command)
    models = [ShownModel(result, start=choice.named_head(result)) for result in results]
    return write_page(path, about, models, sections, force)


def write_page(
    path: str | Path,
    about: About,
    models: Sequence[ShownModel],
    sections: Sequence[PageSection],
    force: bool = False,
) -> Path:
    """Write a page as one HTML file. Returns the path.

    The page makes no network requests, which its content security policy forbids.
    """
    environment = _environment()
    values = _template_values(about, models, sections)
    if about.lead is not None:
        lead_template, lead_values = about.lead
        values["lead"] = environment.get_template(lead_template).render(lead_values)

    text = environment.get_template("page.html.j2").render(values)
    return save_page(path, text, force)


def subtitle(results: Results) -> str:
    """The subtitle of a page of results: the number of prompts, what the first condition and its
    control insert, and whether prompts are much alike."""
    prompt_counts = sorted({result["sequences"].sizes["prompt"] for result in results})
    topic = "Attention"
    if any(len(result.conditions) > 1 for result in results):
        topic = "Attention with and without inserted tokens"
    counts = ", ".join(map(str, prompt_counts))
    noun = "prompt" if prompt_counts == [1] else "prompts"
    sentences = [f"{topic}, {counts} {noun}."]
    sentences += map(_inserted_words, results)
    sentences += map(alike_words, results)
    distinct_sentences = dict.fromkeys(sentences)  # results may have the same ones
    return " ".join(filter(None, distinct_sentences))


def concepts(results: Results) -> list[str]:
    """The files of the docs that explain what was measured and how it was compared."""
    analysis_names = set(chain.from_iterable(result.datasets for result in results))
    names = [name for name, analyses in CONCEPTS.items() if analysis_names.intersection(analyses)]
    return [f"docs/concepts/{name}.md" for name in [*names, "comparisons"]]


def labelled_rows(values: Mapping[str, Any], prefix: str = "") -> LabelledTexts:
    """Nested values as rows of a label and a text. The label joins the nested names by spaces.

    Args:
        values: The values by name.
        prefix: The beginning of each label.
    """
    rows: LabelledTexts = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            rows += labelled_rows(value, f"{label} ")
        else:
            rows.append((label, str(value)))
    return rows


def _environment() -> Any:
    """The jinja2 environment with the templates and the functions that they call."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("mechattn.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (model_caption, percent, percent_words, heads_that_change, time_words, citation)
    for function in functions:
        environment.globals[function.__name__] = function
    return environment


def _template_values(
    about: About, models: Sequence[ShownModel], sections: Sequence[PageSection]
) -> dict[str, Any]:
    """The values that the templates show."""
    from mechattn import __version__

    results = [model.result for model in models]
    rows = picture_rows(models)
    provenance_rows: LabelledTexts = []
    for result in results:
        provenance_rows += labelled_rows(result.provenance)
    if about.command:
        provenance_rows.append(("command", about.command))

    return {
        "title": about.title,
        "subtitle": about.subtitle,
        "version": __version__,
        "command": about.command,
        "style": template("page.css"),
        "script": page_script(),
        "plotly": packed_plotly() if any(section.figure for section in sections) else "",
        "data": page_json(models),
        "answer": answer_sentences(models),
        "picture_open": not any("attention_budget" in result.datasets for result in results),
        "rows": rows,
        "picture": picture(rows),
        "verdicts": verdict_sentences(models),
        "models": captioned(models),
        "lead_sections": [section for section in sections if section.leads],
        "sections": [section for section in sections if not section.leads],
        "concepts": concepts(results),
        "page_citation": citation(about.title, results),
        "provenance": provenance_rows,
    }


def _drawn_sections(
    subject: str, results: Result | Results, figures: Figures
) -> SectionsAndRefusals:
    """The sections of the figures with one subject, and a refusal for each of these figures that
    cannot be drawn.

    Args:
        subject: "result" for the figures that draw one result, or "results" for those that draw
            several together.
        results: The result, or the results that are drawn together.
        figures: Figures with their options. Those with another subject are left out.
    """
    sections = []
    refusals = []
    for draw, options in figures:
        if FIGURES[draw.__name__].subject != subject:
            continue
        try:
            sections.append(drawn_section(draw, results, options))
        except MemoryOptionError:
            raise
        except OptionError as error:
            refusals.append(f"{draw.__name__}: {error}")
    return sections, refusals


def _inserted_words(result: Result) -> str:
    """What the first condition and its control insert, and where, as a sentence.

    Empty if neither inserts a fixed number of tokens.
    """
    phrases = []
    for name in shown_conditions(result):
        stored = stored_condition(result, name)
        words = _condition_words(stored.kind, stored.options)
        if words:
            phrases.append(f"“{name}” is {words}")
    if not phrases:
        return ""
    return f"{'; '.join(phrases)}."


def _condition_words(kind: str, options: Mapping[str, Any]) -> str:
    """What a condition inserts, such as “55 tokens of “/” before the question”.

    Empty if the condition has no place or no number of tokens.
    """
    place = PLACES.get(options.get("place", ""))
    count = options.get("count")
    if place is None or not count:
        return ""
    counted = "1 token" if count == 1 else f"{count} tokens"
    text = options.get("text", options.get("word"))
    if isinstance(text, str):
        return f"{counted} of “{visible(plain(text))}” {place}"
    if kind in RANDOM_TOKENS:
        return f"{counted} of {RANDOM_TOKENS[kind]} {place}"
    return f"{counted} {place}"  # such as Counting, or a class of the user
