"""What can be measured: the analyses that `ma.run` takes, and the kinds of sinks in their results."""

from mechattn.analysis.affine_shift import AffineShift as AffineShift
from mechattn.analysis.analysis import QueryAnalysis as QueryAnalysis
from mechattn.analysis.attention_focus import (
    AttentionFocus as AttentionFocus,
    AttentionSpread as AttentionSpread,
    ScoreDecomposition as ScoreDecomposition,
)
from mechattn.analysis.attention_sinks import AttentionSinks as AttentionSinks
from mechattn.analysis.direct_logits import DirectLogits as DirectLogits, SegmentLogits as SegmentLogits
from mechattn.analysis.mlp_activations import MlpActivations as MlpActivations
from mechattn.analysis.received_attention import (
    AttentionMap as AttentionMap,
    ReceivedAttention as ReceivedAttention,
    SegmentFlow as SegmentFlow,
)
from mechattn.analysis.updates import (
    BlockUpdates as BlockUpdates,
    HeadUpdates as HeadUpdates,
    TopTargetUpdates as TopTargetUpdates,
)
from mechattn.contrast.head_tables import sink_kinds as sink_kinds, sweep_sink_kinds as sweep_sink_kinds
