"""Weights drawn anew: the same architecture, verified; the model that is given stays as it is."""

import copy
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.hooked import facts_of
from mechattn.model.weights import weights_hash


def parameters(model):
    return dict(facts_of(model).native.named_parameters())


def test_initialised_is_what_transformers_makes_of_the_config(shared):
    model = shared("Llama")
    before, state = weights_hash(model), torch.get_rng_state()
    drawn = parameters(ma.random_weights(model, seed=3))
    assert weights_hash(model) == before
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(3)
    config = copy.deepcopy(facts_of(model).native.config)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert drawn.keys() == dict(expected.named_parameters()).keys()
    for name, values in expected.named_parameters():
        assert torch.equal(drawn[name], values), name
    name = "model.embed_tokens.weight"
    assert not torch.equal(drawn[name], parameters(model)[name]), "negative control"


def test_shuffled_keeps_the_numbers_of_each_tensor_and_no_place(shared):
    model = shared("Falcon-RW (ALiBi)")
    drawn = ma.random_weights(model, "shuffled", seed=1)
    for name, values in parameters(model).items():
        shuffled = parameters(drawn)[name]
        assert torch.equal(shuffled.flatten().sort().values, values.flatten().sort().values)
        assert (shuffled == values).float().mean() < 0.1, name

    assert facts_of(drawn).mended, "as the model that is given"
    assert drawn.cfg.default_prepend_bos == model.cfg.default_prepend_bos
    name = f"{model.cfg.model_name}, random weights (shuffled, seed 1)"
    about = ma.run(drawn, "Tom has 3 apples.").provenance["model"]
    assert about["name"] == name
    assert about["random_weights"] == {"kind": "shuffled", "seed": 1}
    assert about["verified"]
    assert ma.run(model, "Tom has 3 apples.").provenance["model"]["random_weights"] is None


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


def test_a_model_without_a_tokenizer_is_drawn_too(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    for path in folder.glob("*token*"):
        path.unlink()
    drawn = ma.random_weights(str(folder))
    assert drawn.tokenizer is None
    assert facts_of(drawn).verified
