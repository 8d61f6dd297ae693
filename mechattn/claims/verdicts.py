"""The verdicts of some models in words: a table, JSON, Markdown and a page, and each claim with its rule."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from mechattn.claims.measures import MEASURES, UNIT, Kind, figure, with_unit
from mechattn.claims.register import Claim, Part, Register
from mechattn.claims.rules import OTHER, WORDS, Estimate, Judged, JudgedPart
from mechattn.errors import OptionError
from mechattn.markup import table
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import About, Section, drawn_section, heads_options, write_page
from mechattn.render.figure_declaration import FIGURES
from mechattn.results.result import Result
from mechattn.store.atomic_writes import write_whole

TABLES = {  # which claims stand together: by origin, and what holds by arithmetic apart
    "stated": "What the sources state",
    "figure": "What is read off their figures, by automatic captions",
    "inferred": "What we would ask besides: not claims of the sources",
    "identity": "Checks of the library: these hold by arithmetic",
}
_KINDS = {"supported": "supported", "contradicted": "contradicted", "cannot be told": "cannot"}

Results = Mapping[str, Result]


@dataclass(frozen=True)
class OfModel:
    """The verdicts of one model, one per claim in the order of the register."""

    name: str  # as requested; of a directory only the last part
    caption: str  # with its size; a toy is called a toy
    judged: tuple[Judged, ...]
    deviations: tuple[str, ...]  # how its run differs from the register's sources
    about: Mapping[str, Any]  # the provenance of its numbers
    known: bool = (
        False  # its numbers were known when the register was written: its verdicts are exploratory
    )


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of ``ma.judge`` for some models."""

    models: tuple[OfModel, ...]  # in the requested order
    register: Register = field(repr=False)
    about: Mapping[str, Any]  # what was run, time, versions and seed

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, by model."""
        return "; ".join(f"{of.name}: {counted(of.judged)}" for of in self.models)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Register, runs, verdicts and all figures, always with the same keys."""
        register, about = self.register, self.register.about
        named = {"name": about.name, "title": about.title, "sources": about.sources}
        named |= {"digest": register.digest, "code": register.code}
        models = [
            {
                "name": m.name,
                "caption": m.caption,
                "exploratory": m.known,
                "deviations": m.deviations,
                **m.about,
            }
            for m in self.models
        ]
        hidden = {"needs", "compared", "identity", "figure", "control", "parts"}
        claims = [
            claim.model_dump(exclude=hidden)
            | {"source": about.sources.get(claim.source, ""), "table": table_of(claim)}
            | {"rules": [*map(line_words, claim.parts)]}
            | {"verdicts": {m.name: _verdict(m.judged[i]) for m in self.models}}
            for i, claim in enumerate(register.claims)
        ]
        return {"register": named, **self.about, "models": models, "claims": claims}

    def table(self) -> pd.DataFrame:
        """One row per claim and model: verdict, reason, figures, q, control, and the published figure."""
        each = [(of.name, claim) for of in self.models for claim in self.content["claims"]]
        of_model, of_claim = (
            ["verdict", "figures", "q", "control_words", "why"],
            ["published", "table"],
        )
        rows = [
            {"claim": claim["key"], "model": name, **claim["verdicts"][name], **claim}
            for name, claim in each
        ]
        return pd.DataFrame(rows)[["claim", "model", *of_model, *of_claim]]

    def to_json(self) -> str:
        """The content as JSON."""
        return (
            json.dumps(_finite(self.content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def to_markdown(self) -> str:
        """Markdown tables with claims as rows and models as columns."""
        return markdown(self.content)

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        rows = [
            (
                claim["title"],
                *(f"{one['verdict']}: {one['figures']}" for one in claim["verdicts"].values()),
            )
            for claim in self.content["claims"]
        ]
        return table(rows, self.summary, ("claim", *(of.name for of in self.models)))


def counted(verdicts: Iterable[Judged]) -> str:
    """How many claims are what."""
    counts = Counter(one.outcome.word for one in verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def table_of(claim: Claim) -> str:
    """In which table a claim stands."""
    return "identity" if claim.identity else claim.origin


def markdown(stored: Mapping[str, Any]) -> str:
    """The same tables from what was stored as JSON."""
    names = [model["name"] for model in stored["models"]]
    heads = [model["name"] + " (exploratory)" * model["exploratory"] for model in stored["models"]]
    lines = []
    for which, title in TABLES.items():
        if claims := [claim for claim in stored["claims"] if claim["table"] == which]:
            lines += [
                f"**{title}**",
                "",
                f"| claim | {' | '.join(heads)} |",
                "|---" * (1 + len(names)) + "|",
            ]
            for claim in claims:
                cells = [claim["title"] + " (exploratory)" * bool(claim["exploratory"])]
                for one in (claim["verdicts"][name] for name in names):
                    cells.append(
                        f"**{one['verdict']}** {one['figures']}" if one["parts"] else one["verdict"]
                    )
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
    name, digest = stored["register"]["name"], stored["register"]["digest"][:16]
    return "\n".join([*lines, f"95 % intervals. {stored['family']} Register {name}, `{digest}`."])


def _verdict(one: Judged) -> dict[str, Any]:
    control, control_words = one.claim.control, ""
    if one.control is not None and control is not None:
        name = ", ".join([control.measure.replace("_", " "), *control.conditions])
        control_words = f"{name}: {with_interval(one.control, control.kind)}"
    figures = "; ".join(with_interval(part.estimate, part.part.kind) for part in one.parts)
    found: dict[str, Any] = {
        "verdict": one.outcome.word,
        "why": one.outcome.why,
        "p": one.outcome.p,
        "q": one.q,
    }
    found |= {
        "figures": figures or one.outcome.why,
        "short": _short(one),
        "parts": [*map(_part, one.parts)],
    }
    return found | {"control": one.control and asdict(one.control), "control_words": control_words}


def _part(found: JudgedPart) -> dict[str, Any]:
    about = {
        "name": found.part.name,
        "kind": found.part.kind,
        "rule": asdict(found.rule),
        **asdict(found.estimate),
    }
    about |= {"random": found.chance and asdict(found.chance), "attainable": found.attainable}
    about |= {"told": found.outcome.told, "verdict": found.outcome.word, "why": found.outcome.why}
    return about | {"words": part_words(found)}


def _finite(value: Any) -> Any:
    """With null where a number is none."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def _levels(estimate: Estimate) -> str:
    return " → ".join(f"{100 * level:.1f}" for level in estimate.levels or ())


def with_interval(estimate: Estimate, kind: Kind) -> str:
    """Such as "−30.3 % [−31.0, −29.6]"; of accuracies with their levels and the exact test."""
    digits = (
        4 if kind == "share" and 0 <= estimate.high < 0.001 else None
    )  # an error of 0 is told from one of 0.04 %
    value, low, high = (
        figure(end, kind, digits) for end in (estimate.value, estimate.low, estimate.high)
    )
    words = f"{value}{UNIT[kind]} [{low}, {high}]"
    if estimate.levels is not None:
        words = f"{_levels(estimate)} % ({words})"
    return words if estimate.exact is None else f"{words}, exact p = {estimate.exact:.2g}"


def _short(one: Judged) -> str:
    """The values alone, for a column of a table."""
    if any(part.estimate.levels for part in one.parts):
        return ", ".join(_levels(part.estimate) for part in one.parts) + " %"
    each = [figure(part.estimate.value, part.part.kind) for part in one.parts]
    return ", ".join(each) + UNIT[one.parts[0].part.kind].replace("points", "pt") if each else ""


def line_words(part: Part) -> str:
    """The rule in words: where the interval has to lie, and what contradicts it."""
    rule, kind = part.rule_of(), part.kind
    against = "it" if rule.opposite == rule.line else with_unit(rule.opposite, kind)
    gains = "; ".join(
        f"{model} {with_unit(gain, kind)} ({of})"
        for of, some in part.gains.items()
        for model, gain in some.items()
    )
    own = f", or the gain that is published for the model and set ({gains})" if gains else ""
    line = f"supported {rule.side} {with_unit(rule.line, kind)}, contradicted {OTHER[rule.side]} {against}"
    return f"{part.name}: {line}{own}"


def part_words(found: JudgedPart) -> dict[str, str]:
    """What was found, what the model can show, random weights, and what this many units and draws can tell."""
    part, kind, chance = found.part, found.part.kind, found.chance
    ends = zip(("least", "most"), found.attainable, strict=True)
    random, told = "", f"n = {found.estimate.n}"
    if chance is not None:
        few, many = (figure(end(chance.draws), kind) for end in (min, max))
        random = f"{with_unit(chance.mean, kind)}, {few} to {many} in {len(chance.draws)} draws"
        told += f", {len(chance.draws)} draws"
    if found.outcome.told is not None and all(map(isfinite, found.outcome.told)):
        yes, no = (with_unit(end, kind) for end in found.outcome.told)
        told = f"supported {part.side} {yes}, contradicted {OTHER[part.side]} {no} ({told})"
    attainable = (
        ", ".join(f"at {w} {with_unit(end, kind)}" for w, end in ends if isfinite(end))
        or "any value"
    )
    shown = f"{part.name}: {with_interval(found.estimate, kind)}"
    return {"found": shown, "attainable": attainable, "random": random, "told": told}


def said(claim: Claim, register: Register) -> str:
    """The quote and its place, and our words."""
    place = ", ".join(filter(None, [register.about.sources.get(claim.source, ""), claim.where]))
    quote = f"“{claim.quote}” ({place})" if claim.quote else place
    unread = "" if claim.audited else " The source itself was not at hand."
    return " ".join(filter(None, [quote, claim.says])) + unread


def rows(claim: Claim, register: Register) -> dict[str, str]:
    """What stands behind a claim, by heading."""
    beyond = ""
    if register.runs[claim.needs].draws and claim.compared and not claim.identity:
        kinds = {"number": (1, ".2f", ""), "log-ratio": (100, ".1f", " %")}
        each = [
            (part.margin, *kinds.get(part.kind, (100, ".1f", " points"))) for part in claim.parts
        ]
        margins = dict.fromkeys(
            f"{margin * scale:{digits}}{unit}" for margin, scale, digits, unit in each
        )
        beyond = " and ".join(
            f"by {m} at least, and by more than one further draw would be" for m in margins
        )
    measured = []
    for part, less in ((part, part.other) for part in claim.parts):
        measured.append(
            part.of.says + (f" Less: {less.of.says}" if less and less.of is not part.of else "")
        )
    found = {
        "of": claim.of,
        "published": claim.published,
        "measured": " ".join(dict.fromkeys(measured)),
    }
    found |= {
        "rule": "; ".join(map(line_words, claim.parts)),
        "beyond random weights": beyond,
        "null": claim.null,
    }
    found |= {"exploratory": claim.exploratory, "differs from the source": claim.deviation}
    return {name: words for name, words in found.items() if words}


def register_markdown(register: Register) -> str:
    """Digest, and of each claim what was said and where, what is measured, and the rule."""
    sources = "; ".join(register.about.sources.values())
    parts = [f"{len(register.claims)} claims of {sources}; SHA-256 `{register.digest}`."]
    for which, title in TABLES.items():
        claims = [claim for claim in register.claims if table_of(claim) == which]
        parts += [f"### {title}"] * bool(claims)
        for claim in claims:
            about = {name: one.replace("|", "\\|") for name, one in rows(claim, register).items()}
            parts += [f"#### {claim.title}", f"`{claim.key}` · {said(claim, register)}"]
            parts.append(
                "\n".join(
                    [
                        "|  |  |",
                        "|---|---|",
                        *(f"| {name} | {one} |" for name, one in about.items()),
                    ]
                )
            )
    return "\n\n".join(parts)


def measures_markdown() -> str:
    """Every measure that a register may name, and what it needs."""
    each = [
        f"| `{name}` | {one.says} | {', '.join(one.needs)} |"
        for name, one in sorted(MEASURES.items())
    ]
    return "\n".join(["| measure | what it is | of |", "|---|---|---|", *each])


def write(verdicts: Verdicts, results: Seq[Results], out: Path, force: bool) -> Path:
    """Write the page, the JSON and the Markdown; the page shows figures of each model's results."""
    made = {"verdicts.json": verdicts.to_json(), "verdicts.md": verdicts.to_markdown() + "\n"}
    for name, text in made.items():
        write_whole(out / name, lambda new, text=text: new.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    register, about = verdicts.register, verdicts.register.about
    sections, links = _sections(register, results)
    groups = [
        {"title": title, "claims": [_row(verdicts, i, links) for i in some]}
        for which, title in TABLES.items()
        if (some := [i for i, claim in enumerate(register.claims) if table_of(claim) == which])
    ]
    models = [
        {
            **vars(m),
            "size": m.caption.removeprefix(m.name).strip(" ()"),
            "counts": counted(m.judged),
        }
        for m in verdicts.models
    ]
    filled = {
        "answer": answer(verdicts),
        "models": models,
        "groups": groups,
        "register": register,
        **verdicts.about,
    }
    of = ", ".join(model.name for model in verdicts.models)
    subtitle = (
        f"{len(register.claims)} claims of {'; '.join(about.sources.values())}, judged for {of}."
    )
    shown = [ShownModel(next(iter(some.values()))) for some in results if some]
    title, lead = f"{about.title}, claim by claim", ("claims.html.j2", filled)
    page = About(title, subtitle, verdicts.about["command"], lead)
    return write_page(out / "index.html", page, shown, sections, force)


def answer(verdicts: Verdicts) -> str:
    """The first sentences: how many cells of the sources' own claims came out how."""
    theirs = [one for m in verdicts.models for one in m.judged if table_of(one.claim) == "stated"]
    claims, models = len(theirs) // len(verdicts.models), len(verdicts.models)
    of = f"{claims} claims that the sources state" + (
        f" × {models} models" if models > 1 else " in this model"
    )
    return f"{of}: {counted(theirs)}. A verdict is of that model on these prompts, not of the sources’ models."


def _row(verdicts: Verdicts, i: int, links: dict[tuple[int, str], str]) -> dict[str, Any]:
    """A claim in the table, and all that stands behind it."""
    register, claim = verdicts.register, verdicts.register.claims[i]
    cells = []
    for at, model in enumerate(verdicts.models):
        one = verdicts.content["claims"][i]["verdicts"][model.name]
        kind, link = _KINDS.get(one["verdict"], "not"), links.get((at, claim.figure), "")
        cells.append({**one, "model": model.name, "kind": kind, "link": link})
    made = {
        "key": claim.key,
        "title": claim.title,
        "published": claim.published,
        "exploratory": claim.exploratory,
    }
    return {
        **made,
        "says": said(claim, register),
        "about": rows(claim, register).items(),
        "cells": cells,
    }


def _sections(
    register: Register, results: Seq[Results]
) -> tuple[list[Section], dict[tuple[int, str], str]]:
    """Figures of every model, and the address of each: by the model's number and the claim's ``figure``."""
    sections: list[Section] = []
    links: dict[tuple[int, str], str] = {}
    for at, some in enumerate(results):
        for claim in (claim for claim in register.claims if claim.figure):
            if (at, claim.figure) not in links and (section := _section(claim, some)) is not None:
                sections.append(section)
                links[at, claim.figure] = f"section-{len(sections)}"
    return sections, links


def _section(claim: Claim, results: Results) -> Section | None:
    """The figure of the claim's own run, if that has what it draws, else of the first that has."""
    kind, _, quantity = claim.figure.partition(":")
    one = replace(FIGURES[kind], report=[{"quantity": quantity} if quantity else {}])
    for name in sorted(results, key=lambda name: name != claim.needs):
        result = results[name]
        for _, options in one.shown(result, {"layer": 0, **heads_options(result, None, 3)}):
            try:
                return drawn_section(one.draw, result, options)
            except OptionError:  # a model without what it shows
                return None
    return None
