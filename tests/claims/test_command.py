"""What ``mechattn claims`` and ``mechattn paper`` hand on."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mechattn.claims import judge
from mechattn.claims.settings import named
from mechattn.commands.claims import models_of
from mechattn.commands.main import app
from mechattn.errors import OptionError
from mechattn.model.toys import toy_names


def test_the_default_models(tmp_path, capsys):
    assert sorted(named(None)) == sorted(toy_names())
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


@pytest.fixture
def call(monkeypatch):
    """Runs a command; what ``judge`` was called with."""
    seen = {}

    def judged(register, models, out, **options):
        seen.update(options, register=register.about.name, models=models, out=out)

    monkeypatch.setattr(judge, "judge", judged)

    def run(*words):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        assert "run the same command without --shard" in done.output
        return seen

    return run


def test_every_option_is_handed_on(call, tmp_path):
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
    given += ["--prompts", "a.jsonl", "--field", "problem", "--device", "cpu", "--answer-field", "a", "--group-field"]
    given += ["g", "--system", "Think.", "--chat-template", "--without", "place,samples"]
    seen = call("claims", str(Path(__file__).parent / "small.toml"), *given)
    assert seen.pop("command")
    assert seen == {
        "register": "small", "models": ("toy:qwen2", "toy:llama"), "out": tmp_path,
        "budget": "30min", "limit": 9, "problems": 8, "samples": 3, "new_tokens": 7, "seed": 5, "dtype": "float32",
        "shard": "1/2", "executor": "ray", "address": "ray://a", "workers": 2, "fresh": True, "force": True,
        "prompts": "a.jsonl", "field": "problem", "device": "cpu", "answer_field": "a", "group_field": "g",
        "system": "Think.", "template": "chat", "without": ["place", "samples"],
    }  # fmt: skip


def test_paper_takes_the_same_options_without_a_register(call):
    seen = call("paper", "--model", "toy:llama", "--limit", "5")
    assert (seen["register"], seen["out"], seen["limit"], seen["template"]) == (
        "2510.01032",
        Path("out/paper"),
        5,
        "plain",
    )
    assert call("claims", "sinks-and-induction")["out"] == Path("out/sinks-and-induction")
