"""The line below a page's title: what was inserted, and how many prompts there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mechattn.axes import BASELINE
from mechattn.markup import plain
from mechattn.results.provenance import matched_control
from mechattn.results.result import Result, alike_words

PLACES = {
    "before_question": "before the question",
    "start": "at the start",
    "middle": "in the middle of the question",
    "after_question": "after the question",
    "before_answer": "before the answer",
    "random": "at a random place in the question",
}
DRAWN_TOKENS = {
    "RandomTokens": "random tokens",
    "RandomSentence": "random sentences",
    "ShuffledSentence": "shuffled sentences",
}


def subtitle(results: Sequence[Result]) -> str:
    """The subtitle of a page of stored results."""
    prompt_counts = {result["sequences"].sizes["prompt"] for result in results}
    subject = "Attention"
    if any(len(result.conditions) > 1 for result in results):
        subject = "Attention with and without inserted tokens"
    counted = f"{subject}, {', '.join(map(str, prompt_counts))} prompts."
    inserted = dict.fromkeys(filter(None, map(_inserted, results)))
    warnings = dict.fromkeys(filter(None, map(alike_words, results)))
    return " ".join([counted, *inserted, *warnings])


def _inserted(result: Result) -> str:
    """What the first condition and its control insert, and where."""
    condition = result.shown_condition()
    if condition == BASELINE:
        return ""
    phrases = []
    for name in (condition, matched_control(result, condition)):
        stored = result.provenance["conditions"].get(name, {})
        words = _condition_words(stored.get("kind", ""), stored.get("options", {}))
        if words:
            phrases.append(f"“{name}” is {words}")
    return "; ".join(phrases) + "." if phrases else ""


def _condition_words(kind: str, options: Mapping[str, Any]) -> str:
    """Such as “55 tokens of “/” before the question”; empty for other kinds of conditions."""
    inserted = DRAWN_TOKENS.get(kind)
    text = options.get("text", options.get("word"))
    if isinstance(text, str):
        inserted = f"“{plain(text)}”"
    place = PLACES.get(options.get("place", ""))
    count = options.get("count")
    if not (inserted and place and count):
        return ""
    return f"{count} tokens of {inserted} {place}"
