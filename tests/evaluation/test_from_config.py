"""`mechattn evaluate`: from a file to a table, and on from where it stopped."""

import copy
import hashlib

import pytest
import torch
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.evaluate import evaluate_from_config
from mechattn.commands.main import app
from mechattn.errors import OptionError
from mechattn.evaluation import server_probe
from mechattn.evaluation.evaluation import Evaluation
from mechattn.stats.units import halves_of
from tests.evaluation import by_hand
from tests.served.stand_in import Engine, StandIn, running

TEXT = """
model = "toy:llama"
[prompts]
source = "word-problems"
limit = 3
[evaluation]
out = "answers/{model}.jsonl"
new_tokens = 12
[conditions.slash]
count = 20
[conditions.arm]
kind = "Baseline"
intervention = { kind = "ARM", c = 0.3 }
[output]
result = "r.zarr"
"""
SHORT = TEXT.replace(
    '[conditions.arm]\nkind = "Baseline"\nintervention = { kind = "ARM", c = 0.3 }\n', ""
)


def evaluated(*options):
    return CliRunner().invoke(app, ["evaluate", "config.toml", *options])


def table_rows(shown):
    return [line for line in shown.output.splitlines() if line.startswith("| ")]


def test_a_table_and_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(TEXT)
    shown = evaluated()
    assert shown.exit_code == 0, shown.output
    rows = table_rows(shown)
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| baseline", "| slash", "| arm"]
    stored = ma.load_evaluation(tmp_path / "answers" / "toy-llama.jsonl")
    table = stored.accuracy().set_index("condition")
    assert f"{100 * table.accuracy['slash']:.1f} %" in rows[2]
    monkeypatch.setattr(
        "mechattn.evaluation.generate.Generation.advance", lambda self: pytest.fail("asked again")
    )
    again = evaluated()
    assert table_rows(again) == rows


@pytest.mark.slow
def test_a_server_answers_in_place_of_the_model(toy, tmp_path, monkeypatch):
    """The same table, from the file and from the command line, without the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(SHORT)
    here = evaluated()
    table = table_rows(here)
    assert len(table) == 3
    (tmp_path / "answers" / "toy-llama.jsonl").unlink()
    monkeypatch.setattr(
        "mechattn.commands.evaluate.load_model", lambda *args, **options: pytest.fail("loaded")
    )
    with running(StandIn(Engine(toy._mechattn.native, toy.tokenizer))) as server:
        with pytest.warns(UserWarning, match="weights = true"):
            there = evaluated("--server", server.address, "--served-model", "toy")
        assert there.exit_code == 0, there.output
        assert table_rows(there) == table
        section = f'\n[evaluation.server]\naddress = "{server.address}"\nmodel = "toy"\n'
        (tmp_path / "config.toml").write_text(SHORT + section)
        server.bodies.clear()
        assert evaluated().exit_code == 0
        assert not server.bodies  # all answers were there
    (tmp_path / "config.toml").write_text(
        SHORT.replace('"toy:llama"', '["toy:llama", "toy:qwen2"]')
    )
    with pytest.raises(OptionError, match="only one model is evaluated on a server"):
        evaluate_from_config(tmp_path / "config.toml", server="http://127.0.0.1:9/v1")


def test_a_command_compares_a_server_with_named_weights(toy, tmp_path, monkeypatch):
    """Another model with the same tokenizer is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_probe, "MOST_ANSWER_TOKENS", 8)
    native = toy._mechattn.native
    changed = copy.deepcopy(native)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += parameter.std() * torch.randn_like(parameter)
    with running(StandIn(Engine(changed, toy.tokenizer))) as server:
        section = f'\n[evaluation.server]\naddress = "{server.address}"\nweights = true\n'
        (tmp_path / "config.toml").write_text(SHORT + section)
        compared = evaluated()
        assert compared.exit_code != 0
        words = compared.output + str(compared.exception)
        assert "does not run the model, against the model here" in words

        server.engine = Engine(native, toy.tokenizer)
        compared = evaluated()
        assert compared.exit_code == 0, compared.output
    evaluation = ma.load_evaluation(tmp_path / "answers" / "toy-llama.jsonl")
    assert "the model here" in evaluation.provenance["probe"]["against"]


def test_the_best_of_many_is_reported_on_the_other_half():
    in_order = sorted(range(20), key=lambda i: hashlib.sha256(str(i).encode()).hexdigest())
    choosing = halves_of(20)[0]
    chosen_on = [in_order.index(number) in choosing for number in range(20)]
    other = [not is_chosen_on for is_chosen_on in chosen_on]
    evaluation = by_hand.evaluation(baseline=[1] * 20, lucky=chosen_on, other=other)
    best = evaluation.best()
    assert best["condition"] == "lucky"
    assert (best["chosen_on"], best["accuracy"], best["baseline"]) == (1.0, 0.0, 1.0)
    assert best["difference"] == -1
    of_a_file = Evaluation(
        evaluation.answers[::-1], {"conditions": dict.fromkeys(evaluation.conditions, "")}
    )
    assert of_a_file.best() == best, "answers come in another order"
    with pytest.raises(OptionError, match="one condition other than the baseline"):
        by_hand.evaluation(baseline=[1] * 20).best()


def test_bad_configs(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TEXT.replace("new_tokens", "new_token"))
    with pytest.raises(OptionError, match=r"evaluation\.new_token: there is no such key"):
        evaluate_from_config(path)
    path.write_text(
        TEXT.replace('"toy:llama"', '["toy:llama", "toy:qwen2"]').replace("{model}", "all")
    )
    with pytest.raises(OptionError, match=r'answers/all\.jsonl: 2 models need "\{model\}"'):
        evaluate_from_config(path)
