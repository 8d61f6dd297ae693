"""The runs of each model, with their conditions and analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mechattn.analysis.affine_shift import AffineShift
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.mlp_activations import MlpActivations
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.analysis.updates import HeadUpdates
from mechattn.engine.labelled_datasets import Keep
from mechattn.interventions.arm import ARM
from mechattn.model.hooked import HookedModel
from mechattn.prompts.conditions import Baseline, Condition, MeaninglessTokens, RandomSentence

ANSWERS = "answers"  # the run that generates answers instead of measuring attention
INSERTED_COUNT = 55  # tokens, the default of the paper's code
CONDITIONS = ("slash", "sentence", "arm")


@dataclass(frozen=True)
class PlannedRun:
    """The arguments of ``ma.run``, except model and prompts."""

    words: str  # what is measured, for a message
    conditions: tuple[str, ...]
    analyses: tuple[Analysis, ...]
    first_layers: int | None = None  # how many layers, from the first; None for all
    keep: Keep = "moments"

    @property
    def quantities(self) -> list[str]:
        """The names of all quantities that the run measures."""
        return [name for analysis in self.analyses for name in analysis.quantities]


RUNS = {
    "first": PlannedRun(
        "attention of layers 0 to 2",
        ("slash", "sentence"),
        (ReceivedAttention(), AffineShift()),
        first_layers=3,
        keep="prompts",
    ),
    "activations": PlannedRun(
        "activations of the first MLP",
        ("slash",),
        (MlpActivations(rule="quantile", value=0.25),),
        first_layers=1,
    ),
    "layers": PlannedRun("attention of all layers", ("slash",), (ReceivedAttention(),)),
    "tokens": PlannedRun(
        "what each token looks at, and what heads write, without inserted tokens",
        (),
        (AttentionFocus(per_query=True), HeadUpdates(per_query=True)),
        keep="prompts",
    ),
}


def conditions_for(
    model: HookedModel, names: Sequence[str], arm: ARM | None
) -> dict[str, Condition]:
    """The conditions with these names.

    The number of “/” is the nearest to 55 that the model's tokenizer allows, and a random sentence
    has the same number of tokens. Without ``arm``, the condition "arm" is left out.
    """
    slash = MeaninglessTokens("/", INSERTED_COUNT).fitted(model)
    conditions: dict[str, Condition] = {"slash": slash, "sentence": RandomSentence(slash.count)}
    if arm is not None:
        conditions["arm"] = Baseline(intervention=arm)
    return {name: conditions[name] for name in names if name in conditions}
