"""Facts that mechattn records about a hooked model: how it was made, corrected and verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mechattn.model.verify.verification import Check, Report

_NAME = "_mechattn"
_boots = 0


@dataclass
class ModelFacts:
    """Kept on the model object.

    Args:
        weights: "raw", or a warning that they may have been folded.
        native: A copy without hooks that shares the parameters; None if there cannot be one.
        why_not_native: The reason if ``native`` is None.
        mended: The corrections, one sentence each.
        to_verify: False if the user turned verification off.
        probe_logits: The native logits when the model was loaded.
        report: The last verification.
        boots: The number of models that the process had made at that time.
        streaming: Whether attention in row blocks gives the hooks' numbers; None if not tried yet.
        hashed: The last hash of the weights, preceded by what was hashed.
    """

    weights: str = "as given, perhaps processed"
    native: Any = None
    why_not_native: str = ""
    mended: tuple[str, ...] = ()
    to_verify: bool = True
    probe_logits: Tensor | None = None
    report: Report | None = None
    boots: int = -1
    streaming: Check | None = None
    hashed: tuple[object, str] | None = None

    @property
    def verified(self) -> bool:
        """Whether the last verification passed."""
        return self.report is not None and self.report.passed


def facts_of(model: Any) -> ModelFacts | None:
    """The facts about ``model``; None for a model that has not gone through ``load_model``."""
    return getattr(model, "__dict__", {}).get(_NAME)


def remember(model: Any, what: ModelFacts) -> ModelFacts:
    """Store ``what`` on the model."""
    setattr(model, _NAME, what)
    return what


def count_boot() -> None:
    """Count a model that was made; booting one can change classes that others use (TransformerLens issue 1795)."""
    global _boots
    _boots += 1


def boots() -> int:
    """The number of models made in this process."""
    return _boots
