"""Heads of latent attention, which TransformerLens splits another way, are those of the model itself."""

import pytest
import torch
from einops import rearrange
from transformers import GPTBigCodeConfig

import mechattn as ma
from mechattn.model.head_parts import output_projection
from mechattn.model.hooks import split_heads
from mechattn.model.patch.keys_values_z import changing_keys_values, changing_z
from tests.tiny_families import bridge_of, random_model, tiny_model

FAMILY, HEADS, WIDTH = "DeepSeek-V3 (latent attention)", 4, 16
TOKENS = torch.arange(5, 25)[None]


def test_a_head_that_is_split_elsewhere_is_noticed(monkeypatch):
    """Σ_h z W_O is the same however z is split; pattern · v is not."""
    cut = torch.arange(HEADS * WIDTH).roll(WIDTH // 2)

    def elsewhere(shown, heads):
        return split_heads(shown.flatten(2)[..., cut.to(shown.device)], heads)

    monkeypatch.setattr("mechattn.model.hooks.split_heads", elsewhere)
    with pytest.raises(ma.MechattnError, match="values failed"):
        bridge_of(tiny_model(FAMILY))


def test_a_head_is_taken_away_alone(shared):
    """As from the model of transformers whose W_O has no such rows."""
    head = 2
    latent = shared(FAMILY)
    plain = tiny_model(FAMILY)
    for n, layer in enumerate(plain.model.layers):
        weight = layer.self_attn.o_proj.weight
        got = output_projection(latent, n)[head]
        torch.testing.assert_close(got, weight.detach()[:, head * WIDTH : (head + 1) * WIDTH].T)
    with torch.no_grad():
        plain.model.layers[0].self_attn.o_proj.weight[:, head * WIDTH : (head + 1) * WIDTH] = 0
        expected = plain(TOKENS).logits

    def without(other):
        def change(z):
            assert z.shape == (1, TOKENS.shape[1], HEADS, WIDTH)
            return z * (torch.arange(HEADS) != other)[:, None]

        with torch.no_grad(), changing_z(latent, {0: change}):
            return latent(TOKENS)

    torch.testing.assert_close(without(head), expected, atol=1e-4, rtol=1e-4)
    assert (without((head + 1) % HEADS) - expected).abs().max() > 0.1, (
        "negative control: the next head"
    )


@pytest.mark.parametrize("multi_query", [True, False])
def test_shared_key_value_projection_equals_the_cache(multi_query):
    """GPT-BigCode orders the columns in two ways: with keys of each head, head by head."""
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = random_model(GPTBigCodeConfig(**sizes, multi_query=multi_query), 0)
    projected = {}

    def keep(part, values):
        projected[part] = values
        return values

    with torch.no_grad(), changing_keys_values(model, {0: keep}):
        cache = model(torch.arange(1, 9)[None], use_cache=True).past_key_values.layers[0]
    for part, values in (("k", cache.keys), ("v", cache.values)):
        expected = rearrange(values, "batch head pos d_head -> batch pos (head d_head)")
        torch.testing.assert_close(projected[part], expected)
