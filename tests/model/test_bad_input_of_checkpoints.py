"""A checkpoint runs no code of its own unless that is asked for, nor any that is in its pickled weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mechattn as ma
from mechattn.errors import ModelError
from tests.security.test_code_in_results import Runs


@pytest.fixture
def pickled(checkpoint, tmp_path):
    """The checkpoint with its weights as a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_are_read_without_running_code(pickled, checkpoint, tmp_path):
    """transformers has torch read nothing but tensors from a pickle."""
    tokens = torch.tensor([[1, 5, 9, 2]])
    read, expected = (
        ma.load_model(str(folder), verify=False)(tokens) for folder in (pickled, checkpoint)
    )
    assert torch.equal(read, expected)

    torch.save({"x": Runs(tmp_path / "ran")}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelError):
        ma.load_model(str(pickled))
    assert not (tmp_path / "ran").exists()
    torch.load(pickled / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists(), "negative control: the pickle does run code"


def test_a_configuration_that_transformers_refuses_is_not_called_missing(checkpoint, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    with pytest.raises(
        ModelError, match=r"transformers cannot read the configuration of .*odd: .*no_such_type"
    ):
        ma.load_model(folder)
