"""Checks of analyses before the first forward pass: that they follow the protocol, and that the
model has the hooks that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mechattn.analysis import analysis as protocols
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel

# What every analysis has, and the protocols of which it follows one, by what it receives.
DECLARED = ("name", "options", "quantities", "problem", "start", "values")
PROTOCOLS: Mapping[str, Any] = {
    "rows": protocols.RowAnalysis,
    "pairs": protocols.PairAnalysis,
    "mlps": protocols.ActivationAnalysis,
    "hooks": protocols.CaptureAnalysis,
    "final": protocols.FinalAnalysis,
}


def with_names(analyses: Sequence[Analysis] | Analysis | None) -> list[Analysis]:
    """The analyses; there must be at least one, and each name must be unique."""
    if analyses is None:
        return [ReceivedAttention()]
    if not isinstance(analyses, (list, tuple)):
        analyses = [cast(Analysis, analyses)]
    for analysis in analyses:
        _check_analysis(analysis)

    names = [analysis.name for analysis in analyses]
    if not names or len(set(names)) < len(names):
        raise OptionError(f"analyses={names}: give at least one, and each name once")

    owners: dict[str, str] = {}
    for analysis in analyses:
        for quantity in {name.removesuffix("_by_segment") for name in analysis.quantities}:
            owner = owners.setdefault(quantity, analysis.name)
            if owner != analysis.name:
                raise OptionError(
                    f"{owner} and {analysis.name} both measure a quantity named {quantity!r}:"
                    " rename it in one of them"
                )
    return list(analyses)


def _check_analysis(analysis: Any) -> None:
    """Refuse an analysis that does not follow the protocol."""
    lacking = [attribute for attribute in DECLARED if not hasattr(analysis, attribute)]
    if lacking or isinstance(analysis, type):
        raise OptionError(
            f"analyses holds {analysis!r}, which is not an analysis (it lacks"
            f" {', '.join(lacking) or 'an instance'}); give one such as ma.ReceivedAttention()"
        )

    if not any(isinstance(analysis, protocol) for protocol in PROTOCOLS.values()):
        raise OptionError(
            f"the analysis {analysis.name} receives no data: define add(sums, rows), or one of"
            " add_pairs, add_activations, add_captures, add_final"
        )

    # It is the name of a dataset, and of its folder.
    if not str(analysis.name).isidentifier():
        raise OptionError(f"an analysis is named {analysis.name!r}: use letters, digits and _")


def check_captures(model: HookedModel, analyses: Sequence[Analysis], layers: Sequence[int]) -> None:
    """Refuse an analysis that captures a hook which a layer doesn't have."""
    hooks: set[str] = set()
    for analysis in analyses:
        if isinstance(analysis, protocols.CaptureAnalysis):
            hooks = hooks or set(model.hook_dict)  # listing them takes a while
            for layer in layers:
                lacking = [
                    name for name in analysis.captures if f"blocks.{layer}.{name}" not in hooks
                ]
                if lacking:
                    raise OptionError(
                        f"{analysis.name} captures {lacking[0]!r}, which layer {layer} of"
                        f" {model.cfg.model_name} doesn't have; model.hook_dict lists all hooks"
                    )
