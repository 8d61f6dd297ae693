"""A model whose heads are known is found out; uniform rows; what cannot be measured."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mechattn as ma
from mechattn.functional import focus as fn


@pytest.fixture(scope="module")
def three_heads(tokenizer):
    """GPT-2 with one layer: head 0 looks at the token before, head 1 at the first, head 2 at itself."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=96,
        n_layer=1,
        n_head=3,
        n_positions=32,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.transformer.h[0].parameters():
            parameter.zero_()
        block = model.transformer.h[0]
        eye = torch.eye(32)
        block.ln_1.weight.fill_(1.0)
        model.transformer.wte.weight[:, :32] = 0
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:, :32] = 10 * eye
        before = torch.cat([eye[:1], eye[:-1]])
        for head, looked_at in enumerate((before, eye[:1].expand(32, -1), eye)):
            block.attn.c_attn.weight[:32, 32 * head : 32 * head + 32] = 4 * looked_at
            block.attn.c_attn.weight[:32, 96 + 32 * head : 96 + 32 * head + 32] = 4 * eye
        block.attn.c_proj.weight.copy_(torch.eye(96))
    return ma.load_model(model, tokenizer=tokenizer)


def test_known_heads_are_found_out(three_heads):
    prompt = ma.Prompt("Tom has 3 apples and 2 pears. How many?", "Count.", id="0")
    result = ma.run(three_heads, [prompt], analyses=ma.analyses.AttentionFocus())
    here = result["attention_focus"].isel(prompt=0, condition=0, layer=0).sel(segment="question")
    for name, head in (("previous", 0), ("first", 1), ("self", 2)):
        shares = here[f"{name}_share"].values
        assert shares[head] == 1, name
        assert (np.delete(shares, head) == 0).all(), name
        assert here[f"{name}_mass"].values[head] > 0.99
    np.testing.assert_allclose(here.distance.values[[0, 2]], [1, 0], atol=0.05)
    assert (here.concentration > 0.98).all()
    assert (here.entropy < 0.05).all()


@pytest.mark.parametrize(
    ("first_query", "first_key", "end_key"),
    [(0, 0, 20), (8, 0, 20), (8, 4, 20), (8, 8, 20), (8, 4, 11)],
)
def test_the_token_before_in_a_block(first_query, first_key, end_key, random_pattern):
    """Blocks begin and end anywhere; a key before the block's first, or after its last, is not among its keys."""
    whole = random_pattern(2, 20)[None]
    block = whole[:, :, first_query : first_query + 6, first_key:end_key]
    got = fn.looking_back(block, 1, first_query, first_key)
    for i in range(6):
        q = first_query + i
        expected = torch.zeros(2, dtype=whole.dtype)
        if first_key < q <= end_key:
            expected = whole[0, :, q, q - 1]
        torch.testing.assert_close(got[0, :, i], expected)


def test_distances_and_half_masses_of_half_precision():
    """bfloat16 has no odd number above 256, and a sum of 512 equal shares stops growing in it."""
    pattern = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    pattern[..., 257] = 1
    assert fn.mean_distance(pattern, first_query=511).item() == 511 - 257
    uniform = torch.full((1, 1, 512), 1 / 512, dtype=torch.bfloat16)
    assert fn.half_mass_keys(uniform).item() == 256


def test_identical_tokens_and_very_short_passages(toy):
    """Ties go to the first key; a passage of two tokens has one query that counts."""
    tokens = torch.tensor([[1, *[7] * 29]])
    result = ma.run(toy, tokens, analyses=[ma.analyses.AttentionFocus(), ma.analyses.HeadUpdates()])
    data = result["attention_focus"].sel(segment="question")
    total = data.self_share + data.first_share + data.previous_share
    assert np.isfinite(total).all()
    assert np.isfinite(result["head_updates"].magnitude.sel(segment="question")).all()
    short = ma.run(toy, torch.tensor([[1, 7]]), analyses=ma.analyses.AttentionFocus())[
        "attention_focus"
    ]
    two = short.sel(segment="question").isel(prompt=0, condition=0)
    np.testing.assert_allclose(two.self_mass + two.first_mass, 1, atol=1e-5)
    with pytest.raises(ma.MechattnError, match="is a single token"):
        ma.run(toy, torch.tensor([[1]]), analyses=ma.analyses.AttentionFocus())


def test_uniform_entropy_is_one_in_every_layer(three_heads):
    """Queries and keys of 0: a uniform head has an entropy share of 1, whatever the length."""
    import copy

    native = copy.deepcopy(three_heads._mechattn.native)
    with torch.no_grad():
        native.transformer.h[0].attn.c_attn.weight[:, :192] = 0
    model = ma.load_model(native, tokenizer=three_heads.tokenizer)
    prompts = [
        ma.Prompt("Tom has 3 apples.", id="0"),
        ma.Prompt("Tom has 3 apples and 2 pears, how many?", id="1"),
    ]
    data = ma.run(model, prompts, analyses=ma.analyses.AttentionFocus(half_mass=True))[
        "attention_focus"
    ]
    here = data.sel(segment="question", condition="baseline")
    np.testing.assert_allclose(here.entropy_share, 1, atol=1e-5)
    np.testing.assert_allclose(here.concentration, 0, atol=1e-6)
    assert (here.half_mass_keys > 2).all()
