"""What the README shows is what the code does: its config, its ten lines, the verdict that they print."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import plotly.io
import pytest
from scipy import stats
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.results.provenance import set_hash
from tests.conftest import need

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VERIFICATION = (ROOT / "docs" / "concepts" / "verification.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:\.\d+)?")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


def assert_same_words_and_numbers(quoted, printed):
    """Words to the letter, whole numbers too; others to the last digit that is quoted, as rounding may turn it."""
    quoted, printed = ([" ".join(line.split()) for line in text] for text in (quoted, printed))
    assert [NUMBER.sub("#", line) for line in quoted] == [NUMBER.sub("#", line) for line in printed]
    for here, there in zip(
        NUMBER.findall(" ".join(quoted)), NUMBER.findall(" ".join(printed)), strict=True
    ):
        digits = len(here.partition(".")[2])
        assert digits == len(there.partition(".")[2]), (here, there)
        most = 1.01 * 10**-digits if digits else 0
        apart = abs(float(here.replace("−", "-")) - float(there.replace("−", "-")))
        assert apart <= most, f"the README says {here}, the code {there}: {quoted}"


def pasted(code, folder):
    """What a block of Python printed, showed and wrote, in a folder of its own."""
    figures = []
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(plotly.io, "show", lambda figure, *args, **kwargs: figures.append(figure))
        with redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue(), figures, {path.name for path in folder.iterdir()}


WRITTEN = {"pattern.html", "smollm2.zarr"}


def test_the_ten_lines_run(tmp_path):
    """On a toy, which reads plain text and tells no number of the README."""
    code = block("python")
    for real, toy in [
        ("real:smollm2", "toy:llama"),
        ("limit=16", "limit=6"),
        ('"chat"', '"plain"'),
    ]:
        assert real in code
        code = code.replace(real, toy)
    printed, figures, written = pasted(code, tmp_path)
    assert printed.startswith("With “slash”, attention received by the question changes by ")
    assert len(figures) == 1
    assert written == WRITTEN


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_the_ten_lines_print_the_verdict(tmp_path, monkeypatch):
    """What they measure is what `make figures` measured and stored, so it is not measured again."""
    stored = list((ROOT / "out" / "figures").glob("*smollm2*.zarr"))
    need("figures", stored, "`make figures` writes them")
    result = ma.load_result(stored[0])

    def measured_before(model, prompts, conditions, analyses):
        assert set_hash(prompts) == result.provenance["prompts"]["hash"]
        assert list(conditions) == result.conditions[1:]
        for name, condition in conditions.items():
            assert repr(condition) == result.provenance["conditions"][name]["written"]
        assert {analysis.name for analysis in analyses} < set(result.datasets)
        return result

    monkeypatch.setattr(ma, "run", measured_before)
    printed, figures, written = pasted(block("python"), tmp_path)
    assert len(figures) == 1
    assert written == WRITTEN
    verdict = re.search(r"It prints:\n\n> (.*?)\n\n", README, re.DOTALL)[1]
    assert_same_words_and_numbers([verdict.replace("\n> ", " ")], [" ".join(printed.splitlines())])


def test_no_other_block_needs_to_run():
    assert len(re.findall("```py", README)) == 1


@pytest.mark.parametrize("change", [("−30.3", "−30.6"), ("fall", "rise")])
def test_another_number_or_word_would_be_noticed(change):
    said = "Question attention −30.3 % in 32 of 32 heads, which fall"
    assert_same_words_and_numbers([said], [said.replace("−30.3", "−30.2")])
    with pytest.raises(AssertionError):
        assert_same_words_and_numbers([said], [said.replace(*change)])


def assert_quoted(quoted, printed):
    """Line by line, to the letter; "…" stands for the rest of a line, alone for lines that are left out."""
    rest, left_out = iter(printed), False
    for line in quoted:
        if line == "…":
            left_out = True
            continue
        wanted, dots = line.removesuffix(" …"), line.endswith(" …")
        for there in rest:
            same = there.startswith(wanted) if dots else there == line
            assert same or left_out, f"the README says {line!r}, the code {there!r}"
            if same:
                break
        else:
            pytest.fail(f"the README says {line!r}, the code does not")
        left_out = False
    assert left_out or not list(rest), "lines were left out at the end, and no … says so"


@pytest.fixture(scope="module")
def printed():
    return str(ma.verify_model("toy:falcon")).splitlines()


@pytest.fixture
def quoted():
    block = re.search(r"\$ mechattn verify toy:falcon\n(.*?)```", VERIFICATION, re.DOTALL)[1]
    return block.splitlines()


def test_what_verify_is_said_to_print(quoted, printed):
    assert_quoted(quoted, printed)


@pytest.mark.parametrize("change", [("passed", "failed"), ("4.3", "4.2")])
def test_another_report_would_be_noticed(quoted, printed, change):
    with pytest.raises((AssertionError, pytest.fail.Exception), match="the README says"):
        assert_quoted(quoted, [line.replace(*change) for line in printed])
    with pytest.raises(
        (AssertionError, pytest.fail.Exception), match=r"the README says|no … says so"
    ):
        assert_quoted([line for line in quoted if line != "…"], printed)


@pytest.mark.slow
def test_the_table_of_accuracies_is_what_the_config_prints(tmp_path):
    """Greedy answers: whole numbers of right ones, which no rounding turns on a toy that is sure of its words."""
    text = (ROOT / "experiments" / "accuracy" / "config.toml").read_text()
    text = re.sub("model = .*", 'model = "toy:llama"', text, count=1)
    text = text.replace('"out/', f'"{tmp_path.as_posix()}/')
    before, left_out, after = re.split(r"(?=\[conditions.sentence\])|(?=\[output\])", text)
    assert left_out.count("[conditions.") == 3  # a row depends on no other condition's
    text = before + after
    (tmp_path / "config.toml").write_text(text)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "config.toml")])
    assert done.exit_code == 0, done.output
    shown = (ROOT / "docs" / "concepts" / "evaluation.md").read_text(encoding="utf-8")
    quoted = re.search(r"\n\n(\| condition \| right .*?)\n\n", shown, re.DOTALL)[1]
    rows = quoted.splitlines()
    assert "\n".join(rows[:-3]) in done.output, done.output


def test_what_it_costs_is_what_was_measured():
    """Each ratio is that of the real model in the newest benchmark, by way and length."""
    newest = max((ROOT / "experiments" / "benchmarks").glob("*-real-cpu.json"))
    costs = json.loads(newest.read_text(encoding="utf-8"))
    measured = {
        (cost["way"], f"{cost['tokens']:,}"): f"{cost['ratio']:.2f}"
        for cost in costs
        if cost["model"] == "smollm2"
    }
    table = re.search(r"\n\n(\| tokens of a prompt \|.*?)\n\n", README, re.DOTALL)[1]
    head, _, *rows = table.splitlines()
    lengths = [cell.strip() for cell in head.split("|")[2:-1]]
    assert len(rows) == 4
    for row in rows:
        way, *cells = (cell.strip(" *") for cell in row.split("|")[1:-1])
        assert cells == [measured[way, length] for length in lengths], way


RUNS = {"SmolLM2": "smollm2-chat", "Qwen2.5": "qwen2.5-chat", "Gemma-3": "gemma3-plain"}
MEASURED = json.loads((ROOT / "experiments" / "real" / "2026-11-25.json").read_text("utf-8"))


def told(triple):
    """A mean with the ends of its interval, as the README writes them."""
    mean, low, high = (f"{number:+.1f}".replace("-", "−") for number in triple)
    return f"{mean} [{low}, {high}]"


def caption_of(page):
    return " ".join(re.search(r"\*We inserted.*?\*\n\n", page, re.DOTALL)[0].split())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_picture_is_described_by_its_numbers(page):
    """The picture and the numbers come from one command: make real."""
    caption = caption_of((ROOT / page).read_text(encoding="utf-8"))
    for run in RUNS.values():
        budget = MEASURED[run]["budget"]["slash"]["change"]
        assert told(budget["question"]) in caption, run
        assert f"{budget['inserted'][0]:.1f}" in caption, run
        assert str(MEASURED[run]["prompts"]) in caption, run
    for run in ("smollm2-chat", "qwen2.5-chat"):
        layer_0 = MEASURED[run]["question in percent"]["slash"]["layer 0"][0]
        taken = MEASURED[run]["layer 0"]["slash"]["change"]["inserted"][0]
        assert f"{-layer_0:.0f} %" in caption
        assert f"{taken:.0f}" in caption


def test_the_oracle_of_the_caption_would_notice_another_interval():
    mean, low, high = MEASURED["smollm2-chat"]["budget"]["slash"]["change"]["question"]
    assert told([mean, low, high + 0.2]) not in caption_of(README)


PAPER = json.loads((ROOT / "experiments" / "paper" / "2026-11-26.json").read_text("utf-8"))
RATIOS = ["attention_falls", "filler_gets_little", "large_grows", "bands_wider"]


def paper_percent(model, name):
    """Mean over prompts, with its t interval, in percent; of log-ratios as a change."""
    values = np.array(PAPER[model]["values by prompt"][name])
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    ends = np.array([values.mean(), values.mean() - half, values.mean() + half])
    if name in RATIOS:
        ends = np.expm1(ends)
    return 100 * ends


def test_the_paragraph_on_the_paper_is_what_was_measured():
    paragraph = re.search(r"## A paper's numbers.*?(?=\n## )", README, re.DOTALL)[0]
    paragraph = " ".join(paragraph.split())
    for model in PAPER:
        falls = told(paper_percent(model, "attention_falls")).replace(" [", " % [")
        assert falls in paragraph
        layers, low, high = paper_percent(model, "most_layers_fall")
        assert f"{layers:.1f} % [{low:.1f}, {high:.1f}]" in paragraph

    for name, sign, sentence in (
        ("filler_gets_little", -1, "gets {:.0f}, {:.0f} and {:.0f} % less"),
        ("affine_first_layer", 1, "affine ({:.0f}, {:.0f} and {:.0f} %)"),
        ("first_token_no_update", 1, "write {:.0f}, {:.0f} and {:.0f} % of their layer's mean"),
        ("large_grows", 1, "large activations ({:+.1f}, {:+.1f} and {:+.1f} %)"),
        ("bands_wider", 1, "the bands ({:+.0f}, {:+.0f} and {:+.0f} %)"),
    ):
        means = [sign * paper_percent(model, name)[0] for model in PAPER]
        assert sentence.format(*means).replace("-", "−") in paragraph

    draws = [
        -100 * np.expm1(draw)
        for model in PAPER.values()
        for draw in model["untrained, mean of each draw"]["attention_falls"]
    ]
    assert f"it falls by {min(draws):.0f} to {max(draws):.0f} % in all three" in paragraph


def test_nothing_was_left_to_be_filled_in():
    for path in [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@[A-Z]+@|<<<<<<<|>>>>>>>|TODO", text), path
