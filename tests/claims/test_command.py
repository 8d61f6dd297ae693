"""What ``mechattn paper`` hands on."""

import pytest
from typer.testing import CliRunner

from mechattn.claims import paper
from mechattn.claims.settings import named
from mechattn.commands.main import app
from mechattn.commands.paper import models_of
from mechattn.errors import OptionError


def test_the_default_models(tmp_path, capsys):
    assert models_of([], None) == named(None)
    assert models_of(["toy:qwen2"], None) == ("toy:qwen2",)
    assert models_of([], tmp_path) == named(None)
    assert "no stories260K" in capsys.readouterr().err
    (tmp_path / "stories260K").mkdir()
    assert models_of([], tmp_path) == (*named(None), str(tmp_path / "stories260K"))
    with pytest.raises(OptionError, match="applies only to the default models"):
        models_of(["toy:qwen2"], tmp_path)
    with pytest.raises(OptionError, match="there is no folder"):
        models_of([], tmp_path / "nowhere")


def test_every_option_is_handed_on(monkeypatch, tmp_path):
    seen = {}

    def judge(models, out, **options):
        seen.update(options, models=models, out=out)

    monkeypatch.setattr(paper, "paper", judge)
    given = [
        "--model",
        "toy:qwen2",
        "--model",
        "toy:llama",
        "--budget",
        "30min",
        "--out",
        str(tmp_path),
        "--limit",
        "9",
    ]
    given += ["--problems", "8", "--samples", "3", "--new-tokens", "7", "--seed", "5", "--dtype", "float32"]
    given += ["--shard", "1/2", "--executor", "ray", "--address", "ray://a", "--workers", "2", "--fresh", "--force"]
    given += ["--prompts", "a.jsonl", "--field", "problem", "--device", "cpu"]
    done = CliRunner().invoke(app, ["paper", *given])
    assert done.exit_code == 0, done.output
    assert "run the same command without --shard" in done.output
    assert (seen.pop("models"), seen.pop("out")) == (("toy:qwen2", "toy:llama"), tmp_path)
    assert seen.pop("command")
    assert seen == {
        "budget": "30min", "limit": 9, "problems": 8, "samples": 3, "new_tokens": 7, "seed": 5, "dtype": "float32",
        "shard": "1/2", "executor": "ray", "address": "ray://a", "workers": 2, "fresh": True, "force": True,
        "prompts": "a.jsonl", "field": "problem", "device": "cpu",
    }  # fmt: skip
