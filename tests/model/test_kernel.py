"""The pattern of the model's own kernel, read through identity values."""

import torch

from mechattn.model import hooks
from mechattn.model.verify.checks import _kernel


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
