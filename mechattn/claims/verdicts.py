"""The verdicts of some models as a table, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mechattn.claims import numbers
from mechattn.claims.claim import Claim
from mechattn.claims.judged import Judged, JudgedPart
from mechattn.claims.register import CLAIMS, VERSION, digest
from mechattn.claims.rules import WORDS
from mechattn.markup import table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class OfModel:
    """The verdicts of one model.

    Args:
        name: The requested name; of a directory only the last part.
        caption: Its name and size; a toy is called a toy.
        judged: One verdict per claim, in the order of the register.
        deviations: How its run differs from the paper.
        about: The provenance of its numbers.
    """

    name: str
    caption: str
    judged: tuple[Judged, ...]
    deviations: tuple[str, ...]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of ``ma.paper`` for some models.

    Args:
        models: The models, in the requested order.
        about: The plan, time, versions and seed.
    """

    models: tuple[OfModel, ...]
    about: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, by model."""
        return "; ".join(f"{of.name}: {counted(of)}" for of in self.models)

    def table(self) -> pd.DataFrame:
        """One row per claim and model: verdict, reason, figures, control, and the paper's figure."""
        import pandas as pd

        rows = []
        for of in self.models:
            for one in of.judged:
                rows.append(
                    {
                        "claim": one.claim.key,
                        "model": of.name,
                        "verdict": one.outcome.word,
                        "figures": numbers.cell(one),
                        "control": _control(one),
                        "published": one.claim.published,
                        "by_definition": bool(one.claim.by_definition),
                        "why": one.outcome.why,
                    }
                )
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """The register, plan, verdicts and all figures as JSON, always with the same keys."""
        content = {
            "register": {"version": VERSION, "digest": digest()},
            **self.about,
            "models": [
                {"name": m.name, "caption": m.caption, "deviations": m.deviations, **m.about} for m in self.models
            ],
            "claims": [
                {**_claim(claim), "verdicts": {m.name: _verdict(m.judged[i]) for m in self.models}}
                for i, claim in enumerate(CLAIMS)
            ],
        }
        return json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """A Markdown table with claims as rows and models as columns."""
        return markdown(json.loads(self.to_json()))

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        rows = [
            (claim.title, *(f"{m.judged[i].outcome.word}: {numbers.cell(m.judged[i])}" for m in self.models))
            for i, claim in enumerate(CLAIMS)
        ]
        return table(rows, self.summary, ("claim", *(m.name for m in self.models)))


def counted(of: OfModel) -> str:
    """How many claims are what."""
    counts = Counter(one.outcome.word for one in of.judged)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def markdown(stored: Mapping[str, Any]) -> str:
    """The same table from what was stored as JSON."""
    names = [model["name"] for model in stored["models"]]
    lines = ["| claim | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for claim in stored["claims"]:
        mark = " *(by definition)*" if claim["by_definition"] else ""
        cells = [claim["title"] + mark]
        for name in names:
            verdict = claim["verdicts"][name]
            cells.append(f"**{verdict['verdict']}** {verdict['figures']}" if verdict["parts"] else verdict["verdict"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    register = stored["register"]
    return "\n".join([*lines, "", f"Register {register['version']}, `{register['digest'][:16]}`; 95 % intervals."])


def _claim(claim: Claim) -> dict[str, Any]:
    names = (
        "key",
        "title",
        "says",
        "where",
        "published",
        "published_of",
        "supported_by",
        "measured",
        "null",
        "deviation",
    )
    made = {name: getattr(claim, name) for name in names}
    rules = [numbers.line_words(part) for part in claim.parts]
    return {**made, "by_definition": claim.by_definition, "rules": rules}


def _verdict(one: Judged) -> dict[str, Any]:
    return {
        "verdict": one.outcome.word,
        "why": one.outcome.why,
        "figures": numbers.cell(one),
        "parts": [_part(part) for part in one.parts],
        "control": None if one.control is None else asdict(one.control),
        "control_words": _control(one),
    }


def _part(part: JudgedPart) -> dict[str, Any]:
    return {
        "name": part.part.measure.name,
        "kind": part.part.measure.kind,
        "rule": asdict(part.part.rule),
        **asdict(part.estimate),
        "random": None if part.chance is None else asdict(part.chance),
        "verdict": part.outcome.word,
        "why": part.outcome.why,
    }


def _control(one: Judged) -> str:
    if one.control is None or one.claim.control is None:
        return ""
    return f"{one.claim.control.name}: {numbers.with_interval(one.control, one.claim.control.kind)}"


def _finite(value: Any) -> Any:
    """With null where a number is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
