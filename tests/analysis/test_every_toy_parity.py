"""`run` on every toy, and on tiny models of other families, against patterns of plain transformers in float64."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.model.checkpoint import toy_names
from tests.analysis.plain import (
    MECHANISMS,
    SHORT,
    alibi_in_the_mask_only,
    models,
    plain_and_hooked,
    windows,
)

TOLERANCE = 2e-6
TINY = [
    "BLOOM",  # ALiBi in the scores
    "GPT-2",  # learned positions
    "Gemma 2",  # capped scores, windows, a norm after attention
    "Qwen3",  # queries and keys normed, rotary positions
]


def oracle(model, ids, original):
    """Received attention [layer, head, key], a mean over the original queries after each key that see it."""
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    out = np.full((len(attentions), attentions[0].shape[1], len(ids)), np.nan)
    for layer, (attention, window) in enumerate(
        zip(attentions, windows(model.config), strict=True)
    ):
        for key in range(len(ids)):
            queries = [q for q in range(key + 1, len(ids)) if original[q] and q - key < window]
            if queries:
                out[layer, :, key] = attention[0, :, queries, key].mean(1)
    return out


def measured(result, index, condition, length):
    dataset = result["received_attention"].isel(prompt=index).sel(condition=condition)
    return dataset.received_per_prompt.values[..., :length]


@pytest.mark.parametrize("name", [*toy_names(), *TINY])
def test_received_attention_equals_the_oracle(name, prompts):
    """Two prompts of different lengths in one batch, each with and without filler: all but one row are padded."""
    is_toy = name in toy_names()
    engines = ("streaming", "hooks") if name in MECHANISMS else ("auto",)
    tolerance = TOLERANCE if is_toy else 10 * TOLERANCE
    plain, hooked = plain_and_hooked(name)
    slash = ma.MeaninglessTokens("/", 55)
    some = [SHORT, prompts[0]]
    results = [
        ma.run(hooked, some, {"slash": slash}, keep="prompts", engine=engine) for engine in engines
    ]
    sequence = slash.apply(SHORT, hooked)
    ids = sequence.tokens.tolist()
    assert len(ids) < results[0]["received_attention"].sizes["key"], "this one was padded"
    with torch.no_grad():
        native = plain(torch.tensor([ids])).logits
    plain.set_attn_implementation("eager")
    with alibi_in_the_mask_only(plain):
        with torch.no_grad():
            torch.testing.assert_close(
                plain(torch.tensor([ids])).logits, native, atol=1e-4, rtol=1e-4
            )
        expected = oracle(plain, ids, (sequence.origin >= 0).tolist())
    for result in results:
        got = measured(result, 0, "slash", len(ids))
        assert_array_equal(np.isnan(got), np.isnan(expected))
        assert np.nanmax(abs(got - expected)) <= tolerance


def test_the_oracle_would_notice_alibi_counted_twice():
    plain, hooked = models("Falcon-RW (ALiBi)")
    result = ma.run(hooked, SHORT, keep="prompts")
    ids = ma.Baseline().apply(SHORT, hooked).tokens.tolist()
    twice = oracle(plain, ids, [True] * len(ids))
    assert np.nanmax(abs(measured(result, 0, "baseline", len(ids)) - twice)) > 1000 * TOLERANCE


@pytest.fixture(scope="module")
def llama(prompts):
    """The plain model, the first prompt with filler, and which of its tokens are original."""
    plain, hooked = models("toy:llama")
    sequence = ma.MeaninglessTokens("/", 55).apply(prompts[0], hooked)
    return plain, sequence.tokens.tolist(), sequence


def test_the_oracle_would_notice_another_rule(llama, slash_result):
    """Counting the inserted queries, or the filler one token earlier, is far outside of the tolerance."""
    plain, ids, sequence = llama
    original = (~sequence.inserted).tolist()
    mine = measured(slash_result, 0, "slash", len(ids))
    every_query = oracle(plain, ids, [True] * len(ids))
    assert np.nanmax(abs(mine - every_query)) > 1000 * TOLERANCE
    shifted = oracle(plain, ids, [*original[1:], True])
    assert np.nanmax(abs(mine - shifted)) > 100 * TOLERANCE


@pytest.mark.parametrize("segment", ["inserted", "template"])
def test_segments_are_means_and_masses_of_the_oracle(llama, slash_result, segment):
    """A mean leaves out keys that no counted query sees, such as the line break at the end."""
    plain, ids, sequence = llama
    original = ~sequence.inserted.numpy()
    keys = sequence.of_segment(segment).numpy()
    received = oracle(plain, ids, original)[..., keys]
    assert np.isnan(received).any() == (segment == "template")
    of_prompt = slash_result["received_attention"].isel(prompt=0).sel(condition="slash")
    mine = of_prompt.sel(segment=segment)
    assert_allclose(mine.received_by_segment, np.nanmean(received, -1), atol=TOLERANCE)
    with torch.no_grad():
        attentions = plain(torch.tensor([ids]), output_attentions=True).attentions
    rows = [attention[0].numpy()[:, original] for attention in attentions]
    mass = [pattern[..., keys].sum(-1).mean(-1) for pattern in rows]
    assert_allclose(mine.mass_by_segment, mass, atol=TOLERANCE)
    assert np.allclose(of_prompt.mass_by_segment.sum("segment"), 1, atol=1e-5)
