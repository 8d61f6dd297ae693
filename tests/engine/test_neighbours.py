"""A row's numbers do not depend on the rows beside it: prompts far apart in length, alone and together."""

import math
from importlib import import_module

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine import batches as batch_plans
from mechattn.engine import request_checks
from mechattn.errors import MechattnError
from mechattn.model.hooked import facts_of
from tests.model.unusual import unusual_model

LENGTHS = (6, 20, 60)
NEW = 4
# One family for each way to count positions, to mask, to route and to compute attention. That logits of a row are
# its own is a check of every family when it is loaded (tests/model/test_families.py).
MECHANISMS = (
    "Mixtral",
    "Qwen3-Next (hybrid)",
    "Gemma 3",
    "Falcon-RW (ALiBi)",
    "GPT-2",
    "DeepSeek-V3 (latent attention)",
)
CLOSE = 5e-5  # of the largest value: float32, two layers, sums over 60 keys


def prompts_of(tokenizer, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    drawn = [
        torch.randint(5, len(tokenizer), (n - 1,), generator=generator).tolist() for n in lengths
    ]
    return [
        ma.Prompt(tokens=(tokenizer.bos_token_id, *row), id=str(i), solution="3", system="")
        for i, row in enumerate(drawn)
    ]


@pytest.fixture
def one_batch(monkeypatch):
    """Prompts of any lengths in one batch, whose rows are noted."""
    seen = []
    module = import_module("mechattn.engine.run")  # the function of that name hides nothing so
    pad = module.pad_right

    def noting(sequences, *arguments):
        seen.append([len(sequence) for sequence in sequences])
        return pad(sequences, *arguments)

    monkeypatch.setattr(batch_plans, "_LEAST_FILL", 0.0)
    monkeypatch.setattr(module, "pad_right", noting)
    return seen


def analyses_of(model, prompts):
    """Received attention, and what the first of these says of the residual stream that this model has."""
    for stream in (ma.analyses.HeadUpdates(per_query=True), ma.analyses.BlockUpdates()):
        try:
            ma.run(model, prompts[0], analyses=[stream])
        except MechattnError:
            continue
        return [ma.ReceivedAttention(), stream]
    ma.run(model, prompts[0])  # tries whether it can be streamed
    return [ma.ReceivedAttention()]


def of_each(result, prompts):
    """All that was kept of each prompt, as far as it reaches."""
    found = {}
    for prompt in prompts:
        for name, dataset in result.datasets.items():
            for variable, values in dataset.data_vars.items():
                if (
                    name == "sequences"
                    or "prompt" not in values.dims
                    or values.dtype.kind not in "fi"
                ):
                    continue
                own = values.sel(prompt=prompt.id)
                growing = [dim for dim in ("key", "original_key", "pos") if dim in own.dims]
                found[prompt.id, name, variable] = own.isel(
                    {d: slice(len(prompt.tokens)) for d in growing}
                ).values
    return found


def differences(one, other):
    """The largest difference of each quantity, in units of its largest value."""
    assert one.keys() == other.keys()
    for where in one:
        a, b = (np.asarray(each[where], dtype=np.float64) for each in (one, other))
        assert (np.isnan(a) == np.isnan(b)).all(), where
        yield (
            where,
            float(np.nanmax(np.abs(a - b), initial=0) / max(np.nanmax(np.abs(a), initial=0), 1e-6)),
        )


def run(model, prompts, analyses, engine, **options):
    made = ma.run(model, prompts, analyses=analyses, engine=engine, keep="prompts", **options)
    return of_each(made, prompts)


def worst(model, prompts, analyses, engine, one_batch):
    one_batch.clear()
    alone = run(model, prompts, analyses, engine, memory="0.001MiB")
    assert sorted(one_batch) == [[len(prompt.tokens)] for prompt in prompts], (
        "each has to be in a batch of its own"
    )
    one_batch.clear()
    together = run(model, prompts, analyses, engine)
    assert one_batch == [[len(prompt.tokens) for prompt in prompts]], "they have to be in one batch"
    return max(differences(alone, together), key=lambda pair: pair[1])


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_row_is_measured_alike_alone_and_beside_others(family, shared, tokenizer, one_batch):
    model = shared(family)
    prompts = prompts_of(tokenizer)
    analyses = analyses_of(model, prompts)
    engines = ["hooks"] + ["streaming"] * (facts_of(model).streaming.outcome == "passed")
    for engine in engines:
        where, difference = worst(model, prompts, analyses, engine, one_batch)
        assert difference < CLOSE, (engine, where, difference)


def read_anew(native, prompt):
    """The likeliest tokens, and their mean log-probability, by a model that reads everything anew for each: no cache."""
    tokens = list(prompt.tokens)
    logprobs = []
    for _ in range(NEW):
        with torch.no_grad():
            likely = (
                native(torch.tensor([tokens]), use_cache=False)
                .logits[0, -1]
                .double()
                .log_softmax(-1)
            )
        tokens.append(int(likely.argmax()))
        logprobs.append(float(likely.max()))
    return tuple(tokens[-NEW:]), sum(logprobs) / NEW


def answered(model, prompts, batch):
    return ma.evaluate(model, prompts, batch=batch, new_tokens=NEW).answers


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_row_is_answered_alike_alone_and_beside_others(family, shared, tokenizer):
    model = shared(family)
    prompts = prompts_of(tokenizer)
    for batch in (8, 1):
        for answer, prompt in zip(answered(model, prompts, batch), prompts, strict=True):
            tokens, logprob = read_anew(facts_of(model).native, prompt)
            assert answer.tokens == tokens
            assert math.isclose(answer.logprob, logprob, abs_tol=1e-4)


@pytest.fixture
def longrope(tokenizer):
    native_model = unusual_model("Llama LongRoPE", len(tokenizer))
    return ma.load_model(native_model, tokenizer=tokenizer)


@pytest.mark.parametrize("engine", ["hooks", "streaming"])
def test_the_law_would_notice_a_model_that_depends_on_its_batch(
    longrope, tokenizer, one_batch, monkeypatch, engine
):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer)
    _, difference = worst(longrope, prompts, [ma.ReceivedAttention()], engine, one_batch)
    assert difference > 1000 * CLOSE


def test_the_law_would_notice_answers_that_depend_on_their_batch(longrope, tokenizer, monkeypatch):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer)
    together, alone = (answered(longrope, prompts, batch) for batch in (8, 1))
    assert [a.tokens for a in together] != [a.tokens for a in alone]
