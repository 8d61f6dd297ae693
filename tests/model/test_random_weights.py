"""Weights drawn anew: the same architecture, verified; the model that is given stays as it is."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.checkpoint import toy_folder
from mechattn.model.hooked import facts_of
from mechattn.model.weights import weights_hash


def parameters(model):
    return dict(facts_of(model).native.named_parameters())


def test_initialised_is_what_transformers_makes_of_the_config(toy):
    torch.manual_seed(3)
    expected = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(toy_folder("toy:llama")), dtype=torch.float32
    )
    made = parameters(ma.random_weights(toy, seed=3))
    assert made.keys() == dict(expected.named_parameters()).keys()
    for name, values in expected.named_parameters():
        torch.testing.assert_close(made[name], values, atol=0, rtol=0)
    other = parameters(ma.random_weights(toy, seed=4))
    assert not torch.equal(other["model.embed_tokens.weight"], made["model.embed_tokens.weight"])


def test_shuffled_keeps_the_numbers_of_each_tensor_and_no_place(toy):
    made, own = parameters(ma.random_weights(toy, "shuffled", seed=0)), parameters(toy)
    for name, values in own.items():
        torch.testing.assert_close(
            made[name].flatten().sort().values, values.flatten().sort().values, atol=0, rtol=0
        )
        assert (made[name] == values).float().mean() < 0.1, name


def test_the_given_model_and_the_random_state_stay(toy):
    before, state = weights_hash(toy), torch.get_rng_state()
    drawn = ma.random_weights(toy, "shuffled")
    assert weights_hash(toy) == before != weights_hash(drawn)
    ma.random_weights(toy)
    torch.testing.assert_close(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("toy:llama", "initialised"), ("toy:falcon", "shuffled")],
)
def test_a_toy_is_drawn_and_verified(name, kind, shared):
    drawn = ma.random_weights(name, kind, seed=1)
    assert facts_of(drawn).verified
    assert drawn.cfg.model_name == f"{name}, random weights ({kind}, seed 1)"
    assert drawn.cfg.default_prepend_bos == shared(name).cfg.default_prepend_bos
    assert bool(facts_of(drawn).mended) == (name == "toy:falcon")
    about = ma.run(drawn, "Tom has 3 apples.").provenance["model"]
    assert about["random_weights"] == {"kind": kind, "seed": 1}
    assert ma.run(shared(name), "Tom has 3 apples.").provenance["model"]["random_weights"] is None
    assert about["verified"]


def test_a_model_without_a_plain_twin_is_refused(toy, monkeypatch):
    facts = facts_of(toy)
    monkeypatch.setattr(facts, "native", None)
    monkeypatch.setattr(
        facts, "why_not_native", "its weights are quantised, and a second model cannot share them"
    )
    with pytest.raises(
        ModelError, match=r"toy:llama cannot be redrawn: its weights are quantised.*unquantised"
    ):
        ma.random_weights(toy)
