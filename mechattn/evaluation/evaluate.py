"""Does it change the answers? Every condition on every problem, stored as it goes, so that a run can be continued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
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
from mechattn.errors import OptionError, PromptError, PromptTooLong
from mechattn.evaluation.answer_file import kept
from mechattn.evaluation.answers import Grader, check_grader, grade, grader_for
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer
from mechattn.evaluation.generate import Answer, Request, answers, native_of, refuse_what_cannot_generate
from mechattn.model.fingerprint import weights_hash
from mechattn.model.hooked import HookedModel
from mechattn.model.load import as_hooked, load_model
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.sequences import Sequence
from mechattn.results import provenance
from mechattn.results.identity import identity

Todo = tuple[Prompt, str, Request]  # a prompt, the name of a condition, and its sequence


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
) -> Evaluation:
    """Generate and grade answers to every problem under every condition, the baseline always among them.

    The model without hooks generates, with a cache; interventions are attached to it. Greedy answers depend on batches
    by rounding alone, and so do sampled ones, whose draws are keyed by seed, prompt, sample and position.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: Prompts with a ``solution``, as ``load_prompts`` gives them.
        conditions: Names and conditions, such as for ``run``.
        new_tokens: The limit of an answer; those that reach it are counted.
        samples: Answers to each question.
        temperature: 0 takes the likeliest token; 0 by default for one sample, 1 for several.
        grader: "number", "math" (math-verify), or "auto": whichever the references need.
        batch: Sequences at a time.
        seed: Decides every draw.
        out: A .jsonl file that each answer is added to as it comes. If it holds answers of the same run already, these
            are taken: a run that was killed goes on.
        progress: Show a bar when it takes longer than two seconds.

    Raises:
        MechattnError: Something given cannot be used; found before the first token is generated.
    """
    model = load_model(as_hooked(model))
    prompts = as_prompts(prompts)
    named = with_baseline(conditions)
    temperature = _temperature(temperature, samples)
    _check_numbers(new_tokens, samples, batch)
    _check_references(prompts, grader)
    native = native_of(model)
    sequences = made_sequences(named, prompts, model, seed)
    _check_sequences(model, native, prompts, sequences, new_tokens)
    sides = dict(zip((p.id for p in prompts), sides_of(model, sequences), strict=False))
    about = _about(model, prompts, named, new_tokens, samples, temperature, grader, seed)
    groups = {p.id: p.group for p in prompts if p.group is not None}
    about |= {"groups": groups} if len(set(groups.values())) < len(groups) else {}
    about |= {"rope_factors": counted_sides(list(sides.values()))} if sides else {}
    with kept(out, about) as file:
        todo = [
            (p, name, Request(p.id, made[name], sample))
            for p, made in zip(prompts, sequences, strict=True)
            for name in named
            for sample in range(samples)
            if (p.id, name, sample) not in file.answers
        ]
        end = _end_tokens(model, native)
        for some in _progress(_batches(todo, batch, sides), progress):
            written = answers(native, [asked for _, _, asked in some], new_tokens, end, temperature, seed)
            texts = [model.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in written]
            fresh = [
                _answered(prompt, name, asked, answer, text, grader)
                for (prompt, name, asked), answer, text in zip(some, written, texts, strict=True)
            ]
            file.add(fresh)
    ordered = [file.answers[p.id, name, sample] for name in named for p in prompts for sample in range(samples)]
    return Evaluation(tuple(ordered), about)


def _batches(todo: Seq[Todo], batch: int, sides: Mapping[str, str]) -> list[list[Todo]]:
    """What is to be answered, similar lengths together, and never prompts on both sides of a model's boundary."""
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
        raise OptionError(f"temperature={temperature!r}: give 0 for the likeliest token, or a number above")
    if temperature == 0 and samples > 1:
        raise OptionError(
            f"samples={samples} with temperature=0 gives the same answer {samples} times; give a temperature"
        )
    return float(temperature)


def _check_numbers(new_tokens: int, samples: int, batch: int) -> None:
    for name, value in (("new_tokens", new_tokens), ("samples", samples), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}: give a whole number, 1 at least")


def _check_references(prompts: Seq[Prompt], grader: Grader) -> None:
    check_grader(grader)
    for prompt in prompts:
        if prompt.solution is None or not prompt.solution.strip():
            raise PromptError(
                f'prompt {prompt.id} ("{prompt.excerpt}") has no solution to compare with; load prompts with answers, '
                "or give Prompt(…, solution=…)"
            )
        if prompt.answer:
            raise PromptError(
                f"prompt {prompt.id} holds an answer already, which the model would read: with_answer=False"
            )
        kind = grader_for(prompt.solution)
        if grader == "number" and kind == "math":
            raise PromptError(f'the solution of prompt {prompt.id} ends in no number; use grader="math"')
        if kind == "math":
            check_grader("math")


def _check_sequences(
    model: HookedModel, native: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], new_tokens: int
) -> None:
    for prompt, made in zip(prompts, sequences, strict=True):
        check_side(prompt, made, model, new_tokens)
        for name, sequence in made.items():
            if name == BASELINE and (sequence.inserted.any() or sequence.edge_mask or sequence.interventions):
                raise OptionError('the condition "baseline" changes the prompt; every comparison is with it')
            if len(sequence) + new_tokens > model.cfg.n_ctx:
                raise PromptTooLong(
                    f'prompt {prompt.id} ("{prompt.excerpt}") has {len(sequence):,} tokens with the condition "{name}" '
                    f"and {new_tokens} new ones are allowed; {model.cfg.model_name} takes {model.cfg.n_ctx:,}"
                )
            refuse_what_cannot_generate(native, sequence, name)
    check_variants(model, [dict(made) for made in sequences])
    check_interventions(model, [p.id for p in prompts], [dict(made) for made in sequences])


def _end_tokens(model: HookedModel, native: Any) -> frozenset[int]:
    """Tokens that end an answer, by the tokenizer and by the model's generation settings."""
    found = getattr(getattr(native, "generation_config", None), "eos_token_id", None)
    found = found if isinstance(found, (list, tuple)) else [found]
    return frozenset(int(t) for t in [*found, model.tokenizer.eos_token_id] if t is not None)


def _about(
    model: HookedModel,
    prompts: Seq[Prompt],
    named: Mapping[str, Condition],
    new_tokens: int,
    samples: int,
    temperature: float,
    grader: str,
    seed: int,
) -> dict[str, Any]:
    parameters = next(model.parameters())
    return {
        "model": provenance.name_of(str(model.cfg.model_name)),
        "weights_hash": weights_hash(model),
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "prompts": provenance.digest(prompts),
        "conditions": {name: identity(condition) for name, condition in named.items()},
        "new_tokens": new_tokens,
        "samples": samples,
        "temperature": temperature,
        "grader": grader,
        "seed": seed,
        "versions": provenance.versions(),
    }


def _progress(batches: list, show: bool) -> Iterable | Iterator:
    from tqdm.auto import tqdm

    return tqdm(batches, desc="answers", unit="batch", delay=2, disable=not show)
