"""experiments/README.md is what the stored verdicts say, and names every experiment; every claim of them is decidable."""

import importlib.util
import json
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from mechattn.claims.register import PAPER, read_register
from mechattn.claims.rules import WORDS, Chance, Estimate, Rule, bounds, decide, together
from mechattn.claims.verdicts import markdown

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STORED = json.loads((EXPERIMENTS / "paper" / "verdicts.json").read_text(encoding="utf-8"))
REGISTER = read_register(PAPER)
MODELS = [model["name"] for model in STORED["models"]]
CELLS = [(claim["key"], name) for claim in STORED["claims"] for name in MODELS]


def script():
    spec = importlib.util.spec_from_file_location("paper_readme", EXPERIMENTS / "paper" / "readme.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_readme_is_generated_from_the_verdicts():
    text = script().readme()
    assert (EXPERIMENTS / "README.md").read_text(encoding="utf-8") == text, "python experiments/paper/readme.py --write"
    changed = json.loads(json.dumps(STORED))
    verdict = changed["claims"][0]["verdicts"]["toy:llama"]
    verdict["verdict"] = next(word for word in WORDS if word != verdict["verdict"])
    assert markdown(changed) not in text


def test_it_names_every_folder():
    folders = {path.name for path in EXPERIMENTS.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert set(script().FOLDERS) == folders


def test_the_verdicts_are_of_the_register_and_of_the_code_that_decides():
    """Where this fails, a rule, a measure or the register was changed: run it again (experiments/paper/readme.py)."""
    assert (STORED["register"]["digest"], STORED["register"]["code"]) == (REGISTER.digest, REGISTER.code)
    assert MODELS == ["toy:llama", "toy:falcon", "toy:gemma3", "toy:qwen2", "stories260K"]
    assert all(model["exploratory"] for model in STORED["models"]), "their numbers were known before"


@pytest.mark.parametrize(("key", "name"), CELLS)
def test_a_claim_that_is_tested_can_come_out_either_way(key, name):
    """For each claim and model: numbers that satisfy it are supported, numbers that break it contradicted.

    They are as many as were measured, within what the model can show, and beside its random weights. What no numbers
    can decide is not tested.
    """
    verdict = next(claim for claim in STORED["claims"] if claim["key"] == key)["verdicts"][name]
    if verdict["verdict"] in ("not applicable", "holds"):
        return
    if verdict["verdict"] == "not testable here":
        assert verdict["p"] is None, "it counts nowhere"
        if verdict["parts"]:
            assert any(
                satisfied(key, i, part)[0].word != "supported" for i, part in enumerate(verdict["parts"])
            ) or any(satisfied(key, i, part)[1].word != "contradicted" for i, part in enumerate(verdict["parts"]))
        return
    found = [satisfied(key, i, part) for i, part in enumerate(verdict["parts"])]
    assert found
    assert together([supports for supports, _ in found]).word == "supported"
    for i, (_, against) in enumerate(found):
        outcomes = [supports for supports, _ in found[:i]] + [against] + [supports for supports, _ in found[i + 1 :]]
        assert together(outcomes).word == "contradicted"


def satisfied(key, i, part):
    """What the rule says to two made-up numbers: halfway to each end of the range from what the verdict takes."""
    rule = Rule(**part["rule"])
    compared = part["random"] is not None and next(c for c in REGISTER.claims if c.key == key).compared
    draws = tuple(part["random"]["draws"]) if compared else None
    low, high = (end if end is not None else other for end, other in zip(part["attainable"], (-inf, inf)))
    outcomes = []
    chance = None if draws is None else Chance(Estimate(0.0, 0.0, 0.0, part["n"], 0.0), draws)
    for bound, sign in zip(bounds(rule, chance), (rule.sign, -rule.sign)):
        end = high if sign > 0 else low
        value = (bound + end) / 2 if abs(end) < inf else bound + sign
        outcomes.append(decide(rule, *numbers(value, abs(value - bound) / 8, part, draws), (low, high)))
    return outcomes


def numbers(value, half, part, draws):
    """An estimate and what is beside it, with a narrow interval."""
    exact = None if part["exact"] is None else 1e-6
    found = Estimate(value, value - half, value + half, part["n"], half, exact, None, part["floor"])
    if draws is None:
        return found, None
    apart = value - sum(draws) / len(draws)
    return found, Chance(Estimate(apart, apart - half, apart + half, part["n"], half), draws)


# In layer 0 one repeated token has one value vector, so no weights make its shift less of one direction.
BY_ARITHMETIC = {"one_direction"}


def test_what_none_of_these_models_can_decide():
    """By arithmetic, or since they solve nearly all problems or none: a model that solves half decides all of these."""
    words = Counter(claim["verdicts"][name]["verdict"] for claim in STORED["claims"] for name in MODELS)
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
        outcomes = [satisfied(claim["key"], i, part) for i, part in enumerate(half)]
        assert {tuple(one.word for one in both) for both in outcomes} == {("supported", "contradicted")}, claim["key"]


def test_what_the_readme_says_is_what_is_stored():
    readme = " ".join((EXPERIMENTS.parent / "README.md").read_text(encoding="utf-8").split())
    for sentence in script().sentences(STORED):
        assert sentence in readme
