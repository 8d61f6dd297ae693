"""The sections of a page: one prompt, figures with captions, and views, each with its provenance."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.markup import visible
from mechattn.render.received_figures import received_attention
from mechattn.render.view import View, in_script
from mechattn.render.words import choice_words, model_caption, said
from mechattn.results.result import Result

Row = tuple[str, str]


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, content, what it shows and how to read it.

    Args:
        title: The heading.
        note: How to read what is shown.
        says: The sentence with the main number below a figure.
        figure: The figure as JSON that is safe in a script element.
        height: The height of the figure in pixels.
        view: HTML.
        script: The library that the view needs.
        tokens: The texts of tokens and their segments.
        made: How a figure was made.
        citation: How to cite it.
    """

    title: str
    note: str = ""
    says: str = ""
    figure: str = ""
    height: int = 0
    view: str = ""
    script: str = ""
    tokens: Seq[tuple[str, str]] = field(default_factory=list)
    made: Seq[Row] = field(default_factory=list)
    citation: str = ""

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the legend."""
        present = {name for _, name in self.tokens}
        return [name for name in SEGMENTS if name in present]


def prompt_section(result: Result, condition: str | None = None) -> Section:
    """The first prompt of a result as the model reads it, with each segment marked."""
    condition = result.shown_condition(condition)
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    return Section(title, "The first of the prompts.", tokens=_tokens(result, condition))


def drawn_section(
    draw: Callable,
    results: Result | Seq[Result],
    options: Mapping[str, Any],
    command: str = "",
) -> Section:
    """Turn a figure into a section, described by the text in the figure itself."""
    figure = draw(results, **options)
    of = [results] if isinstance(results, Result) else list(results)
    heading, _, under = figure.layout.title.text.partition("<br>")
    title = html.unescape(heading)
    figure.update_layout(title_text=under.replace("<sup>", "").replace("</sup>", ""), title_font_size=13)
    if draw is received_attention:
        how = "heads chosen by hand" if isinstance(options.get("heads"), list) else "heads chosen by the data"
        shown = of[0].shown_condition(options.get("condition"))
        title += f", layer {options['layer']}, {how}, condition “{shown}”"
        note = _received_note(of[0], alone=shown == BASELINE)
        choose = options.get("choose")
        if isinstance(choose, int) and shown != BASELINE:
            note += f" {choice_words(of[0], shown, options['layer'], choose)}".rstrip()
    else:
        note = (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]
    return Section(
        title,
        note,
        says=said(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        made=[row for result in of for row in _made_rows(result, command)],
        citation=citation(title, of),
    )


def _received_note(result: Result, alone: bool) -> str:
    options = result.provenance["analyses"]["received_attention"]
    which = {"original": "the original tokens", "all": "all tokens"}.get(
        options["queries"], f"the {options['queries']}"
    )
    self_too = " (its own position counts)" if options["include_self"] else ""
    lines = (
        "Blue: the unchanged prompts; dotted: uniform attention."
        if alone
        else "Blue: the unchanged prompt; orange: with the inserted tokens. Top row: the original tokens, aligned; "
        "bottom row: the whole sequence with the inserted span shaded."
    )
    beside = (
        "A key's value falls with its position by definition, as fewer tokens come after it; compare with the uniform "
        "null."
        if alone
        else "Part of a fall is there by definition, as attention is positive and sums to 1; compare with the uniform "
        "null."
    )
    return (
        f"Received attention of a key is the mean attention that {which} after it pay to it{self_too}. {lines} Bands "
        f"are pointwise (not simultaneous) 95 % intervals over prompts; keys that too few prompts have are hidden. "
        f"{beside}"
    )


def view_section(view: View, title: str, note: str) -> Section:
    """Turn a view into a section."""
    return Section(title, note, view=view.body, script=view.script or "")


def _made_rows(result: Result, command: str = "") -> list[Row]:
    """How the numbers of a figure were made."""
    about, model = result.provenance, result.provenance["model"]
    rows = [("model", model_caption(result)), ("architecture", model["architecture"])]
    rows += [
        (name, str(model[name])) for name in ("revision", "weights", "dtype", "verified") if model.get(name) is not None
    ]
    rows += [("prompts", f"{about['prompts']['count']}, hash {about['prompts']['hash']}")]
    rows += [(f"condition {name}", made["written"]) for name, made in about["conditions"].items()]
    rows += [("seed", str(about["seed"])), ("engine", about["engine"]), ("made", time_words(result))]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))]
    return rows + [("command", command)] * bool(command)


def citation(title: str, results: Seq[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    about = results[0].provenance
    version, year = about["versions"]["mechattn"], time_words(results[0])[:4]
    of = "; ".join(
        f"{model_caption(r)}, {r.provenance['prompts']['count']} prompts, seed {r.provenance['seed']}" for r in results
    )
    return (
        f"{title}. {of}. Made with mechattn {version}, transformer-lens {about['versions']['transformer-lens']}.\n\n"
        f"@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, "
        f"author = {{{{The mechattn developers}}}}, version = {{{version}}}, year = {{{year}}}}}"
    )


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)


def _tokens(result: Result, condition: str) -> list[tuple[str, str]]:
    first = result["sequences"].sel(condition=condition)
    codes = first.segment_index.isel(prompt=0).values
    texts = first.first_prompt_text.values
    return [(visible(str(text)), SEGMENTS[code]) for text, code in zip(texts, codes, strict=True) if code >= 0]
