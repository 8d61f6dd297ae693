"""Generates and grades answers under every condition; a run can be resumed and extended."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.engine import request_checks
from mechattn.errors import Interrupted, OptionError, PromptError, check_counts
from mechattn.evaluation import grader as graders
from mechattn.evaluation.answer_file import GradedAnswer, KeptAnswers, kept_answers
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.generate import (
    Answer,
    Sampling,
    dtype_name,
    local_answers,
    native_of,
)
from mechattn.evaluation.generating_rows import Request
from mechattn.evaluation.grader import Grader
from mechattn.evaluation.served_answers import check_room, check_servable, served_answers
from mechattn.evaluation.server import Server
from mechattn.model.architectures import particulars_of
from mechattn.model.hooked import HookedModel, alone, config_of, holding, measuring
from mechattn.model.load import load_model
from mechattn.model.positions import boundary_of
from mechattn.model.unloaded import UnloadedModel, unloaded
from mechattn.model.weights import weights_hash
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results.provenance import digest, identity, name_of, versions


def evaluate(
    model: Any,
    prompts: Prompt | str | Tensor | Sequence[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    *,
    grader: Grader = "auto",
    batch: int = 32,
    seed: int = 0,
    out: str | Path | None = None,
    server: Server | str | None = None,
    new_tokens: int = 256,
    samples: int = 1,
    temperature: float | None = None,
) -> Evaluation:
    """Generate and grade answers to every problem under every condition and the baseline.

    The model without hooks generates, with a key-value cache and under the interventions of each
    condition. When an answer ends, the next problem takes its place in the batch. Batches affect
    answers only through rounding: the draws of sampled answers are keyed by seed, prompt, sample
    and position.

    With ``server`` another machine generates, after its answers were compared with the model's.
    Conditions may then insert tokens, but interventions inside the model are refused. Each sampled
    answer has its own seed on the server.

    Args:
        model: A hooked model, or anything that ``load_model`` takes. With a server it may be a
            tokenizer, or a name or directory, of which only the tokenizer is loaded. A loaded model
            is compared with the server.
        prompts: Prompts with a ``solution``, as from ``load_prompts``.
        conditions: Conditions by name, as for ``run``.
        grader: "number", "math" (math-verify), or "auto" to choose by the references.
        batch: The number of sequences, or of requests to a server, at a time.
        seed: The seed of all draws.
        out: A .jsonl file to which each answer is added as soon as it ends. Answers that it already
            holds are not generated again. A later call may add problems, conditions or samples.
        server: An ``ma.Server``, or its address, such as "http://host:8000/v1", if nothing else
            about it has to be said.
        new_tokens: The longest answer in tokens; answers that reach it are counted as unfinished.
        samples: The number of answers to each question.
        temperature: 0 takes the likeliest token; by default 0 for one sample and 1 for several.

    Returns:
        The answers to these prompts with their grades and their provenance, condition by condition.

    Raises:
        MechattnError: An argument cannot be used. This is raised before the first token is
            generated.
        ServerError: The server cannot be reached or used, is not the model, or fails; its earlier
            answers are kept.
        Interrupted: Ctrl-C; the message says how many answers are kept.
    """
    if server is not None and not isinstance(server, Server):
        server = Server(server)

    prompts = as_prompts(prompts)
    named_conditions = request_checks.with_baseline(conditions)
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    sampling = Sampling(new_tokens, samples, temperature, seed)
    check_counts(batch=batch)
    _check_references(prompts, grader)

    # The model that reads the prompts. With a server only its tokenizer is needed here; weights are
    # used if they are loaded already.
    reader: Any
    if server is None:
        reader = load_model(model)
    else:
        reader = unloaded(model)

    sequences = request_checks.condition_sequences(named_conditions, prompts, reader, seed)
    requests = _requests(prompts, sequences, sampling.samples)
    if server is None:
        _check_generated_here(reader, prompts, sequences, new_tokens)
        provenance = _provenance_here(reader, sequences)
    else:
        check_servable(reader, prompts, sequences, new_tokens)
        provenance = _provenance_of_served(reader, server)
    check_room(requests, new_tokens, reader.cfg.n_ctx, str(reader.cfg.model_name))

    provenance |= asdict(sampling)
    provenance["grader"] = grader
    provenance["prompts"] = digest(prompts)
    provenance["versions"] = versions()
    provenance["conditions"] = {
        name: identity(condition) for name, condition in named_conditions.items()
    }
    groups = {prompt.id: prompt.group for prompt in prompts if prompt.group is not None}
    if len(set(groups.values())) < len(groups):
        provenance["groups"] = groups

    with kept_answers(out, provenance) as file, _saying_what_is_kept(file, requests):
        _check_kept(file, requests)
        open_requests = [request for request in requests if request.key not in file.answers]
        if server is None:
            kept_count = len(requests) - len(open_requests)
            answers = local_answers(
                reader, open_requests, sampling, batch=batch, kept_count=kept_count
            )
        else:
            answers = served_answers(
                server,
                reader,
                requests,
                open_requests=open_requests,
                sampling=sampling,
                at_once=batch,
                file=file,
            )

        with closing(answers):  # after an error, no more answers are requested
            for request, answer, text in answers:
                file.add(_graded_answer(request, answer, text, grader))

    if "probe" in file.provenance:
        provenance["probe"] = file.provenance["probe"]

    # By condition, and within each in the order of the prompts. Some problems may have no answer
    # from a server that takes only text.
    names = list(named_conditions)
    requests.sort(key=lambda request: names.index(request.condition))
    graded_answers = [
        file.answers[request.key] for request in requests if request.key in file.answers
    ]
    return Evaluation(tuple(graded_answers), provenance)


@alone
def baseline_noise(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    *,
    grader: Grader = "auto",
    batch: int = 32,
    other_batch: int = 8,
    seed: int = 0,
    new_tokens: int = 256,
    samples: int = 1,
    temperature: float | None = None,
) -> pd.DataFrame:
    """Measure how many baseline answers change with the batch size and with the dtype.

    Rounding depends on both, and occasionally changes an answer. The same problems are therefore
    answered three times: first with ``batch``, then with ``other_batch``, and then in another dtype
    (bfloat16 for a model in float32, and float32 for any other). This gives a rate of changes, not
    a test. If a condition changes no more answers than here, in either direction, rounding alone
    may explain it.

    Args:
        model: As for ``evaluate``, without a server. A copy of its parameters in the other dtype is
            held temporarily.
        prompts: Prompts with a ``solution``.
        grader: As for ``evaluate``.
        batch: The batch size of the first and the third run.
        other_batch: The batch size of the second run.
        seed: As for ``evaluate``.
        new_tokens: As for ``evaluate``.
        samples: As for ``evaluate``.
        temperature: As for ``evaluate``.

    Returns:
        A row for each run, compared with the first: repetition (dtype and batch size), accuracy,
        difference with low, high, p and n as from ``Evaluation.compare``, flipped (the fraction of
        answers that became right or wrong), and texts (the fraction with a different text).

    Raises:
        OptionError: The second run has the batches of the first: the same size, or one batch of all
            answers.
        MechattnError: As for ``evaluate``.
    """
    check_counts(batch=batch, other_batch=other_batch, samples=samples)
    prompts = as_prompts(prompts)
    answer_count = len(prompts) * samples
    if min(batch, answer_count) == min(other_batch, answer_count):
        raise OptionError(
            f"batch={batch} and other_batch={other_batch}: both runs have the same batches of"
            f" {answer_count} answers, which shows no noise; choose another value"
        )

    model = load_model(model)
    dtype = dtype_name(model)
    other_dtype = "bfloat16" if dtype == "float32" else "float32"
    twin = load_model(
        copy.deepcopy(native_of(model)),
        tokenizer=model.tokenizer,
        dtype=getattr(torch, other_dtype),
        verify=False,
    )

    evaluate_baseline = partial(
        evaluate,
        prompts=prompts,
        grader=grader,
        seed=seed,
        new_tokens=new_tokens,
        samples=samples,
        temperature=temperature,
    )
    first = evaluate_baseline(model, batch=batch)
    runs = {
        f"{dtype}, batch {batch}": first,
        f"{dtype}, batch {other_batch}": evaluate_baseline(model, batch=other_batch),
        f"{other_dtype}, batch {batch}": evaluate_baseline(twin, batch=batch),
    }

    return pd.DataFrame([_changes(name, run, first) for name, run in runs.items()])


def _check_references(prompts: Sequence[Prompt], grader: Grader) -> None:
    """Refuse prompts that already have an answer, or have no solution that the grader can read.

    Raises:
        OptionError: There is no such grader, or its package is not installed.
        PromptError: There is such a prompt.
    """
    graders.check_grader(grader)
    for prompt in prompts:
        if prompt.solution is None or not prompt.solution.strip():
            raise PromptError(
                f"{prompt.where} has no solution to compare with; load prompts with answers, or"
                " give Prompt(…, solution=…)"
            )

        if prompt.answer or prompt.answer_tokens:
            raise PromptError(
                f"prompt {prompt.id} already holds an answer, which the model would read; load "
                "prompts with with_answer=False"
            )

        if graders.grader_for(prompt.solution) == "math":
            if grader == "number":
                raise PromptError(
                    f"the solution of prompt {prompt.id} does not end in a number; use"
                    ' grader="math"'
                )
            graders.check_grader("math")


def _requests(
    prompts: Sequence[Prompt], sequences: Sequence[Mapping[str, TokenSequence]], samples: int
) -> list[Request]:
    """All requested answers, by problem, then by condition, then by sample."""
    requests = []
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        for name, sequence in by_condition.items():
            for sample in range(samples):
                requests.append(Request(prompt.id, sequence, sample, name, str(prompt.solution)))

    return requests


def _check_generated_here(
    model: HookedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    new_tokens: int,
) -> None:
    """Refuse a model that cannot generate, and conditions and prompts under which it cannot.

    Args:
        model: The hooked model.
        prompts: The prompts.
        sequences: The sequences of each prompt by condition.
        new_tokens: The longest answer, in tokens.

    Raises:
        MechattnError: It is such a model, or there is such a condition or prompt.
    """
    native_of(model)
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        request_checks.check_is_unchanged(by_condition[BASELINE])
        for name, sequence in by_condition.items():
            _check_cut_edges(model, sequence, name)
        request_checks.check_side(prompt, by_condition, model, new_tokens)

    ids = [prompt.id for prompt in prompts]
    with holding(model), measuring(model):
        request_checks.check_variants(model, sequences)
        request_checks.check_interventions(model, ids, sequences)


def _check_cut_edges(model: HookedModel, sequence: TokenSequence, name: str) -> None:
    """Refuse cut edges that generation cannot reproduce.

    Raises:
        OptionError: The edges are cut in some layers only, or the model has ALiBi or windows.
    """
    if sequence.cut_edges is None:
        return

    if sequence.cut_edges.layers is not None:
        raise OptionError(
            f"{name!r} cuts edges in some layers only, which works in run but not in evaluate"
        )

    config = config_of(model)
    masks_edges = particulars_of(model).masks_edges
    layer_types = getattr(config, "layer_types", None) or ()
    if masks_edges and "sliding_attention" not in layer_types:
        return

    reason = "has layers with windows, whose cache is cut short" if masks_edges else "has ALiBi"
    raise OptionError(
        f"{name!r} cuts edges, and a {config.model_type} model {reason}: generation with cut edges"
        " is not supported here. Omit the condition"
    )


def _provenance_here(
    model: HookedModel, sequences: Sequence[Mapping[str, TokenSequence]]
) -> dict[str, Any]:
    """The provenance of answers that says which model generates them here."""
    provenance: dict[str, Any] = {
        "model": name_of(str(model.cfg.model_name)),
        "weights_hash": weights_hash(model),
        "dtype": dtype_name(model),
    }
    if boundary_of(model) is not None:  # as for LongRoPE
        sides = request_checks.sides_of(model, sequences)
        provenance["rope_factors"] = dict(Counter(sides))
    return provenance


def _provenance_of_served(reader: UnloadedModel, server: Server) -> dict[str, Any]:
    """The provenance of answers that says which model and which server generate them."""
    return {
        "model": name_of(str(reader.cfg.model_name)),
        "server": server.address,
        "served_model": None if server.model is None else name_of(server.model),
    }


@contextmanager
def _saying_what_is_kept(file: KeptAnswers, requests: Sequence[Request]) -> Iterator[None]:
    """On Ctrl-C, raise an error that says how many answers are kept and how to continue.

    Raises:
        Interrupted: Ctrl-C was pressed.
    """
    try:
        yield
    except KeyboardInterrupt:
        message = (
            "stopped; no answer is kept, since no file was given: with out=… each answer is stored"
            " when it ends"
        )
        if file.path is not None:
            count = sum(request.key in file.answers for request in requests)
            message = (
                f"stopped; {count} of {len(requests)} answers are kept in {file.path}. The same"
                " call goes on with the rest"
            )
        raise Interrupted(message) from None


def _check_kept(file: KeptAnswers, requests: Sequence[Request]) -> None:
    """Refuse a file whose answers are to other token ids or have other references.

    Raises:
        OptionError: It has such an answer to a problem of this call.
    """
    for request in requests:
        answer = file.answers.get(request.key)
        if answer is None:
            continue

        differences = []
        if answer.read != _read_digest(request):
            differences.append("tokens")
        if answer.solution != request.solution:
            differences.append("solution")
        if differences:
            raise OptionError(
                f"{file.path} holds answers of another run (prompt {request.prompt} under"
                f" {request.condition!r} differs in its {' and '.join(differences)}); choose"
                " another file, or move this one"
            )


def _read_digest(request: Request) -> str:
    """A digest of the token ids that the model reads, stored with each answer."""
    return digest([request.sequence.tokens.tolist()])


def _graded_answer(request: Request, answer: Answer, text: str, grader: Grader) -> GradedAnswer:
    """The answer to a request with its grade, as it is stored."""
    grade = graders.grade(text, request.solution, grader, finished=answer.finished)
    return GradedAnswer(
        prompt=request.prompt,
        condition=request.condition,
        sample=request.sample,
        text=text,
        tokens=answer.tokens,
        answer=grade.answer,
        solution=request.solution,
        right=grade.right,
        finished=answer.finished,
        logprob=answer.logprob,
        read=_read_digest(request),
    )


def _changes(name: str, run: Evaluation, first: Evaluation) -> dict[str, Any]:
    """A row of :func:`baseline_noise`: how the answers of a run differ from those of the first."""
    comparison = run.compare(BASELINE, other=first)
    figures = {figure: comparison[figure] for figure in ("difference", "low", "high", "p", "n")}

    is_right = run.right(BASELINE)
    is_other_text = run.to_dataframe().text != first.to_dataframe().text
    return {
        "repetition": name,
        "accuracy": float(is_right.mean()),
        **figures,
        "flipped": float((is_right != first.right(BASELINE)).mean()),
        "texts": float(is_other_text.mean()),
    }
