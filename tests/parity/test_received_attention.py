"""`run` against an independent oracle: the plain model of transformers, eager attention, loops in float64."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mechattn.model.checkpoint import toy_folder

TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def plain():
    folder = toy_folder("toy:llama")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def plain_tokens(tokenizer, prompt, slashes):
    """System, slashes and question put together by hand; returns the ids and which of them are original."""
    system = tokenizer(f"{prompt.system}\n")["input_ids"]
    filler = (
        tokenizer(" ".join(["/"] * slashes), add_special_tokens=False)["input_ids"]
        if slashes
        else []
    )
    question = tokenizer(f"{prompt.question}\n", add_special_tokens=False)["input_ids"]
    return system + filler + question, [True] * len(system) + [False] * len(filler) + [True] * len(
        question
    )


def oracle(model, ids, original):
    """Received attention [layer, head, key], a mean over the original queries after each key, one by one."""
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    out = np.full((len(attentions), attentions[0].shape[1], len(ids)), np.nan)
    for layer, attention in enumerate(attentions):
        pattern = attention[0].numpy()
        for head in range(pattern.shape[0]):
            for key in range(len(ids)):
                seen = [
                    pattern[head, query, key]
                    for query in range(key + 1, len(ids))
                    if original[query]
                ]
                if seen:
                    out[layer, head, key] = sum(seen) / len(seen)
    return out


def measured(result, index, condition, length):
    dataset = result["received_attention"]
    return (
        dataset.received_per_prompt.isel(prompt=index).sel(condition=condition).values[..., :length]
    )


def test_the_oracle_would_notice_another_rule(plain, prompts, slash_result):
    """Counting the inserted queries, or the filler one token earlier, is far outside of the tolerance."""
    ids, original = plain_tokens(plain[1], prompts[0], 55)
    got = measured(slash_result, 0, "slash", len(ids))
    every_query = oracle(plain[0], ids, [True] * len(ids))
    assert np.nanmax(abs(got - every_query)) > 1000 * TOLERANCE
    shifted = oracle(plain[0], ids, [*original[1:], True])
    assert np.nanmax(abs(got - shifted)) > 100 * TOLERANCE


def test_segments_are_means_and_masses_of_the_oracle(plain, prompts, slash_result):
    ids, original = plain_tokens(plain[1], prompts[0], 55)
    per_key = oracle(plain[0], ids, original)
    start = original.index(False)
    got = slash_result["received_attention"].isel(prompt=0).sel(condition="slash")
    inserted = got.received_by_segment.sel(segment="inserted").values
    np.testing.assert_allclose(inserted, per_key[..., start : start + 55].mean(-1), atol=TOLERANCE)
    with torch.no_grad():
        attentions = plain[0](torch.tensor([ids]), output_attentions=True).attentions
    queries = [q for q in range(len(ids)) if original[q]]
    mass = [
        [a[0, h, queries][:, start : start + 55].sum(-1).mean() for h in range(8)]
        for a in attentions
    ]
    np.testing.assert_allclose(
        got.mass_by_segment.sel(segment="inserted").values, mass, atol=TOLERANCE
    )
    assert np.allclose(got.mass_by_segment.sum("segment"), 1, atol=1e-5)
