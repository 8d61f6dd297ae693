"""experiments/README.md is what the stored verdicts say, and names every experiment; every claim of them is decidable."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from mechattn.claims.register import PAPER, read_register
from mechattn.claims.rules import WORDS
from mechattn.claims.verdicts import markdown

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STORED = json.loads((EXPERIMENTS / "paper" / "verdicts.json").read_text(encoding="utf-8"))
REGISTER = read_register(PAPER)
MODELS = [model["name"] for model in STORED["models"]]
CELLS = [(claim["key"], name) for claim in STORED["claims"] for name in MODELS]


def script(name="readme"):
    spec = importlib.util.spec_from_file_location(
        f"paper_{name}", EXPERIMENTS / "paper" / f"{name}.py"
    )
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_readme_is_generated_from_the_verdicts():
    text = script().readme()
    assert (EXPERIMENTS / "README.md").read_text(encoding="utf-8") == text, (
        "python experiments/paper/readme.py --write"
    )
    changed = json.loads(json.dumps(STORED))
    verdict = changed["claims"][0]["verdicts"]["toy:llama"]
    verdict["verdict"] = next(word for word in WORDS if word != verdict["verdict"])
    assert markdown(changed) not in text


def test_it_names_every_folder():
    folders = {
        path.name
        for path in EXPERIMENTS.iterdir()
        if path.is_dir() and not path.name.startswith(("_", "."))
    }
    assert set(script().FOLDERS) == folders


def test_the_verdicts_are_of_the_register_and_of_the_code_that_decides():
    """Where this fails, a rule, a measure or the register was changed: run it again (experiments/paper/readme.py)."""
    assert (STORED["register"]["digest"], STORED["register"]["code"]) == (
        REGISTER.digest,
        REGISTER.code,
    )
    assert MODELS == ["toy:llama", "toy:falcon", "toy:gemma3", "toy:qwen2", "stories260K"]
    assert all(model["exploratory"] for model in STORED["models"]), (
        "their numbers were known before"
    )


@pytest.fixture(scope="module")
def decidable():
    return script("decidable")


@pytest.mark.parametrize(("key", "name"), CELLS)
def test_a_claim_that_is_tested_can_come_out_either_way(decidable, key, name):
    """For each claim and model: numbers that satisfy it are supported, numbers that break it contradicted.

    They are as many as were measured, within what the model can show, and beside its random weights. What no numbers
    can decide is not tested.
    """
    verdict = next(claim for claim in STORED["claims"] if claim["key"] == key)["verdicts"][name]
    if verdict["verdict"] in ("not applicable", "holds") or not verdict["parts"]:
        assert verdict["verdict"] in ("not applicable", "holds", "not testable here")
        return
    satisfied, broken = decidable.both(key, verdict)
    if verdict["verdict"] == "not testable here":
        assert verdict["p"] is None, "it counts nowhere"
        assert satisfied.word != "supported" or any(one.word != "contradicted" for one in broken)
        return
    assert satisfied.word == "supported"
    assert [one.word for one in broken] == ["contradicted"] * len(verdict["parts"])


def test_the_table_of_what_can_be_decided_is_that_of_the_verdicts(decidable):
    text = decidable.table(STORED)
    assert decidable.TABLE.read_text(encoding="utf-8") == text, (
        "python experiments/paper/decidable.py --write"
    )
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(STORED["claims"])
    assert all(row.count("|") == 2 + len(MODELS) for row in rows)


# In layer 0 one repeated token has one value vector, so no weights make its shift less of one direction.
BY_ARITHMETIC = {"one_direction"}


def test_what_none_of_these_models_can_decide(decidable):
    """By arithmetic, or since they solve nearly all problems or none: a model that solves half decides all of these."""
    words = Counter(
        claim["verdicts"][name]["verdict"] for claim in STORED["claims"] for name in MODELS
    )
    assert words["supported"] > 0
    assert words["contradicted"] > 0
    for claim in STORED["claims"]:
        verdicts = claim["verdicts"].values()
        if claim["table"] == "identity" or any(one["p"] is not None for one in verdicts):
            continue
        parts = next(one["parts"] for one in verdicts if one["parts"])
        if claim["key"] in BY_ARITHMETIC:
            assert parts[0]["value"] > 1 - 1e-4
            continue
        half = [part | {"attainable": [-0.5, 0.5]} for part in parts]
        outcomes = [decidable.synthetic(claim["key"], part) for part in half]
        assert {tuple(one.word for one in both) for both in outcomes} == {
            ("supported", "contradicted")
        }, claim["key"]


def test_what_the_readme_says_is_what_is_stored():
    readme = " ".join((EXPERIMENTS.parent / "README.md").read_text(encoding="utf-8").split())
    for sentence in script().sentences(STORED):
        assert sentence in readme
