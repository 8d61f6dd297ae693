"""`run` on every toy, and on tiny models of other families, against patterns of plain transformers in float64."""

import contextlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconAttention

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer, toy_folder, toy_names
from tests.conftest import loaded_once
from tests.tiny_families import tiny_model

TOLERANCE = 2e-6
TINY = [
    "BLOOM",  # ALiBi in the scores
    "Falcon-RW (ALiBi)",  # ALiBi in the mask
    "GPT-2",  # learned positions
    "Gemma 2",  # capped scores, windows, a norm after attention
    "Qwen3",  # queries and keys normed, rotary positions
]


@contextlib.contextmanager
def alibi_in_the_mask_only(model, monkeypatch):
    """Falcon's eager attention adds ALiBi a second time: here the second is zero."""
    forward = FalconAttention.forward

    def once(self, hidden_states, alibi, *args, **kwargs):
        return forward(
            self, hidden_states, None if alibi is None else torch.zeros_like(alibi), *args, **kwargs
        )

    with monkeypatch.context() as patch:
        if model.config.model_type == "falcon":
            patch.setattr(FalconAttention, "forward", once)
        yield


def plain_and_hooked(name, tokenizer):
    """A model of transformers in float64 with eager attention, and the same one hooked, in float32."""
    if name in TINY:
        return tiny_model(name, len(tokenizer)).double(), loaded_once(name)
    return AutoModelForCausalLM.from_pretrained(
        toy_folder(name), dtype=torch.float64
    ).eval(), loaded_once(name)


def windows(config):
    """For each layer how far back a query sees, read from the configuration by hand."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    width = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    return [width if kind == "sliding_attention" and width else 10**9 for kind in kinds]


def oracle(model, ids, original):
    """Received attention [layer, head, key], a mean over the original queries after each key that see it."""
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    out = np.full((len(attentions), attentions[0].shape[1], len(ids)), np.nan)
    for layer, (attention, window) in enumerate(
        zip(attentions, windows(model.config), strict=True)
    ):
        for head, pattern in enumerate(attention[0].numpy()):
            for key in range(len(ids)):
                queries = [q for q in range(key + 1, len(ids)) if original[q] and q - key < window]
                if queries:
                    out[layer, head, key] = sum(pattern[q, key] for q in queries) / len(queries)
    return out


def measured(result, index, condition, length):
    dataset = result["received_attention"].isel(prompt=index).sel(condition=condition)
    return dataset.received_per_prompt.values[..., :length]


@pytest.mark.parametrize("name", [*toy_names(), *TINY])
def test_received_attention_equals_the_oracle(name, prompts, monkeypatch):
    """Three prompts of different lengths in one batch, each with and without filler: all but one row are padded."""
    engines = ("streaming", "hooks") if name in toy_names() else ("auto",)
    tokenizer = load_tokenizer(name if name in toy_names() else "toy:llama")
    plain, hooked = plain_and_hooked(name, tokenizer)
    slash = ma.MeaninglessTokens("/", 55)
    some = prompts[:3]
    results = [
        ma.run(hooked, some, {"slash": slash}, keep="prompts", engine=engine) for engine in engines
    ]
    index = min(range(3), key=lambda i: len(slash.apply(some[i], hooked)))
    sequence = slash.apply(some[index], hooked)
    ids = sequence.tokens.tolist()
    assert len(ids) < results[0]["received_attention"].sizes["key"], "this one was padded"
    with torch.no_grad():
        native = plain(torch.tensor([ids])).logits
    plain.set_attn_implementation("eager")
    with alibi_in_the_mask_only(plain, monkeypatch):
        with torch.no_grad():
            torch.testing.assert_close(
                plain(torch.tensor([ids])).logits, native, atol=1e-4, rtol=1e-4
            )
        expected = oracle(plain, ids, (sequence.origin >= 0).tolist())
    for result in results:
        got = measured(result, index, "slash", len(ids))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        assert np.nanmax(abs(got - expected)) <= (
            TOLERANCE if name in toy_names() else 10 * TOLERANCE
        )


def test_the_oracle_would_notice_alibi_counted_twice(prompts):
    tokenizer = load_tokenizer("toy:llama")
    plain, hooked = plain_and_hooked("Falcon-RW (ALiBi)", tokenizer)
    result = ma.run(hooked, prompts[:1], keep="prompts")
    ids = ma.Baseline().apply(prompts[0], hooked).tokens.tolist()
    plain.set_attn_implementation("eager")
    twice = oracle(plain, ids, [True] * len(ids))
    assert np.nanmax(abs(measured(result, 0, "baseline", len(ids)) - twice)) > 1000 * TOLERANCE


@pytest.fixture(scope="module")
def llama(prompts):
    """The plain model, the first prompt with filler, and which of its tokens are original."""
    plain, hooked = plain_and_hooked("toy:llama", load_tokenizer("toy:llama"))
    plain.set_attn_implementation("eager")
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


def test_segments_are_means_and_masses_of_the_oracle(llama, slash_result):
    plain, ids, sequence = llama
    inserted = sequence.inserted.numpy()
    received = oracle(plain, ids, ~inserted)[..., inserted].mean(-1)
    of_prompt = slash_result["received_attention"].isel(prompt=0).sel(condition="slash")
    mine = of_prompt.sel(segment="inserted")
    np.testing.assert_allclose(mine.received_by_segment, received, atol=TOLERANCE)
    with torch.no_grad():
        attentions = plain(torch.tensor([ids]), output_attentions=True).attentions
    rows = [attention[0].numpy()[:, ~inserted] for attention in attentions]
    mass = [pattern[..., inserted].sum(-1).mean(-1) for pattern in rows]
    np.testing.assert_allclose(mine.mass_by_segment, mass, atol=TOLERANCE)
    assert np.allclose(of_prompt.mass_by_segment.sum("segment"), 1, atol=1e-5)
