"""The verdicts of some models as a table, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mechattn.claims import numbers
from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.register import Claim, Register
from mechattn.claims.rules import WORDS
from mechattn.markup import table

if TYPE_CHECKING:
    import pandas as pd

TABLES = {  # which claims stand together
    "stated": "What the sources state",
    "figure": "What is read off their figures, by automatic captions",
    "inferred": "What we would ask besides: not claims of the sources",
    "identity": "Checks of the library: these hold by arithmetic",
}


@dataclass(frozen=True)
class OfModel:
    """The verdicts of one model, one per claim in the order of the register."""

    name: str  # as requested; of a directory only the last part
    caption: str  # with its size; a toy is called a toy
    judged: tuple[Judged, ...]
    deviations: tuple[str, ...]  # how its run differs from the register's sources
    about: Mapping[str, Any]  # the provenance of its numbers
    known: bool = False  # its numbers were known when the register was written: its verdicts are exploratory


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of ``ma.judge`` for some models."""

    models: tuple[OfModel, ...]  # in the requested order
    register: Register = field(repr=False)
    about: Mapping[str, Any]  # what was run, time, versions and seed

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, by model."""
        return "; ".join(f"{of.name}: {counted(of)}" for of in self.models)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Register, runs, verdicts and all figures, always with the same keys."""
        about, register = self.register.about, self.register
        named = {"name": about.name, "title": about.title, "sources": about.sources}
        models = [
            {"name": m.name, "caption": m.caption, "exploratory": m.known, "deviations": m.deviations, **m.about}
            for m in self.models
        ]
        claims = [
            {**_claim(claim, register), "verdicts": {m.name: _verdict(m.judged[i]) for m in self.models}}
            for i, claim in enumerate(register.claims)
        ]
        digests = {"digest": register.digest, "code": register.code}
        return {"register": named | digests, **self.about, "models": models, "claims": claims}

    def table(self) -> pd.DataFrame:
        """One row per claim and model: verdict, reason, figures, q, control, and the published figure."""
        import pandas as pd

        columns = ("verdict", "figures", "q", "control_words", "why")
        return pd.DataFrame(
            [
                {"claim": claim["key"], "model": name, **{key: one[key] for key in columns}}
                | {key: claim[key] for key in ("published", "table")}
                for name in (of.name for of in self.models)
                for claim in self.content["claims"]
                for one in [claim["verdicts"][name]]
            ]
        )

    def to_json(self) -> str:
        """The content as JSON."""
        return json.dumps(_finite(self.content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Markdown tables with claims as rows and models as columns."""
        return markdown(self.content)

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        names = [of.name for of in self.models]
        rows = [
            (claim["title"], *(f"{one['verdict']}: {one['figures']}" for one in claim["verdicts"].values()))
            for claim in self.content["claims"]
        ]
        return table(rows, self.summary, ("claim", *names))


def table_of(claim: Claim) -> str:
    """In which table a claim stands: by its origin, and what holds by arithmetic apart."""
    return "identity" if claim.identity else claim.origin


def counted(of: OfModel) -> str:
    """How many claims are what."""
    counts = Counter(one.outcome.word for one in of.judged)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def family_words(cells: Seq[Judged]) -> str:
    """What was corrected for: the tests behind the verdicts, over all cells of a page."""
    tested = sum(one.q is not None for one in cells)
    return f"{tested} tests behind {len(cells)} cells are one family (Benjamini–Hochberg, q ≤ 0.05)."


def markdown(stored: Mapping[str, Any]) -> str:
    """The same tables from what was stored as JSON."""
    names = [model["name"] for model in stored["models"]]
    lines = []
    for which, title in TABLES.items():
        claims = [claim for claim in stored["claims"] if claim["table"] == which]
        if claims:
            marks = [name + (" (exploratory)" if m["exploratory"] else "") for name, m in zip(names, stored["models"])]
            lines += [f"**{title}**", "", "| claim | " + " | ".join(marks) + " |", "|---" * (1 + len(names)) + "|"]
            lines += [_markdown_row(claim, names) for claim in claims] + [""]
    register = stored["register"]
    return "\n".join(
        [*lines, f"95 % intervals. {stored['family']} Register {register['name']}, `{register['digest'][:16]}`."]
    )


def _markdown_row(claim: Mapping[str, Any], names: Seq[str]) -> str:
    cells = [claim["title"]]
    for name in names:
        verdict = claim["verdicts"][name]
        cells.append(f"**{verdict['verdict']}** {verdict['figures']}" if verdict["parts"] else verdict["verdict"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _claim(claim: Claim, register: Register) -> dict[str, Any]:
    names = ("key", "title", "quote", "where", "origin", "audited", "says", "of", "published", "null", "deviation")
    made = {name: getattr(claim, name) for name in names}
    source = register.about.sources.get(claim.source, "")
    return {**made, "source": source, "table": table_of(claim), "rules": [*map(numbers.line_words, claim.parts)]}


def _verdict(one: Judged) -> dict[str, Any]:
    return {
        "verdict": one.outcome.word,
        "why": one.outcome.why,
        "p": one.outcome.p,
        "q": one.q,
        "figures": numbers.cell(one),
        "short": numbers.short(one),
        "parts": [_part(part) for part in one.parts],
        "control": None if one.control is None else asdict(one.control),
        "control_words": numbers.control_words(one),
    }


def _part(part: JudgedPart) -> dict[str, Any]:
    words = {
        "found": f"{part.part.name}: {numbers.with_interval(part.estimate, part.part.of.kind)}",
        "attainable": numbers.range_words(part),
        "random": numbers.chance_words(part),
        "told": numbers.told_words(part),
    }
    return {
        "name": part.part.name,
        "kind": part.part.of.kind,
        "rule": asdict(part.part.rule),
        **asdict(part.estimate),
        "random": None if part.chance is None else asdict(part.chance),
        "attainable": part.attainable,
        "told": part.outcome.told,
        "verdict": part.outcome.word,
        "why": part.outcome.why,
        "words": words,
    }


def _finite(value: Any) -> Any:
    """With null where a number is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
