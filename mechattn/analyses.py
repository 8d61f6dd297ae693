"""What can be measured: the analyses that `ma.run` takes, and `sink_kinds`, which
classifies sinks in their results."""

from mechattn.analysis.affine_shift import AffineShift as AffineShift
from mechattn.analysis.attention_budget import AttentionBudget as AttentionBudget
from mechattn.analysis.attention_focus import AttentionFocus as AttentionFocus
from mechattn.analysis.attention_sinks import AttentionSinks as AttentionSinks
from mechattn.analysis.block_updates import BlockUpdates as BlockUpdates
from mechattn.analysis.direct_logits import DirectLogits as DirectLogits
from mechattn.analysis.direct_logits import SegmentLogits as SegmentLogits
from mechattn.analysis.mlp_activations import MlpActivations as MlpActivations
from mechattn.analysis.query_analysis import QueryAnalysis as QueryAnalysis
from mechattn.analysis.received_attention import AttentionMap as AttentionMap
from mechattn.analysis.received_attention import ReceivedAttention as ReceivedAttention
from mechattn.analysis.received_attention import SegmentFlow as SegmentFlow
from mechattn.analysis.score_decomposition import ScoreDecomposition as ScoreDecomposition
from mechattn.analysis.updates import HeadUpdates as HeadUpdates
from mechattn.analysis.updates import TopTargetUpdates as TopTargetUpdates
from mechattn.contrast.head_tables import sink_kinds as sink_kinds
