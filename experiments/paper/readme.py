"""Writes experiments/README.md: a line for each folder, and what ``mechattn paper`` says of the models it was run on.

mechattn paper --models ../shared/models --out out/paper
cp out/paper/paper.json out/paper/paper.md experiments/paper/ && python experiments/paper/readme.py --write
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
FOLDERS = {  # what each is, in a line
    "paper": "claims of arXiv:2510.01032 and of a blog post, judged for the toys and stories260K: the table below",
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
    "stories": "stories260K, which others trained, beside the toys, and random weights; see its README",
    "gsm8k": "real questions; see its README",
    "groups": "what prompts of one template do to intervals",
    "toys": "trains and measures the toys",
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
that was trained with filler is not a 7 B model: each verdict is of its own model. What it means, and every rule:
`docs/concepts/the-paper.md`.

"""


def readme() -> str:
    """The whole text."""
    stored = json.loads((HERE / "paper.json").read_text(encoding="utf-8"))
    settings = stored["settings"]
    about = {"prompts": settings["limit"], "problems": settings["problems"], "seed": settings["seed"]}
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in FOLDERS.items())
    table = (HERE / "paper.md").read_text(encoding="utf-8")
    return HEAD + rows + CLAIMS.format(**about, date=stored["made"][:10]) + table


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(readme(), encoding="utf-8")
    else:
        print(readme())
