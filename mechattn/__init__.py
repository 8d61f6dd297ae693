"""mechattn: what attention does, measured on any model that TransformerLens can hook."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechattn import render as render
    from mechattn.analysis.affine_shift import AffineShift as AffineShift
    from mechattn.analysis.attention_focus import AttentionFocus as AttentionFocus
    from mechattn.analysis.attention_map import AttentionMap as AttentionMap
    from mechattn.analysis.attention_sinks import AttentionSinks as AttentionSinks
    from mechattn.analysis.attention_spread import AttentionSpread as AttentionSpread
    from mechattn.analysis.block_updates import BlockUpdates as BlockUpdates
    from mechattn.analysis.direct_logits import DirectLogits as DirectLogits
    from mechattn.analysis.head_updates import HeadUpdates as HeadUpdates
    from mechattn.analysis.head_updates import TopTargetUpdates as TopTargetUpdates
    from mechattn.analysis.mlp_activations import MlpActivations as MlpActivations
    from mechattn.analysis.query_analysis import QueryAnalysis as QueryAnalysis
    from mechattn.analysis.received_attention import ReceivedAttention as ReceivedAttention
    from mechattn.analysis.score_decomposition import ScoreDecomposition as ScoreDecomposition
    from mechattn.analysis.segment_flow import SegmentFlow as SegmentFlow
    from mechattn.analysis.segment_logits import SegmentLogits as SegmentLogits
    from mechattn.claims.judge import judge as judge
    from mechattn.claims.judge import paper as paper
    from mechattn.claims.verdicts import Verdicts as Verdicts
    from mechattn.contrast.adjust import adjust as adjust
    from mechattn.contrast.contrast import Contrast as Contrast
    from mechattn.contrast.sink_kinds import sink_kinds as sink_kinds
    from mechattn.contrast.sink_kinds import sweep_sink_kinds as sweep_sink_kinds
    from mechattn.engine.own_forward import measure as measure
    from mechattn.engine.random_runs import run_random as run_random
    from mechattn.engine.record import head_means as head_means
    from mechattn.engine.record import record_affine as record_affine
    from mechattn.engine.record import record_keys_values as record_keys_values
    from mechattn.engine.run import run as run
    from mechattn.errors import MechattnError as MechattnError
    from mechattn.evaluation.answer_file import load_evaluation as load_evaluation
    from mechattn.evaluation.baseline_noise import baseline_noise as baseline_noise
    from mechattn.evaluation.evaluate import evaluate as evaluate
    from mechattn.evaluation.evaluation import Evaluation as Evaluation
    from mechattn.evaluation.trend import trend as trend
    from mechattn.evaluation.while_answering import WhileAnswering as WhileAnswering
    from mechattn.evaluation.while_answering import while_answering as while_answering
    from mechattn.interventions.ablation import HeadAblation as HeadAblation
    from mechattn.interventions.affine_attention import AffineAttention as AffineAttention
    from mechattn.interventions.arm import ARM as ARM
    from mechattn.interventions.knockout import Knockout as Knockout
    from mechattn.interventions.transplant import KeysValues as KeysValues
    from mechattn.interventions.transplant import Transplant as Transplant
    from mechattn.jobs.chunks import run_job as run_job
    from mechattn.jobs.job import Job as Job
    from mechattn.known_answers.selftest import selftest as selftest
    from mechattn.model.load import load_model as load_model
    from mechattn.model.load import verify_model as verify_model
    from mechattn.model.random_weights import random_weights as random_weights
    from mechattn.pages.one_prompt import explore as explore
    from mechattn.pages.one_prompt import pattern as pattern
    from mechattn.pages.one_prompt import pattern_difference as pattern_difference
    from mechattn.pages.page import browse as browse
    from mechattn.pages.page import page as page
    from mechattn.patching.effects import Patching as Patching
    from mechattn.patching.patch import patch as patch
    from mechattn.patching.sites import Sites as Sites
    from mechattn.prompts.conditions import Baseline as Baseline
    from mechattn.prompts.conditions import Counting as Counting
    from mechattn.prompts.conditions import Insertion as Insertion
    from mechattn.prompts.conditions import MeaninglessTokens as MeaninglessTokens
    from mechattn.prompts.conditions import RandomSentence as RandomSentence
    from mechattn.prompts.conditions import RandomTokens as RandomTokens
    from mechattn.prompts.conditions import RepeatedWord as RepeatedWord
    from mechattn.prompts.conditions import RepeatQuestion as RepeatQuestion
    from mechattn.prompts.conditions import ShuffledSentence as ShuffledSentence
    from mechattn.prompts.conditions import Text as Text
    from mechattn.prompts.datasets import load_prompts as load_prompts
    from mechattn.prompts.prompt import Prompt as Prompt
    from mechattn.prompts.sequences import Sequence as Sequence
    from mechattn.prompts.sweeps import sweep as sweep
    from mechattn.results.merge import merge_results as merge_results
    from mechattn.results.result import Result as Result
    from mechattn.store.reading import load_result as load_result
    from mechattn.store.saving import save_result as save_result

__version__ = "0.1.0"

# Loaded when first used, so that `import mechattn` imports neither torch nor TransformerLens.
_HOME = {
    "ARM": "interventions.arm",
    "AffineAttention": "interventions.affine_attention",
    "AffineShift": "analysis.affine_shift",
    "AttentionFocus": "analysis.attention_focus",
    "AttentionMap": "analysis.attention_map",
    "AttentionSinks": "analysis.attention_sinks",
    "AttentionSpread": "analysis.attention_spread",
    "Baseline": "prompts.conditions",
    "Contrast": "contrast.contrast",
    "BlockUpdates": "analysis.block_updates",
    "DirectLogits": "analysis.direct_logits",
    "Counting": "prompts.conditions",
    "Evaluation": "evaluation.evaluation",
    "HeadAblation": "interventions.ablation",
    "HeadUpdates": "analysis.head_updates",
    "Insertion": "prompts.conditions",
    "Job": "jobs.job",
    "KeysValues": "interventions.transplant",
    "Knockout": "interventions.knockout",
    "MeaninglessTokens": "prompts.conditions",
    "Text": "prompts.conditions",
    "MechattnError": "errors",
    "MlpActivations": "analysis.mlp_activations",
    "Patching": "patching.effects",
    "Prompt": "prompts.prompt",
    "QueryAnalysis": "analysis.query_analysis",
    "RandomSentence": "prompts.conditions",
    "RandomTokens": "prompts.conditions",
    "ReceivedAttention": "analysis.received_attention",
    "RepeatQuestion": "prompts.conditions",
    "RepeatedWord": "prompts.conditions",
    "Result": "results.result",
    "ScoreDecomposition": "analysis.score_decomposition",
    "SegmentFlow": "analysis.segment_flow",
    "SegmentLogits": "analysis.segment_logits",
    "Sequence": "prompts.sequences",
    "Sites": "patching.sites",
    "ShuffledSentence": "prompts.conditions",
    "TopTargetUpdates": "analysis.head_updates",
    "Transplant": "interventions.transplant",
    "WhileAnswering": "evaluation.while_answering",
    "Verdicts": "claims.verdicts",
    "adjust": "contrast.adjust",
    "baseline_noise": "evaluation.baseline_noise",
    "browse": "pages.page",
    "evaluate": "evaluation.evaluate",
    "explore": "pages.one_prompt",
    "head_means": "engine.record",
    "judge": "claims.judge",
    "load_evaluation": "evaluation.answer_file",
    "load_model": "model.load",
    "load_prompts": "prompts.datasets",
    "load_result": "store.reading",
    "merge_results": "results.merge",
    "measure": "engine.own_forward",
    "page": "pages.page",
    "paper": "claims.judge",
    "patch": "patching.patch",
    "pattern": "pages.one_prompt",
    "pattern_difference": "pages.one_prompt",
    "random_weights": "model.random_weights",
    "sink_kinds": "contrast.sink_kinds",
    "sweep_sink_kinds": "contrast.sink_kinds",
    "record_affine": "engine.record",
    "record_keys_values": "engine.record",
    "render": "",
    "run": "engine.run",
    "selftest": "known_answers.selftest",
    "run_job": "jobs.chunks",
    "run_random": "engine.random_runs",
    "save_result": "store.saving",
    "sweep": "prompts.sweeps",
    "trend": "evaluation.trend",
    "verify_model": "model.load",
    "while_answering": "evaluation.while_answering",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mechattn' has no attribute {name!r}")
    if not _HOME[name]:
        return import_module(f"mechattn.{name}")
    return getattr(import_module(f"mechattn.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
