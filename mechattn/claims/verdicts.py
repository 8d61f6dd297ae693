"""The verdicts of some models as a table, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mechattn.claims import words
from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.register import Claim, Register
from mechattn.claims.rules import WORDS
from mechattn.markup import table

if TYPE_CHECKING:
    import pandas as pd


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
        return "; ".join(f"{of.name}: {counted(of.judged)}" for of in self.models)

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

        each = [(name, claim) for name in (of.name for of in self.models) for claim in self.content["claims"]]
        of_model, of_claim = ["verdict", "figures", "q", "control_words", "why"], ["published", "table"]
        rows = [{"claim": claim["key"], "model": name, **claim["verdicts"][name], **claim} for name, claim in each]
        return pd.DataFrame(rows)[["claim", "model", *of_model, *of_claim]]

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


def counted(verdicts: Iterable[Judged]) -> str:
    """How many claims are what."""
    counts = Counter(one.outcome.word for one in verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def family_words(cells: Seq[Judged]) -> str:
    """What was corrected for: the tests behind the verdicts, over all cells of a page."""
    tested = sum(one.q is not None for one in cells)
    return f"{tested} tests behind {len(cells)} cells are one family (Benjamini–Hochberg, q ≤ 0.05)."


def markdown(stored: Mapping[str, Any]) -> str:
    """The same tables from what was stored as JSON."""
    names = [model["name"] for model in stored["models"]]
    heads = [model["name"] + " (exploratory)" * model["exploratory"] for model in stored["models"]]
    lines = []
    for which, title in words.TABLES.items():
        claims = [claim for claim in stored["claims"] if claim["table"] == which]
        if claims:
            lines += [f"**{title}**", "", f"| claim | {' | '.join(heads)} |", "|---" * (1 + len(names)) + "|"]
            lines += [_markdown_row(claim, names) for claim in claims] + [""]
    register = stored["register"]
    name, digest = register["name"], register["digest"][:16]
    return "\n".join([*lines, f"95 % intervals. {stored['family']} Register {name}, `{digest}`."])


def _markdown_row(claim: Mapping[str, Any], names: Seq[str]) -> str:
    cells = [claim["title"] + " (exploratory)" * bool(claim["exploratory"])]
    for verdict in (claim["verdicts"][name] for name in names):
        cells.append(f"**{verdict['verdict']}** {verdict['figures']}" if verdict["parts"] else verdict["verdict"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _claim(claim: Claim, register: Register) -> dict[str, Any]:
    made = claim.model_dump(exclude={"needs", "compared", "identity", "figure", "control", "parts"})
    of = {"source": register.about.sources.get(claim.source, ""), "table": words.table_of(claim)}
    return made | of | {"rules": [*map(words.line_words, claim.parts)]}


def _verdict(one: Judged) -> dict[str, Any]:
    return {
        "verdict": one.outcome.word,
        "why": one.outcome.why,
        "p": one.outcome.p,
        "q": one.q,
        "figures": words.cell(one),
        "short": words.short(one),
        "parts": [_part(part) for part in one.parts],
        "control": None if one.control is None else asdict(one.control),
        "control_words": words.control_words(one),
    }


def _part(part: JudgedPart) -> dict[str, Any]:
    return {
        "name": part.part.name,
        "kind": part.part.kind,
        "rule": asdict(part.rule),
        **asdict(part.estimate),
        "random": None if part.chance is None else asdict(part.chance),
        "attainable": part.attainable,
        "told": part.outcome.told,
        "verdict": part.outcome.word,
        "why": part.outcome.why,
        "words": words.part_words(part),
    }


def _finite(value: Any) -> Any:
    """With null where a number is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
