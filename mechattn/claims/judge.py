"""Judges the claims of a register for some models: checks, measures, judges and writes."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mechattn.claims.budget import check_budget
from mechattn.claims.conditions import conditions_for
from mechattn.claims.evidence import Work, measured
from mechattn.claims.judged import Evidence, corrected, judged
from mechattn.claims.page import write
from mechattn.claims.register import PAPER, Register, read_register
from mechattn.claims.settings import Settings, named, seconds
from mechattn.claims.verdicts import OfModel, Verdicts, family_words
from mechattn.errors import OutputError, PromptTooLong
from mechattn.jobs.chunks import WHOLE, parse_shard
from mechattn.jobs.executor import Executor, ExecutorName, executor_named
from mechattn.model.load import architecture_named, check_device, dtype_named, layers_and_heads
from mechattn.model.without_weights import unloaded
from mechattn.prompts.prompt import Template
from mechattn.prompts.templates import tokenize
from mechattn.render.html import check_page_place
from mechattn.render.theme import model_caption
from mechattn.results import provenance
from mechattn.results.result import Result
from mechattn.store.atomic_writes import check_writable, say, write_whole
from mechattn.store.file_names import file_names


def paper(
    models: Seq[str] | str | None = None, out: str | os.PathLike[str] = "out/paper", **options: Any
) -> Verdicts | None:
    """Judge the claims of arXiv:2510.01032 for some models: :func:`judge` with the register that mechattn ships.

    Args:
        models: Names or directories; the four toys by default.
        out: The folder.
        **options: Those of :func:`judge`.
    """
    return judge(PAPER, models, out, **options)


def judge(
    register: str | os.PathLike[str] | Register,
    models: Seq[str] | str | None = None,
    out: str | os.PathLike[str] = "out/claims",
    *,
    budget: str | float | None = None,
    prompts: str = "word-problems",
    field: str = "question",
    answer_field: str = "answer",
    group_field: str | None = None,
    system: str | None = None,
    template: Template = "plain",
    limit: int = 32,
    problems: int = 100,
    samples: int = 4,
    new_tokens: int = 90,
    without: Seq[str] = (),
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
    """Judge the claims of a register for some models, by rules that stand in it before anything is measured.

    Writes ``verdicts.json``, ``verdicts.md`` and ``index.html``, a page that opens offline, to a folder. What will run
    is printed first. An interrupted call resumes where it stopped.

    Args:
        register: A TOML file, or the name of a register that mechattn ships: "2510.01032".
        models: Names or directories; the four toys by default.
        out: The folder.
        budget: The time for all models together, as "30min", "2h" or seconds. Each model is timed first, and a call
            that would take longer is refused with the time of each run; it never changes how much is measured.
        prompts: "word-problems", a .jsonl file, or a hub dataset, with solutions.
        field: The field of a file or dataset with the question.
        answer_field: The field with the solution.
        group_field: The field with what problems share, as for ``load_prompts``.
        system: The text before each question; by default that of the register, before questions of a file or dataset.
        template: "plain" or "chat".
        limit: The number of prompts that analyses measure.
        problems: The number of problems to answer.
        samples: The number of sampled answers to each of two fifths of these problems.
        new_tokens: The longest answer, in tokens.
        without: Runs of the register to leave out, such as "samples".
        seed: The seed of all draws, those of random weights too.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: The torch device.
        shard: "3/16" measures the third of 16 parts without judging; afterwards make the same call without it.
        executor: "local", "ray", or your own executor, which computes the chunks of runs.
        address: The address of a Ray cluster.
        workers: The number of workers in a cluster.
        fresh: Start again, ignoring stored parts.
        force: Replace a page that mechattn did not write.
        command: The command line, for the record.

    Returns:
        The verdicts; None with ``shard``.

    Raises:
        MechattnError: The register, a model, its tokenizer, the prompts, the budget or the folder cannot be used;
            raised before anything is measured.
    """
    source = {"source": prompts, "field": field, "answer_field": answer_field, "group_field": group_field}
    settings = Settings(
        register if isinstance(register, Register) else read_register(os.fspath(register)),
        named(models), Path(out), source | {"system": system, "template": template}, limit, problems, samples,
        new_tokens, (without,) if isinstance(without, str) else tuple(without), seed, dtype, device,
    )  # fmt: skip
    part = parse_shard(shard)
    where = executor_named(executor, address, workers) if isinstance(executor, str) else executor
    works = _checked(settings, force, fresh)
    works = [replace(work, executor=where, shard=part, fresh=fresh) for work in works]
    say(f"what will run:\n{_plan(works)}")
    check_budget(works, seconds(budget))
    found = [_of_model(work) for work in works]
    if part != WHOLE:
        return None
    family = corrected([of.judged for of, _ in found])
    of_models = tuple(replace(of, judged=some) for (of, _), some in zip(found, family, strict=True))
    about = {
        "made": provenance.now(),
        "versions": provenance.versions(),
        "settings": {**settings.decides(), "models": [of.name for of in of_models]},
        "runs": _counts(settings),
        "family": family_words([one for some in family for one in some]),
        "command": command,
    }
    verdicts = Verdicts(of_models, settings.register, about)
    write(verdicts, [results for _, results in found], settings.out, command, force)
    return verdicts


def _checked(settings: Settings, force: bool, fresh: bool) -> list[Work]:
    """Everything that can be refused without reading a weight; what remains to be done."""
    dtype_named(settings.dtype)
    check_device(settings.device)
    check_writable(settings.out / "verdicts.json")
    check_page_place(settings.out / "index.html", force)
    files = file_names(settings.models)
    works = []
    for name in settings.models:
        layers_and_heads(name)
        tokens = unloaded(name)
        conditions = conditions_for(settings.register, name, architecture_named(name), tokens.tokenizer)
        _check_length(tokens, settings, max((getattr(one, "count", 0) for one in conditions.made.values()), default=0))
        works.append(Work(name, settings.out / files[name], settings, conditions, executor_named("local")))
    _keep(settings, fresh)
    return works


def _check_length(model: Any, settings: Settings, inserted: int) -> None:
    """Refuse problems that do not fit with the longest insertion and answer."""
    if all(run.prompts != "problems" for run in settings.runs.values()):
        return
    longest = max(settings.prompts, key=lambda prompt: len(tokenize(prompt, model)))
    new = settings.new_tokens if any(run.answers for run in settings.runs.values()) else 0
    tokens = len(tokenize(longest, model)) + inserted
    if tokens + new > model.cfg.n_ctx:
        raise PromptTooLong(
            f'prompt {longest.id} ("{longest.excerpt}") has {tokens:,} tokens with the longest insertion, and '
            f"{new:,} new ones are allowed; {provenance.name_of(model.cfg.model_name)} takes {model.cfg.n_ctx:,}. Give "
            "fewer new tokens, or shorter problems"
        )


def _keep(settings: Settings, fresh: bool) -> None:
    """Write down what a folder is for, and refuse one that is for something else."""
    place, now = settings.out / "settings.json", json.loads(json.dumps(settings.decides()))
    try:
        before = now if fresh else json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        before = now
    except (OSError, ValueError) as error:
        raise OutputError(f"{place} cannot be read ({error}); give another folder, or fresh=True (--fresh)") from None
    if differs := ", ".join(name for name in now if before.get(name) != now[name]):
        raise OutputError(
            f"{settings.out} holds a run with other arguments ({differs} differs): give another folder, or start again "
            f"there with fresh=True (--fresh)"
        )
    write_whole(place, lambda new: new.write_text(json.dumps(now, indent=1), encoding="utf-8"))


def _counts(settings: Settings) -> dict[str, dict[str, Any]]:
    """How much each run is of: what there is, where there is less than asked for."""
    found = {}
    for name, run in settings.register.runs.items():
        of = settings.count(run) if name in settings.runs else 0
        claims = sum(claim.needs == name for claim in settings.register.claims)
        found[name] = {"says": run.says, "of": of, "draws": run.draws, "claims": claims}
    return found


def _plan(works: Seq[Work]) -> str:
    """What will run of every model."""
    lines = ["| run | what | of | random models | claims |", "|---|---|---|---|---|"]
    for name, row in _counts(works[0].settings).items():
        of = row["of"] or "left out, as asked for"
        lines.append(f"| {name} | {row['says']} | {of} | {row['draws'] or ''} | {row['claims']} |")
    return "\n".join([*lines, "", f"Models: {', '.join(provenance.name_of(work.name) for work in works)}."])


def _of_model(work: Work) -> tuple[OfModel, dict[str, Result]]:
    """Measure and judge one model; its results, for the page."""
    work.folder.mkdir(parents=True, exist_ok=True)
    say(f"{work.name} …")
    name, register = provenance.name_of(work.name), work.settings.register
    evidence = measured(work)
    results = {key: one for key, one in evidence.runs.items() if isinstance(one, Result)}
    if work.shard != WHOLE:
        return OfModel(name, name, (), (), {}), results
    first = next(iter(results.values()), None)
    caption = model_caption(first) if first else name
    verdicts = tuple(judged(claim, evidence) for claim in register.claims)
    about = _about(work, first)
    gc.collect()
    return OfModel(name, caption, verdicts, _deviations(work, evidence), about, name in register.about.known), results


def _deviations(work: Work, evidence: Evidence) -> tuple[str, ...]:
    """How this model's run differs from what the sources did."""
    made = [f"{provenance.name_of(work.settings.source['source'])}, in place of the sources' data."]
    made += work.conditions.deviations
    if evidence.drawn and not evidence.draws:
        made.append("Its weights cannot be redrawn, so claims that need that null cannot be told.")
    return tuple(made)


def _about(work: Work, result: Result | None) -> dict[str, Any]:
    model = dict(result.provenance["model"]) if result else {}
    keep = ("architecture", "parameters", "layers", "heads", "dtype", "weights", "weights_hash", "verified")
    return {**{name: model.get(name) for name in keep}, "files": work.folder.name, "threads": torch.get_num_threads()}
