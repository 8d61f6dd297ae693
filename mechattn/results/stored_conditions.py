"""The conditions of a result as data from its provenance, so that figures need not parse text."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechattn.results.result import Result

_LONGEST = 2000  # characters of a condition's text in an older result


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
    about = result.provenance.get("conditions", {}).get(name) or from_words("")
    return StoredCondition(**(about | {"interventions": tuple(about["interventions"])}))


def matched_control(result: Result, condition: str) -> str | None:
    """The condition that inserts as many tokens of a random sentence at the same place; None if there is none."""

    def is_sentence(name: str) -> bool:
        about = stored_condition(result, name)
        return about.inserts_only and about.kind == "RandomSentence"

    origin = result["sequences"].origin
    others = [name for name in result.conditions if name != condition and is_sentence(name)]
    alike = [n for n in others if (origin.sel(condition=n).values == origin.sel(condition=condition).values).all()]
    return alike[0] if alike and not is_sentence(condition) else None


def from_words(written: str) -> dict[str, Any]:
    """The data of a condition that an older result (schemas 1 and 2) has only as text, from ``repr``."""
    made: dict[str, Any] = {"kind": "", "options": {}, "masked": False, "unshifted": False, "interventions": []}
    try:
        call = _call(ast.parse(written[:_LONGEST], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return made | {"written": written}  # of a class with its own repr
    acts: list[Any] = []
    while call["kind"] == "Variant":
        options = call["options"]
        made |= {"masked": made["masked"] or options.get("hides", False)}
        made |= {"unshifted": made["unshifted"] or options.get("keeps_positions", False)}
        acts = [*options.get("interventions", ()), *acts]
        call = options["condition"] if isinstance(options.get("condition"), dict) else {"kind": "", "options": {}}
    if call["kind"] == "Baseline":
        given = call["options"].pop("intervention", ())
        acts = [*(given if isinstance(given, tuple) else (given,)), *acts]
    return made | call | {"interventions": [act for act in acts if isinstance(act, dict)], "written": written}


def _call(node: ast.AST) -> dict[str, Any]:
    """Parse a call into its kind and options."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("no call")
    return {"kind": node.func.id, "options": {str(part.arg): _value(part.value) for part in node.keywords}}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return _call(node)
    return tuple(map(_value, node.elts)) if isinstance(node, ast.Tuple) else ast.literal_eval(node)
