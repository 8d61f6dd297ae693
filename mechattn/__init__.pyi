# The public names, which __init__.py loads when they are first used.
from . import analyses as analyses
from . import conditions as conditions
from . import interventions as interventions
from . import render as render
from .analysis.received_attention import ReceivedAttention as ReceivedAttention
from .claims.evidence import ClaimSettings as ClaimSettings
from .claims.judge import judge as judge
from .claims.judge import paper as paper
from .contrast.adjust import adjust as adjust
from .contrast.contrast import Contrast as Contrast
from .engine.queries_and_keys import AttentionScores as AttentionScores
from .engine.queries_and_keys import measure as measure
from .engine.record import (
    head_means as head_means,
)
from .engine.record import (
    record_affine as record_affine,
)
from .engine.record import (
    record_keys_values as record_keys_values,
)
from .engine.run import RunOptions as RunOptions
from .engine.run import run as run
from .engine.run import run_random as run_random
from .errors import MechattnError as MechattnError
from .evaluation.answer_file import load_evaluation as load_evaluation
from .evaluation.answer_units import trend as trend
from .evaluation.evaluate import baseline_noise as baseline_noise
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.evaluation import Evaluation as Evaluation
from .evaluation.server import Server as Server
from .evaluation.while_answering import while_answering as while_answering
from .jobs.job import Job as Job
from .jobs.resumable_run import run_job as run_job
from .known_answers.selftest import selftest as selftest
from .model.load import load_model as load_model
from .model.load import verify_model as verify_model
from .model.weights import random_weights as random_weights
from .pages.page import browse as browse
from .pages.show_prompt import explore as explore
from .pages.show_prompt import pattern as pattern
from .patching.circuit import Circuit as Circuit
from .patching.circuit import circuit as circuit
from .patching.edges import edges as edges
from .patching.effects import Patching as Patching
from .patching.patch import patch as patch
from .patching.paths import paths as paths
from .patching.sites import Sites as Sites
from .prompts.conditions import (
    Baseline as Baseline,
)
from .prompts.conditions import (
    MeaninglessTokens as MeaninglessTokens,
)
from .prompts.conditions import (
    RandomSentence as RandomSentence,
)
from .prompts.datasets import load_prompts as load_prompts
from .prompts.datasets import repeated_random as repeated_random
from .prompts.pairs import pairs as pairs
from .prompts.prompt import Prompt as Prompt
from .prompts.sweeps import sweep as sweep
from .results.merge import merge_results as merge_results
from .results.result import Result as Result
from .stats.resolution import power as power
from .store.reading import load_result as load_result

__version__: str
