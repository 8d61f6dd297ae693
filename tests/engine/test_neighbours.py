"""A row's numbers do not depend on the rows beside it: prompts far apart in length, alone and together."""

import math
from importlib import import_module

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine import batches as batch_plans
from mechattn.engine import request_checks
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


def received(model, prompts, engine, **options):
    """What each token of each prompt receives."""
    result = ma.run(model, prompts, engine=engine, keep="prompts", **options)
    values = result["received_attention"].received_per_prompt.sel(condition="baseline")
    return [
        values.sel(prompt=prompt.id).isel(key=slice(len(prompt.tokens))).values
        for prompt in prompts
    ]


def largest_difference(model, prompts, engine, one_batch):
    """Of prompts that are read alone and together, in units of the largest value."""
    ma.run(model, prompts[0])  # verifies the model, and tries whether it can be streamed
    one_batch.clear()
    alone = received(model, prompts, engine, memory="0.001MiB")
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert sorted(one_batch) == [[length] for length in lengths], "each in a batch of its own"
    one_batch.clear()
    together = received(model, prompts, engine)
    assert one_batch == [lengths], "all in one batch"
    differences = []
    for expected, values in zip(alone, together, strict=True):
        assert (np.isnan(expected) == np.isnan(values)).all()
        differences.append(np.nanmax(np.abs(expected - values)) / np.nanmax(expected))
    return max(differences)


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_row_is_measured_alike_alone_and_beside_others(family, shared, tokenizer, one_batch):
    model = shared(family)
    prompts = prompts_of(tokenizer)
    assert largest_difference(model, prompts, "hooks", one_batch) < CLOSE
    if facts_of(model).streaming.outcome == "passed":
        assert largest_difference(model, prompts, "streaming", one_batch) < CLOSE


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


@pytest.fixture(scope="module")
def longrope(tokenizer):
    native_model = unusual_model("Llama LongRoPE", len(tokenizer))
    return ma.load_model(native_model, tokenizer=tokenizer)


def test_the_law_would_notice_a_model_that_depends_on_its_batch(
    longrope, tokenizer, one_batch, monkeypatch
):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer)
    assert largest_difference(longrope, prompts, "hooks", one_batch) > 1000 * CLOSE


def test_the_law_would_notice_answers_that_depend_on_their_batch(longrope, tokenizer, monkeypatch):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer)
    together, alone = (answered(longrope, prompts, batch) for batch in (8, 1))
    assert [a.tokens for a in together] != [a.tokens for a in alone]
