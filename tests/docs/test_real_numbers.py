"""Numbers about real models in the docs are those that experiments/real measured."""

import json
import math
import re
from pathlib import Path

from scipy import stats

from mechattn.published.statements import read_statements

ROOT = Path(__file__).parents[2]
MEASURED = json.loads(
    (ROOT / "experiments" / "real" / "2026-11-25.json").read_text(encoding="utf-8")
)
FALL = (ROOT / "docs" / "gotchas" / "a-fall-by-definition.md").read_text(encoding="utf-8")
RUNS = ("smollm2-chat", "gemma3-plain", "qwen2.5-chat")


def test_heads_where_the_question_gains_are_counted():
    counts = [MEASURED[run]["heads"]["slash"] for run in RUNS]

    rising = re.search(r"\*rises\* in (\d+) of (\d+), (\d+) of (\d+) and (\d+) of (\d+)", FALL)
    expected = [number for count in counts for number in (count["rise"], count["heads"])]
    assert [int(number) for number in rising.groups()] == expected

    beyond = re.search(r"rises in (\d+), (\d+) and (\d+) heads and falls in (\d+), (\d+) and", FALL)
    gains = [count["rise beyond the margin"] for count in counts]
    losses = [count["fall beyond the margin"] for count in counts]
    assert [int(number) for number in beyond.groups()] == [*gains, *losses[:2]]


def test_changes_in_the_text_are_those_measured():
    budgets = [MEASURED[run]["budget"]["slash"]["change"] for run in RUNS]

    taken = re.search(r"take (\d\.\d), (\d\.\d) and (\d\.\d) points", FALL).groups()
    assert list(taken) == [f"{budget['inserted'][0]:.1f}" for budget in budgets]

    question = re.search(r"changes by ([+−]\d\.\d), ([+−]\d\.\d) and ([+−]\d\.\d)\.", FALL).groups()
    measured = [f"{budget['question'][0]:+.1f}".replace("-", "−") for budget in budgets]
    assert list(question) == measured


def test_the_papers_table_has_means_of_all_prompts():
    folder = ROOT / "experiments" / "paper"
    by_model = json.loads((folder / "2026-11-26.json").read_text(encoding="utf-8"))
    values = [by_model[model]["values by prompt"] for model in ("smollm2", "qwen2.5", "gemma3")]
    page = (ROOT / "docs" / "concepts" / "the-paper.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([A-Z][^|]+) \| (.+) \|$", page, re.MULTILINE))
    checked = 0
    for statement in read_statements().statements:
        key = statement.key
        if key not in values[0]:
            continue
        cells = rows[statement.title].split(" | ")
        for cell, of_model in zip(cells, values, strict=True):
            mean = sum(of_model[key]) / len(of_model[key])
            is_ratio = statement.unit == "change"
            expected = 100 * (math.expm1(mean) if is_ratio else mean)
            told = float(re.search(r": ([+−]?\d+\.\d)", cell)[1].replace("−", "-"))
            assert abs(told - expected) < 0.06, (key, cell, expected)
            checked += 1
    assert checked == 66


def test_the_accuracies_are_those_of_the_kept_answers():
    kept = (ROOT / "experiments" / "real" / "2026-11-26-accuracy.json").read_text(encoding="utf-8")
    right = {name: own["right"] for name, own in json.loads(kept)["conditions"].items()}
    assert {len(values) for values in right.values()} == {700}
    page = (ROOT / "docs" / "concepts" / "the-paper.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (55 “/”|random sentence|ARM|as long a step)[^|]*\| (.+) % \| (\S+) .*\| (\S+) \|$",
        page,
        re.M,
    )
    names = {
        "55 “/”": "slash",
        "random sentence": "sentence",
        "ARM": "arm",
        "as long a step": "direction",
    }
    assert [label for label, *_ in rows] == list(names)
    for label, percent, difference, p in rows:
        own = right[names[label]]
        pairs = list(zip(own, right["baseline"], strict=True))
        gained = pairs.count((1, 0))
        lost = pairs.count((0, 1))
        assert percent == f"{100 * sum(own) / 700:.1f}"
        assert difference == f"{100 * (gained - lost) / 700:+.1f}".replace("-", "−")
        exact = stats.binomtest(gained, gained + lost).pvalue
        assert p == f"{exact:.2g}"
        assert f"{percent} %" in readme


def test_readmes_circuit_is_the_measured_one():
    page = ROOT / "experiments" / "real" / "circuits" / "2026-11-26-circuits.md"
    _, of_smollm2 = page.read_text(encoding="utf-8").split("## smollm2, ioi\n")
    section, *_ = of_smollm2.split("\n## ")
    rows = [line.split() for line in section.splitlines()]
    numbers = {
        row[0]: list(map(float, row[1:])) for row in rows if len(row) == 6 and row[0].isdigit()
    }
    _, share, low, high, random = numbers["707"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    docs = (ROOT / "docs" / "how-to" / "which-circuit.md").read_text(encoding="utf-8")
    assert f"| 707 of 70,651 | {share:.2f} [{low:.2f}, {high:.2f}] |" in docs
    assert f"707 of {max(map(int, numbers)):,} edges carry" in readme
    assert f"carry {100 * share:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of the effect" in readme
    assert abs(random) < 0.001
