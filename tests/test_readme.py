"""What the README shows is what the code does: its config, its ten lines, the verdict that they print."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import plotly.io
import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.commands.run_config import read_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VERIFICATION = (ROOT / "docs" / "concepts" / "verification.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:\.\d+)?")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


def test_the_config_measures_what_the_ten_lines_do():
    config = read_config(ROOT / "experiments" / "first" / "config.toml")
    assert "`experiments/first/config.toml`" in README
    assert f'load_model("{config.models[0]}")' in block("python")
    assert f'load_prompts("{config.prompts.source}", limit={config.prompts.limit})' in block(
        "python"
    )
    slash = config.conditions["slash"]
    assert f'MeaninglessTokens("{slash.text}", count={slash.count})' in block("python")


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


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """All blocks in one process, as a reader pastes them, one after another: what each printed, showed and wrote."""
    scope, done = {}, []
    blocks = re.findall(r"```py(?:thon)?\n(.*?)```", README, re.DOTALL)
    assert blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pasted"))
        for code in blocks:
            shown, printed = [], io.StringIO()
            patch.setattr(
                plotly.io, "show", lambda figure, *args, shown=shown, **kwargs: shown.append(figure)
            )
            with redirect_stdout(printed):
                exec(compile(code, "README.md", "exec"), scope)
            done.append(
                (
                    printed.getvalue(),
                    shown,
                    {path.name for path in Path().iterdir()},
                    scope.get("result"),
                )
            )
    return done


def test_all_blocks_run_in_order_and_the_ten_lines_print_the_verdict(pasted):
    printed, shown, written, result = pasted[0]
    assert README.index("```py") == README.index("```python\n"), "they are the first block"
    assert len(shown) == 1
    assert written == {"pattern.html", "llama.zarr"}
    verdict = re.search(r"The verdict that it prints:\n\n> (.*?)\n\n", README, re.DOTALL)[
        1
    ].replace("\n> ", " ")
    table = re.search(r"```text\n( +layer  head.*?)```", README, re.DOTALL)[1]
    assert_same_words_and_numbers([verdict, *table.splitlines()], printed.splitlines())
    assert f"9 of its {len(result.compare('slash', resamples=99).columns)} columns" in block(
        "python"
    )
    assert {"pattern.html", "llama.zarr"} <= pasted[-1][2], "all later blocks ran in order too"


def test_other_fillers_are_those_of_the_experiment():
    written = (ROOT / "experiments" / "first" / "other-fillers.md").read_text(encoding="utf-8")
    falls = sorted(re.findall(r"\| `[^/]` \| −([\d.]+)\s%", written), key=float)
    heads = re.search(r"(\d+) of 32 heads lose less", written)[1]
    said = re.search(
        r"With\s+seven\s+other\s+characters.*?falls by ([\d.]+) to ([\d.]+) %.*?(\d+) heads still",
        README,
        re.DOTALL,
    )
    assert len(falls) == 7
    assert said.groups() == (falls[0], falls[-1], heads)


@pytest.mark.parametrize(
    "change", [("−30.3", "−30.6"), ("32 of", "31 of"), ("fall", "rise"), ("%", "")]
)
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


def test_what_verify_is_said_to_print():
    report = ma.verify_model("toy:falcon")
    quoted = re.search(r"\$ mechattn verify toy:falcon\n(.*?)```", VERIFICATION, re.DOTALL)[
        1
    ].splitlines()
    assert_quoted(quoted, str(report).splitlines())
    for check in report.checks:  # nor would another CPU's rounding turn a digit
        for figure in (check.hooked, check.expected):
            assert len({f"{figure * (1 + turn):.3g}" for turn in (-1e-5, 0, 1e-5)}) == 1, check


@pytest.mark.parametrize(
    "change", [("16 ", "17 "), ("passed", "failed"), ("(sdpa)", "(eager)"), ("4.3", "4.2")]
)
def test_another_report_would_be_noticed(change):
    printed = str(ma.verify_model("toy:falcon")).splitlines()
    quoted = re.search(r"\$ mechattn verify toy:falcon\n(.*?)```", VERIFICATION, re.DOTALL)[
        1
    ].splitlines()
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
    text = re.sub("model = .*", 'model = "toy:llama"', text, count=1).replace(
        '"out/', f'"{tmp_path.as_posix()}/'
    )
    (tmp_path / "config.toml").write_text(text)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "config.toml")])
    assert done.exit_code == 0, done.output
    shown = (ROOT / "docs" / "concepts" / "evaluation.md").read_text(encoding="utf-8")
    quoted = re.search(r"\n\n(\| condition \| right .*?)\n\n", shown, re.DOTALL)[1]
    assert quoted in done.output, done.output


def test_what_it_costs_is_what_was_measured():
    """Each ratio stands in the row of that name and the column of that length of a benchmark's first table."""
    measured = {}
    text = (ROOT / "experiments" / "benchmarks" / "2026-11-24-cpu.md").read_text(encoding="utf-8")
    head, _, *rows = re.search(r"\n\n(\|  \|.*?)\n\n", text, re.DOTALL)[1].splitlines()
    lengths = [cell.strip() for cell in head.split("|")[2:-1]]
    for row in rows:
        way, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        measured[way] = {
            length: cell.split(" ")[0] for length, cell in zip(lengths, cells, strict=True)
        }
    head, _, *rows = re.search(r"\n\n(\| tokens \|.*?)\n\n", README, re.DOTALL)[1].splitlines()
    lengths = [cell.strip() for cell in head.split("|")[2:-1]]
    assert len(rows) == 4
    for row in rows:
        way, *cells = (cell.strip(" *").replace("`", "") for cell in row.split("|")[1:-1])
        way = way.replace("averaging during the pass", "a trace that reduces")
        assert cells == [measured[way][length] for length in lengths], way


def test_the_first_picture_is_described_by_its_numbers():
    """The picture and the numbers come from the same command: python experiments/first_picture.py docs/images/first.png."""
    stored = json.loads((ROOT / "docs" / "images" / "first.json").read_text(encoding="utf-8"))
    falls, nulls = ([-of[part] for of in stored.values()] for part in ("estimate", "uniform"))
    said = (
        f"Attention to the question falls by {min(falls):.0f} to {max(falls):.0f} % in four small models; under uniform "
        f"attention it would fall by {min(nulls):.0f} to {max(nulls):.0f} %"
    )
    for page in (README, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        assert f"![{said}](" in page
    llama = ma.run(
        "toy:llama", ma.load_prompts("word-problems", limit=64), {"s": ma.MeaninglessTokens()}
    )
    assert 100 * float(llama.verdict("s").change.estimate) == pytest.approx(
        stored["toy:llama"]["estimate"], abs=0.06
    )


def test_it_is_short():
    assert README.count("\n") <= 140


def test_nothing_was_left_to_be_filled_in():
    for path in [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@[A-Z]+@|<<<<<<<|>>>>>>>|TODO", text), path
