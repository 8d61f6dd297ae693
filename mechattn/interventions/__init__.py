"""What can be changed inside a forward pass: interventions."""

from mechattn.interventions.ablation import AttentionKnockout as AttentionKnockout
from mechattn.interventions.ablation import HeadAblation as HeadAblation
from mechattn.interventions.arm import ARM as ARM
from mechattn.interventions.recorded import AffineAttention as AffineAttention
from mechattn.interventions.recorded import KeysValues as KeysValues
from mechattn.interventions.recorded import KVPatch as KVPatch
from mechattn.interventions.recorded import RecordedAffine as RecordedAffine


def __dir__() -> list[str]:
    """The names of the interventions, without those of their modules."""
    return sorted(
        name for name, member in globals().items() if callable(member) and not name.startswith("_")
    )
