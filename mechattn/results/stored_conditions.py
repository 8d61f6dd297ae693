"""The conditions of a result as data from its provenance, so that figures need not parse text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechattn.results.result import Result

_NOTHING: Mapping[str, Any] = dict(kind="", options={}, masked=False, unshifted=False, interventions=(), written="")


@dataclass(frozen=True)
class StoredCondition:
    """A condition of a result.

    Args:
        kind: The class of what is inserted, such as "MeaninglessTokens"; "Baseline" if nothing is. For a class that is
            not mechattn's, a hash of its source follows.
        options: Its options.
        masked: Whether original tokens don't see the inserted ones.
        unshifted: Whether original tokens keep their positions.
        interventions: The interventions on the model: the kind and the options of each.
        written: All of this as text.
    """

    kind: str
    options: Mapping[str, Any]
    masked: bool
    unshifted: bool
    interventions: tuple[Mapping[str, Any], ...]
    written: str

    @property
    def inserts_only(self) -> bool:
        """Whether it only inserts tokens."""
        return self.kind not in ("", "Baseline") and not (self.masked or self.unshifted or self.interventions)


def stored_condition(result: Result, name: str) -> StoredCondition:
    """A condition of a result, from its provenance."""
    about = result.provenance.get("conditions", {}).get(name) or _NOTHING
    return StoredCondition(**{**about, "interventions": tuple(about["interventions"])})


def matched_control(result: Result, condition: str) -> str | None:
    """The condition that inserts as many tokens of a random sentence at the same place; None if there is none."""

    def is_sentence(name: str) -> bool:
        about = stored_condition(result, name)
        return about.inserts_only and about.kind == "RandomSentence"

    origin = result["sequences"].origin
    others = [name for name in result.conditions if name != condition and is_sentence(name)]
    alike = [n for n in others if (origin.sel(condition=n).values == origin.sel(condition=condition).values).all()]
    return alike[0] if alike and not is_sentence(condition) else None
