"""The pattern of the model's own kernel, read through identity values."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mechattn.model import hooks
from mechattn.model.verify.checks import _kernel, _ThroughIdentity


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


def test_a_layer_without_a_pattern_at_its_hook_is_reported(toy):
    layers = hooks.attention_layers(toy)
    pattern = torch.rand(1, 2, 3, 3)
    hook_values = {hooks.pattern_hook(layer): pattern for layer in layers}
    patterns = [pattern] * len(layers)
    assert _kernel(toy, hook_values, patterns, "", torch.float32).outcome == "passed"
    del hook_values[hooks.pattern_hook(1)]
    check = _kernel(toy, hook_values, patterns, "", torch.float32)
    assert check.outcome == "not checked"
    assert "layers [1]" in check.detail
