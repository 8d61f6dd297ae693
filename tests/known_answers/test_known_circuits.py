"""Circuits written by hand do what they were written to do, are found, and others are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechattn.patching.edges import edges
from mechattn.prompts.counterparts import Counterpart
from tests.known_answers import known_circuits as known

CIRCUITS = {circuit.name: circuit for circuit in known.known_circuits()}


@pytest.mark.parametrize("name", CIRCUITS)
def test_each_model_gives_both_answers_and_needs_each_of_its_heads(name, monkeypatch):
    circuit = CIRCUITS[name]
    model = circuit.model(noise=0.0)
    pairs = circuit.prompts(8, 0)

    with torch.no_grad():
        for pair in pairs:
            for tokens, answer in (
                (pair.tokens, pair.answer_tokens),
                (pair.counterpart, pair.other_answer),
            ):
                assert int(model(torch.tensor([tokens]))[0, -1].argmax()) == answer[0]

    decoys = [where for where in circuit.heads if f"L{where[0]}H{where[1]}" not in circuit.nodes]
    assert len(decoys) >= len(circuit.nodes)
    noisy = circuit.model()
    monkeypatch.setattr(known.KnownCircuit, "model", lambda *_: noisy)  # made once for all heads

    for where in circuit.heads:
        fall = known.without(circuit, where, mean=True, prompts=8)
        assert (fall > 0.5) == (where not in decoys), (where, fall)


@pytest.mark.parametrize(
    "name", ["induction, two layers", "the name that is not repeated, three layers"]
)
def test_integrated_gradients_find_them_and_one_step_misses_edges(name):
    circuit = CIRCUITS[name]
    several, one = (known.scores_of(circuit, method) for method in ("EAP-IG, 5 steps", "EAP"))
    assert several == {"edges": 1.0, "heads": 1.0, "precision": 1.0}
    assert one["precision"] < 1.0, "where a softmax saturates the first order misses edges"
    wrong = replace(
        circuit, true=frozenset({("embedding", "L0H1.v"), ("L0H1", "L1H1.k"), ("L1H1", "logits")})
    )
    assert known.scores_of(wrong, "EAP-IG, 5 steps")["edges"] < 0.95, (
        "a decoy's edges would be noticed"
    )


def test_exact_patching_finds_an_induction_circuit():
    assert known.scores_of(CIRCUITS["induction, two layers"], "exact", prompts=3)["edges"] == 1.0


def test_zero_ablation_names_a_head_that_always_writes_the_same():
    """Its mean does not: nothing that differs between prompts passes through it. So does exact patching."""
    circuit = CIRCUITS["induction that needs a constant, two layers"]
    assert known.without(circuit, (0, 5), mean=False) > 0.5
    assert abs(known.without(circuit, (0, 5), mean=True)) < 0.01
    assert "L0H5" not in circuit.nodes
    assert known.scores_of(circuit, "EAP-IG, 5 steps")["heads"] == 1.0


def test_answers_that_have_nothing_to_do_with_the_prompts_find_no_edge():
    """With its own answers the same pairs find the circuit (negative control)."""
    circuit = CIRCUITS["induction, two layers"]
    model, pairs = circuit.model(), circuit.prompts(16, 3)
    others = [
        replace(pair, answer_tokens=(a,), other_answer=(b,))
        for pair, (a, b) in zip(
            pairs, np.random.default_rng(0).integers(0, 15, (99, 2)), strict=False
        )
        if a != b
    ]
    q = [edges(model, some, Counterpart(), steps=5).table(top=4) for some in (others, pairs)]
    assert not (q[0].q_effect < 0.05).any()
    assert set(zip(q[1].writer, q[1].reader, strict=True)) == circuit.true
    assert (q[1].q_effect < 0.05).all()
