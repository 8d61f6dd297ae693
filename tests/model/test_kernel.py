"""The pattern of the model's own kernel, read through identity values, and the faults that it shows."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import mechattn as ma
from mechattn.model.verify.checks import _ThroughIdentity
from tests.tiny_families import tiny_model


@pytest.mark.parametrize(
    "keys", [5, 8, 21], ids=["fewer keys than d_value", "as many", "several calls"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_identity_values_give_the_pattern(keys, masked):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, keys, 4), torch.randn(2, 3, keys, 4), torch.randn(2, 3, keys, 8)
    seen = torch.ones(keys, keys, dtype=torch.bool).tril()
    if masked:
        seen &= ~seen.tril(-3)
    bias = torch.zeros(keys, keys).masked_fill(~seen, -torch.inf)
    with _ThroughIdentity() as through:
        if masked:
            got = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.7, enable_gqa=True)
        else:
            got = scaled_dot_product_attention(
                q, k, value=v, is_causal=True, scale=0.7, enable_gqa=True
            )
    expected = torch.zeros(2, 6, keys, keys, dtype=torch.float64)
    for head in range(6):
        scores = 0.7 * q[:, head].double() @ k[:, head // 2].double().mT
        expected[:, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(through.patterns[0].double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        got.double(), expected @ v.double().repeat_interleave(2, 1), atol=1e-5, rtol=1e-5
    )


def heads_swapped(model):
    """The keys of one key-value head for another's."""
    model.blocks[1].attn.k.hook_out.add_perma_hook(lambda k, hook: k.roll(k.shape[-1] // 2, -1))


def alibi_doubled(model):
    """As eager attention of transformers counts it, which mechattn mends."""
    for block in model.blocks:
        del block.attn._reconstruct_attention


def sink_dropped(model):
    model.blocks[0].attn.hook_pattern.add_perma_hook(
        lambda pattern, hook: pattern / pattern.sum(-1, keepdim=True)
    )


def window_off_by_one(model):
    model.original_model.config.sliding_window += 1


FAULTS = {
    heads_swapped: ("Llama", 1),
    alibi_doubled: ("Falcon-RW (ALiBi)", 0),
    sink_dropped: ("GPT-OSS", 0),
    window_off_by_one: ("Mistral", 0),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_in_its_layer(fault, tokenizer):
    family, layer = FAULTS[fault]
    model = ma.load_model(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)
    assert ma.verify_model(model)["kernel"].outcome == "passed"
    fault(model)
    check = ma.verify_model(model)["kernel"]
    assert check.outcome == "failed"
    assert check.layer is not None
    assert check.layer >= layer
    assert check.difference > 100 * check.tolerance
