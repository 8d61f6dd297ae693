"""The first picture of the README: the attention that the question loses in each toy, and would lose anyway.

python experiments/first_picture.py docs/images/first.png
"""

import json
import sys
from pathlib import Path

import mechattn as ma
from mechattn.model.checkpoint import toy_names

SLASH = ma.MeaninglessTokens("/", count=55)


def measured(limit: int = 64) -> list[ma.Result]:
    """A result for each toy, the largest fall first."""
    prompts = ma.load_prompts("word-problems", limit=limit)
    found = [ma.run(name, prompts, {"slash": SLASH}) for name in toy_names()]
    return sorted(found, key=lambda result: float(result.verdict().change.estimate))


def numbers(results: list[ma.Result]) -> dict[str, dict[str, float]]:
    """By toy, in percent: the change with its 95 % interval, and that of uniform attention."""
    made = {}
    for result in results:
        verdict = result.verdict()
        ends = zip(
            ("estimate", "low", "high", "uniform"),
            (*verdict.change, verdict.null.estimate),
            strict=True,
        )
        made[result.provenance["model"]["name"]] = {
            name: round(100 * float(end), 1) for name, end in ends
        }
    return made


if __name__ == "__main__":
    target, results = Path(sys.argv[1]), measured()
    target.with_suffix(".json").write_text(
        json.dumps(numbers(results), indent=1) + "\n", encoding="utf-8"
    )
    figure = ma.render.verdicts(results).update_layout(width=900, height=420)
    figure.layout.title.text = figure.layout.title.text.replace(
        "with “slash”", "with 55 “/” before it"
    )
    figure.write_image(target, scale=2)
