"""A row's numbers do not depend on the rows beside it: prompts far apart in length, alone and together."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine import request_checks
from mechattn.model.hooked import facts_of
from tests.engine.conftest import prompts_of, received
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


def largest_difference(model, prompts, engine, batches):
    """Of prompts that are read alone and together, in units of the largest value."""
    ma.run(model, prompts[0])  # verifies the model, and tries whether it can be streamed
    batches.clear()
    alone = ma.run(model, prompts, engine=engine, keep="prompts", memory="0.001MiB")
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert sorted(batches) == [[length] for length in lengths], "each in a batch of its own"
    batches.clear()
    together = ma.run(model, prompts, engine=engine, keep="prompts")
    assert batches == [lengths], "all in one batch"
    differences = []
    for prompt in prompts:
        expected = received(alone, prompt)
        values = received(together, prompt)
        assert (np.isnan(expected) == np.isnan(values)).all()
        differences.append(np.nanmax(np.abs(expected - values)) / np.nanmax(expected))
    return max(differences)


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_row_is_measured_alike_alone_and_beside_others(family, shared, tokenizer, batches):
    model = shared(family)
    prompts = prompts_of(tokenizer, LENGTHS)
    assert largest_difference(model, prompts, "hooks", batches) < CLOSE
    if facts_of(model).streaming.outcome == "passed":
        assert largest_difference(model, prompts, "streaming", batches) < CLOSE


def read_anew(native, prompt):
    """The likeliest tokens, and their mean log-probability, by a model that reads everything anew for each: no cache."""
    tokens = list(prompt.tokens)
    logprobs = []
    for _ in range(NEW):
        with torch.no_grad():
            logits = native(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        likely = logits.double().log_softmax(-1)
        tokens.append(int(likely.argmax()))
        logprobs.append(float(likely.max()))
    return tuple(tokens[-NEW:]), sum(logprobs) / NEW


def answered(model, prompts, batch):
    return ma.evaluate(model, prompts, batch=batch, new_tokens=NEW).answers


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_row_is_answered_alike_alone_and_beside_others(family, shared, tokenizer):
    model = shared(family)
    prompts = prompts_of(tokenizer, LENGTHS)
    for batch in (8, 1):
        for answer, prompt in zip(answered(model, prompts, batch), prompts, strict=True):
            tokens, logprob = read_anew(facts_of(model).native, prompt)
            assert answer.tokens == tokens
            assert math.isclose(answer.logprob, logprob, abs_tol=1e-4)


@pytest.fixture(scope="module")
def longrope(tokenizer):
    native_model = unusual_model("Llama LongRoPE", len(tokenizer))
    return ma.load_model(native_model, tokenizer=tokenizer)


def test_the_law_would_notice_batch_dependence(longrope, tokenizer, batches, monkeypatch):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer, LENGTHS)
    assert largest_difference(longrope, prompts, "hooks", batches) > 1000 * CLOSE


def test_the_law_would_notice_answers_that_depend_on_their_batch(longrope, tokenizer, monkeypatch):
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    prompts = prompts_of(tokenizer, LENGTHS)
    together, alone = (answered(longrope, prompts, batch) for batch in (8, 1))
    assert [a.tokens for a in together] != [a.tokens for a in alone]
