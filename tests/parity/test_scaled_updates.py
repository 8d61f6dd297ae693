"""Granite multiplies what its blocks give before it is added: updates have that factor, as its layers themselves show."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer
from tests.parity.plain import SHORT, seen_in
from tests.tiny_families import tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
FACTOR = 0.22


@pytest.fixture(scope="module")
def granite():
    """The hooked model, a sequence, and what each layer of plain transformers shows of it, in float64."""
    tokenizer = load_tokenizer("toy:llama")
    plain, same = (
        tiny_model("Granite", len(tokenizer), residual_multiplier=FACTOR) for _ in range(2)
    )
    model = ma.load_model(same, tokenizer=tokenizer)
    ids = SLASH.apply(SHORT, model).tokens.tolist()
    into = {}
    out_of = {}
    for n, layer in enumerate(plain.double().model.layers):
        into |= {(n, "before"): layer, (n, "middle"): layer.post_attention_layernorm}
        into[n, "z"] = layer.self_attn.o_proj
        out_of |= {(n, "after"): layer, (n, "mlp"): layer.mlp}
    return model, plain, seen_in(plain, ids, into, out_of)[0]


def measured(model, prompts, analysis):
    result = ma.run(model, [SHORT, prompts[0]], {"slash": SLASH}, analysis, keep="prompts")
    return result[analysis.name].sel(condition="slash").isel(prompt=0)


def test_scaled_updates_are_those_that_reach_the_residual_stream(granite, prompts):
    model, plain, seen = granite
    heads = plain.config.num_attention_heads
    mine = measured(model, prompts, ma.analyses.HeadUpdates(per_query=True))
    for n, layer in enumerate(plain.model.layers):
        z = seen[n, "z"].reshape(len(seen[n, "z"]), heads, -1)
        w_o = layer.self_attn.o_proj.weight.detach().numpy().T.reshape(heads, z.shape[-1], -1)
        delta = np.einsum("phd,hdm->phm", z, w_o) * FACTOR
        before = seen[n, "before"]
        np.testing.assert_allclose(delta.sum(1), seen[n, "middle"] - before, atol=1e-12)
        expected = np.linalg.norm(delta, axis=-1) / np.linalg.norm(before, axis=-1, keepdims=True)
        got = mine.magnitude_at_per_prompt.sel(layer=n).values[:, : len(z)]
        np.testing.assert_allclose(got, expected.T, rtol=1e-3)


def test_block_updates_that_are_scaled(granite, prompts):
    """What a block adds is its output times the residual multiplier."""
    model, _, seen = granite
    mine = measured(model, prompts, ma.analyses.BlockUpdates(per_query=True))
    for n in range(2):
        before, middle, after = (seen[n, name] for name in ("before", "middle", "after"))
        np.testing.assert_allclose(after - middle, FACTOR * seen[n, "mlp"], atol=1e-12)
        for block, (stream, delta) in enumerate(
            ((before, middle - before), (middle, after - middle))
        ):
            size = np.linalg.norm(delta, axis=-1)
            base = np.linalg.norm(stream, axis=-1)
            of_block = mine.sel(layer=n).isel(block=block)
            magnitude = of_block.block_magnitude_at_per_prompt.values[: len(size)]
            np.testing.assert_allclose(magnitude, size / base, rtol=1e-4)
            assert abs(magnitude - size / base / FACTOR).min() > 0.01, (
                "negative control: without the multiplier"
            )
            cosine = (stream * delta).sum(-1) / size / base
            turned = of_block.block_orientation_at_per_prompt.values[: len(size)]
            np.testing.assert_allclose(turned, cosine, atol=1e-4)


def test_small_updates_of_a_large_stream_are_what_blocks_give(tokenizer, prompts):
    """In bfloat16, where the difference of the streams is mostly rounding."""
    plain, same = (tiny_model("Llama", len(tokenizer)) for _ in range(2))
    for native in (plain, same):
        with torch.no_grad():
            native.model.embed_tokens.weight *= 10000
        native.bfloat16()
    model = ma.load_model(same, tokenizer=tokenizer, verify=False)
    ids = SLASH.apply(SHORT, model).tokens.tolist()
    layer = plain.model.layers[0]
    into = {"before": layer, "middle": layer.post_attention_layernorm}
    seen = seen_in(plain, ids, into, {"attention": layer.self_attn})[0]
    expected = np.linalg.norm(seen["attention"], axis=-1)
    difference = np.linalg.norm(seen["middle"] - seen["before"], axis=-1)
    assert np.median(abs(difference / expected - 1)) > 0.05, "negative control"

    mine = measured(model, prompts, ma.analyses.BlockUpdates(per_query=True))
    of_block = mine.sel(layer=0, block="attention")
    magnitude = of_block.block_magnitude_at_per_prompt.values[: len(ids)]
    stream = np.linalg.norm(seen["before"], axis=-1)
    np.testing.assert_allclose(magnitude, expected / stream, rtol=0.02)
