"""Writes experiments/README.md: a line for each folder, and what ``mechattn paper`` says of the models it was run on.

mechattn paper --model toy:llama --model toy:falcon --model toy:gemma3 --model toy:qwen2 \\
  --model ../shared/models/stories260K --limit 16 --problems 60 --out out/paper
cp out/paper/verdicts.json experiments/paper/ && python experiments/paper/readme.py --write
"""

import json
import sys
from collections import Counter
from pathlib import Path

from mechattn.claims.verdicts import markdown

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
FOLDERS = {  # what each is, in a line
    "paper": "claims of arXiv:2510.01032 and of a blog post, judged for the toys and stories260K: the tables below",
    "first": "a config to copy; see its README",
    "redistribution": "received attention of three heads, without and with 55 “/”; map of all heads",
    "controls": "“/” against a random sentence, “?”, “he”, shuffled and random tokens; rank of the shift",
    "layers": "one head in layers 0, 1, 2, without and with 55 “/”",
    "affine": "λ by layer, and what `λ · output + Σσ` misses",
    "sweeps": "by length, 10 to 70 tokens, and by place",
    "two-by-two": "keys visible or masked × positions shifted or kept",
    "activations": "the first MLP's activations: near-zero share, norms, Gini; tokens beside ARM, with agreement",
    "accuracy": "answers by condition, length, place and text, under ARM, with parts and with several samples",
    "focus": "what attention focuses on and what heads change, without and with tokens; sinks",
    "sinks": "claims of sinks and induction heads, judged for a model that is trained to copy, and for the others",
    "stories": "stories260K, which others trained, beside the toys, and random weights; see its README",
    "gsm8k": "real questions; see its README",
    "simulations": "how often each statistical rule says yes where nothing is there; `make simulate`",
    "groups": "what prompts of one template do to intervals",
    "toys": "trains and measures the toys, and a twin of toy:llama without filler",
    "benchmarks": "time and memory; see its README",
}
HEAD = """# Experiments

Each folder is one config or script; `mechattn run experiments/NAME/config.toml` writes results and a page that opens
offline under `out/NAME`. The toys by default; for real models change the line `model = …`. `LOG.md` is the dated log.

| folder | what it is |
|---|---|
"""
CLAIMS = """
## What they say of the paper

From `mechattn paper` ({prompts} prompts, {problems} problems, seed {seed}, {date}). A toy of a million parameters
that was trained with filler is not a 7 B model: each verdict is of its own model, and exploratory. What the words mean,
and every rule: `docs/concepts/the-paper.md`.

"""


def readme() -> str:
    """The whole text."""
    stored = json.loads((HERE / "verdicts.json").read_text(encoding="utf-8"))
    settings = stored["settings"]
    about = {
        "prompts": settings["limit"],
        "problems": settings["problems"],
        "seed": settings["seed"],
    }
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in FOLDERS.items())
    return HEAD + rows + CLAIMS.format(**about, date=stored["made"][:10]) + markdown(stored) + "\n"


def sentences(stored: dict) -> list[str]:
    """What the README of the project says of them."""
    stated = [claim for claim in stored["claims"] if claim["table"] == "stated"]
    names = [model["name"] for model in stored["models"]]
    found = Counter(claim["verdicts"][name]["verdict"] for claim in stated for name in names)
    by_key = {claim["key"]: claim["verdicts"] for claim in stored["claims"]}
    little, falls, fewer = (
        by_key[key] for key in ("filler_gets_little", "attention_falls", "near_zero_falls")
    )
    assert all(one["verdict"] == "supported" for one in little.values())
    assert not any(one["verdict"] in ("supported", "contradicted") for one in falls.values())
    assert not any(one["verdict"] == "supported" for one in fewer.values())
    denied = ("none", "one", "two")[sum(one["verdict"] == "contradicted" for one in fewer.values())]
    solved = sorted(
        100 * one["parts"][0]["levels"][0] for one in by_key["tokens_help"].values() if one["parts"]
    )
    return [
        f"We tested the {len(stated)} claims stated in the paper and in the blog post",
        f"Of the {len(stated) * len(names)} pairs of a claim and a model, {found['supported']} are “supported” and "
        f"{found['contradicted']} “contradicted”.",
        f"In {found['no more than untrained']} the effect is no larger than with untrained weights.",
        f"For {found['not testable here']} we give no verdict, because only one outcome was possible",
        f"the toys solve {solved[0]:.0f} to {solved[-1]:.0f} % of the problems without “/”",
        f"The other {found['cannot be told']} are undecided",
        "**Inserted tokens get little attention**: supported in all five models.",
        "**The question loses attention**: it does, but in no model more than with untrained weights.",
        f"**With “/”, fewer activations are near zero**: supported in no model and contradicted in {denied}.",
    ]


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(readme(), encoding="utf-8")
    else:
        print(readme())
