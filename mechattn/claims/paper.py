"""Judges the paper's claims for some models: plans, measures, judges and writes."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mechattn.claims.claim import Needs
from mechattn.claims.evidence_run import Work, measured
from mechattn.claims.judged import judged
from mechattn.claims.measures import Evidence
from mechattn.claims.page import check_place, write
from mechattn.claims.plan import Plan, keep_plan, kept_plan, least_passes, planned, refuse_small
from mechattn.claims.probe import check_model, least_seconds, probed, prompts_of
from mechattn.claims.protocol import PROTOCOL
from mechattn.claims.register import CLAIMS
from mechattn.claims.settings import Settings, named, seconds
from mechattn.claims.verdicts import OfModel, Verdicts
from mechattn.jobs.chunks import WHOLE, parse_shard
from mechattn.jobs.executor import Executor, ExecutorName, executor_named
from mechattn.model.load import check_device, dtype_named
from mechattn.render.theme import model_caption
from mechattn.results import provenance
from mechattn.results.file_names import file_names
from mechattn.results.result import Result
from mechattn.results.whole import check_writable, say

_PAPERS_MODELS = ("Qwen2.5-Math-7B", "Qwen2.5-Math-1.5B", "Llama-3.1-8B-Instruct", "gemma-3-4b-it")


@dataclass(frozen=True)
class _Measured:
    """One model: its verdicts, and the results that the page shows."""

    of: OfModel
    results: tuple[Result, ...]


def paper(
    models: Seq[str] | str | None = None,
    out: str | os.PathLike[str] = "out/paper",
    *,
    budget: str | float | None = None,
    prompts: str = "word-problems",
    field: str = "question",
    limit: int = 32,
    problems: int = 100,
    samples: int = 4,
    new_tokens: int = 90,
    seed: int = 0,
    dtype: str = "auto",
    device: str | None = None,
    shard: str | None = None,
    executor: ExecutorName | Executor = "local",
    address: str | None = None,
    workers: int | None = None,
    fresh: bool = False,
    force: bool = False,
    command: str = "",
) -> Verdicts | None:
    """Judge the registered claims of arXiv:2510.01032 for some models, by rules fixed beforehand.

    Writes ``paper.json``, ``paper.md`` and ``index.html``, a page that opens offline, to a folder. The plan and its
    estimated time are printed before anything is measured. An interrupted call resumes where it stopped.

    Args:
        models: Names or directories; the four toys by default.
        out: The folder.
        budget: The time for all models together, as "30min", "2h" or seconds, divided equally; stages that do not fit
            are left out by priority. No limit by default.
        prompts: "word-problems", a .jsonl file, or a hub dataset, with solutions.
        field: The field of a file or dataset with the question.
        limit: The largest number of prompts to measure attention on.
        problems: The largest number of problems to answer.
        samples: The number of sampled answers to each of two fifths of these problems.
        new_tokens: The longest answer, in tokens.
        seed: The seed of all draws.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: The torch device.
        shard: "3/16" measures the third of 16 parts without judging; afterwards make the same call without it.
        executor: "local", "ray", or your own executor, which computes the chunks of attention runs.
        address: The address of a Ray cluster.
        workers: The number of workers in a cluster.
        fresh: Start again, ignoring stored parts.
        force: Replace a page that mechattn did not write.
        command: The command line, for the record.

    Returns:
        The verdicts; None with ``shard``.

    Raises:
        MechattnError: A model, its tokenizer, the prompts, the budget or the folder cannot be used; raised before
            anything is measured.
    """
    settings = Settings(
        named(models), Path(out), prompts, field, limit, problems, samples, new_tokens, seconds(budget), seed, dtype,
        device,
    )  # fmt: skip
    part = parse_shard(shard)
    where = executor_named(executor, address, workers) if isinstance(executor, str) else executor
    names = file_names(settings.models)
    _check(settings, force)
    plan = _plan(settings, fresh)
    say(f"what will run:\n{plan}")
    found = [
        _of_model(Work(name, settings.out / names[name], settings, plan, where, part, fresh))
        for name in settings.models
    ]
    if part != WHOLE:
        return None
    about = {
        "made": provenance.now(),
        "versions": provenance.versions(),
        "settings": {**settings.decides(), "models": [one.of.name for one in found]},
        "plan": [{"model": provenance.name_of(s.model), "of": s.of, "count": s.count} for s in plan.stages],
        "command": command,
    }
    verdicts = Verdicts(tuple(one.of for one in found), about)
    write(verdicts, [one.results for one in found], settings.out, command, force)
    return verdicts


def _check(settings: Settings, force: bool) -> None:
    """Everything that can be refused without reading a weight."""
    dtype_named(settings.dtype)
    check_device(settings.device)
    for name in settings.models:
        check_model(name)
    check_writable(settings.out / "paper.json")
    check_place(settings.out, force)
    if settings.budget is not None:
        for name in settings.models:
            least = least_seconds(name, settings, prompts_of(settings), least_passes(settings))
            refuse_small(settings, least, name)


def _plan(settings: Settings, fresh: bool) -> Plan:
    """The plan of an earlier call for the same, or a new one after a short probe of each model."""
    place = settings.out / "plan.json"
    plan = None if fresh else kept_plan(place, settings)
    if plan is None:
        costs = {}
        for name in settings.models:
            costs[name] = probed(name, settings, prompts_of(settings))
            gc.collect()  # hooked models hold themselves
        plan = planned(settings, costs)
        # Another shard may have made one in the meantime: all take the same.
        meanwhile = None if fresh else kept_plan(place, settings)
        if meanwhile is not None:
            return meanwhile
        keep_plan(place, settings, plan)
    return plan


def _of_model(work: Work) -> _Measured:
    """Measure and judge one model."""
    work.folder.mkdir(parents=True, exist_ok=True)
    say(f"{work.name} …")
    evidence = measured(work)
    name = provenance.name_of(work.name)
    if evidence.attention is None:
        return _Measured(OfModel(name, name, (), (), {}), ())
    of = OfModel(
        name,
        model_caption(evidence.attention),
        tuple(judged(claim, evidence) for claim in CLAIMS),
        _deviations(work, evidence),
        _about(work, evidence.attention),
    )
    results = (evidence.attention, evidence.activations) if evidence.activations else (evidence.attention,)
    return _Measured(of, results)


def _deviations(work: Work, evidence: Evidence) -> tuple[str, ...]:
    """How this model's run differs from what the paper did."""
    settings, cost = work.settings, work.cost
    made = []
    if not any(name in work.name for name in _PAPERS_MODELS):
        made.append("Another model than the paper's.")
    of: tuple[tuple[Needs, str], ...] = (("attention", "prompts"), ("answers", "problems"))
    counts = [f"{work.plan.count(work.name, stage)} {what}" for stage, what in of]
    made.append(f"{provenance.name_of(settings.prompts)} ({', '.join(counts)}) in place of MATH-500 and AIME 2024.")
    if cost.count != PROTOCOL.count or cost.separator != PROTOCOL.separator:
        by = "with blanks" if cost.separator else "without blanks"
        made.append(f"{cost.count} tokens of “/” {by}: its tokenizer does not make 55 of “/ /”.")
    if not evidence.random_attention:
        made.append("Its weights cannot be redrawn, so claims that need that null cannot be supported.")
    return tuple(made)


def _about(work: Work, result: Result) -> dict[str, Any]:
    model = dict(result.provenance["model"])
    keep = ("architecture", "parameters", "layers", "heads", "dtype", "weights", "weights_hash", "verified")
    files = work.folder.name
    return {name: model.get(name) for name in keep} | {"files": files, "threads": torch.get_num_threads()}
