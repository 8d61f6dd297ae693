"""Names that no hub has, and a hub that does not answer."""

import shutil
import socket
import time

import datasets
import pytest
from huggingface_hub import constants

import mechattn as ma
from mechattn.errors import ModelError, PromptError
from mechattn.model.checkpoint import text_config, tokenizer_named
from mechattn.model.hooked import facts_of


@pytest.fixture
def nobody(monkeypatch):
    """An address where nothing listens in place of the hub's; gives the pauses between attempts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    waits = []
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("ask", [ma.load_model, ma.load_prompts, text_config, tokenizer_named])
def test_a_hub_that_does_not_answer_is_asked_once(ask, nobody):
    with pytest.raises((ModelError, PromptError), match="no/such-thing"):
        ask("no/such-thing")
    assert nobody == []
    assert not constants.HF_HUB_OFFLINE, "it is asked again next time"


def test_toys_and_directories_need_no_hub(nobody, monkeypatch, checkpoint):
    monkeypatch.setattr("mechattn.hub_access._offline_switch", None)
    assert ma.load_model(str(checkpoint), verify=False).cfg.n_layers == 3
    assert tokenizer_named("toy:llama")


def test_a_result_names_the_commit_of_its_model(monkeypatch, checkpoint, tmp_path):
    """transformers 5 no longer writes it into the configuration."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "c" * 40
    folder = tmp_path / "models--some--model"
    shutil.copytree(checkpoint, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for name, revision in (("some/model", commit), (str(checkpoint), None)):
        result = ma.run(ma.load_model(name, verify=False), "What is 3 + 4?")
        assert result.provenance["model"]["revision"] == revision


def test_a_directory_named_like_a_hub_model(nobody, monkeypatch, checkpoint, tmp_path):
    """The hub was asked for it, and its commit stored, though the weights came from here."""
    shutil.copytree(checkpoint, tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names, **_: asked.append(names))
    assert facts_of(ma.load_model("some/model", verify=False)).revision is None
    assert asked == []


def test_another_commit_is_another_job(monkeypatch, prompts, checkpoint, tmp_path):
    """By the name of a model on the hub, of which a commit was downloaded before."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    decided = []
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(checkpoint, folder / "snapshots" / commit)
        (folder / "refs" / "main").write_text(commit)
        decided.append(ma.Job("some/model", prompts).decides)
    assert [each.pop("weights") for each in decided] == ["a" * 40, "b" * 40]
    assert decided[0] == decided[1]


@pytest.mark.parametrize("name", ["/nowhere/model", "a/b/c"])
def test_a_path_is_not_a_name_on_the_hub(name):
    with pytest.raises(
        ModelError, match=r"it is not a directory here, and models on the hub are named owner/name$"
    ):
        ma.load_model(name)
    with pytest.raises(PromptError, match=r"^there is no file of prompts at "):
        ma.load_prompts(name)


def test_a_file_is_not_a_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="it is a file, not the directory of a checkpoint"):
        ma.load_model(tmp_path / "model.safetensors")


def test_a_table_of_prompts_says_how_to_convert_it(tmp_path):
    (tmp_path / "p.csv").write_text("question,answer\nWhy?,So\n")
    with pytest.raises(
        PromptError, match=r"is a table; give a \.jsonl file, .*pandas\.read_csv.*to_json"
    ):
        ma.load_prompts(str(tmp_path / "p.csv"))
