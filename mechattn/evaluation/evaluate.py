"""Generates and grades answers under every condition; an interrupted run can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.engine.check import (
    check_interventions,
    check_side,
    check_variants,
    counted_sides,
    made_sequences,
    sides_of,
    with_baseline,
)
from mechattn.errors import OptionError, PromptError
from mechattn.evaluation.answer_file import kept
from mechattn.evaluation.answers import Grader, check_grader, grade, grader_for
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer
from mechattn.evaluation.generate import Answer, Request, answers, native_of, refuse_what_cannot_generate
from mechattn.evaluation.served.answering import Exchanged, Todo, check_room, check_servable, served, tokens_of
from mechattn.evaluation.served.server import Server, server_given
from mechattn.model.fingerprint import weights_hash
from mechattn.model.hooked import HookedModel
from mechattn.model.load import as_hooked, load_model
from mechattn.model.lock import alone
from mechattn.model.without_weights import UnloadedModel, end_tokens, unloaded
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import MOST, Prompt, as_prompts
from mechattn.prompts.sequences import Sequence
from mechattn.results import provenance
from mechattn.results.canonical import identity


def evaluate(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    *,
    new_tokens: int = 256,
    samples: int = 1,
    temperature: float | None = None,
    grader: Grader = "auto",
    batch: int = 32,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
    server: str | None = None,
    served_model: str | None = None,
    server_key: str | None = None,
    server_timeout: int | float = 600.0,
    verify_server: bool = True,
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
        new_tokens: The longest answer, in tokens; answers that reach it are counted as unfinished.
        samples: The number of answers to each question.
        temperature: The sampling temperature; 0 takes the likeliest token. By default 0 for one sample and 1 for
            several.
        grader: "number", "math" (math-verify), or "auto" to choose by the references.
        batch: The number of sequences (or requests to a server) at a time.
        seed: The seed of all draws.
        out: A .jsonl file to which each answer is added. If it already holds answers of the same run, the run resumes
            where it stopped.
        progress: Show a bar when it takes longer than two seconds.
        server: The address of a server with a completions endpoint, such as "http://host:8000/v1".
        served_model: The name of the model there; by default the only one that it lists.
        server_key: The name of the environment variable with the server's key.
        server_timeout: Seconds that an answer from the server may take before it is requested again.
        verify_server: Refuse a server whose answers differ from the model's; with False, the comparison is only
            recorded.

    Raises:
        MechattnError: An argument cannot be used; raised before the first token is generated.
        ServerError: The server cannot be reached or used, is not the model, or fails; its earlier answers are kept.
    """
    at = server_given(server, served_model, server_key, server_timeout, verify_server)
    reader: Any = load_model(as_hooked(model)) if at is None else unloaded(model)
    prompts = as_prompts(prompts)
    named = with_baseline(conditions)
    temperature = _temperature(temperature, samples)
    _check_numbers(new_tokens, samples, batch)
    _check_references(prompts, grader)
    native = native_of(reader) if at is None else None
    sequences = made_sequences(named, prompts, reader, seed)
    sides = _checked_sides(reader, native, prompts, sequences, new_tokens)
    about = _about(reader, at, prompts, sequences, named, new_tokens, samples, temperature, grader, seed)
    about |= {"rope_factors": counted_sides(list(sides.values()))} if sides else {}
    with kept(out, about) as file, ExitStack() as stack:
        todo = [
            (p, name, Request(p.id, made[name], sample))
            for p, made in zip(prompts, sequences, strict=True)
            for name in named
            for sample in range(samples)
            if (p.id, name, sample) not in file.answers
        ]
        if at is None:
            came = _generated(reader, native, _batches(todo, batch, sides), new_tokens, temperature, seed, progress)
        elif todo:
            before = file.about.get("probe")
            there = stack.enter_context(
                served(at, reader, prompts, sequences, new_tokens, batch, temperature, seed, before)
            )
            file.note("probe", there.probe.about)
            came = there.answered(todo, new_tokens, temperature, seed, progress)
        else:
            came = iter(())
        try:
            for some in came:
                file.add([_answered(*one, answer, text, grader) for one, answer, text in some])
        except Exchanged as error:
            file.note("probe", file.about["probe"], without=error.since)
            raise
        if at is not None and todo:
            file.note("probe", file.about["probe"])
    about |= {"probe": file.about["probe"]} if "probe" in file.about else {}
    ordered = [file.answers[p.id, name, sample] for name in named for p in prompts for sample in range(samples)]
    return Evaluation(tuple(ordered), about)


def _generated(
    model: HookedModel,
    native: Any,
    batches: list[list[Todo]],
    new_tokens: int,
    temperature: float,
    seed: int,
    progress: bool,
) -> Iterator[list[tuple[Todo, Answer, str]]]:
    """The answers of each batch, with their texts."""
    end = end_tokens(getattr(native, "generation_config", None), model.tokenizer)
    for some in _progress(batches, progress):
        written = answers(native, [asked for _, _, asked in some], new_tokens, end, temperature, seed)
        texts = [model.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in written]
        yield list(zip(some, written, texts, strict=True))


def _batches(todo: Seq[Todo], batch: int, sides: Mapping[str, str]) -> list[list[Todo]]:
    """The requests in batches of similar length, none with prompts on both sides of a model's boundary."""
    parts: dict[str, list[Todo]] = {}
    for item in sorted(todo, key=lambda item: len(item[2].sequence)):
        parts.setdefault(sides.get(item[0].id, ""), []).append(item)
    return [part[i : i + batch] for part in parts.values() for i in range(0, len(part), batch)]


def _answered(prompt: Prompt, name: str, asked: Request, answer: Answer, text: str, grader: Grader) -> GradedAnswer:
    """An answer, graded."""
    graded = grade(text, str(prompt.solution), grader)
    return GradedAnswer(
        prompt=prompt.id,
        condition=name,
        sample=asked.sample,
        text=text,
        tokens=answer.tokens,
        answer=graded.answer,
        solution=str(prompt.solution),
        right=graded.right,
        finished=answer.finished,
        logprob=answer.logprob,
    )


def _temperature(temperature: float | None, samples: int) -> float:
    """As given, or the default."""
    if temperature is None:
        return 0.0 if samples == 1 else 1.0
    if not 0 <= temperature < float("inf"):
        raise OptionError(f"temperature={temperature!r}: give 0 for the likeliest token, or a number above 0")
    if temperature == 0 and samples > 1:
        raise OptionError(
            f"samples={samples} with temperature=0 gives the same answer {samples} times; give a temperature above 0"
        )
    return float(temperature)


def _check_numbers(new_tokens: int, samples: int, batch: int) -> None:
    for name, value in (("new_tokens", new_tokens), ("samples", samples), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}: give a whole number, at least 1")
    if samples > MOST:
        raise OptionError(f"samples={samples}: give at most {MOST:,} answers to a question")


def _check_references(prompts: Seq[Prompt], grader: Grader) -> None:
    check_grader(grader)
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
        kind = grader_for(prompt.solution)
        if grader == "number" and kind == "math":
            raise PromptError(f'the solution of prompt {prompt.id} does not end in a number; use grader="math"')
        if kind == "math":
            check_grader("math")


@alone
def _checked_sides(
    model: Any, native: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], new_tokens: int
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
            check_side(prompt, made, hooked, new_tokens)
    check_room(prompts, sequences, new_tokens, model.cfg.n_ctx, str(model.cfg.model_name))
    if isinstance(model, UnloadedModel):
        return {}
    for made in sequences:
        for name, sequence in made.items():
            refuse_what_cannot_generate(native, sequence, name)
    check_variants(model, [dict(made) for made in sequences])
    check_interventions(model, [p.id for p in prompts], [dict(made) for made in sequences])
    return dict(zip((p.id for p in prompts), sides_of(model, sequences), strict=False))


def _about(
    model: Any,
    server: Server | None,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    named: Mapping[str, Condition],
    new_tokens: int,
    samples: int,
    temperature: float,
    grader: str,
    seed: int,
) -> dict[str, Any]:
    groups = {p.id: p.group for p in prompts if p.group is not None}
    return {
        "model": provenance.name_of(str(model.cfg.model_name)),
        **(_about_weights(model) if server is None else _about_server(server, sequences)),
        "prompts": provenance.digest(prompts),
        "conditions": {name: identity(condition) for name, condition in named.items()},
        "new_tokens": new_tokens,
        "samples": samples,
        "temperature": temperature,
        "grader": grader,
        "seed": seed,
        "versions": provenance.versions(),
        **({"groups": groups} if len(set(groups.values())) < len(groups) else {}),
    }


def _about_weights(model: HookedModel) -> dict[str, Any]:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"weights_hash": weights_hash(model), "dtype": dtype}


def _about_server(server: Server, sequences: Seq[Mapping[str, Sequence]]) -> dict[str, Any]:
    """The server, and a digest of all tokens that are sent: with another tokenizer it is another run."""
    name = None if server.model is None else provenance.name_of(server.model)
    return {"server": server.address, "served_model": name, "sent": provenance.digest(tokens_of(sequences))}


def _progress(batches: list, show: bool) -> Iterable | Iterator:
    from tqdm.auto import tqdm

    return tqdm(batches, desc="answers", unit="batch", delay=2, disable=not show)
