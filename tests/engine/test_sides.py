"""LongRoPE: both sides of the boundary never share a batch, each side is right, and the result says which it is."""

from functools import cache

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.engine import request_checks
from mechattn.errors import OptionError
from tests.engine.conftest import prompts_of, received
from tests.model.unusual import BOUNDARY, unusual_model

LENGTHS = (12, 40, 27, 60, 6, BOUNDARY, BOUNDARY + 1)


@cache
def loaded(name, tokenizer):
    return ma.load_model(unusual_model(name, len(tokenizer)), tokenizer=tokenizer)


def run(model, prompts, conditions=None, **options):
    return ma.run(model, prompts, conditions, keep="prompts", **options)


def own_received(native, tokens, counted, **options):
    """What each key receives from counted queries after it [layer, head, key], in the model's own attention."""
    native.set_attn_implementation("eager")
    options |= {"output_attentions": True, "use_cache": False}
    with torch.no_grad():
        patterns = native(tokens[None], **options).attentions
    place = torch.arange(len(tokens))
    later = (place[:, None] > place) & counted[:, None]
    total = (torch.cat(patterns).double() * later).sum(-2)
    return (total / later.sum(-2)).numpy()


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("Phi-3 LongRoPE", "hooks"),  # which is not streamed
        ("Llama LongRoPE", "streaming"),
    ],
)
def test_every_prompt_is_read_with_its_own_factors(name, engine, tokenizer, batches):
    model = loaded(name, tokenizer)
    prompts = prompts_of(tokenizer, LENGTHS)
    together = run(model, prompts, engine=engine)
    assert sorted(map(sorted, batches)) == [[6, 12, 27, BOUNDARY], [BOUNDARY + 1, 40, 60]]
    batches.clear()
    alone = run(model, prompts, engine=engine, memory="0.001MiB")
    assert sorted(batches) == [[length] for length in sorted(LENGTHS)]
    for prompt in prompts:
        assert_allclose(received(together, prompt), received(alone, prompt), atol=2e-6)


@pytest.mark.parametrize("name", ["Phi-4-mini", "Llama LongRoPE"])
def test_each_side_equals_a_model_with_those_factors(name, tokenizer):
    """The oracle: plain RoPE has no boundary, and LongRoPE with factors of 1 is plain RoPE times a constant."""
    model = loaded(name, tokenizer)
    prompts = prompts_of(tokenizer, LENGTHS)
    result = run(model, prompts)
    for index, factors in ((0, "short_factor"), (3, "long_factor")):
        native = unusual_model(name, len(tokenizer))
        scaling = native.config.rope_parameters
        rotary = native.model.rotary_emb
        width = len(scaling[factors])
        turns = 1 / (
            torch.tensor(scaling[factors]) * scaling["rope_theta"] ** (torch.arange(width) / width)
        )
        rotary.rope_type = "default"  # nothing is chosen by length any more
        rotary.inv_freq.copy_(turns)
        tokens = torch.tensor(prompts[index].tokens)
        expected = own_received(native, tokens, torch.ones(len(tokens), dtype=torch.bool))
        assert_allclose(received(result, prompts[index]), expected, atol=2e-6)


def test_the_result_says_which_side(toy, tokenizer, tmp_path):
    model = loaded("Llama LongRoPE", tokenizer)
    prompts = prompts_of(tokenizer, LENGTHS)
    result = run(model, prompts[:4])
    assert "short factors up to 32 positions" in result.provenance["model"]["rope"]
    result.save(tmp_path / "stored.zarr")
    for of_run in (result, ma.load_result(tmp_path / "stored.zarr")):
        assert of_run["sequences"].rope_factors.values.tolist() == ["short", "long"] * 2
    plain = ma.run(toy, "Tom has 3 apples.")
    assert "rope" not in plain.provenance["model"]
    assert "rope_factors" not in plain["sequences"]


def test_answers_of_both_sides_share_no_batch(tokenizer):
    model = loaded("Phi-3 LongRoPE", tokenizer)
    prompts = prompts_of(tokenizer, (10, 20, 28, 40, 60))
    many, one = (ma.evaluate(model, prompts, batch=b, new_tokens=4) for b in (8, 1))
    assert [a.tokens for a in many.answers] == [a.tokens for a in one.answers]
    assert_allclose([a.logprob for a in many.answers], [a.logprob for a in one.answers], atol=1e-4)
    assert many.provenance["rope_factors"] == {"short": 3, "long": 2}


def test_tokens_that_move_nothing_stay_on_their_side(tokenizer):
    """28 tokens and 10 more at the positions of the 28: the model counts no more positions than in the baseline."""
    model = loaded("Llama LongRoPE", tokenizer)
    (prompt,) = prompts_of(tokenizer, (28,))
    few = ma.MeaninglessTokens("/", 10, place="middle").unshifted()
    made = run(model, [prompt], {"few": few})
    assert_allclose(received(made, prompt), received(run(model, prompt), prompt), atol=2e-6)
    assert made["sequences"].rope_factors.values.tolist() == ["short"]


def test_without_the_guard_the_baseline_would_be_of_another_model(tokenizer, monkeypatch):
    """What was so until now: the condition crosses the boundary, and takes the baseline's factors with it."""
    model = loaded("Llama LongRoPE", tokenizer)
    (prompt,) = prompts_of(tokenizer, (28,))
    alone = received(run(model, prompt), prompt)
    monkeypatch.setattr(request_checks, "boundary_of", lambda model: None)
    beside = received(run(model, [prompt], {"ten": ma.MeaninglessTokens("/", 10)}), prompt)
    assert np.nanmax(np.abs(beside - alone)) > 0.1


def kept_apart(name, tokenizer, count, place, moved=0):
    """The largest difference of what run says under ``.unshifted()`` and the model's own patterns at the same ids.

    Under RoPE ids that are all moved by the same are the same.
    """
    model = loaded(name, tokenizer)
    (prompt,) = prompts_of(tokenizer, (12,))
    condition = ma.MeaninglessTokens("/", count, place=place).unshifted()
    dataset = run(model, [prompt], {"kept": condition})["received_attention"]
    got = dataset.received_per_prompt.sel(condition="kept").values[0]
    sequence = condition.apply(prompt, model)
    native = unusual_model(name, len(tokenizer))
    ids = sequence.position_ids[None] + moved
    assert int(ids.min()) >= 0
    options = {"position_ids": ids, "attention_mask": torch.ones_like(sequence.tokens)[None]}
    expected = own_received(native, sequence.tokens, sequence.origin >= 0, **options)
    return float(np.nanmax(np.abs(got - expected)))


@pytest.mark.parametrize("name", ["CodeGen", "Phi-3 LongRoPE"])
def test_ids_from_0_up_are_those_of_the_model(name, tokenizer):
    assert kept_apart(name, tokenizer, 5, "middle") < 2e-6


def test_negative_ids_are_excluded_from_tables_alone(tokenizer, monkeypatch):
    """The last is what was so until now: CodeGen took rows from the end of its table."""
    assert kept_apart("Phi-3 LongRoPE", tokenizer, 19, "start", moved=19) < 5e-6
    with pytest.raises(OptionError, match="has a table of positions"):
        kept_apart("CodeGen", tokenizer, 19, "start", moved=19)
    monkeypatch.setattr(request_checks, "takes_negative_ids", lambda model: True)
    assert kept_apart("CodeGen", tokenizer, 19, "start", moved=19) > 0.05
