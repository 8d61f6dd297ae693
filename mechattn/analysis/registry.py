"""All analyses that come with mechattn: what the family table and the compatibility tests run over."""

from __future__ import annotations

from collections.abc import Callable

from mechattn.analysis.affine_shift import AffineShift
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_map import AttentionMap
from mechattn.analysis.mlp_activations import MlpActivations
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.analysis.segment_flow import SegmentFlow

ANALYSES: tuple[Callable[[], Analysis], ...] = (
    ReceivedAttention,
    AffineShift,
    SegmentFlow,
    MlpActivations,
    AttentionMap,
)
