"""One self-contained page from results: the verdict, one prompt, the figures, the provenance; it opens offline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mechattn.analysis.registry import ANALYSES
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.engine.collect import lacking
from mechattn.errors import OptionError
from mechattn.markup import visible
from mechattn.render.html import check_page_place, save_page
from mechattn.render.plain import as_heading
from mechattn.render.received_attention import matched_control, received_attention, verdict_words
from mechattn.render.theme import DARK, faint, model_caption
from mechattn.render.view import View, in_script, view_script
from mechattn.render.words import percent, percent_words, said
from mechattn.results.result import Result

Row = tuple[str, str]
VERDICT_COLUMNS = (
    "model", "condition", "question attention, change", "under uniform attention", "heads further and less far",
    "prompts",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, something to look at, what it says, and how to read it.

    Args:
        title: The heading.
        note: How to read what is shown.
        says: The sentence with its number under a figure.
        figure: The figure as JSON that can stand in a script element.
        height: Of the figure, in pixels.
        view: HTML, and the script that it needs.
        tokens: Texts and their segments.
        contents: The words in the table of contents; the title by default, nothing with "".
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
    contents: str | None = None
    made: Seq[Row] = field(default_factory=list)
    citation: str = ""

    @property
    def names(self) -> list[str]:
        """The segments that occur, for the key."""
        present = {name for _, name in self.tokens}
        return [name for name in SEGMENTS if name in present]


def prompt_section(result: Result, condition: str | None = None, contents: str | None = None) -> Section:
    """The first prompt of a result as the model reads it, each segment marked."""
    condition = result.shown_condition(condition)
    title = f"{model_caption(result)}: one prompt as the model reads it, condition “{condition}”"
    return Section(title, "The first of the prompts.", tokens=_tokens(result, condition), contents=contents)


def drawn_section(
    draw: Callable, results: Result | Seq[Result], options: Mapping[str, Any], command: str = "", contents: str = ""
) -> Section:
    """A figure as a section: what it shows is what the function that drew it says of itself.

    Args:
        draw: A function of ``mechattn.render``.
        results: The result, or results, that it is of.
        options: Its other arguments.
        command: What was typed.
        contents: Its words in the table of contents.
    """
    figure = draw(results, **options)
    of = [results] if isinstance(results, Result) else list(results)
    under = figure.layout.title.text.partition("<br>")[2]  # the first line is the section's heading
    title = as_heading(figure.layout.title.text)
    figure.update_layout(title_text=under.replace("<sup>", "").replace("</sup>", ""), title_font_size=13)
    if draw is received_attention:
        how = "heads chosen by the data" if isinstance(options["heads"], int) else "heads chosen by hand"
        shown = of[0].shown_condition(options.get("condition"))
        title += f", layer {options['layer']}, {how}, condition “{shown}”"
        note = _received_note(of[0], alone=shown == BASELINE)
    else:
        note = (inspect.getdoc(draw) or "").split("\n\nArgs:")[0]
    return Section(
        title,
        note,
        says=said(figure),
        figure=in_script(figure.to_json()),
        height=int(figure.layout.height or 450),
        contents=contents,
        made=[row for result in of for row in made_rows(result, command)],
        citation=citation(title, of),
    )


def _received_note(result: Result, alone: bool) -> str:
    options = result.provenance["analyses"]["received_attention"]
    which = {"original": "the original tokens", "all": "all tokens"}.get(
        options["queries"], f"the {options['queries']}"
    )
    self_too = " (its own position counts)" if options["include_self"] else ""
    lines = (
        "Blue: the prompts as they are; dotted: what uniform attention would give."
        if alone
        else "Blue: the prompt as it is; red: with the inserted tokens. Top row: the original tokens, aligned; bottom "
        "row: the whole sequence with the inserted span shaded."
    )
    beside = (
        "A key's value falls with its position by definition, as fewer tokens come after it: compare with the uniform "
        "null."
        if alone
        else "Some drop is there by definition, as attention is positive and sums to 1: compare with the uniform null."
    )
    return (
        f"Received attention of a key is the mean attention that {which} after it pay to it{self_too}. {lines} Bands "
        "are pointwise 95 % intervals over prompts, not simultaneous ones; keys that too few prompts have are hidden. "
        f"{beside}"
    )


def view_section(view: View, title: str, note: str) -> Section:
    """A view as a section."""
    return Section(title, note, view=view.body, script=view.script or "", contents="")


def write_page(
    path: str | Path,
    title: str,
    subtitle: str,
    results: Seq[Result],
    sections: Seq[Section],
    command: str = "",
    force: bool = False,
) -> Path:
    """Write one HTML file that makes no request to anywhere; its content policy forbids any.

    Raises:
        OutputError: It cannot be written, or would replace a file that mechattn did not write (not with ``force``).
    """
    from jinja2 import Environment, PackageLoader

    from mechattn import __version__

    environment = Environment(loader=PackageLoader("mechattn"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        version=__version__,
        style=_template("page.css"),
        script=_template("page.js").replace("/*COLOURS*/ {}", in_script(json.dumps(_dark()))),
        verdicts=[words for r in results for words in verdicts(r)[:1]] if len(results) == 1 else [],
        more_verdicts=[words for r in results for words in verdicts(r)[1:]] if len(results) == 1 else [],
        verdict_columns=VERDICT_COLUMNS,
        verdict_rows=[row for r in results for row in verdict_rows(r)] if len(results) > 1 else [],
        strips=[strip_words(result) for result in results],
        sections=sections,
        provenance=[row for result in results for row in flat(result.provenance)]
        + [("command", command)] * bool(command),
        plotly=view_script("plotly") if any(s.figure or s.script == "plotly" for s in sections) else "",
        view_script=view_script() if any(s.script == "circuitsvis" for s in sections) else "",
    )
    return save_page(path, text, force)


def _template(name: str) -> str:
    return files("mechattn").joinpath("templates", name).read_text(encoding="utf-8")


def _dark() -> dict[str, str]:
    """Each colour of the figures and what stands for it on a dark ground, faint ones too."""
    faints = {faint(a).rsplit(",", 1)[0]: faint(b).rsplit(",", 1)[0] for a, b in DARK.items() if len(a) == len(b) == 7}
    return DARK | faints


def results_page(
    results: Seq[Result],
    path: str | Path,
    figures: Seq[tuple[Callable, Mapping[str, Any]]],
    command: str = "",
    missing: list[str] | None = None,
    force: bool = False,
) -> Path:
    """A page of some results: each figure for each of them, or once where it shows several models side by side.

    Args:
        results: One result a model.
        path: The HTML file.
        figures: Functions of ``mechattn.render``, and their options.
        command: What was typed.
        missing: Takes a sentence for each figure that cannot be drawn; without it such a figure is an error.
        force: Replace a file that mechattn did not write.
    """
    of_one = [one for one in figures if not _of_many(one[0])]
    of_many = [one for one in figures if _of_many(one[0])]
    sections: list[Section] = []
    for result in results:
        sections.append(prompt_section(result, contents=model_caption(result)))
        sections += _drawn(of_one, result, command, missing)
    sections += [replace(made, contents=made.title) for made in _drawn(of_many, list(results), command, missing)]
    counts = {result["sequences"].sizes["prompt"] for result in results}
    compared = any(len(result.conditions) > 1 for result in results)
    of = "Attention with and without inserted tokens" if compared else "Attention"
    subtitle = f"{of}, {', '.join(map(str, counts))} prompts."
    title = f"mechattn: {', '.join(model_caption(result) for result in results)}"
    return write_page(path, title, subtitle, results, sections, command, force)


def _drawn(
    figures: Seq[tuple[Callable, Mapping[str, Any]]],
    of: Result | Seq[Result],
    command: str,
    missing: list[str] | None,
) -> Iterator[Section]:
    for draw, options in figures:
        try:
            with _explained([of] if isinstance(of, Result) else of):
                made = drawn_section(draw, of, options, command)
            yield made
        except OptionError as error:
            if missing is None:
                raise
            missing.append(f"{draw.__name__}: {error}")


@contextmanager
def _explained(results: Seq[Result]) -> Iterator[None]:
    """What fails since a stored result lacks a number says so; whatever else fails is a fault of ours."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        for result in results:
            for analysis in (make() for make in ANALYSES):
                missing = lacking(result[analysis.name], analysis) if analysis.name in result.datasets else []
                if missing:
                    raise OptionError(
                        f"{analysis.name} lacks {', '.join(missing[:4])}: the result was stored by another version, or "
                        "changed since"
                    ) from error
        raise


def _of_many(draw: Callable) -> bool:
    """Whether a figure shows several models side by side."""
    return "results" in inspect.signature(draw).parameters


def verdicts(result: Result) -> list[str]:
    """A sentence for each condition, where received attention was measured; a control stands beside what it matches."""
    if "received_attention" not in result.datasets:
        return []
    try:
        with _explained([result]):
            return [
                f"{model_caption(result)}: {verdict_words(result, name, control=matched_control(result, name))}"
                for name in result.conditions[1:]
            ]
    except OptionError as error:  # too few prompts for an interval, or no question in every prompt
        return [f"{model_caption(result)}: no verdict, since {error}."]


def verdict_rows(result: Result) -> list[tuple[str, ...]]:
    """The same as rows of a table with the columns ``VERDICT_COLUMNS``, for pages of several models."""
    model = model_caption(result)
    if "received_attention" not in result.datasets:
        return []
    try:
        with _explained([result]):
            found = {name: result.verdict(name) for name in result.conditions[1:]}
    except OptionError as error:
        return [(model, "", f"no verdict, since {error}", "", "", "")]
    return [
        (
            model,
            name,
            percent_words(verdict.change),
            percent(verdict.null.estimate),
            f"{int(verdict.beyond.sum())} and {int(verdict.above.sum())} of {verdict.beyond.size}",
            str(verdict.n),
        )
        for name, verdict in found.items()
    ]


def strip_words(result: Result) -> str:
    """One line of provenance."""
    about, model = result.provenance, result.provenance["model"]
    verified = "verified" if model["verified"] else "not verified"
    parts = [model_caption(result), f"{model['dtype']} on {model['device']}", verified]
    prompts = about["prompts"]
    parts += [f"{prompts['count']} prompts ({prompts['hash']})", f"seed {about['seed']}", f"engine {about['engine']}"]
    parts += [f"{name} {about['versions'][name]}" for name in ("mechattn", "transformer-lens", "torch")]
    return " · ".join([*parts, time_words(result)])


def time_words(result: Result) -> str:
    """When the numbers were made; from when to when, where a result was merged from several runs."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)


def made_rows(result: Result, command: str = "") -> list[Row]:
    """How the numbers of a figure were made."""
    about, model = result.provenance, result.provenance["model"]
    rows = [("model", model_caption(result)), ("architecture", model["architecture"])]
    rows += [
        (name, str(model[name])) for name in ("revision", "weights", "dtype", "verified") if model.get(name) is not None
    ]
    rows += [("prompts", f"{about['prompts']['count']}, hash {about['prompts']['hash']}")]
    rows += [(f"condition {name}", str(made)) for name, made in about["conditions"].items()]
    rows += [("seed", str(about["seed"])), ("engine", about["engine"]), ("made", time_words(result))]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))]
    return rows + [("command", command)] * bool(command)


def citation(title: str, results: Seq[Result]) -> str:
    """How to cite a figure: a caption, and an entry for BibTeX."""
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


def result_page(result: Result, path: str | Path, layer: int, heads: Seq[int] | int, force: bool = False) -> Path:
    """The page of one result: received attention under each of its conditions."""
    check_page_place(path, force)
    names = result.conditions[1:] or [BASELINE]
    options = [{"layer": layer, "heads": heads, "condition": name} for name in names]
    return results_page([result], path, [(received_attention, some) for some in options], force=force)


def _tokens(result: Result, condition: str) -> list[tuple[str, str]]:
    first = result["sequences"].sel(condition=condition)
    codes = first.segment_index.isel(prompt=0).values
    texts = first.first_prompt_text.values
    return [(visible(str(text)), SEGMENTS[code]) for text, code in zip(texts, codes, strict=True) if code >= 0]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as rows of a table."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name} ") if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
    return rows
