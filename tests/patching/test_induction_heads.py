"""Induction heads against plain transformers in float64, and in a circuit whose heads are known."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import OptionError
from tests.conftest import loaded_once
from tests.known_answers.known_circuits import known_circuits
from tests.patching.test_edges import ByHand

SPAN = 6


class PlainLoss:
    """The loss of the second copy in plain transformers, with one head's output replaced."""

    def __init__(self):
        self.native = ByHand().native
        self.width = self.native.config.head_dim
        self.outputs = {}

    def __call__(self, tokens, replaced=None):
        """``replaced`` is (layer, head, outputs [pos d_head]); what each W_O reads is kept."""
        handles = []

        def before_output(layer, module, inputs):
            z = inputs[0]
            if replaced is not None and replaced[0] == layer:
                columns = slice(replaced[1] * self.width, (replaced[1] + 1) * self.width)
                z = z.clone()
                z[0, :, columns] = replaced[2]
            self.outputs[layer] = z
            return (z,)

        for layer, block in enumerate(self.native.model.layers):
            output = block.self_attn.o_proj
            handles.append(
                output.register_forward_pre_hook(
                    lambda module, inputs, layer=layer: before_output(layer, module, inputs)
                )
            )
        logits = self.native(torch.tensor([tokens]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        start = len(tokens) - SPAN
        log_probs = logits.log_softmax(-1)
        terms = [-log_probs[place - 1, tokens[place]] for place in range(start + 1, len(tokens))]
        return torch.stack(terms).mean()


def test_scores_effects_and_estimates_by_hand():
    model = loaded_once("toy:llama", dtype=torch.float64)
    heads = ma.induction_heads(model, 3, span=SPAN)
    plain = PlainLoss()
    mean = {}
    for prompt in ma.repeated_random(model, 32, span=(SPAN, SPAN), seed=1):
        with torch.no_grad():
            plain(prompt.tokens)
        for layer, z in plain.outputs.items():
            mean[layer] = mean.get(layer, 0.0) + z[0] / 32

    shifted = []
    over_positions = []
    for index, prompt in enumerate(ma.repeated_random(model, 3, span=(SPAN, SPAN), seed=0)):
        tokens = list(prompt.tokens)
        start = len(tokens) - SPAN
        with torch.no_grad():
            attentions = plain.native(torch.tensor([tokens]), output_attentions=True).attentions
        loss = plain(tokens)
        gradients = torch.autograd.grad(loss, list(plain.outputs.values()))
        outputs = dict(plain.outputs)
        assert float(heads.loss[index]) == pytest.approx(loss.item(), abs=1e-7)
        without_first_copy = [*tokens[: start - SPAN], *tokens[start:]]
        with torch.no_grad():
            whole = float(plain(without_first_copy)) - loss.item()
        assert float(heads.needed.effects.whole[index]) == pytest.approx(whole, abs=1e-7)

        for layer in range(4):
            for head in range(8):
                cell = {"layer": layer, "head": head}
                pattern = attentions[layer][0, head]
                by_hand = [float(pattern[t, t - SPAN + 1]) for t in range(start, len(tokens))]
                score = float(heads.scores[index].sel(cell))
                assert score == pytest.approx(np.mean(by_hand), abs=1e-7)
                same_token = [float(pattern[t, t - SPAN]) for t in range(start, len(tokens))]
                shifted.append(abs(score - np.mean(same_token)))

                columns = slice(head * plain.width, (head + 1) * plain.width)
                value = mean[layer][:, columns]
                step = value - outputs[layer][0, :, columns]
                estimate = (gradients[layer][0, :, columns] * step).sum().item()
                attributed = float(heads.attributed[index].sel(cell))
                assert attributed == pytest.approx(estimate, abs=1e-7)
        for layer, head in ((0, 4), (1, 0), (3, 7)):
            columns = slice(head * plain.width, (head + 1) * plain.width)
            value = mean[layer][:, columns]
            effect = float(heads.needed.effects.effect[index].sel(layer=layer, head=head))
            with torch.no_grad():
                exact = float(plain(tokens, (layer, head, value)) - loss)
                constant = float(plain(tokens, (layer, head, value.mean(0))) - loss)
            assert effect == pytest.approx(exact, abs=1e-7)
            over_positions.append(abs(effect - constant))
    assert max(shifted) > 0.01, "attention to the token itself would be noticed"
    assert max(over_positions) > 1e-4, "a mean over positions would be noticed"


def test_heads_that_look_alike_are_told_apart_by_what_copying_needs():
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


def test_the_print_says_what_is_compared():
    heads = ma.induction_heads(loaded_once("toy:llama"), 3, span=SPAN)
    text = str(heads)
    assert "3 spans of random tokens, each read twice" in text
    assert f"{heads.ranks['score']:.2f} with the score's" in text
    assert "11 prompts" in text
    columns = list(heads.table().columns)
    assert columns[:5] == ["layer", "head", "score", "score_low", "score_high"]
    assert len(heads.table(top=4)) == 4


def test_spans_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="give a shortest and a longest span"):
        ma.induction_heads(loaded_once("toy:llama"), 2, span=0)
