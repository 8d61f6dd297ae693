"""One self-contained page from results: the verdict, one prompt, the figures, the provenance; it opens offline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechattn.axes import SEGMENTS
from mechattn.render.received_attention import received_attention, verdict_words
from mechattn.render.theme import model_caption
from mechattn.render.view import View, view_script
from mechattn.results.result import Result


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, something to look at, a sentence that says what it shows, its words in the contents.

    Without ``contents`` the title stands there; with "" nothing.
    """

    title: str
    note: str = ""
    figure: str = ""
    view: str = ""
    tokens: Seq[tuple[str, str]] = field(default_factory=list)
    contents: str | None = None

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the key."""
        present = {name for _, name in self.tokens}
        return [name for name in SEGMENTS if name in present]


def result_sections(result: Result, layer: int, heads: Seq[int] | int, condition: str | None = None) -> list[Section]:
    """The prompt and the figure of a result, as sections of a page."""
    condition = result.condition(condition)
    note = f"The first of the prompts, condition “{condition}”."
    prompt = Section("One prompt as the model reads it", note, tokens=_tokens(result, condition))
    return [prompt, figure_section(result, layer, heads, condition)]


def figure_section(result: Result, layer: int, heads: Seq[int] | int, condition: str | None = None) -> Section:
    """The figure of received attention as a section."""
    figure = received_attention(result, layer, heads, condition)
    which = "heads chosen by the data" if isinstance(heads, int) else "heads chosen by hand"
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
    title = f"{model_caption(result)}: layer {layer}, {which}, condition “{result.condition(condition)}”"
    return Section(title, _note(result), figure=drawn)


def _note(result: Result) -> str:
    options = result.provenance["analyses"]["received_attention"]
    which = {"original": "the original tokens", "all": "all tokens"}.get(
        options["queries"], f"the {options['queries']}"
    )
    self_too = " (its own position counts)" if options["include_self"] else ""
    return (
        f"Received attention of a key is the mean attention that {which} after it pay to it{self_too}. Blue: the "
        "prompt as it is; red: with the inserted tokens. Top row: the original tokens, aligned; bottom row: the whole "
        "sequence with the inserted span shaded. Bands are pointwise 95 % intervals over prompts, not simultaneous "
        "ones; keys that too few prompts have are hidden. Some drop is there by definition, as attention is positive "
        "and sums to 1: compare with the uniform null."
    )


def view_section(view: View, title: str, note: str) -> Section:
    """A view as a section."""
    return Section(title, note, figure=view.body) if view.script == "plotly" else Section(title, note, view=view.body)


def write_page(
    path: str | Path, title: str, subtitle: str, results: Seq[Result], sections: Seq[Section], command: str = ""
) -> Path:
    """Write one HTML file that makes no request to anywhere."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("mechattn"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        verdicts=[words for r in results for words in _verdicts(r)[:1]],
        more_verdicts=[words for r in results for words in _verdicts(r)[1:]],
        sections=sections,
        provenance=[row for result in results for row in _flat(result.provenance)]
        + [("command", command)] * bool(command),
        plotly=view_script("plotly") if any(s.figure for s in sections) else "",
        view_script=view_script() if any(s.view for s in sections) else "",
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def results_page(
    results: Seq[Result], path: str | Path, figures: Seq[tuple[Callable, Mapping[str, Any]]], command: str = ""
) -> Path:
    """A page of some results: each figure for each of them, or once where it shows several models side by side.

    Args:
        results: One result a model.
        path: The HTML file.
        figures: Functions of ``mechattn.render``, and their options.
        command: What was typed.
    """
    sections = []
    for result in results:
        note = "The first of the prompts."
        for name in result.conditions[1:2]:
            title = f"{model_caption(result)}: one prompt as the model reads it, condition “{name}”"
            sections.append(Section(title, note, tokens=_tokens(result, name), contents=model_caption(result)))
        for draw, options in figures:
            if "results" not in inspect.signature(draw).parameters:
                sections.append(_drawn(draw(result, **options), draw, result))
    for draw, options in figures:
        if "results" in inspect.signature(draw).parameters:
            sections.append(_drawn(draw(results, **options), draw))
    counts = {result["sequences"].sizes["prompt"] for result in results}
    subtitle = f"Attention with and without inserted tokens, {', '.join(map(str, counts))} prompts."
    title = f"mechattn: {', '.join(model_caption(result) for result in results)}"
    return write_page(path, title, subtitle, results, sections, command)


def _verdicts(result: Result) -> list[str]:
    """A sentence for each condition, where received attention was measured."""
    names = result.conditions[1:] if "received_attention" in result.datasets else []
    return [f"{model_caption(result)}: {verdict_words(result, name)}" for name in names]


def result_page(result: Result, path: str | Path, layer: int, heads: Seq[int] | int, command: str = "") -> Path:
    """The page of one result: received attention under each of its conditions."""
    options = [{"layer": layer, "heads": heads, "condition": name} for name in result.conditions[1:]]
    return results_page([result], path, [(received_attention, some) for some in options], command)


def _drawn(figure: Any, draw: Callable, result: Result | None = None) -> Section:
    """A figure as a section: what it shows is what the function that drew it says of itself."""
    if draw is received_attention and result is not None:
        title, note = figure.layout.title.text.split("<br>")[0], _note(result)
    else:
        title, note = figure.layout.title.text.split("<br>")[0], (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]
    html = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
    return Section(title, note, figure=html, contents=None if result is None else "")


def _tokens(result: Result, condition: str) -> list[tuple[str, str]]:
    first = result["sequences"].sel(condition=condition)
    codes = first.segment_index.isel(prompt=0).values
    texts = first.first_prompt_text.values
    return [(_visible(str(text)), SEGMENTS[code]) for text, code in zip(texts, codes, strict=True) if code >= 0]


def _visible(text: str) -> str:
    """A token's text with its newlines shown."""
    return text.replace("\n", "⏎") or "·"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        rows += _flat(value, f"{prefix}{name} ") if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
    return rows
