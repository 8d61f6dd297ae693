"""experiments/README.md is what the stored verdicts say, and names every experiment."""

import importlib.util
import json
from pathlib import Path

from mechattn.claims.register import CLAIMS, VERSION, digest
from mechattn.claims.rules import WORDS
from mechattn.claims.verdicts import markdown

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STORED = json.loads((EXPERIMENTS / "paper" / "paper.json").read_text(encoding="utf-8"))


def script():
    spec = importlib.util.spec_from_file_location("paper_readme", EXPERIMENTS / "paper" / "readme.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_readme_is_generated_from_the_verdicts():
    text = script().readme()
    assert (EXPERIMENTS / "README.md").read_text(encoding="utf-8") == text, "python experiments/paper/readme.py --write"
    assert markdown(STORED) + "\n" == (EXPERIMENTS / "paper" / "paper.md").read_text(encoding="utf-8")
    assert markdown(STORED) in text


def test_another_verdict_would_be_noticed():
    changed = json.loads(json.dumps(STORED))
    verdict = changed["claims"][0]["verdicts"]["toy:llama"]
    verdict["verdict"] = next(word for word in WORDS if word != verdict["verdict"])
    assert markdown(changed) != markdown(STORED)


def test_it_names_every_folder():
    folders = {path.name for path in EXPERIMENTS.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert set(script().FOLDERS) == folders


def test_the_verdicts_are_of_the_register_that_is_in_the_code():
    assert STORED["register"] == {"version": VERSION, "digest": digest()}
    assert [claim["key"] for claim in STORED["claims"]] == [claim.key for claim in CLAIMS]
    assert STORED["models"][0]["name"] == "toy:llama"
