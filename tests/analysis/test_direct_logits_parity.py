"""`DirectLogits` against plain transformers in float64: each head by hand, and all parts together, which are the logit."""

import numpy as np
import pytest
import torch

import mechattn as ma
from tests.analysis.plain import SHORT, blocks_of, passed, read, rms, updates_of, weight_of
from tests.tiny_families import bridge_of, tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
GRANITE = {"logits_scaling": 8.0, "residual_multiplier": 0.22}
SUMMED = {
    "GPT-2": {},
    "Gemma 2": {"final_logit_softcapping": 4.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": GRANITE,
}


def normed_alone(plain, run, layer):
    """A mistake: each head's update divided by a scale of its own, where a norm follows attention."""
    block = blocks_of(plain)[layer]
    if not hasattr(block, "post_feedforward_layernorm"):  # and so one after attention too
        return None
    norm = block.post_attention_layernorm
    delta = np.einsum("phd,hdm->phm", run.z[layer], run.w_o[layer])
    return weight_of(norm) * delta / rms(delta, norm)


def biases_read(plain, ids):
    """What the final norm's bias gives to the logit of the next token."""
    if not hasattr(plain, "transformer"):
        return 0
    w_u = plain.get_output_embeddings().weight.detach().numpy()
    return (w_u - w_u.mean(0))[ids[1:]] @ plain.transformer.ln_f.bias.detach().numpy()


@pytest.fixture(scope="module", params=SUMMED)
def summed(request, prompts):
    """The model, what the analysis gives [layer, head, pos], the ids and the parts by hand; all in float64."""
    settings = SUMMED[request.param]
    plain, same = (tiny_model(request.param, **settings).double() for _ in range(2))
    plain.set_attn_implementation("eager")
    hooked = bridge_of(same, dtype=torch.float64, verify=False)
    some = [SHORT, prompts[0]]
    analysis = ma.analyses.DirectLogits(per_query=True)
    result = ma.run(hooked, some, {"slash": SLASH}, analysis, keep="prompts")
    ids = SLASH.apply(SHORT, hooked).tokens.tolist()
    per_query = result["direct_logits"].next_token_logit_at_per_prompt.sel(condition="slash")
    mine = per_query.isel(prompt=0).values
    return plain, mine[..., : len(ids) - 1], ids, passed(plain, ids)


def test_all_parts_are_the_logit(summed):
    """Heads as measured; embedding, MLPs and biases by hand. Of capped logits, those before the cap."""
    plain, mine, ids, run = summed
    cap = getattr(plain.config, "final_logit_softcapping", None)
    logits = cap * np.arctanh(run.logits / cap) if cap else run.logits
    expected = of_next_tokens(logits, ids)
    rest = run.resid[0].copy()
    for layer, attention in enumerate(run.attention):
        rest += run.mlp[layer] + attention - updates_of(run, layer).sum(1)  # and the bias
    got = mine.sum((0, 1)) + read(plain, rest, run.resid[-1], ids) + biases_read(plain, ids)
    size = abs(expected).max()
    assert abs(got - expected).max() < 1e-5 * size
    without_a_head = got - mine[0, 0]
    assert abs(without_a_head - expected).max() > 1e-2 * size, "negative control"
    if cap:
        capped = of_next_tokens(run.logits, ids)
        assert abs(got - capped).max() > 0.1 * size, "negative control: the logits after the cap"


def of_next_tokens(logits, ids):
    """The centred logits of the tokens that follow."""
    centred = logits - logits.mean(-1, keepdims=True)
    return centred[np.arange(len(ids) - 1), ids[1:]]


def test_each_head_of_the_sum(summed):
    plain, mine, ids, run = summed
    for layer in range(len(run.z)):
        expected = read(plain, updates_of(run, layer), run.resid[-1], ids).T
        size = abs(expected).max()
        np.testing.assert_allclose(mine[layer], expected, rtol=1e-5, atol=1e-5 * size)
        another = abs(mine[layer] - expected[::-1]).max()
        assert another > 0.1 * size, "negative control: another head"
        alone = normed_alone(plain, run, layer)
        if alone is not None:
            read_alone = read(plain, alone, run.resid[-1], ids).T
            assert abs(mine[layer] - read_alone).max() > 0.1 * size, "negative control"


def test_a_model_without_norms(tokenizer):
    """What attention adds is read as it is."""
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
        _, cache = model.run_with_cache(ids[None])
        w_u = (model.W_U - model.W_U.mean(1, keepdim=True))[:, ids[1:]].T
        attention = [cache[f"blocks.{layer}.hook_attn_out"][0, :-1] for layer in range(2)]
        expected = [((out - model.b_O[n]) * w_u).sum(-1) for n, out in enumerate(attention)]
    per_token = result["direct_logits"].next_token_logit_at_per_prompt[0, 0]
    got = per_token.sum("head").values[:, : len(ids) - 1]
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-4, atol=1e-5)
    assert abs(got - got[::-1]).max() > 0.1 * abs(got).max(), "negative control: another layer"
