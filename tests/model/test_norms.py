"""Norms that are computed once: the same numbers to the bit, and whoever looks into one still sees, and edits, it."""

import pytest
import torch

from mechattn.model import hooks

TOKENS = torch.arange(5, 17)[None]


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def test_a_norm_without_a_hook_is_not_computed_twice(toy, monkeypatch):
    norm = toy.blocks[0].ln1
    shown = []
    monkeypatch.setattr(type(norm.hook_scale), "forward", lambda point, x: shown.append(point) or x)
    hooks.forward_to(toy, TOKENS, 0, [])
    assert norm.hook_in in shown
    assert norm.hook_scale not in shown
    shown.clear()
    logits(toy)
    assert norm.hook_scale in shown, "outside of a measuring pass it is as it was"


@pytest.mark.parametrize("name", ["hook_scale", "hook_normalized"])
def test_a_hook_inside_a_norm_sees_and_edits_it(toy, name):
    def last(fwd_hooks):
        seen = []
        look = ("blocks.0.hook_resid_post", lambda stream, hook: seen.append(stream.clone()))
        hooks.forward_to(toy, TOKENS, 0, [*fwd_hooks, look])
        return seen[0]

    fired = []
    watching = last([(f"blocks.0.ln1.{name}", lambda value, hook: fired.append(value))])
    assert len(fired) == 1
    assert torch.equal(watching, last([]))
    assert not torch.allclose(
        last([(f"blocks.0.ln1.{name}", lambda value, hook: 2 * value)]), watching
    )
