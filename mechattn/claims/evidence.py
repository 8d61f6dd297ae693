"""What a register is judged on, and measuring one model for it: its runs, random weights and answers; resumable."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.axes import BASELINE
from mechattn.claims.measures import NotApplicable
from mechattn.claims.register import Arm, Register, RunSection
from mechattn.claims.rules import Evidence, Outcome, units
from mechattn.engine.run import RunOptions, make_plan, run
from mechattn.errors import ConditionError, ModelError, OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.jobs.executors import Executor
from mechattn.jobs.from_config import made_analyses, made_conditions
from mechattn.jobs.job import Job
from mechattn.jobs.resumable_run import WHOLE, Shard, run_job
from mechattn.model.load import dtype_named, load_model
from mechattn.model.weights import random_weights
from mechattn.prompts.conditions import Condition, MeaninglessTokens, Variant
from mechattn.prompts.datasets import LONGEST, REPEATED, SHORTEST, load_prompts, repeated_random
from mechattn.prompts.fillers import nearest_count
from mechattn.prompts.prompt import MOST, Prompt, Template
from mechattn.results import provenance
from mechattn.results.merge import merge_results
from mechattn.results.provenance import name_of
from mechattn.results.result import Result
from mechattn.stats.intervals import FEWEST
from mechattn.store.atomic_writes import say, write_whole
from mechattn.toml_sections import InterventionSection

_CHUNK = 16  # prompts
_SAMPLED = 0.4  # of the problems
_DRAWS = 1000  # the first seed of random weights: far from those that a user takes; each seed has a thousand


@dataclass(frozen=True, kw_only=True)
class ClaimSettings:
    """What decides the numbers of ``ma.judge``, beside the register and the models.

    Args:
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
        command: The command line, for the record.

    Raises:
        OptionError: A number is no whole one, or too small.
    """

    prompts: str = "word-problems"
    field: str = "question"
    answer_field: str = "answer"
    group_field: str | None = None
    system: str | None = None
    template: Template = "plain"
    limit: int = 32
    problems: int = 100
    samples: int = 4
    new_tokens: int = 90
    without: Seq[str] = ()
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        least = {"limit": FEWEST, "problems": 2 * FEWEST, "samples": 2, "new_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= MOST:
                raise OptionError(
                    f"{name}={value!r}: give a whole number from {fewest} to {MOST:,}"
                )
        object.__setattr__(
            self,
            "without",
            (self.without,) if isinstance(self.without, str) else tuple(self.without),
        )

    def decides(self) -> dict[str, Any]:
        """What decides the numbers: a folder holds the run of one such set."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("device", "command")
        }


@dataclass(frozen=True)
class Conditions:
    """What is run of a model."""

    made: Mapping[str, Condition]
    deviations: tuple[
        str, ...
    ] = ()  # how they differ from what the register asks for, in sentences


def conditions_for(register: Register, model: str, architecture: str, tokenizer: Any) -> Conditions:
    """The conditions of a register, for a model of an architecture such as "Qwen2ForCausalLM"."""
    arm, said = _arm(register.arms, model, architecture)
    sections = dict(register.conditions)
    for name, section in sections.items():
        acts = section.intervention
        if (
            arm
            and acts is not None
            and acts.kind == "ARM"
            and not {"c", "p1", "form"} & set(acts.options)
        ):
            own: dict[str, Any] = {"form": arm.form, "c": arm.c, "p1": arm.p1, **acts.options}
            sections[name] = section.model_copy(
                update={"intervention": InterventionSection(kind="ARM", **own)}
            )
    made: dict[str, Any] = made_conditions(sections)
    deviations = (
        [said] if said and any(section.intervention for section in sections.values()) else []
    )
    try:
        fitted = {name: _fitted(one, tokenizer) for name, one in made.items()}
    except ConditionError as error:
        raise ConditionError(f"{model}: {error}") from None
    filler = next((one for one in fitted.values() if isinstance(one, MeaninglessTokens)), None)
    for name, one in fitted.items():
        if filler and hasattr(one, "count") and "count" not in sections[name].options:
            fitted[name] = replace(one, count=filler.count)
    for name, one in fitted.items():
        if isinstance(asked := made[name], MeaninglessTokens) and one != asked:
            instead = f" in place of {asked.count}" * (one.count != asked.count)
            apart = f"{'with' if one.separator else 'without'} spaces between them."
            deviations.append(f"{name}: {one.count} “{one.text}” tokens{instead}, {apart}")
    return Conditions(fitted, tuple(deviations))


def _arm(arms: list[Arm], model: str, architecture: str) -> tuple[Arm | None, str]:
    """That of the model by its name, else of its family (what stands before "For"), else of all others."""
    name, family = name_of(model).rpartition("/")[2], architecture.partition("For")[0]
    for arm in arms:
        if arm.model and arm.model.casefold() == name.casefold():
            return arm, ""
    for arm in arms:
        if arm.architecture and arm.architecture.partition("For")[0] == family:
            return (
                arm,
                f"ARM as for {family} (c = {arm.c:g}, p1 = {arm.p1:g}): the register has no values for {name}.",
            )
    rest = next((arm for arm in arms if not arm.model and not arm.architecture), None)
    return (
        rest,
        f"ARM in the form {rest.form!r}: the register has no values for {family}." if rest else "",
    )


def _fitted(asked: Any, tokenizer: Any) -> Any:
    """Filler in the number asked for with its separator, else without one, else the nearest number with it."""
    if isinstance(asked, Variant):
        return replace(asked, condition=_fitted(asked.condition, tokenizer))
    if not isinstance(asked, MeaninglessTokens):
        return asked
    counts: dict[str, int] = {}
    for by in dict.fromkeys((asked.separator, "")):
        with suppress(ConditionError):
            counts[by] = nearest_count(tokenizer, asked.text, by, asked.count)
    by = next((by for by, count in counts.items() if count == asked.count), asked.separator)
    if by not in counts:
        raise ConditionError(
            f"no whole number of {asked.text!r} gives about {asked.count} tokens with this tokenizer"
        )
    return replace(asked, count=counts[by], separator=by)


@dataclass
class Work:
    """Everything that measures one model, with the conditions of the register for it; its files go to a folder."""

    name: str
    folder: Path
    register: Register
    settings: ClaimSettings
    problems: list[Prompt]  # the same for all models
    conditions: Conditions
    executor: Executor
    shard: Shard = WHOLE
    fresh: bool = False

    @cached_property
    def model(self) -> Any:
        """The hooked model; ``del`` frees it."""
        return load_model(
            self.name, dtype=dtype_named(self.settings.dtype), device=self.settings.device
        )

    @cached_property
    def runs(self) -> dict[str, RunSection]:
        """What is run, in the order of the register."""
        return {
            name: run
            for name, run in self.register.runs.items()
            if name not in self.settings.without
        }

    @cached_property
    def refused(self) -> set[tuple[str, bool]]:
        """The conditions that this model cannot have, before an answer (True) or the end of the prompt."""
        found, first = set(), self.problems[0]
        for answers, prompt in (
            (False, first),
            (True, replace(first, answer=first.answer or " 1")),
        ):
            for name, condition in self.conditions.made.items():
                try:
                    make_plan(self.model, {name: condition}, ReceivedAttention()).sequences(
                        [prompt]
                    )
                except (ConditionError, ModelError, OptionError):
                    found.add((name, answers))
        return found

    def conditions_of(self, section: RunSection) -> dict[str, Condition]:
        """Those of a run that the model can have."""
        made, answers = self.conditions.made, section.answers
        return {
            name: made[name] for name in section.conditions if (name, answers) not in self.refused
        }

    def missing(self, name: str) -> str:
        """Why a run of analyses cannot be made with this model; empty where it can."""
        section = self.runs[name]
        try:
            options = RunOptions(section.layers)
            make_plan(
                self.model, self.conditions_of(section), made_analyses(section.analyses), options
            )
        except (ModelError, OptionError) as error:
            return str(error)
        return ""

    def count(self, section: RunSection) -> int:
        """Of how many prompts a run is: those that there are, where more are asked for."""
        count = self.settings.problems if section.answers else self.settings.limit
        count = min(count, len(self.problems)) if section.prompts == "problems" else count
        return max(2, round(_SAMPLED * count)) if section.sampled else count

    def prompts_of(self, section: RunSection, model: Any) -> list[Prompt]:
        """The prompts of a run: the first problems, or those that the register generates."""
        count, seed = self.count(section), self.settings.seed
        if section.prompts == "problems":
            return self.problems[:count]
        if section.prompts == REPEATED:  # as long as the model takes
            longest = min(LONGEST, (model.cfg.n_ctx - 1) // 2)
            return repeated_random(
                model, count, span=(min(SHORTEST, longest // 2), longest), seed=seed
            )
        return load_prompts(section.prompts, limit=count)


def measured(work: Work) -> Evidence:
    """All evidence about one model, or about the part of the prompts that a shard measures."""
    work.folder.mkdir(parents=True, exist_ok=True)
    say(f"{work.name} …")
    runs, left_out = work.runs, [name for name in work.register.runs if name not in work.runs]
    missing = {
        name: Outcome("cannot be told", f"{name} was left out, as asked for") for name in left_out
    }
    measures = {name: section for name, section in runs.items() if not section.answers}
    for name in measures:
        if why := work.missing(name):
            missing[name] = Outcome("not applicable", why)
    there = [name for name in measures if name not in missing]
    prompts = {name: work.prompts_of(measures[name], work.model) for name in there}
    conditions = {name: work.conditions_of(measures[name]) for name in there}
    draws = _draws(work, there)
    answers, out = _answers(work)
    missing |= out
    del work.model
    gc.collect()  # hooked models hold themselves, and a worker loads its own
    results = {name: _job(work, name, prompts[name], conditions[name]) for name in there}
    drawn = frozenset(name for name in there if measures[name].draws)
    of = provenance.name_of(work.name), provenance.name_of(work.settings.prompts)
    return Evidence({**results, **answers}, draws, drawn, missing, *of)


def _job(
    work: Work, name: str, prompts: list[Prompt], conditions: Mapping[str, Condition]
) -> Result | None:
    """A run in chunks; shards that other processes have computed are merged."""
    settings, section = work.settings, work.runs[name]
    job = Job(
        model=work.name, prompts=prompts, conditions=conditions, analyses=made_analyses(section.analyses),
        options=RunOptions(section.layers, settings.seed, section.positions), dtype=settings.dtype,
        device=settings.device, chunk=_CHUNK,
    )  # fmt: skip
    place = work.folder / f"{name}.zarr"
    of = _shards(work.folder, rf"{name}-\d+-of-(\d+)\.zarr(\.parts)?")
    if work.shard != WHOLE:
        number, many = work.shard
        if number > len(job.chunks):  # a share of the answers alone
            return None
        return run_job(
            job, place, shard=f"{number}/{many}", executor=work.executor, fresh=work.fresh
        )
    if of is None or work.fresh:
        return run_job(job, place, executor=work.executor, fresh=work.fresh)
    numbers = range(1, min(of, len(job.chunks)) + 1)
    return merge_results(
        [run_job(job, place, shard=f"{number}/{of}", executor=work.executor) for number in numbers]
    )


def _draws(work: Work, there: list[str]) -> dict[str, list[np.ndarray]]:
    """The values of every part with random weights; none for a model whose weights cannot be drawn again."""
    settings, runs, (number, of) = work.settings, work.runs, work.shard
    found: dict[str, list[np.ndarray]] = {}
    decides = [
        settings.decides(),
        work.register.digest,
        work.register.code,
        work.name,
        provenance.versions(),
    ]
    key = provenance.digest(decides)
    for draw in range(number - 1, max((runs[name].draws for name in there), default=0), of):
        place = work.folder / f"random-{draw}.json"
        values = None
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # what an earlier call has kept of this very draw
            kept = json.loads(place.read_text())
            values = kept["values"] if kept["key"] == key and not work.fresh else None
        if values is None:
            try:
                drawn = random_weights(work.model, seed=_DRAWS * (1 + settings.seed) + draw)
            except ModelError:
                return {}
            values = _of_draw(work, drawn, [name for name in there if runs[name].draws > draw])
            del drawn
            gc.collect()
            text = json.dumps({"key": key, "values": values})
            write_whole(place, lambda new, text=text: new.write_text(text))  # type: ignore[misc]
        for part, some in values.items():
            found.setdefault(part, []).append(np.array(some, dtype=np.float64))
    return found


def _of_draw(work: Work, drawn: Any, names: list[str]) -> dict[str, list[float]]:
    """The values of all parts that these runs decide; none of a part that this draw has not got."""
    values: dict[str, list[float]] = {}
    for name in names:
        section = work.runs[name]
        options: dict[str, Any] = {"seed": work.settings.seed, "positions": section.positions}
        analyses, prompts = made_analyses(section.analyses), work.prompts_of(section, drawn)
        result = run(
            drawn, prompts, work.conditions_of(section), analyses, layers=section.layers, **options
        )
        for claim in work.register.claims:
            for i, part in enumerate(
                claim.parts if claim.needs == name and not claim.identity else ()
            ):
                with suppress(NotApplicable):
                    values[f"{claim.key}/{i}"] = units(part, result).tolist()
    return values


def _answers(work: Work) -> tuple[dict[str, Evaluation], dict[str, Outcome]]:
    """The evaluations of all runs that answer, and the verdict of those that cannot.

    Runs with one answer to each problem share one evaluation under all of their conditions.
    """
    runs = {name: section for name, section in work.runs.items() if section.answers}
    if not runs:
        return {}, {}
    greedy = [name for name, section in runs.items() if not section.sampled]
    first = runs[(greedy or list(runs))[0]]
    alone = _evaluated(work, "baseline", first, {})
    right, of = int(alone.right(BASELINE).any(1).sum()), len(alone.right(BASELINE))
    if work.shard == WHOLE and not right:
        why = (
            f"it solves none of {of} problems without inserted tokens, so only a gain could be seen"
        )
        return {}, dict.fromkeys(runs, Outcome("not testable here", why))
    found: dict[str, Evaluation] = {}
    if greedy:
        conditions = {
            key: one for name in greedy for key, one in work.conditions_of(runs[name]).items()
        }
        found = dict.fromkeys(greedy, _evaluated(work, "answers", first, conditions))
    for name in set(runs) - set(greedy):
        options = {"samples": work.settings.samples, "temperature": 1.0}
        found[name] = _evaluated(work, name, runs[name], work.conditions_of(runs[name]), **options)
    return found, {}


def _evaluated(
    work: Work, name: str, section: RunSection, conditions: Mapping[str, Condition], **options: Any
) -> Evaluation:
    """Answers to the problems of a shard, each stored as it comes; those of all shards are combined."""
    prompts = work.prompts_of(section, work.model)
    options |= {"seed": work.settings.seed, "new_tokens": work.settings.new_tokens}

    def share(number: int, many: int) -> Evaluation:
        out = work.folder / (f"{name}.jsonl" if many == 1 else f"{name}-{number}-of-{many}.jsonl")
        if work.fresh:
            out.unlink(missing_ok=True)
        return evaluate(work.model, prompts[number - 1 :: many], conditions, out=out, **options)

    if work.shard != WHOLE:
        return share(*work.shard)
    many = None if work.fresh else _shards(work.folder, rf"{name}-\d+-of-(\d+)\.jsonl")
    parts = [share(number, many or 1) for number in range(1, (many or 1) + 1)]
    groups = {
        prompt: group
        for part in parts
        for prompt, group in part.provenance.get("groups", {}).items()
    }
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    answers = sorted(
        (a for part in parts for a in part.answers), key=lambda a: (order[a.prompt], a.sample)
    )
    about = {**parts[0].provenance, "groups": groups} if groups else parts[0].provenance
    return Evaluation(tuple(answers), about)


def _shards(folder: Path, pattern: str) -> int | None:
    """Of how many shards a folder holds some."""
    found = {
        int(read[1]) for path in folder.glob("*") if (read := re.fullmatch(pattern, path.name))
    }
    if len(found) > 1:
        raise OptionError(
            f"{folder} holds shards of {' and of '.join(map(str, sorted(found)))}; remove those of one"
        )
    return found.pop() if found else None
