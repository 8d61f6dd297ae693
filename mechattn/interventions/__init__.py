"""What can be changed inside a forward pass: interventions."""

from mechattn.interventions.ablation import HeadAblation as HeadAblation, Knockout as Knockout
from mechattn.interventions.arm import ARM as ARM
from mechattn.interventions.recorded import (
    AffineAttention as AffineAttention,
    KeysValues as KeysValues,
    Transplant as Transplant,
)


def __dir__() -> list[str]:
    """The interventions; not the files that they are in."""
    return sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
