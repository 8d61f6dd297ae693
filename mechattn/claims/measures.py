"""The table of measures: every name that a register may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from mechattn.claims import measures_activations as mlp
from mechattn.claims import measures_answers as answers
from mechattn.claims import measures_attention as attention
from mechattn.claims import measures_heads as heads
from mechattn.claims.measure import ANY, APART, SHARE, Kind, Measure, Range
from mechattn.errors import OptionError

_RECEIVED, _AFFINE, _MLP = ("received_attention",), ("affine_shift",), ("mlp_activations",)
_FOCUS, _SINKS, _UPDATES = ("attention_focus",), ("attention_sinks",), ("head_updates",)
_POSITIVE, _UNBOUNDED = (0.0, inf), (-inf, inf)


def _row(of: Callable[..., Any], needs: tuple[str, ...], kind: Kind, range: Range = ANY) -> tuple[str, Measure]:
    says = (of.__doc__ or "").partition("\n")[0]
    return of.__name__, Measure(of, needs, kind, says, range)


MEASURES: Mapping[str, Measure] = dict([
    _row(attention.fall, _RECEIVED, "log-ratio"),
    _row(attention.fall_beyond_uniform, _RECEIVED, "log-ratio"),
    _row(attention.deeper, _RECEIVED, "log-ratio"),
    _row(attention.peaks, _RECEIVED, "log-ratio"),
    _row(attention.peak_moved, _RECEIVED, "share", SHARE),
    _row(attention.peak_moved_apart, _RECEIVED, "points", APART),
    _row(attention.filler_beside_question, _RECEIVED, "log-ratio"),
    _row(attention.evenness, _RECEIVED, "share", attention.evenness_range),
    _row(attention.evenness_apart, _RECEIVED, "points", APART),
    _row(attention.band, _RECEIVED, "log-ratio"),
    _row(attention.affine_missed, _AFFINE, "share", _POSITIVE),
    _row(attention.affine_identity, _AFFINE, "share", _POSITIVE),
    _row(attention.affine_explained, _AFFINE, "share", (-inf, 1.0)),
    _row(attention.affine_explained_apart, _AFFINE, "points", _UNBOUNDED),
    _row(attention.best_affine_missed, _AFFINE, "share", _POSITIVE),
    _row(attention.one_direction, _AFFINE, "share", SHARE),
    _row(attention.one_direction_apart, _AFFINE, "points", APART),
    _row(attention.lambda_spread, _AFFINE, "share", attention.lambda_spread_range),
    _row(mlp.activations, _MLP, "log-ratio"),
    _row(mlp.large, _MLP, "log-ratio"),
    _row(mlp.classes_near_zero, _MLP, "log-ratio"),
    _row(mlp.distribution_agreement, _MLP, "number", mlp.distribution_range),
    _row(mlp.distribution_agreement_apart, _MLP, "number", (-2.0, 2.0)),
    _row(mlp.agreement, _MLP, "number", mlp.agreement_range),
    _row(mlp.agreement_share, _MLP, "share", APART),
    _row(heads.early_less_late, _FOCUS, "points", APART),
    _row(heads.first_and_update, _FOCUS + _UPDATES, "number", APART),
    _row(heads.update_at_first, _FOCUS + _UPDATES, "log-ratio"),
    _row(heads.heads_related, _FOCUS, "number", APART),
    _row(heads.turned, (), "number", SHARE),
    _row(heads.sink_rate, _SINKS, "share", SHARE),
    _row(heads.first_beyond_uniform, _SINKS, "log-ratio"),
    _row(heads.distance_early, _FOCUS, "log-ratio"),
    _row(heads.sink_value, _SINKS, "number", _POSITIVE),
    _row(heads.sink_rank, _SINKS, "log-ratio"),
    _row(heads.strongest, _FOCUS, "share", APART),
    _row(heads.strongest_apart, _FOCUS, "points", (-2.0, 2.0)),
    _row(heads.copies, (*_FOCUS, "direct_logits"), "number", _UNBOUNDED),
    _row(answers.accuracy_apart, ("answers",), "points", answers.accuracy_range),
    _row(answers.pass_apart, ("answers",), "points", answers.accuracy_range),
])  # fmt: skip


def measure_named(name: str) -> Measure:
    """One of the table.

    Raises:
        OptionError: There is none of this name.
    """
    if name not in MEASURES:
        raise OptionError(f"measure = {name!r}: there is no such measure; choose one of {', '.join(sorted(MEASURES))}")
    return MEASURES[name]
