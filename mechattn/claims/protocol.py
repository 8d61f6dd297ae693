"""What is run for the register: which tokens, how many, where, which ARM; fixed with it, and in its digest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mechattn.analysis.affine_shift import AffineShift
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.head_updates import HeadUpdates
from mechattn.analysis.mlp_activations import MlpActivations
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.interventions.arm import ARM
from mechattn.prompts.conditions import Baseline, Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.fillers import nearest_count
from mechattn.prompts.places import Place
from mechattn.stats.intervals import FEWEST


@dataclass(frozen=True)
class Protocol:
    """The numbers of the protocol.

    Args:
        text: What is inserted.
        separator: Between two of them.
        count: How many tokens.
        lengths: The other numbers of tokens.
        places: The other places.
        arms: The form of ARM, c and p1, by architecture; for all others the last.
        level: Of intervals.
        fewest: Units of an interval.
        draws: How many random models.
    """

    text: str = "/"
    separator: str = " "
    count: int = 55
    lengths: tuple[int, ...] = (10, 25, 40, 70)
    places: tuple[Place, ...] = ("start", "random", "before_answer")
    arms: tuple[tuple[str, str, float, float], ...] = (
        ("LlamaForCausalLM", "released_llama", 0.32, 90.0),
        ("Qwen2ForCausalLM", "released_qwen2", 0.13, 99.5),
        ("Gemma3ForCausalLM", "gemma", 0.25, 85.0),
        ("", "paper", 0.13, 99.5),
    )
    level: float = 0.95
    fewest: int = FEWEST
    draws: int = 3


PROTOCOL = Protocol()
ANALYSES = (ReceivedAttention(), AffineShift(), AttentionFocus(), HeadUpdates())
ACTIVATIONS = MlpActivations(rule="quantile", value=0.25)


def slash_for(tokenizer: Any) -> MeaninglessTokens:
    """The tokens that a tokenizer can make: 55 with blanks, 55 without, or the nearest number with blanks.

    Raises:
        ConditionError: None within ten can be made.
    """
    spaced = MeaninglessTokens(PROTOCOL.text, PROTOCOL.count, separator=PROTOCOL.separator)
    counts = {by: nearest_count(tokenizer, spaced.text, by, spaced.count) for by in (spaced.separator, "")}
    exact = [by for by, count in counts.items() if count == spaced.count]
    by = exact[0] if exact else spaced.separator
    return replace(spaced, count=counts[by], separator=by)


def arm_for(architecture: str, control: Any = None) -> ARM:
    """ARM as it was published for a family; of others as the paper has it."""
    _, form, c, p1 = next(row for row in PROTOCOL.arms if row[0] in (architecture, ""))
    return ARM(form=form, c=c, p1=p1, control=control)  # type: ignore[arg-type]


def attention_conditions(slash: MeaninglessTokens) -> dict[str, Condition]:
    """Beside the baseline, in the run of all layers."""
    return {"slash": slash, "sentence": RandomSentence(count=slash.count)}


def arm_conditions(architecture: str) -> dict[str, Condition]:
    """ARM, and a random change of its size."""
    return {
        "arm": Baseline(intervention=arm_for(architecture)),
        "direction": Baseline(intervention=arm_for(architecture, "random_direction")),
    }


def length_conditions(slash: MeaninglessTokens, tokenizer: Any) -> dict[str, Condition]:
    """Other numbers of tokens, as near as the tokenizer comes."""
    return {
        f"count={count}": replace(slash, count=nearest_count(tokenizer, slash.text, slash.separator, count))
        for count in PROTOCOL.lengths
    }


def place_conditions(slash: MeaninglessTokens) -> dict[str, Condition]:
    """Other places."""
    return {f"place={place}": replace(slash, place=place) for place in PROTOCOL.places}
