"""What ``mechattn claims`` and ``mechattn paper`` hand on."""

from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mechattn.claims import judge
from mechattn.commands.main import app
from mechattn.jobs import executors
from mechattn.model.checkpoint import toy_names


def test_the_default_models():
    assert judge.named(None) == judge.named([])
    assert sorted(judge.named(None)) == sorted(toy_names())
    assert judge.named(None)[0] == "toy:llama"
    assert judge.named("toy:qwen2") == judge.named(["toy:qwen2"]) == ("toy:qwen2",)


@pytest.fixture
def call(monkeypatch):
    """Runs a command; what ``judge`` was called with."""
    seen = {}

    def judged(register, models, out, settings, **options):
        seen.update(
            options, register=register.about.name, models=models, out=out, settings=settings
        )

    monkeypatch.setattr(judge, "judge", judged)

    def run(*words):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        assert "run the same command without --shard" in done.output
        return seen

    return run


def test_every_option_is_handed_on(call, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "executor_named", lambda *given: given)
    given = ["--model", "toy:qwen2", "--model", "toy:llama", "--out", str(tmp_path), "--limit", "9"]
    given += [
        "--problems",
        "8",
        "--samples",
        "3",
        "--new-tokens",
        "7",
        "--seed",
        "5",
        "--dtype",
        "float32",
    ]
    given += [
        "--shard",
        "1/2",
        "--executor",
        "ray",
        "--address",
        "ray://a",
        "--workers",
        "2",
        "--fresh",
        "--force",
    ]
    given += [
        "--prompts",
        "a.jsonl",
        "--field",
        "problem",
        "--device",
        "cpu",
        "--answer-field",
        "a",
        "--group-field",
    ]
    given += ["g", "--system", "Think.", "--chat-template", "--without", "place,samples"]
    seen = call("claims", str(Path(__file__).parent / "small.toml"), *given)
    settings = asdict(seen.pop("settings"))
    assert settings.pop("command")
    assert settings == {
        "limit": 9, "problems": 8, "samples": 3, "new_tokens": 7, "seed": 5, "dtype": "float32", "prompts": "a.jsonl",
        "field": "problem", "device": "cpu", "answer_field": "a", "group_field": "g", "system": "Think.",
        "template": "chat", "without": ("place", "samples"),
    }  # fmt: skip
    assert seen == {
        "register": "small", "models": ["toy:qwen2", "toy:llama"], "out": tmp_path, "shard": "1/2",
        "executor": ("ray", "ray://a", 2), "fresh": True, "force": True,
    }  # fmt: skip


def test_paper_takes_the_same_options_without_a_register(call):
    seen = call("paper", "--model", "toy:llama", "--limit", "5")
    assert (seen["register"], seen["out"]) == ("2510.01032", Path("out/paper"))
    assert (seen["settings"].limit, seen["settings"].template) == (5, "plain")
    assert call("claims", "sinks-and-induction")["out"] == Path("out/sinks-and-induction")
