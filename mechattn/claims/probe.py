"""Probes a model before the run: whether it can be used, and its time per prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from mechattn.claims.protocol import ACTIVATIONS, ANALYSES, PROTOCOL, arm_conditions, attention_conditions, slash_for
from mechattn.claims.settings import Settings
from mechattn.engine.run import run
from mechattn.errors import ConditionError, MechattnError, PromptTooLong
from mechattn.evaluation.evaluate import evaluate
from mechattn.model.load import dtype_named, layers_and_heads, load_model, text_config, tokenizer_named
from mechattn.prompts.conditions import MeaninglessTokens
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.templates import tokenize

_TRIED = 2  # prompts
_ANSWERED, _WORDS = 8, 16  # problems, and tokens of each
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")
_LOAD = 1.0  # seconds: no model of any size loads and starts faster
_BATCH = 0.5  # of the time that an answer takes among eight, among thirty-two


@dataclass(frozen=True)
class Cost:
    """Seconds that a model takes, and what of it the plan needs.

    Args:
        load: To load it.
        prompt: To measure one prompt under all conditions.
        answer: To answer one problem once.
        architecture: Its class.
        count: How many tokens its tokenizer makes of 55 “/”.
        separator: What stands between them.
        no_activations: Why its MLPs cannot be measured.
    """

    load: float
    prompt: float
    answer: float
    architecture: str
    count: int
    separator: str
    no_activations: str = ""

    @property
    def slash(self) -> MeaninglessTokens:
        """The tokens that are inserted."""
        return MeaninglessTokens(count=self.count, separator=self.separator)


def prompts_of(settings: Settings) -> list[Prompt]:
    """The problems, the same for all models.

    Raises:
        PromptError: There are none.
    """
    asked = max(settings.limit, settings.problems)
    return load_prompts(settings.prompts, limit=asked, field=settings.field, seed=settings.seed)


def check_model(name: str) -> None:
    """Refuse what is no model, or cannot make the filler, before its weights are read.

    Raises:
        ModelError: There is no such model, or it has no tokenizer.
        ConditionError: Its tokenizer cannot make about 55 “/”.
    """
    layers_and_heads(name)
    try:
        slash_for(tokenizer_named(name))
    except ConditionError as error:
        raise ConditionError(f"{name}: {error}") from None


def least_seconds(name: str, settings: Settings, prompts: Seq[Prompt], passes: int) -> float:
    """A lower bound on the time of the first stage: loading, and passes by the config's sizes on this machine's CPU.

    Only loading counts where the passes cannot be timed without the model: on a GPU, and for a mixture of experts.
    """
    loads = _LOAD * (1 + PROTOCOL.draws)
    config = text_config(name)
    sizes = vars(config)
    on_gpu = settings.device not in (None, "cpu") or (settings.device is None and torch.cuda.is_available())
    if on_gpu or any(sizes.get(key) for key in _EXPERTS) or not isinstance(sizes.get("intermediate_size"), int):
        return loads
    layers, width, inner = (int(sizes.get(part) or 0) for part in _SIZES)
    tokenizer = tokenizer_named(name)
    tokens = min(len(tokenizer(prompt.question)["input_ids"]) for prompt in prompts)
    return loads + layers * (2 * width**2 + 2 * width * inner) * tokens * passes / _speed()


def probed(name: str, settings: Settings, prompts: Seq[Prompt]) -> Cost:
    """Load a model, check that the longest problem fits, and time a few prompts and a few words of a few answers.

    Raises:
        MechattnError: The model, or a prompt, cannot be used.
    """
    load, model = timed(lambda: load_model(name, dtype=dtype_named(settings.dtype), device=settings.device))
    architecture = str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture)
    slash = slash_for(model.tokenizer)
    _check_length(model, prompts, settings, slash)
    conditions, seed = attention_conditions(slash), settings.seed
    run(model, prompts[:1], conditions, ANALYSES, seed=seed, progress=False)  # what is done once is not timed
    each = _each(lambda some: run(model, some, conditions, ANALYSES, seed=seed, progress=False), prompts, _TRIED)
    why, more = "", 0.0
    try:
        many = conditions | arm_conditions(architecture)
        more, _ = timed(lambda: run(model, prompts[:_TRIED], many, ACTIVATIONS, layers=0, seed=seed, progress=False))
    except MechattnError as error:
        why = str(error)
    words = min(_WORDS, settings.new_tokens)
    answer = _each(lambda some: evaluate(model, some, new_tokens=words, progress=False), prompts, _ANSWERED)
    answer *= settings.new_tokens / words * _BATCH
    # The thresholds of the first MLP are nearly all that its run costs, and are found once.
    return Cost(load + more, each, answer, architecture, slash.count, slash.separator, why)


def _each(call: Callable[[list[Prompt]], Any], prompts: Seq[Prompt], count: int) -> float:
    """Seconds a prompt; where a few take less than a second, of four times as many."""
    took, _ = timed(lambda: call(list(prompts[:count])))
    if took < 1:
        count *= 4
        took, _ = timed(lambda: call(list(prompts[:count])))
    return took / len(prompts[:count])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    start = time.perf_counter()
    made = call()
    return time.perf_counter() - start, made


def _check_length(model: Any, prompts: Seq[Prompt], settings: Settings, slash: MeaninglessTokens) -> None:
    longest = max(prompts, key=lambda prompt: len(tokenize(prompt, model)))
    tokens = len(tokenize(longest, model)) + max(slash.count, *PROTOCOL.lengths)
    if tokens + settings.new_tokens > model.cfg.n_ctx:
        raise PromptTooLong(
            f'prompt {longest.id} ("{longest.excerpt}") has {tokens:,} tokens with the longest insertion, and '
            f"{settings.new_tokens:,} new ones are allowed; {model.cfg.model_name} takes {model.cfg.n_ctx:,}. Give "
            "fewer new tokens, or shorter problems"
        )


def _speed() -> float:
    """Floating-point operations a second in a product of matrices of this machine, its best of several."""
    a = torch.ones(512, 512)
    with torch.no_grad():
        took = min(timed(lambda: a @ a)[0] for _ in range(8))
    return 2 * 512.0**3 / took
