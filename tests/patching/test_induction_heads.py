"""Induction heads against plain transformers in float64, and in a circuit whose heads are known."""

from functools import partial

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import OptionError
from tests.conftest import loaded_once
from tests.known_answers.known_circuits import known_circuits
from tests.patching.plain_runs import W_O, plain_logits, plain_toy

SPAN = 6


WIDTH = 16  # of a head


def plain_loss(tokens, replaced=None):
    """The loss of the second copy in plain transformers, and what each W_O reads; with one head's output replaced, if
    ``replaced`` is (layer, head, outputs [pos d_head]).
    """
    outputs = []

    def replace_output(layer, z):
        if replaced is not None and replaced[0] == layer:
            _, head, values = replaced
            z = z.clone()
            z[:, head * WIDTH : (head + 1) * WIDTH] = values
        outputs.append(z)
        return z

    reading = {W_O.format(layer): partial(replace_output, layer) for layer in range(4)}
    log_probs = plain_logits(plain_toy(), tokens, reading).log_softmax(-1)
    places = torch.arange(len(tokens) - SPAN + 1, len(tokens))
    return -log_probs[places - 1, torch.tensor(tokens)[places]].mean(), outputs


@pytest.fixture(scope="module")
def heads():
    """All heads of the toy, in float64."""
    return ma.induction_heads(loaded_once("toy:llama", dtype=torch.float64), 3, span=SPAN)


def test_scores_effects_and_estimates_by_hand(heads):
    model = loaded_once("toy:llama", dtype=torch.float64)
    mean = [0.0] * 4
    for prompt in ma.repeated_random(model, 32, span=(SPAN, SPAN), seed=1):
        with torch.no_grad():
            _, outputs = plain_loss(prompt.tokens)
        mean = [total + z / 32 for total, z in zip(mean, outputs, strict=True)]

    shifted = []
    over_positions = []
    prompts = ma.repeated_random(model, 3, span=(SPAN, SPAN), seed=0)
    for index, prompt in enumerate(prompts[:2]):
        tokens = list(prompt.tokens)
        start = len(tokens) - SPAN
        with torch.no_grad():
            attentions = plain_toy()(torch.tensor([tokens]), output_attentions=True).attentions
            without_first_copy, _ = plain_loss([*tokens[: start - SPAN], *tokens[start:]])
        loss, outputs = plain_loss(tokens)
        gradients = torch.autograd.grad(loss, outputs)
        assert float(heads.loss[index]) == pytest.approx(loss.item(), abs=1e-7)
        whole = float(heads.needed.effects.whole[index])
        assert whole == pytest.approx((without_first_copy - loss).item(), abs=1e-7)

        for layer, head in np.ndindex(4, 8):
            cell = {"layer": layer, "head": head}
            pattern = attentions[layer][0, head]
            score = float(heads.scores[index].sel(cell))
            after_the_token, the_token = (
                pattern.diagonal(offset)[-SPAN:].mean().item() for offset in (1 - SPAN, -SPAN)
            )
            assert score == pytest.approx(after_the_token, abs=1e-7)
            shifted.append(abs(score - the_token))

            columns = slice(head * WIDTH, (head + 1) * WIDTH)
            changes = gradients[layer] * (mean[layer] - outputs[layer])
            estimate = changes[:, columns].sum().item()
            assert float(heads.attributed[index].sel(cell)) == pytest.approx(estimate, abs=1e-7)
            if (layer, head) in ((0, 4), (1, 0), (3, 7)):
                value = mean[layer][:, columns]
                with torch.no_grad():
                    exact, _ = plain_loss(tokens, (layer, head, value))
                    constant, _ = plain_loss(tokens, (layer, head, value.mean(0)))
                effect = float(heads.needed.effects.effect[index].sel(cell))
                assert effect == pytest.approx((exact - loss).item(), abs=1e-7)
                over_positions.append(abs(exact - constant).item())
    assert max(shifted) > 0.01, "attention to the token itself would be noticed"
    assert max(over_positions) > 1e-4, "a mean over positions would be noticed"


def test_similar_heads_are_distinguished_by_what_copying_needs():
    """Decoys attend as the induction head does and write where nothing reads."""
    circuit = known_circuits()[0]
    assert circuit.name == "induction, two layers"
    heads = ma.induction_heads(circuit.model(), 6, span=SPAN)
    table = heads.table().set_index(["layer", "head"])
    for decoy in (1, 2):
        assert table.score[1, decoy] == pytest.approx(table.score[1, 0], abs=0.05)
        assert abs(table.effect[1, decoy]) < 0.05 * table.effect[1, 0]
    assert table.score[0, 0] < 0.3
    assert table.effect[0, 0] > 0.5 * table.effect[1, 0], "the previous-token head is needed"
    assert heads.ranks["attributed"] > heads.ranks["score"]
    assert {(row.layer, row.head) for row in heads.table(2).itertuples()} == {(0, 0), (1, 0)}


def test_spans_too_few_or_too_long_are_refused(toy):
    with pytest.raises(OptionError, match="limit=2: give a whole number, at least 3"):
        ma.induction_heads(toy, 2)
    with pytest.raises(OptionError, match="span=1: give a whole number, at least 2"):
        ma.induction_heads(toy, 3, span=1)
