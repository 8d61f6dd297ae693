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
def test_each_model_needs_each_of_its_heads(name):
    circuit = CIRCUITS[name]
    model = circuit.model()
    pairs = circuit.prompts(8, 0)

    with torch.no_grad():
        own = model(torch.tensor([pair.tokens for pair in pairs]))[:, -1]
        other = model(torch.tensor([pair.counterpart for pair in pairs]))[:, -1]
    assert own.argmax(-1).tolist() == [pair.answer_tokens[0] for pair in pairs]
    assert other.argmax(-1).tolist() == [pair.other_answer[0] for pair in pairs]

    is_needed = [f"L{layer}H{head}" in circuit.nodes for layer, head in circuit.heads]
    assert sum(is_needed) <= len(is_needed) / 2, "the others are decoys"
    falls = known.falls_without(circuit, [*circuit.heads], mean=True)
    assert [fall > 0.5 for fall in falls] == is_needed, falls


def test_integrated_gradients_find_one_and_one_step_misses_edges():
    circuit = CIRCUITS["the name that is not repeated, three layers"]
    sizes = known.edge_sizes(circuit, "EAP-IG, 5 steps")
    assert known.scores(circuit, sizes) == {"edges": 1.0, "heads": 1.0, "precision": 1.0}
    one_step = known.scores_of(circuit, "EAP")
    assert one_step["precision"] < 1.0, "where a softmax saturates the first order misses edges"

    decoy = frozenset({("embedding", "L0H1.v"), ("L0H1", "L1H1.k"), ("L1H1", "logits")})
    wrong = replace(circuit, true=decoy)
    assert known.scores(wrong, sizes)["edges"] < 0.95, "a decoy's edges would be noticed"


def test_exact_patching_finds_an_induction_circuit():
    assert known.scores_of(CIRCUITS["induction, two layers"], "exact", prompts=3)["edges"] == 1.0


def test_zero_ablation_names_a_head_that_always_writes_the_same():
    """Its mean does not: nothing that differs between prompts passes through it. So does exact patching."""
    circuit = CIRCUITS["induction that needs a constant, two layers"]
    (fall,) = known.falls_without(circuit, [(0, 5)], mean=False)
    assert fall > 0.5
    (fall,) = known.falls_without(circuit, [(0, 5)], mean=True)
    assert abs(fall) < 0.01
    assert "L0H5" not in circuit.nodes
    assert known.scores_of(circuit, "EAP-IG, 5 steps")["heads"] == 1.0


def test_unrelated_answers_find_no_edge():
    """With its own answers the same pairs find the circuit (negative control)."""
    circuit = CIRCUITS["induction, two layers"]
    model, pairs = circuit.model(), circuit.prompts(12, 3)
    generator = np.random.default_rng(0)
    others = []
    for pair in pairs:
        answer, other = generator.choice(15, 2, replace=False)
        others.append(replace(pair, answer_tokens=(answer,), other_answer=(other,)))
    q = [edges(model, some, Counterpart(), steps=5).table(top=4) for some in (others, pairs)]
    assert not (q[0].q_effect < 0.05).any()
    assert set(zip(q[1].writer, q[1].reader, strict=True)) == circuit.true
    assert (q[1].q_effect < 0.05).all()
