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
        native: A copy without hooks that shares the parameters; None where there can be none.
        why_not_native: The reason for None.
        mended: What was mended, a sentence each.
        to_verify: False where the user asked for no verification.
        probe_logits: The native logits when the model was loaded.
        report: The last verification.
        boots: How many models the process had made at that time.
        streaming: Whether attention in row blocks gives the hooks' numbers; None before it was tried.
        hashed: The last hash of the weights, after what it was of.
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
    """What is known about ``model``; None for a model that has not gone through ``load_model``."""
    return getattr(model, "__dict__", {}).get(_NAME)


def remember(model: Any, what: ModelFacts) -> ModelFacts:
    """Keep ``what`` on the model."""
    setattr(model, _NAME, what)
    return what


def count_boot() -> None:
    """A model was made; booting one can change classes that others use (TransformerLens issue 1795)."""
    global _boots
    _boots += 1


def boots() -> int:
    """How many models were made in this process."""
    return _boots
