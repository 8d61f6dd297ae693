"""A claim as data: the statement, its measure, its control and the rule that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mechattn.claims.rules import Rule

Kind = Literal["log-ratio", "share", "points", "number"]
Needs = Literal["attention", "activations", "answers", "length", "place", "samples"]
PAPER = "arXiv:2510.01032"
BLOG = "R. Claus, “Attention Focus Plots”"


@dataclass(frozen=True)
class Measure:
    """A number for each prompt or problem.

    Args:
        name: What it is of, in words.
        of: A function of ``mechattn.claims.measures``.
        conditions: Its arguments: names of conditions.
        kind: In which units it is shown: "log-ratio" as a change in percent, "share" in percent, "points" of accuracy.
    """

    name: str
    of: str
    conditions: tuple[str, ...] = ()
    kind: Kind = "log-ratio"


@dataclass(frozen=True)
class Part:
    """A measure, and the rule that it is decided by."""

    measure: Measure
    rule: Rule


@dataclass(frozen=True)
class Claim:
    """One claim of the register.

    Args:
        key: Its name.
        title: Its heading, in a few words.
        says: What was said, in our words.
        where: Section or figure.
        published: The published figure in short, where it is known here.
        published_of: Of which model, and where it is from.
        supported_by: What would support it.
        measured: How it is measured, and in which layers.
        null: What the number is beside, so that no change counts that is there anyhow.
        control: What is measured besides; it decides nothing.
        parts: What decides; all of them have to hold.
        needs: The stage of the run that measures it.
        deviation: How the measurement differs from what was done there.
        by_definition: Why it holds whatever a model has learned; empty where it need not.
        figure: A function of ``mechattn.render`` that shows it; empty where none does.
    """

    key: str
    title: str
    says: str
    where: str
    published: str
    supported_by: str
    measured: str
    null: str
    control: Measure | None
    parts: tuple[Part, ...]
    needs: Needs
    deviation: str
    published_of: str = ""
    by_definition: str = ""
    figure: str = ""
