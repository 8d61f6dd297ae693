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

from mechattn.claims.evidence import ClaimSettings, Work, conditions_for, measured
from mechattn.claims.register import PAPER, Register, read_register
from mechattn.claims.rules import corrected, judged
from mechattn.claims.verdicts import OfModel, Verdicts, write
from mechattn.errors import OptionError, OutputError, PromptTooLong
from mechattn.jobs.executors import Executor, ExecutorName, executor_named
from mechattn.jobs.resumable_run import WHOLE, parse_shard
from mechattn.model.checkpoint import architecture_named, layers_and_heads, toy_names
from mechattn.model.load import check_device, dtype_named, unloaded
from mechattn.prompts.datasets import RECALL, WORD_PROBLEMS, load_prompts
from mechattn.prompts.tokenization import tokenize
from mechattn.render.html_views import check_page_place
from mechattn.render.words import model_caption
from mechattn.results import provenance
from mechattn.results.result import Result
from mechattn.store.atomic_writes import check_writable, file_names, say, write_whole

Models = Seq[str] | str | None


def paper(
    models: Models = None, out: str | os.PathLike[str] = "out/paper", **options: Any
) -> Verdicts | None:
    """Judge the claims of arXiv:2510.01032 for some models: :func:`judge` with the register that mechattn ships."""
    return judge(PAPER, models, out, **options)


def judge(
    register: str | os.PathLike[str] | Register,
    models: Models = None,
    out: str | os.PathLike[str] = "out/claims",
    settings: ClaimSettings | None = None,
    *,
    shard: str | None = None,
    executor: ExecutorName | Executor = "local",
    fresh: bool = False,
    force: bool = False,
) -> Verdicts | None:
    """Judge the claims of a register for some models, by rules that stand in it before anything is measured.

    Writes ``verdicts.json``, ``verdicts.md`` and ``index.html``, a page that opens offline, to a folder. What will run
    is printed first. An interrupted call resumes where it stopped.

    Args:
        register: A TOML file, or the name of a register that mechattn ships: "2510.01032".
        models: Names or directories; the four toys by default.
        out: The folder.
        settings: What they are judged on, and how much of it.
        shard: "3/16" measures the third of 16 parts without judging; afterwards make the same call without it.
        executor: "local", "ray", or your own executor, which computes the chunks of runs.
        fresh: Start again, ignoring stored parts.
        force: Replace a page that mechattn did not write.

    Returns:
        The verdicts; None with ``shard``.

    Raises:
        MechattnError: The register, a model, its tokenizer, the prompts or the folder cannot be used;
            raised before anything is measured.
    """
    read = register if isinstance(register, Register) else read_register(os.fspath(register))
    settings, part = settings or ClaimSettings(), parse_shard(shard)
    where = executor_named(executor) if isinstance(executor, str) else executor
    checked = _checked(read, named(models), Path(out), settings, force)
    works = [replace(work, executor=where, shard=part, fresh=fresh) for work in checked]
    _keep(
        Path(out),
        {"models": [work.name for work in works], **settings.decides(), "register": read.digest},
        fresh,
    )
    runs = _counts(works[0])
    plan = ["| run | what | of | random models | claims |", "|---|---|---|---|---|"]
    for name, row in runs.items():
        of = row["of"] or "left out, as asked for"
        plan.append(f"| {name} | {row['says']} | {of} | {row['draws'] or ''} | {row['claims']} |")
    names = ", ".join(provenance.name_of(work.name) for work in works)
    say("\n".join(["what will run:", *plan, "", f"Models: {names}."]))
    if part != WHOLE:
        for work in works:
            measured(work)
        return None
    found = [_of_model(work) for work in works]
    family = corrected([of.judged for of, _ in found])
    tested = [one.q is not None for some in family for one in some]
    of_models = tuple(replace(of, judged=some) for (of, _), some in zip(found, family, strict=True))
    decides = settings.decides() | {"prompts": provenance.name_of(settings.prompts)}
    family_words = f"{sum(tested)} tests behind {len(tested)} cells are one family (Benjamini–Hochberg, q ≤ 0.05)."
    about = {"made": provenance.now(), "versions": provenance.versions()}
    about |= {"settings": {"models": [of.name for of in of_models], **decides}, "runs": runs}
    about |= {"family": family_words, "command": settings.command}
    verdicts = Verdicts(of_models, read, about)
    write(verdicts, [results for _, results in found], Path(out), force)
    return verdicts


def named(models: Models) -> tuple[str, ...]:
    """The models that are asked for; the toys where none is."""
    found = (models,) if isinstance(models, str) else tuple(map(str, models or ()))
    if len(set(found)) < len(found):
        raise OptionError(f"models={list(found)}: a model is given twice; give each once")
    return found or tuple(sorted(toy_names(), key=lambda name: name != "toy:llama"))


def _checked(
    register: Register, models: Seq[str], out: Path, settings: ClaimSettings, force: bool
) -> list[Work]:
    """Everything that can be refused without reading a weight; what remains to be done."""
    dtype_named(settings.dtype)
    check_device(settings.device)
    check_writable(out / "verdicts.json")
    check_page_place(out / "index.html", force)
    if unknown := [name for name in settings.without if name not in register.runs]:
        raise OptionError(
            f"without={unknown[0]!r}: there is no such run; there is {', '.join(register.runs)}"
        )
    source = {name: getattr(settings, name) for name in ("field", "system", "template")}
    source |= {"answer": settings.answer_field, "group": settings.group_field}
    if settings.system is None and settings.prompts not in (WORD_PROBLEMS, RECALL):
        source["system"] = register.about.system or None
    problems = load_prompts(
        settings.prompts, limit=max(settings.limit, settings.problems), **source
    )
    files, works = file_names(models), []
    for name in models:
        layers_and_heads(name)
        tokens = unloaded(name)
        conditions = conditions_for(register, name, architecture_named(name), tokens.tokenizer)
        work = Work(
            name,
            out / files[name],
            register,
            settings,
            problems,
            conditions,
            executor_named("local"),
        )
        works.append(work)
        if any(run.prompts == "problems" for run in work.runs.values()):
            _check_length(tokens, work)
    return works


def _check_length(model: Any, work: Work) -> None:
    """Refuse problems that do not fit with the longest insertion and answer."""
    longest = max(work.problems, key=lambda prompt: len(tokenize(prompt, model)))
    new = work.settings.new_tokens if any(run.answers for run in work.runs.values()) else 0
    inserted = max((getattr(one, "count", 0) for one in work.conditions.made.values()), default=0)
    tokens = len(tokenize(longest, model)) + inserted
    if tokens + new > model.cfg.n_ctx:
        raise PromptTooLong(
            f'prompt {longest.id} ("{longest.excerpt}") has {tokens:,} tokens with the longest insertion, and '
            f"{new:,} new ones are allowed; {provenance.name_of(model.cfg.model_name)} takes {model.cfg.n_ctx:,}. Give "
            "fewer new tokens, or shorter problems"
        )


def _keep(out: Path, decides: dict[str, Any], fresh: bool) -> None:
    """Write down what a folder is for, and refuse one that is for something else."""
    place, now = out / "settings.json", json.loads(json.dumps(decides))
    try:
        before = (
            now if fresh or not place.exists() else json.loads(place.read_text(encoding="utf-8"))
        )
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{place} cannot be read ({error}); give another folder, or fresh=True (--fresh)"
        ) from None
    if differs := ", ".join(name for name in now if before.get(name) != now[name]):
        raise OutputError(
            f"{out} holds a run with other arguments ({differs} differs): give another folder, or start again there "
            "with fresh=True (--fresh)"
        )
    write_whole(place, lambda new: new.write_text(json.dumps(now, indent=1), encoding="utf-8"))


def _counts(work: Work) -> dict[str, dict[str, Any]]:
    """How much each run is of: what there is, where there is less than asked for."""
    claims = [claim.needs for claim in work.register.claims]
    found = {}
    for name, run in work.register.runs.items():
        of = work.count(run) if name in work.runs else 0
        found[name] = {"says": run.says, "of": of, "draws": run.draws, "claims": claims.count(name)}
    return found


def _of_model(work: Work) -> tuple[OfModel, dict[str, Result]]:
    """Measure and judge one model; its results, for the page."""
    name, register = provenance.name_of(work.name), work.register
    evidence = measured(work)
    results = {key: one for key, one in evidence.runs.items() if isinstance(one, Result)}
    first = next(iter(results.values()), None)
    caption = model_caption(first) if first else name
    verdicts = tuple(judged(claim, evidence) for claim in register.claims)
    gc.collect()
    model = dict(first.provenance["model"]) if first else {}
    keep = (
        "architecture",
        "parameters",
        "layers",
        "heads",
        "dtype",
        "weights",
        "weights_hash",
        "verified",
    )
    about = {key: model.get(key) for key in keep} | {
        "files": work.folder.name,
        "threads": torch.get_num_threads(),
    }
    deviations = [f"{provenance.name_of(work.settings.prompts)}, in place of the sources' data."]
    deviations += work.conditions.deviations
    if evidence.drawn and not evidence.draws:
        deviations.append(
            "Its weights cannot be redrawn, so claims that need that null cannot be told."
        )
    return OfModel(
        name, caption, verdicts, tuple(deviations), about, name in register.about.known
    ), results
