"""Heads written by hand and heads that were trained to copy are found, and others are not."""

import pytest
import torch

from tests.known_answers import known_heads


def test_each_handmade_head_does_what_was_written():
    distances = known_heads.distances_from_what_was_written()
    assert max(distances.values()) <= 1e-5, distances


def test_a_head_that_does_something_else_is_noticed(monkeypatch):  # negative control
    monkeypatch.setitem(known_heads.HEADS, (0, 3), ("induction", "induction_mass"))
    assert known_heads.distances_from_what_was_written()[0, 3] > 0.1


def test_handmade_patterns_by_loops():
    """The pattern of the induction head is what its definition says, key by key, in plain transformers."""
    model = known_heads.handmade_model()
    model.set_attn_implementation("eager")
    tokens = [47, 5, 9, 2, 30, 5, 9, 2, 30]

    with torch.no_grad():
        first, second = model(torch.tensor([tokens]), output_attentions=True).attentions

    for query in range(1, len(tokens)):
        assert first[0, 0, query, query - 1] == pytest.approx(1, abs=1e-6)
        assert first[0, 2, query, 0] == pytest.approx(1, abs=1e-6)
        assert first[0, 3, query, : query + 1].tolist() == pytest.approx(
            [1 / (query + 1)] * (query + 1)
        )
        if tokens[query] in tokens[1:query]:
            place = tokens.index(tokens[query])
            assert first[0, 1, query, place] == pytest.approx(1, abs=1e-6)
            assert second[0, 0, query, place + 1] == pytest.approx(1, abs=1e-6)


def trained_to_copy(seed, steps):
    """The share of copied tokens, the induction heads, and the share copied without them."""
    tokens, foreseen = known_heads.repeated_spans(
        known_heads.PROMPTS, torch.Generator().manual_seed(seed)
    )
    model = known_heads.hooked_model(known_heads.copying_model(seed, steps))
    copied = known_heads.copied_share(model, tokens, foreseen)
    heads = known_heads.induction_heads(model, tokens)
    copied_without = known_heads.copied_share(model, tokens, foreseen, heads)
    return copied, heads, copied_without


@pytest.mark.slow
def test_a_trained_model_copies_by_induction_heads_of_the_second_layer():
    copied, heads, copied_without = trained_to_copy(0, steps=400)
    assert copied >= 0.99
    assert {layer for layer, _ in heads} == {1}
    assert copied_without < 0.2


def test_before_it_has_learned_no_induction_head_is_found():
    copied, heads, _ = trained_to_copy(0, steps=5)
    assert copied < 0.2
    assert heads == []
