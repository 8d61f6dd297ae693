"""The whole call: table, page and files; it resumes; and mistakes are said before anything is measured."""

import json

import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.errors import OptionError
from mechattn.published import measure, paper
from mechattn.published.comparison import NOT_MEASURABLE
from mechattn.published.measure import ModelRuns, Settings
from mechattn.published.statements import read_statements


@pytest.fixture(scope="module", autouse=True)
def without_map():
    """Pages without the numbers of the map of heads, which ``tests/pages`` compares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.pages.page.page_json", lambda *models: "")
        yield


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of the toy with few prompts, and its folder."""
    out = tmp_path_factory.mktemp("paper")
    options = {"limit": 4, "draws": 1, "problems": 3, "new_tokens": 4, "prompts": "word-problems"}
    return ma.paper("toy:llama", out, **options), out, options


def test_a_row_for_each_statement_and_model(compared, toy):
    comparison, _, _ = compared
    table = comparison.table()
    assert list(table.statement) == [each.key for each in read_statements().statements]
    row = table.set_index("statement").loc["attention_falls"]
    system = comparison.statements.system
    prompts = ma.load_prompts("word-problems", limit=4, template="joined", system=system)
    result = ma.run(toy, prompts, {"slash": ma.MeaninglessTokens()}, layers=0)
    received = result["received_attention"].received_by_segment.sel(segment="question", layer=0)
    means = received.astype(float).mean("head")
    changes = means.sel(condition="slash") / means.sel(condition="baseline")
    assert 1 + row.value / 100 == pytest.approx(float(changes.prod()) ** (1 / 4), rel=1e-4)
    answered = table.set_index("statement").loc[["tokens_help", "sentence_harms", "arm_helps"]]
    assert (answered.n == 3).all()
    assert answered.note.str.contains("exact McNemar").all()


def test_page_markdown_and_json_say_the_same(compared):
    comparison, out, _ = compared
    page = (out / "index.html").read_text(encoding="utf-8")
    markdown = (out / "paper.md").read_text(encoding="utf-8")
    for statement in comparison.statements.statements:
        cell = comparison.cells[statement.key]["toy:llama"]
        assert cell.word in page
        assert cell.unit == statement.unit
        assert str(cell) in markdown
    assert comparison.summary in page
    assert "about 1 miss the true value by chance" in comparison.summary
    assert "captions of figures 15 and 18" in page
    rows = json.loads((out / "paper.json").read_text(encoding="utf-8"))["rows"]
    assert next(row for row in rows if row["word"] == NOT_MEASURABLE)["value"] is None


def test_the_same_call_measures_nothing_again(compared, monkeypatch):
    comparison, out, options = compared

    def refused(*arguments, **_):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(measure, "run", refused)
    again = ma.paper("toy:llama", out, **options)
    assert again.table().equals(comparison.table())
    with pytest.raises(AssertionError, match="measured again"):
        ma.paper("toy:llama", out, **options | {"limit": 3})


def test_the_arm_is_that_of_the_models_family(tmp_path):
    settings = Settings([], [], 0, 8, 0, "auto", None, tmp_path)
    statements = read_statements()
    assert ModelRuns("toy:falcon", "falcon", statements, settings).arm is None
    arm = ModelRuns("toy:llama", "llama", statements, settings).arm
    assert (arm.form, arm.c, arm.p1) == ("released_llama", 0.32, 90.0)


def test_each_draw_has_weights_of_its_own(toy, prompts, tmp_path):
    settings = Settings(prompts[:3], [], 2, 8, 0, "float32", None, tmp_path)
    runs = ModelRuns("toy:llama", "llama", read_statements(), settings)
    runs.model = toy
    first, second = (runs.run_values("first", draw) for draw in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (iter([]), {}, "give the name"),
        (3, {}, "give the name"),
        ("toy:llama", {"limit": 2}, "limit=2: give a whole number, at least 3"),
        ("toy:llama", {"new_tokens": 0}, "new_tokens=0"),
        (["models--a--b/snapshots/c", "models--a--b/snapshots/d"], {}, "both be called 'a/b'"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(
    tmp_path, monkeypatch, models, options, message
):
    monkeypatch.setattr(paper, "ModelRuns", None)
    with pytest.raises(OptionError, match=message):
        ma.paper(models, tmp_path / "out", **options)


def test_a_data_set_without_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "ModelRuns", None)
    path = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": f"How many are {i} and 2?"}) for i in range(4)]
    path.write_text("\n".join(lines), encoding="utf-8")
    said = r"3 problems are to be answered, but prompt 0 .* has no solution.*name the field"
    with pytest.raises(OptionError, match=said):
        ma.paper("toy:llama", tmp_path / "out", prompts=str(path), limit=4, problems=3)


def test_the_command_hands_on_its_options(monkeypatch, tmp_path):
    given = {}

    def called(models, out, **options):
        given.update(options, models=models, out=out)
        return "the comparison"

    monkeypatch.setattr(paper, "paper", called)
    words = ["paper", "--model", "toy:qwen2", "--model", "toy:llama", "--out", str(tmp_path)]
    words += ["--limit", "9", "--draws", "4", "--problems", "8", "--new-tokens", "7", "--seed", "5"]
    words += ["--prompts", "a.jsonl", "--field", "problem", "--answer-field", "a"]
    words += ["--dtype", "float32", "--device", "cpu", "--force"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "the comparison" in done.output
    assert given.pop("command")
    assert given == {
        "models": ["toy:qwen2", "toy:llama"], "out": tmp_path, "limit": 9, "draws": 4, "problems": 8, "new_tokens": 7,
        "seed": 5, "prompts": "a.jsonl", "field": "problem", "answer_field": "a", "dtype": "float32", "device": "cpu",
        "force": True,
    }  # fmt: skip
