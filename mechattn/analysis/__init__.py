"""All analyses that come with mechattn, for code that goes through every one of them."""

from __future__ import annotations

from collections.abc import Callable

from mechattn.analysis.affine_shift import AffineShift
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_budget import AttentionBudget
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.attention_sinks import AttentionSinks
from mechattn.analysis.block_updates import BlockUpdates
from mechattn.analysis.direct_logits import DirectLogits, SegmentLogits
from mechattn.analysis.mlp_activations import MlpActivations
from mechattn.analysis.received_attention import AttentionMap, ReceivedAttention, SegmentFlow
from mechattn.analysis.score_decomposition import ScoreDecomposition
from mechattn.analysis.updates import HeadUpdates, TopTargetUpdates

ANALYSES: tuple[Callable[[], Analysis], ...] = (
    ReceivedAttention,
    AffineShift,
    SegmentFlow,
    MlpActivations,
    AttentionFocus,
    HeadUpdates,
    TopTargetUpdates,
    BlockUpdates,
    DirectLogits,
    SegmentLogits,
    AttentionSinks,
    ScoreDecomposition,
    AttentionMap,
    AttentionBudget,
)
