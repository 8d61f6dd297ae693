"""Numbers about real models in the docs are those that experiments/real measured."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEASURED = json.loads(
    (ROOT / "experiments" / "real" / "2026-11-25.json").read_text(encoding="utf-8")
)
RUNS = ("smollm2-chat", "gemma3-plain", "qwen2.5-chat")


def test_the_heads_in_which_the_question_gains_are_those_that_were_counted():
    page = (ROOT / "docs" / "gotchas" / "a-fall-by-definition.md").read_text(encoding="utf-8")
    counts = [MEASURED[run]["heads"]["slash"] for run in RUNS]

    rising = re.search(r"\*rises\* in (\d+) of (\d+), (\d+) of (\d+) and (\d+) of (\d+)", page)
    expected = [number for count in counts for number in (count["rise"], count["heads"])]
    assert [int(number) for number in rising.groups()] == expected

    beyond = re.search(r"rises in (\d+), (\d+) and (\d+) heads and falls in (\d+), (\d+) and", page)
    gains = [count["rise beyond the margin"] for count in counts]
    losses = [count["fall beyond the margin"] for count in counts]
    assert [int(number) for number in beyond.groups()] == [*gains, *losses[:2]]


def test_what_the_question_and_the_inserted_tokens_change_by_is_what_was_measured():
    page = (ROOT / "docs" / "gotchas" / "a-fall-by-definition.md").read_text(encoding="utf-8")
    budgets = [MEASURED[run]["budget"]["slash"]["change"] for run in RUNS]

    taken = re.search(r"take (\d\.\d), (\d\.\d) and (\d\.\d) points", page).groups()
    assert list(taken) == [f"{budget['inserted'][0]:.1f}" for budget in budgets]

    question = re.search(r"changes by ([+−]\d\.\d), ([+−]\d\.\d) and ([+−]\d\.\d)\.", page).groups()
    measured = [f"{budget['question'][0]:+.1f}".replace("-", "−") for budget in budgets]
    assert list(question) == measured
