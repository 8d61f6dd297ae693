"""Generates and grades answers under every condition; an interrupted run can be resumed. And the baseline's noise."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm
from typing_extensions import Unpack

from mechattn.axes import BASELINE
from mechattn.engine import request_checks
from mechattn.errors import OptionError, PromptError, check_counts
from mechattn.evaluation import generate
from mechattn.evaluation import grader as graders
from mechattn.evaluation.answer_file import kept
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer
from mechattn.evaluation.generate import Answer, Request, Sampling, SamplingOptions, answers
from mechattn.evaluation.grader import Grader
from mechattn.evaluation.served_answers import Exchanged, Todo, check_room, check_servable, served
from mechattn.evaluation.server import Server
from mechattn.model.checkpoint import UnloadedModel, end_tokens
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import as_hooked, load_model, unloaded
from mechattn.model.weights import weights_hash
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import Sequence
from mechattn.results import provenance
from mechattn.results.provenance import identity


def evaluate(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    *,
    grader: Grader = "auto",
    batch: int = 32,
    seed: int = 0,
    out: str | Path | None = None,
    server: Server | str | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Evaluation:
    """Generate and grade answers to every problem under every condition and the baseline.

    The model without hooks generates, with a key-value cache and with the interventions attached. Batches affect
    answers only through rounding; the draws of sampled answers are keyed by seed, prompt, sample and position.

    With ``server`` another machine generates, after a comparison with the model. Conditions may insert tokens;
    interventions inside the model are refused. Each sampled answer has its own seed there.

    Args:
        model: A hooked model, or anything that ``load_model`` takes. With a server, a name or directory (only its
            tokenizer is loaded) or a tokenizer is enough; a loaded model is compared with the server.
        prompts: Prompts with a ``solution``, as from ``load_prompts``.
        conditions: Conditions by name, as for ``run``.
        grader: "number", "math" (math-verify), or "auto" to choose by the references.
        batch: The number of sequences (or requests to a server) at a time.
        seed: The seed of all draws.
        out: A .jsonl file to which each answer is added; if it holds answers of this run already, the run resumes.
        server: An ``ma.Server``, or the address of one that needs nothing else, such as "http://host:8000/v1".
        sampling: ``new_tokens``, the longest answer in tokens (256; answers that reach it are counted as unfinished);
            ``samples``, the number of answers to each question (1); ``temperature``, where 0 takes the likeliest token
            (by default 0 for one sample and 1 for several).

    Raises:
        MechattnError: An argument cannot be used; raised before the first token is generated.
        ServerError: The server cannot be reached or used, is not the model, or fails; its earlier answers are kept.
    """
    if server is not None and not isinstance(server, Server):
        server = Server(server)
    reader: Any = load_model(as_hooked(model)) if server is None else unloaded(model)
    prompts = as_prompts(prompts)
    named = request_checks.with_baseline(conditions)
    how = generate.sampling_of(sampling, seed)
    check_counts(batch=batch)
    _check_references(prompts, grader)
    native = generate.native_of(reader) if server is None else None
    sequences = request_checks.made_sequences(named, prompts, reader, seed)
    sides = _checked_sides(reader, native, prompts, sequences, how.new_tokens)
    about = {
        **_about(reader, server, prompts, sequences),
        **asdict(how),
        "conditions": {name: identity(condition) for name, condition in named.items()},
        "grader": grader,
        **({"rope_factors": request_checks.counted_sides(list(sides.values()))} if sides else {}),
    }
    with kept(out, about) as file, ExitStack() as stack:
        each = product(zip(prompts, sequences, strict=True), named, range(how.samples))
        todo = [
            (p, name, Request(p.id, made[name], sample))
            for (p, made), name, sample in each
            if (p.id, name, sample) not in file.answers
        ]
        came: Iterator[list[tuple[Todo, Answer, str]]] = iter(())
        if server is None:
            came = _generated(reader, native, _batches(todo, batch, sides), how)
        elif todo:
            before = file.about.get("probe")
            there = stack.enter_context(
                served(server, reader, prompts, sequences, how, batch, before)
            )
            file.note("probe", there.probe.about)
            came = there.answered(todo)
        try:
            for some in came:
                file.add([_graded(*one, answer, text, grader) for one, answer, text in some])
        except Exchanged as error:
            file.note("probe", file.about["probe"], without=error.since)
            raise
        if server is not None and todo:
            file.note("probe", file.about["probe"])
    about |= {"probe": file.about["probe"]} if "probe" in file.about else {}
    ordered = [
        file.answers[p.id, name, sample]
        for name in named
        for p in prompts
        for sample in range(how.samples)
    ]
    return Evaluation(tuple(ordered), about)


@alone
def baseline_noise(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    *,
    batch: int = 32,
    other_batch: int = 8,
    other_dtype: str | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Measure how much baseline answers change with the batch size and with the dtype.

    The same problems are answered three times; the second and third runs are compared with the first. Rounding depends
    on batch size and dtype, and occasionally changes an answer. This is a rate of changes, not a test: an effect beside
    which as many answers change as here, in both directions, may come from rounding alone.

    Args:
        model: As for ``evaluate``. For the other dtype a copy of its parameters is held temporarily.
        prompts: Prompts with a ``solution``.
        batch: The batch size of the first run.
        other_batch: The batch size of the second run.
        other_dtype: The dtype of the third run; by default bfloat16, or float32 for a model of lower precision.
        options: Options of ``evaluate``, such as ``new_tokens``.

    Returns:
        One row per repetition: accuracy, difference with Newcombe's interval, mid-p McNemar, ``flipped``, the share of
        answers that became right or wrong, and ``texts``, the share with a different text.

    Raises:
        OptionError: A repetition has the same batch size or dtype as the first run.
    """
    if taken := sorted({"out", "conditions", "server"} & set(options)):
        raise OptionError(
            f"{taken[0]}=… cannot be given: only the baseline is answered, again in each repetition"
        )
    model, prompts = load_model(as_hooked(model)), as_prompts(prompts)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    other_dtype = other_dtype or ("bfloat16" if dtype == "float32" else "float32")
    if batch == other_batch or dtype == other_dtype:
        same = f"batch={batch}" if batch == other_batch else f"dtype {dtype}"
        raise OptionError(f"{same} in both runs shows no noise; choose another value")
    known = getattr(torch, other_dtype, None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise OptionError(
            f"other_dtype={other_dtype!r}: give the name of a dtype, such as 'bfloat16'"
        )
    made = [evaluate(model, prompts, batch=size, **options) for size in (batch, other_batch)]
    twin = load_model(
        copy.deepcopy(generate.native_of(model)),
        tokenizer=model.tokenizer,
        dtype=known,
        verify=False,
    )
    made.append(evaluate(twin, prompts, batch=batch, **options))
    names = (
        f"{dtype}, batch {batch}",
        f"{dtype}, batch {other_batch}",
        f"{other_dtype}, batch {batch}",
    )
    rows: list[dict[str, Any]] = []
    for name, again in zip(names, made, strict=True):
        compared, right = again.compare(BASELINE, other=made[0]), again.right(BASELINE)
        shown = {key: compared[key] for key in ("difference", "low", "high", "p", "n")}
        texts = [a.text != b.text for a, b in zip(again.answers, made[0].answers, strict=True)]
        shares = {
            "flipped": float((right != made[0].right(BASELINE)).mean()),
            "texts": sum(texts) / len(texts),
        }
        rows.append({"repetition": name, "accuracy": float(right.mean()), **shown, **shares})
    return pd.DataFrame(rows)


def _generated(
    model: HookedModel, native: Any, batches: list[list[Todo]], how: Sampling
) -> Iterator[list[tuple[Todo, Answer, str]]]:
    end = end_tokens(getattr(native, "generation_config", None), model.tokenizer)
    for some in tqdm(batches, desc="answers", unit="batch", delay=2):
        asked = [request for _, _, request in some]
        written = answers(native, asked, how.new_tokens, end, how.temperature, how.seed)
        texts = [
            model.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in written
        ]
        yield list(zip(some, written, texts, strict=True))


def _batches(todo: Seq[Todo], batch: int, sides: Mapping[str, str]) -> list[list[Todo]]:
    """The requests in batches of similar length, none with prompts on both sides of a model's boundary."""
    parts: dict[str, list[Todo]] = {}
    for item in sorted(todo, key=lambda item: len(item[2].sequence)):
        parts.setdefault(sides.get(item[0].id, ""), []).append(item)
    return [part[i : i + batch] for part in parts.values() for i in range(0, len(part), batch)]


def _graded(
    prompt: Prompt, name: str, asked: Request, answer: Answer, text: str, grader: Grader
) -> GradedAnswer:
    solution = str(prompt.solution)
    both = vars(answer) | vars(graders.grade(text, solution, grader, finished=answer.finished))
    return GradedAnswer(prompt.id, name, asked.sample, text, solution=solution, **both)


def _check_references(prompts: Seq[Prompt], grader: Grader) -> None:
    graders.check_grader(grader)
    for prompt in prompts:
        if prompt.solution is None or not prompt.solution.strip():
            raise PromptError(
                f'prompt {prompt.id} ("{prompt.excerpt}") has no solution to compare with; load prompts with answers, '
                "or give Prompt(…, solution=…)"
            )
        if prompt.answer or prompt.answer_tokens:
            raise PromptError(
                f"prompt {prompt.id} already holds an answer, which the model would read; load prompts with "
                f"with_answer=False"
            )
        kind = graders.grader_for(prompt.solution)
        if grader == "number" and kind == "math":
            raise PromptError(
                f'the solution of prompt {prompt.id} does not end in a number; use grader="math"'
            )
        if kind == "math":
            graders.check_grader("math")


@alone
def _checked_sides(
    model: Any,
    native: Any,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    new_tokens: int,
) -> dict[str, str]:
    """The side of the model's boundary on which each prompt lies; checks all prompts before a token is generated."""
    for made in sequences:
        first = made[BASELINE]
        if first.inserted.any() or first.edge_mask or first.interventions:
            raise OptionError(
                'the condition "baseline" changes the prompt, but comparisons need it unchanged; use another name'
            )
    if isinstance(model, UnloadedModel):
        check_servable(sequences)
    hooked = model.loaded if isinstance(model, UnloadedModel) else model
    if hooked is not None:
        for prompt, made in zip(prompts, sequences, strict=True):
            request_checks.check_side(prompt, made, hooked, new_tokens)
    check_room(prompts, sequences, new_tokens, model.cfg.n_ctx, str(model.cfg.model_name))
    if isinstance(model, UnloadedModel):
        return {}
    for made in sequences:
        for name, sequence in made.items():
            generate.refuse_what_cannot_generate(native, sequence, name)
    ids, each = [p.id for p in prompts], [dict(made) for made in sequences]
    request_checks.check_variants(model, each)
    request_checks.check_interventions(model, ids, each)
    return dict(zip(ids, request_checks.sides_of(model, sequences), strict=False))


def _about(
    model: Any, server: Server | None, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]]
) -> dict[str, Any]:
    """What answers and prompts come from, and a digest of the tokens, which a dated template changes."""
    groups = {p.id: p.group for p in prompts if p.group is not None}
    about: dict[str, Any] = {"model": provenance.name_of(str(model.cfg.model_name))}
    if server is None:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        about |= {"weights_hash": weights_hash(model), "dtype": dtype}
    else:
        name = None if server.model is None else provenance.name_of(server.model)
        about |= {"server": server.address, "served_model": name}
    token_ids = (sequence.tokens.tolist() for made in sequences for sequence in made.values())
    about["token_ids"] = provenance.digest(token_ids)
    about |= {"prompts": provenance.digest(prompts), "versions": provenance.versions()}
    return about | ({"groups": groups} if len(set(groups.values())) < len(groups) else {})
