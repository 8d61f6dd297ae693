"""`DirectLogits` against plain transformers in float64: each head by hand, and all parts together, which are the logit."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer
from tests.parity.plain import (
    SHORT,
    blocks_of,
    loop_over_experts,
    module_of,
    read,
    rms,
    seen_in,
    weight_of,
)
from tests.tiny_families import tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
GRANITE = {"logits_scaling": 8.0, "residual_multiplier": 0.22}
SUMMED = {
    "GPT-2": {},
    "Gemma 2": {"final_logit_softcapping": 4.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": GRANITE,
}


@dataclass
class Parts:
    """What a model of transformers adds to the residual stream at each token [pos, d_model], and what it makes of it."""

    heads: list  # of each layer [pos, head, d_model]
    alone: list  # the same, where the norm after attention is of each head by itself: a mistake
    rest: np.ndarray  # embedding, MLPs and biases
    stream: np.ndarray
    logits: np.ndarray


def parts_of(plain, ids):
    """Of one run, part by part."""
    blocks = blocks_of(plain)
    into = {}
    out_of = {"stream": blocks[-1]}
    outputs = []
    for n, block in enumerate(blocks):
        attention = block.attn if hasattr(block, "attn") else block.self_attn
        outputs.append(module_of(attention, "c_proj", "o_proj"))
        into |= {(n, "z"): outputs[n], (n, "before"): block}
        out_of[n, "mlp"] = getattr(block, "post_feedforward_layernorm", block.mlp)
    seen, run = seen_in(plain, ids, into, out_of)
    count = plain.config.num_attention_heads
    factor = getattr(plain.config, "residual_multiplier", 1.0)
    found = Parts([], [], seen[0, "before"].copy(), seen["stream"], run.logits[0].numpy())
    for n, block in enumerate(blocks):
        out = outputs[n]
        z = seen[n, "z"]
        weight = out.weight.detach().numpy()
        weight = weight if type(out).__name__ == "Conv1D" else weight.T
        w_o = weight.reshape(count, -1, weight.shape[-1])
        bias = 0 if getattr(out, "bias", None) is None else out.bias.detach().numpy()
        delta = np.einsum("phd,hdm->phm", z.reshape(len(ids), count, -1), w_o)
        whole = delta.sum(1) + bias
        alone = delta
        if hasattr(block, "post_feedforward_layernorm"):  # and so one after attention too
            norm = block.post_attention_layernorm
            delta, alone = (
                weight_of(norm) * delta / scale
                for scale in (rms(whole, norm)[:, None], rms(delta, norm))
            )
        found.heads.append(factor * delta)
        found.alone.append(factor * alone)
        found.rest += factor * (seen[n, "mlp"] + bias)
    return found


def biases_read(plain, ids):
    """What the final norm's bias gives to the logit of the next token."""
    norm = plain.transformer.ln_f if hasattr(plain, "transformer") else plain.model.norm
    w_u = plain.get_output_embeddings().weight.detach().numpy()
    bias = getattr(norm, "bias", None)
    return 0 if bias is None else (w_u - w_u.mean(0))[ids[1:]] @ bias.detach().numpy()


@pytest.fixture(scope="module", params=SUMMED)
def summed(request, prompts):
    """The model, what the analysis gives [layer, head, pos], the ids and the parts by hand; all in float64."""
    tokenizer = load_tokenizer("toy:llama")
    settings = SUMMED[request.param]
    plain, same = (tiny_model(request.param, len(tokenizer), **settings).double() for _ in range(2))
    loop_over_experts(plain)
    loop_over_experts(same)
    hooked = ma.load_model(same, tokenizer=tokenizer, dtype=torch.float64, verify=False)
    some = [SHORT, prompts[0]]
    analysis = ma.analyses.DirectLogits(per_query=True)
    result = ma.run(hooked, some, {"slash": SLASH}, analysis, keep="prompts")
    ids = SLASH.apply(SHORT, hooked).tokens.tolist()
    per_query = result["direct_logits"].next_token_logit_at_per_prompt.sel(condition="slash")
    mine = per_query.isel(prompt=0).values
    return plain, mine[..., : len(ids) - 1], ids, parts_of(plain, ids)


def test_all_parts_are_the_logit(summed):
    """Heads as measured; embedding, MLPs and biases by hand. Of capped logits, those before the cap."""
    plain, mine, ids, parts = summed
    cap = getattr(plain.config, "final_logit_softcapping", None)
    logits = cap * np.arctanh(parts.logits / cap) if cap else parts.logits
    expected = (logits - logits.mean(-1, keepdims=True))[np.arange(len(ids) - 1), ids[1:]]
    got = mine.sum((0, 1)) + read(plain, parts.rest, parts.stream, ids) + biases_read(plain, ids)
    size = abs(expected).max()
    assert abs(got - expected).max() < 1e-5 * size
    assert abs(got - mine[0, 0] - expected).max() > 1e-2 * size, (
        "negative control: a head is left out"
    )
    if cap:
        capped = (parts.logits - parts.logits.mean(-1, keepdims=True))[
            np.arange(len(ids) - 1), ids[1:]
        ]
        assert abs(got - capped).max() > 0.1 * size, "negative control: the logits after the cap"


def test_each_head_of_the_sum(summed):
    plain, mine, ids, parts = summed
    for layer, delta in enumerate(parts.heads):
        expected = read(plain, delta, parts.stream, ids).T
        np.testing.assert_allclose(
            mine[layer], expected, rtol=1e-5, atol=1e-5 * abs(expected).max()
        )
        assert abs(mine[layer] - expected[::-1]).max() > 0.1 * abs(expected).max(), (
            "negative control: another head's"
        )
        if parts.alone[layer] is not delta and abs(parts.alone[layer] - delta).max() > 1e-12:
            alone = read(plain, parts.alone[layer], parts.stream, ids).T
            assert abs(mine[layer] - alone).max() > 0.1 * abs(expected).max(), (
                "negative control: each head normed"
            )


def test_a_model_without_norms(tokenizer):
    """Heads, embedding, MLPs and biases add up to the logit as they are."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources import native

    config = TransformerBridgeConfig(
        n_layers=2, d_model=16, n_ctx=256, d_head=8, n_heads=2, d_vocab=len(tokenizer), act_fn="relu", d_mlp=24,
        normalization_type=None, initializer_range=0.3, seed=0,
    )  # fmt: skip
    model = ma.load_model(native.boot(config, tokenizer=tokenizer))
    analysis = ma.analyses.DirectLogits(per_query=True)
    result = ma.run(model, SHORT, analyses=analysis, keep="prompts")
    ids = ma.Baseline().apply(SHORT, model).tokens
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids[None])
    w_u = (model.W_U - model.W_U.mean(1, keepdim=True)).detach().double()
    centred = logits[0, :-1].double() - logits[0, :-1].double().mean(-1, keepdim=True)
    expected = centred.gather(-1, ids[1:, None])[:, 0]
    rest = cache["hook_embed"][0] + cache["hook_pos_embed"][0] + model.b_O.detach().sum(0)
    rest = rest + sum(cache[f"blocks.{layer}.hook_mlp_out"][0] for layer in range(2))
    rest = (rest[:-1].double() * w_u[:, ids[1:]].T).sum(-1)
    per_token = result["direct_logits"].next_token_logit_at_per_prompt[0, 0]
    heads = per_token.sum(("layer", "head")).values[: len(ids) - 1]
    np.testing.assert_allclose(heads + rest.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(heads).mean() > 0.1 * float(expected.abs().mean()), (
        "negative control: the heads add something"
    )
