"""Generates and grades answers under every condition; a run can be resumed and extended."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.engine import request_checks
from mechattn.errors import Interrupted, OptionError, PromptError, check_counts
from mechattn.evaluation import generate
from mechattn.evaluation import grader as graders
from mechattn.evaluation.answer_file import Kept, Key, kept
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.generate import Answer, Generation, Request, Sampling
from mechattn.evaluation.graded_answers import GradedAnswer
from mechattn.evaluation.grader import Grader
from mechattn.evaluation.progress import AnswerBar
from mechattn.evaluation.served_answers import check_room, check_servable, served_answers
from mechattn.evaluation.server import Server
from mechattn.model.checkpoint import UnloadedModel, end_tokens
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import as_hooked, load_model, unloaded
from mechattn.model.weights import weights_hash
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results import provenance
from mechattn.results.provenance import identity


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

    The model without hooks generates, with a key-value cache and with the interventions attached.
    Where an answer ends, the next problem takes its place in the batch. Batches affect answers only
    through rounding; the draws of sampled answers are keyed by seed, prompt, sample and position.

    With ``server`` another machine generates, after a comparison with the model. Conditions may
    insert tokens; interventions inside the model are refused. Each sampled answer has its own seed
    there.

    Args:
        model: A hooked model, or anything that ``load_model`` takes. With a server, a name or
            directory (only its tokenizer is loaded) or a tokenizer is enough; a loaded model is
            compared with the server.
        prompts: Prompts with a ``solution``, as from ``load_prompts``.
        conditions: Conditions by name, as for ``run``.
        grader: "number", "math" (math-verify), or "auto" to choose by the references.
        batch: The number of sequences (or requests to a server) at a time.
        seed: The seed of all draws.
        out: A .jsonl file to which each answer is added as soon as it ends. Answers that it already
            holds are not generated again; more problems, conditions or samples extend it.
        server: An ``ma.Server``, or the address of one that needs nothing else, such as
            "http://host:8000/v1".
        new_tokens: The longest answer in tokens; answers that reach it are counted as unfinished.
        samples: The number of answers to each question.
        temperature: 0 takes the likeliest token; by default 0 for one sample and 1 for several.

    Returns:
        All answers with their grades and their provenance, condition by condition.

    Raises:
        MechattnError: An argument cannot be used; raised before the first token is generated.
        ServerError: The server cannot be reached or used, is not the model, or fails; its earlier
            answers are kept.
        Interrupted: Ctrl-C; the message says how many answers are kept.
    """
    if server is not None and not isinstance(server, Server):
        server = Server(server)

    # A server needs only the tokenizer here; weights are used where they are loaded already.
    reader: Any
    if server is None:
        reader = load_model(as_hooked(model))
    else:
        reader = unloaded(model)

    prompts = as_prompts(prompts)
    named = request_checks.with_baseline(conditions)
    sampling = generate.checked_sampling(new_tokens, samples, temperature, seed)
    check_counts(batch=batch)
    _check_references(prompts, grader)
    native = None
    if server is None:
        native = generate.native_of(reader)

    sequences = request_checks.made_sequences(named, prompts, reader, seed)
    requested = _requested(prompts, sequences, sampling.samples)
    rope_factors = _checked_rope_factors(
        reader,
        native,
        prompts,
        sequences,
        sampling.new_tokens,
        requested,
    )

    about = _about(reader, server, prompts)
    about |= asdict(sampling)
    about["conditions"] = {name: identity(condition) for name, condition in named.items()}
    about["grader"] = grader
    if rope_factors:
        about["rope_factors"] = dict(Counter(rope_factors.values()))

    with kept(out, about) as file:
        _check_kept(file, requested)
        todo = [key for key in requested if key not in file.answers]

        with _interruption_told(file, requested):
            if server is None:
                answers = _generated(reader, native, requested, todo, batch, rope_factors, sampling)
            else:
                answers = served_answers(server, reader, requested, todo, sampling, batch, file)

            with closing(answers):  # so that after an error nothing more is asked for
                for key, answer, text in answers:
                    graded = _graded(requested[key], answer, text, grader)
                    file.add(graded)

    if "probe" in file.about:
        about["probe"] = file.about["probe"]

    # By condition, and within each in the order of the prompts.
    names = list(named)
    ordered = sorted(requested, key=lambda key: names.index(key[1]))
    # A server that takes only text may leave problems out.
    answered = [file.answers[key] for key in ordered if key in file.answers]
    return Evaluation(tuple(answered), about)


@alone
def baseline_noise(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    *,
    batch: int = 32,
    other_batch: int = 8,
    **options: Any,
) -> pd.DataFrame:
    """Measure how much baseline answers change with the batch size and with the dtype.

    The same problems are answered three times, and compared with the first: then in other batches,
    and in bfloat16 (a model of lower precision in float32). Rounding depends on batch size and
    dtype, and occasionally changes an answer. This is a rate of changes, not a test: an effect
    beside which as many answers change as here, in both directions, may come from rounding alone.

    Args:
        model: As for ``evaluate``. For the other dtype a copy of its parameters is held
            temporarily.
        prompts: Prompts with a ``solution``.
        batch: The batch size of the first run.
        other_batch: The batch size of the second run.
        options: Options of ``evaluate``, such as ``new_tokens``.

    Returns:
        One row per repetition: accuracy, difference with Newcombe's interval, mid-p McNemar,
        ``flipped``, the share of answers that became right or wrong, and ``texts``, the share with
        a different text.

    Raises:
        OptionError: The second run has the batch size of the first.
    """
    forbidden = sorted({"out", "conditions", "server"} & set(options))
    if forbidden:
        raise OptionError(
            f"{forbidden[0]}=… cannot be given: only the baseline is answered, again in each "
            "repetition"
        )

    model = load_model(as_hooked(model))
    prompts = as_prompts(prompts)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if batch == other_batch:
        raise OptionError(f"batch={batch} in both runs shows no noise; choose another value")

    other_dtype = "float32"
    if dtype == "float32":
        other_dtype = "bfloat16"
    twin = load_model(
        copy.deepcopy(generate.native_of(model)),
        tokenizer=model.tokenizer,
        dtype=getattr(torch, other_dtype),
        verify=False,
    )

    def answered(by: Any, batch: int) -> Evaluation:
        return evaluate(by, prompts, batch=batch, **options)

    first = answered(model, batch)
    repetitions = {
        f"{dtype}, batch {batch}": first,
        f"{dtype}, batch {other_batch}": answered(model, other_batch),
        f"{other_dtype}, batch {batch}": answered(twin, batch),
    }

    first_right = first.right(BASELINE)
    rows = []
    for name, repetition in repetitions.items():
        right = repetition.right(BASELINE)
        comparison = repetition.compare(BASELINE, other=first)
        figures = {figure: comparison[figure] for figure in ("difference", "low", "high", "p", "n")}

        pairs = zip(repetition.answers, first.answers, strict=True)
        changed_texts = [answer.text != first_answer.text for answer, first_answer in pairs]
        rows.append(
            {
                "repetition": name,
                "accuracy": float(right.mean()),
                **figures,
                "flipped": float((right != first_right).mean()),
                "texts": float(np.mean(changed_texts)),
            }
        )

    return pd.DataFrame(rows)


def _requested(
    prompts: Sequence[Prompt], sequences: Sequence[Mapping[str, TokenSequence]], samples: int
) -> dict[Key, Request]:
    """Everything that is asked for, each problem's conditions one after the other."""
    requested = {}
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        for name, sequence in by_condition.items():
            for sample in range(samples):
                request = Request(prompt.id, sequence, sample, name, str(prompt.solution))
                requested[prompt.id, name, sample] = request

    return requested


def _check_kept(file: Kept, requested: Mapping[Key, Request]) -> None:
    """Refuse kept answers to other token ids, or with another reference, than those of this
    call."""
    for key, request in requested.items():
        answer = file.answers.get(key)
        if answer is None:
            continue

        different = None
        if answer.read != read_digest(request.sequence):
            different = "the tokens"
        elif answer.solution != request.solution:
            different = "the solution"

        if different is not None:
            raise OptionError(
                f"{file.path} holds answers of another run ({different} of prompt {request.prompt}"
                f" under {request.condition!r} differ); choose another file, or move this one"
            )


def read_digest(sequence: TokenSequence) -> str:
    """A digest of the token ids that the model reads, stored with each answer."""
    return provenance.digest([sequence.tokens.tolist()])


@contextmanager
def _interruption_told(file: Kept, requested: Mapping[Key, Request]) -> Iterator[None]:
    """On Ctrl-C, say how many answers are kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        message = (
            "stopped; no answer is kept, since no file was given: with out=… each one is stored"
            " when it ends"
        )

        if file.path is not None:
            count = sum(key in file.answers for key in requested)
            message = (
                f"stopped; {count} of {len(requested)} answers are kept in {file.path}. The same"
                " call goes on with the rest"
            )
        raise Interrupted(message) from None


def _generated(
    model: HookedModel,
    native: Any,
    requested: Mapping[Key, Request],
    todo: Sequence[Key],
    batch: int,
    rope_factors: Mapping[str, str],
    sampling: Sampling,
) -> Generator[tuple[Key, Answer, str], None, None]:
    """Each answer with its text, as soon as it ends."""
    generation_config = getattr(native, "generation_config", None)
    end = end_tokens(generation_config, model.tokenizer)

    # LongRoPE has other factors beyond a length, and chooses them for a whole batch.
    keys_by_factors: dict[str, list[Key]] = {}
    shortest_first = sorted(todo, key=lambda key: len(requested[key].sequence))
    for key in shortest_first:
        factors = rope_factors.get(key[0], "")
        keys_by_factors.setdefault(factors, []).append(key)

    kept_count = len(requested) - len(todo)
    with AnswerBar(len(todo), kept_count) as bar:
        for keys in keys_by_factors.values():
            generation = Generation(
                native,
                [requested[key] for key in keys],
                batch,
                sampling.new_tokens,
                end,
                sampling.temperature,
                sampling.seed,
                bar.add_tokens,
            )
            while generation.is_open:
                for number, answer in generation.advance().items():
                    text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                    bar.add_answer()
                    yield keys[number], answer, text


def _graded(request: Request, answer: Answer, text: str, grader: Grader) -> GradedAnswer:
    """An answer with its grade, as it is stored."""
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
        read=read_digest(request.sequence),
    )


def _check_references(prompts: Sequence[Prompt], grader: Grader) -> None:
    """Refuse prompts without a solution that the grader can read, or with an answer already."""
    graders.check_grader(grader)
    for prompt in prompts:
        if prompt.solution is None or not prompt.solution.strip():
            raise PromptError(
                f'prompt {prompt.id} ("{prompt.excerpt}") has no solution to compare with; load '
                "prompts with answers, or give Prompt(…, solution=…)"
            )

        if prompt.answer or prompt.answer_tokens:
            raise PromptError(
                f"prompt {prompt.id} already holds an answer, which the model would read; load "
                "prompts with with_answer=False"
            )

        kind = graders.grader_for(prompt.solution)
        if grader == "number" and kind == "math":
            raise PromptError(
                f'the solution of prompt {prompt.id} does not end in a number; use grader="math"'
            )

        if kind == "math":
            graders.check_grader("math")


@alone
def _checked_rope_factors(
    model: Any,
    native: Any,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    new_tokens: int,
    requested: Mapping[Key, Request],
) -> dict[str, str]:
    """The rope factors with which a LongRoPE model reads each prompt: the "short" or "long" ones.

    All prompts are checked, before a token is generated.
    """
    for by_condition in sequences:
        request_checks.check_is_unchanged(by_condition[BASELINE])

    hooked = model
    if isinstance(model, UnloadedModel):
        check_servable(sequences)
        hooked = model.loaded
    if hooked is not None:
        for prompt, by_condition in zip(prompts, sequences, strict=True):
            request_checks.check_side(prompt, by_condition, hooked, new_tokens)

    model_name = str(model.cfg.model_name)
    check_room(requested.values(), new_tokens, model.cfg.n_ctx, model_name)
    if isinstance(model, UnloadedModel):
        return {}

    for by_condition in sequences:
        for name, sequence in by_condition.items():
            generate.refuse_what_cannot_generate(native, sequence, name)

    ids = [prompt.id for prompt in prompts]
    sequences_by_name = [dict(by_condition) for by_condition in sequences]
    request_checks.check_variants(model, sequences_by_name)
    request_checks.check_interventions(model, ids, sequences_by_name)
    factors = request_checks.sides_of(model, sequences)
    return dict(zip(ids, factors, strict=False))


def _about(model: Any, server: Server | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What answers and prompts come from."""
    about: dict[str, Any] = {"model": provenance.name_of(str(model.cfg.model_name))}
    if server is None:
        about["weights_hash"] = weights_hash(model)
        about["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    else:
        about["server"] = server.address
        about["served_model"] = None
        if server.model is not None:
            about["served_model"] = provenance.name_of(server.model)

    about["prompts"] = provenance.digest(prompts)
    about["versions"] = provenance.versions()
    groups = {prompt.id: prompt.group for prompt in prompts if prompt.group is not None}
    if len(set(groups.values())) < len(groups):
        about["groups"] = groups
    return about
