"""Heads written by hand and heads that were trained to copy are found, and others are not."""

import pytest
import torch

from tests.known_answers import known_heads


def test_each_handmade_head_does_what_was_written():
    focus = known_heads.focus_of_handmade()
    distances = known_heads.distances_from_what_was_written(focus, known_heads.HEADS)
    assert max(distances.values()) <= 1e-5, distances

    uniform = {(0, 3): ("induction", "induction_mass")}
    [distance] = known_heads.distances_from_what_was_written(focus, uniform).values()
    assert distance > 0.1, "a head that does something else would be noticed"


def trained_to_copy(seed, steps):
    """The share of copied tokens, the induction heads, and the share copied without them."""
    tokens, foreseen = known_heads.repeated_spans(
        known_heads.PROMPTS, torch.Generator().manual_seed(seed)
    )
    model = known_heads.hooked_model(known_heads.copying_model(seed, steps, batch=24))
    copied = known_heads.copied_share(model, tokens, foreseen)
    heads = known_heads.induction_heads(model, tokens)
    copied_without = known_heads.copied_share(model, tokens, foreseen, heads)
    return copied, heads, copied_without


@pytest.mark.slow
def test_trained_induction_heads_are_in_the_second_layer():
    copied, heads, copied_without = trained_to_copy(0, steps=300)
    assert copied > 0.9
    assert {layer for layer, _ in heads} == {1}
    assert copied_without < 0.2


def test_before_it_has_learned_no_induction_head_is_found():
    copied, heads, _ = trained_to_copy(0, steps=5)
    assert copied < 0.2
    assert heads == []
