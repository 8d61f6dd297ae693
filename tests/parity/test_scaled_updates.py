"""Granite multiplies what its blocks give before it is added: updates have that factor, as its layers themselves show."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer
from tests.tiny_families import tiny_model

SLASH = ma.MeaninglessTokens("/", 20)


def at(result, dataset, name, length):
    return (
        result[dataset][f"{name}_per_prompt"]
        .sel(condition="slash")
        .isel(prompt=0)
        .values[..., :length]
    )


def test_scaled_updates_are_those_that_reach_the_residual_stream(prompts):
    """Granite multiplies what a block gives before it is added."""
    tokenizer = load_tokenizer("toy:llama")
    plain = tiny_model("Granite", len(tokenizer), residual_multiplier=0.22)
    same = tiny_model("Granite", len(tokenizer), residual_multiplier=0.22)
    model = ma.load_model(same, tokenizer=tokenizer, verify=False)
    result = ma.run(
        model, prompts[:1], analyses=ma.analyses.HeadUpdates(per_query=True), keep="prompts"
    )
    ids = ma.Baseline().apply(prompts[0], model).tokens
    layer = plain.model.layers[0]
    seen = {}
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda m, given: seen.update(z=given[0][0])
        ),
        layer.register_forward_pre_hook(lambda m, given: seen.update(before=given[0][0])),
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda m, given: seen.update(middle=given[0][0])
        ),
    ]
    with torch.no_grad():
        plain(ids[None])
    for handle in handles:
        handle.remove()
    heads = plain.config.num_attention_heads
    w_o = layer.self_attn.o_proj.weight.detach().T.view(heads, -1, plain.config.hidden_size)
    delta = torch.einsum("phd,hdm->phm", seen["z"].view(len(ids), heads, -1), w_o) * 0.22
    torch.testing.assert_close(delta.sum(1), seen["middle"] - seen["before"], atol=1e-4, rtol=1e-4)
    expected = (delta.norm(dim=-1) / seen["before"].norm(dim=-1, keepdim=True)).T
    mine = result["head_updates"].magnitude_at_per_prompt[0, 0, 0].values
    np.testing.assert_allclose(mine, expected, rtol=1e-3)


@pytest.mark.parametrize("engine", ["streaming", "hooks"])
def test_block_updates_that_are_scaled(prompts, engine):
    """Granite: what a block adds is its output times the residual multiplier, as its layers themselves show."""
    tokenizer = load_tokenizer("toy:llama")
    factor = 0.22
    plain, same = (
        tiny_model("Granite", len(tokenizer), residual_multiplier=factor) for _ in range(2)
    )
    plain = plain.double()
    model = ma.load_model(same, tokenizer=tokenizer)
    result = ma.run(
        model, prompts[:2], {"slash": SLASH}, ma.analyses.BlockUpdates(per_query=True), engine=engine, keep="prompts",
    )  # fmt: skip
    ids = SLASH.apply(prompts[0], model).tokens
    seen = {}
    handles = []
    for n, layer in enumerate(plain.model.layers):
        shown = {"before": layer, "middle": layer.post_attention_layernorm}
        for name, module in shown.items():
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, given, k=(n, name): seen.update({k: given[0][0]})
                )
            )
        handles.append(
            layer.register_forward_hook(
                lambda m, given, out, k=(n, "after"): seen.update({k: out[0]})
            )
        )
        handles.append(
            layer.mlp.register_forward_hook(
                lambda m, given, out, k=(n, "mlp"): seen.update({k: out[0]})
            )
        )
    with torch.no_grad():
        plain(ids[None])
    for handle in handles:
        handle.remove()
    for n in range(2):
        before, middle, after, mlp = (
            seen[n, name].numpy() for name in ("before", "middle", "after", "mlp")
        )
        np.testing.assert_allclose(after - middle, factor * mlp, atol=1e-12)
        for block, (stream, delta) in enumerate(
            ((before, middle - before), (middle, after - middle))
        ):
            size = np.linalg.norm(delta, axis=-1)
            base = np.linalg.norm(stream, axis=-1)
            mine = at(result, "block_updates", "block_magnitude_at", len(ids))[n, block]
            np.testing.assert_allclose(mine, size / base, rtol=1e-4)
            assert abs(mine - size / base / factor).min() > 0.01, (
                "negative control: without the multiplier"
            )
            turned = at(result, "block_updates", "block_orientation_at", len(ids))[n, block]
            np.testing.assert_allclose(turned, (stream * delta).sum(-1) / size / base, atol=1e-4)
