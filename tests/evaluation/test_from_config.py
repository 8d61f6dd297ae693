"""`mechattn evaluate`: from a file to a table, and on from where it stopped."""

import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.cli import app
from mechattn.errors import OptionError
from mechattn.from_config import evaluate_from_config

TEXT = """
model = "toy:llama"
[prompts]
source = "word-problems"
limit = 6
[evaluation]
out = "answers/{model}.jsonl"
new_tokens = 40
[conditions.slash]
count = 20
[conditions.arm]
kind = "Baseline"
intervention = { kind = "ARM", c = 0.3 }
[output]
result = "r.zarr"
"""


def test_a_table_and_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(TEXT)
    shown = CliRunner().invoke(app, ["evaluate", "config.toml"])
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.output.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| baseline", "| slash", "| arm"]
    stored = ma.load_evaluation(tmp_path / "answers" / "toy-llama.jsonl")
    table = stored.accuracy().set_index("condition")
    assert f"{100 * table.accuracy['slash']:.1f} %" in rows[2]
    again = CliRunner().invoke(app, ["evaluate", "config.toml"])
    assert [line for line in again.output.splitlines() if line.startswith("| ")] == rows
    monkeypatch.setattr("mechattn.evaluation.evaluate.answers", lambda *args: pytest.fail("asked again"))
    evaluate_from_config(tmp_path / "config.toml")


def test_the_best_of_many_is_reported_on_the_other_half():
    from mechattn.evaluation.evaluation import Answered, Evaluation

    def rows(name, right):
        return [Answered(str(i), name, 0, "", (), None, "1", bool(r), True) for i, r in enumerate(right)]

    even = [i % 2 == 0 for i in range(20)]
    made = Evaluation((*rows("baseline", [True] * 20), *rows("lucky", even), *rows("other", [not e for e in even])), {})
    best = made.best()
    assert best["condition"] == "lucky"
    assert (best["chosen_on"], best["accuracy"], best["baseline"]) == (1.0, 0.0, 1.0)
    assert best["difference"] == -1
    with pytest.raises(OptionError, match="one condition beside the baseline"):
        Evaluation(tuple(rows("baseline", [True] * 20)), {}).best()


def test_bad_configs(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TEXT.replace("[evaluation]\n", "").replace('out = "answers/{model}.jsonl"\nnew_tokens = 40\n', ""))
    with pytest.raises(OptionError, match=r"has no section \[evaluation\]"):
        evaluate_from_config(path)
    path.write_text(TEXT.replace("new_tokens", "new_token"))
    with pytest.raises(OptionError, match=r"evaluation\.new_token: there is no such key"):
        evaluate_from_config(path)
    path.write_text(
        TEXT.replace('"toy:llama"', '["toy:llama", "toy:qwen2"]')
        .replace("{model}", "all")
        .replace("r.zarr", "{model}.zarr")
    )
    with pytest.raises(OptionError, match=r'need "\{model\}" in evaluation\.out'):
        evaluate_from_config(path)
