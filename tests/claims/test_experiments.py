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


def test_what_the_readme_says_is_what_is_stored():
    readme = " ".join((EXPERIMENTS.parent / "README.md").read_text(encoding="utf-8").split())
    by_key = {claim["key"]: claim["verdicts"] for claim in STORED["claims"]}

    def values(key):
        return {name: verdict["parts"][0]["value"] for name, verdict in by_key[key].items() if verdict["parts"]}

    assert f"tests {len(CLAIMS)} claims" in readme
    assert all(value < 0 for value in values("attention_falls").values())
    assert all(verdict["parts"][0]["low"] > 0 for verdict in by_key["more_than_dilution"].values()), "less than uniform"
    missed = values("affine_deeper").values()
    assert (
        f"an affine map leaves an error of {100 * min(missed):.0f} to {100 * max(missed):.0f} % of the norm" in readme
    )
    cosines = [abs(value) for value in values("arm_does_the_same").values()]
    assert f"(cosine {min(cosines):.2f} to {max(cosines):.2f})" in readme
    gains = by_key["tokens_help"]
    costs = {
        name: -100 * v["parts"][0]["value"] for name, v in gains.items() if v["parts"] and v["parts"][0]["high"] < 0
    }
    assert (
        f"`toy:falcon` loses {costs.pop('toy:falcon'):.0f} points and `toy:qwen2` {costs.pop('toy:qwen2'):.0f}"
        in readme
    )
    assert not costs
    assert not any(verdict["verdict"] == "supported" for verdict in gains.values())
    free = [claim for claim in STORED["claims"] if not claim["by_definition"] and claim["where"].startswith("arXiv")]
    held, failed = (
        sum(all(v["verdict"] == word for v in claim["verdicts"].values()) for claim in free)
        for word in ("supported", "contradicted")
    )
    said = (
        f"Of the {len(CLAIMS)} claims, {len(free)} are from the paper and falsifiable. Of these {len(free)}, {held} are "
        f"supported in all five models and {failed} are contradicted in all"
    )
    assert said in readme
