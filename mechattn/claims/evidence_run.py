"""Measures one model by its plan, and resumes an interrupted call."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechattn.analysis.analysis import Analysis
from mechattn.axes import BASELINE
from mechattn.claims.measures import Evidence
from mechattn.claims.plan import Plan
from mechattn.claims.probe import Cost, prompts_of
from mechattn.claims.protocol import (
    ACTIVATIONS,
    ANALYSES,
    PROTOCOL,
    arm_conditions,
    attention_conditions,
    length_conditions,
    place_conditions,
)  # fmt: skip
from mechattn.claims.settings import Settings
from mechattn.engine.run import run
from mechattn.errors import ModelError, OptionError, OutputError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.jobs.chunks import WHOLE, Shard, run_job
from mechattn.jobs.executor import Executor
from mechattn.jobs.job import Job
from mechattn.model.load import dtype_named, load_model
from mechattn.model.random_weights import random_weights
from mechattn.prompts.conditions import Condition, RandomSentence
from mechattn.prompts.prompt import Prompt
from mechattn.results import provenance
from mechattn.results.merge import merge_results
from mechattn.results.reading import load_result
from mechattn.results.result import Result
from mechattn.results.storage import save_result

_CHUNK = 16  # prompts
_FIRST_DRAW = 1000  # seeds of random weights: far from those that a user takes


@dataclass(frozen=True)
class Work:
    """Everything that measures one model.

    Args:
        name: The model.
        folder: Where its files go.
        settings: The arguments of ``ma.paper``.
        plan: The plan of the run.
        executor: What computes chunks.
        shard: Which share of them.
        fresh: Start again, ignoring stored parts.
    """

    name: str
    folder: Path
    settings: Settings
    plan: Plan
    executor: Executor
    shard: Shard = WHOLE
    fresh: bool = False

    @property
    def cost(self) -> Cost:
        """What the probe has found."""
        return self.plan.costs[self.name]

    def prompts(self, of: Any) -> list[Prompt]:
        """The first prompts, as many as the plan says."""
        return prompts_of(self.settings)[: self.plan.count(self.name, of)]


def measured(work: Work) -> Evidence:
    """All evidence about one model, or about the part of the prompts that a shard measures."""
    missing = {"activations": work.cost.no_activations} if work.cost.no_activations else {}
    attention = _job(work, "attention", attention_conditions(work.cost.slash), ANALYSES, None)
    many = attention_conditions(work.cost.slash) | arm_conditions(work.cost.architecture)
    activations = None if missing else _job(work, "activations", many, (ACTIVATIONS,), [0])
    gc.collect()
    model = load_model(work.name, dtype=dtype_named(work.settings.dtype), device=work.settings.device)
    draws = _draws(work, model, many)
    gc.collect()
    answers, why = _answers(work, model)
    samples = None if why else _samples(work, model)
    missing |= dict.fromkeys(("answers", "length", "place", "samples"), why) if why else {}
    return Evidence(
        attention=attention,
        activations=activations,
        answers=answers,
        samples=samples,
        random_attention=tuple(draw[0] for draw in draws),
        random_activations=tuple(draw[1] for draw in draws if draw[1] is not None),
        missing=missing,
    )


def _job(
    work: Work, name: str, conditions: Mapping[str, Condition], analyses: Seq[Analysis], layers: list[int] | None
) -> Result | None:
    """A run in chunks; shards that other processes have computed are merged."""
    settings = work.settings
    job = Job(
        model=work.name, prompts=work.prompts("attention"), conditions=conditions, analyses=analyses, layers=layers,
        seed=settings.seed, positions="prompts" if name == "attention" else "moments", dtype=settings.dtype,
        device=settings.device, chunk=_CHUNK,
    )  # fmt: skip
    place = work.folder / f"{name}.zarr"
    of = _shards(work.folder, rf"{name}-\d+-of-(\d+)\.zarr(\.parts)?")
    if work.shard != WHOLE:
        number, many = work.shard
        if number > len(job.chunks):  # a share of the answers alone
            return None
        return run_job(job, place, shard=f"{number}/{many}", executor=work.executor, fresh=work.fresh)
    if of is None or work.fresh:
        return run_job(job, place, executor=work.executor, fresh=work.fresh)
    parts = [
        run_job(job, place, shard=f"{number}/{of}", executor=work.executor)
        for number in range(1, min(of, len(job.chunks)) + 1)
    ]
    return merge_results(parts)


def _draws(work: Work, model: Any, many: Mapping[str, Condition]) -> list[tuple[Result, Result | None]]:
    """The same for random weights, draw by draw; none for a model whose weights cannot be drawn again."""
    prompts, (number, of) = work.prompts("attention"), work.shard
    found = []
    for draw in range(number - 1, PROTOCOL.draws, of):
        key = provenance.digest([work.settings.decides(), work.name, draw, len(prompts), provenance.versions()])
        places = [work.folder / f"random-{draw}-{name}.zarr" for name in ("attention", "activations")]
        stored = [] if work.fresh else [_stored(place, key) for place in places]
        drawn: Any = None
        gc.collect()  # hooked models hold themselves: the one before would stay beside the next
        if not all(stored):
            try:
                drawn = random_weights(model, seed=_FIRST_DRAW + draw)
            except ModelError:
                return []
        del stored
        some = attention_conditions(work.cost.slash)
        attention = _of_draw(work, drawn, places[0], key, some, ANALYSES, None)
        activations = None
        if not work.cost.no_activations:
            activations = _of_draw(work, drawn, places[1], key, many, (ACTIVATIONS,), [0])
        found.append((attention, activations))
    return found


def _of_draw(
    work: Work,
    drawn: Any,
    place: Path,
    key: str,
    conditions: Mapping[str, Condition],
    analyses: Seq[Analysis],
    layers: list[int] | None,
) -> Result:
    if not work.fresh and (there := _stored(place, key)) is not None:
        return there
    positions: Any = "prompts" if layers is None else "moments"
    options: dict[str, Any] = {"seed": work.settings.seed, "positions": positions, "layers": layers}
    result = run(drawn, work.prompts("attention"), conditions, analyses, **options)
    result = replace(result, provenance={**result.provenance, "job": key})
    save_result(result, place)
    return result


def _stored(place: Path, key: str) -> Result | None:
    """What an earlier call has kept of this very run."""
    try:
        there = load_result(place)
    except OutputError:
        return None
    return there if there.provenance.get("job") == key else None


def _answers(work: Work, model: Any) -> tuple[Evaluation | None, str]:
    """Greedy answers under all planned conditions, or why there are none."""
    if not work.plan.count(work.name, "answers"):
        return None, "answers were left out, as the budget is too small for them"
    alone = _evaluated(work, model, "answers", "baseline", {})
    right, of = int(alone.right(BASELINE).any(1).sum()), len(work.prompts("answers"))
    if work.shard == WHOLE and not right:
        return None, f"it solves none of {of} problems without inserted tokens"
    slash, sentence = work.cost.slash, RandomSentence(count=work.cost.count)
    conditions: dict[str, Condition] = {"slash": slash, "sentence": sentence}
    conditions |= arm_conditions(work.cost.architecture) if not work.cost.no_activations else {}
    if work.plan.count(work.name, "length"):
        conditions |= length_conditions(slash, model.tokenizer)
    if work.plan.count(work.name, "place"):
        conditions |= place_conditions(slash)
    return _evaluated(work, model, "answers", "answers", conditions), ""


def _samples(work: Work, model: Any) -> Evaluation | None:
    """Several sampled answers to each of some problems."""
    if not work.plan.count(work.name, "samples"):
        return None
    conditions: dict[str, Condition] = {"slash": work.cost.slash}
    if not work.cost.no_activations:
        conditions["arm"] = arm_conditions(work.cost.architecture)["arm"]
    samples = work.settings.samples
    return _evaluated(work, model, "samples", "samples", conditions, samples=samples, temperature=1.0)


def _evaluated(
    work: Work, model: Any, of: Any, name: str, conditions: Mapping[str, Condition], **options: Any
) -> Evaluation:
    """Answers to the problems of a shard, each stored as it comes; those of all shards are combined."""
    prompts = work.prompts(of)
    options |= {"seed": work.settings.seed, "new_tokens": work.settings.new_tokens}

    def share(number: int, many: int) -> Evaluation:
        out = work.folder / (f"{name}.jsonl" if many == 1 else f"{name}-{number}-of-{many}.jsonl")
        if work.fresh:
            out.unlink(missing_ok=True)
        return evaluate(model, prompts[number - 1 :: many], conditions, out=out, **options)

    if work.shard != WHOLE:
        return share(*work.shard)
    many = None if work.fresh else _shards(work.folder, rf"{name}-\d+-of-(\d+)\.jsonl")
    parts = [share(number, many or 1) for number in range(1, (many or 1) + 1)]
    groups = {prompt: group for part in parts for prompt, group in part.provenance.get("groups", {}).items()}
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    answers = sorted((a for part in parts for a in part.answers), key=lambda a: (order[a.prompt], a.sample))
    about = {**parts[0].provenance, "groups": groups} if groups else parts[0].provenance
    return Evaluation(tuple(answers), about)


def _shards(folder: Path, pattern: str) -> int | None:
    """Of how many shards a folder holds some."""
    found = {int(read[1]) for path in folder.glob("*") if (read := re.fullmatch(pattern, path.name))}
    if len(found) > 1:
        raise OptionError(f"{folder} holds shards of {' and of '.join(map(str, sorted(found)))}; remove those of one")
    return found.pop() if found else None
