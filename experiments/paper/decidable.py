"""Whether each claim can come out either way: two synthetic models, mere numbers, for each claim and model.

One satisfies the claim and one breaks it; both lie within what the model can show, beside its random weights, and are
as many as were measured. ``python experiments/paper/decidable.py --write`` writes decidable.md from verdicts.json.
"""

import json
import sys
from math import inf
from pathlib import Path

from mechattn.claims.measures import with_unit
from mechattn.claims.register import PAPER, read_register
from mechattn.claims.rules import Chance, Estimate, Outcome, Rule, bounds, decide, together

HERE = Path(__file__).parent
TABLE = HERE / "decidable.md"
COMPARED = {claim.key: claim.compared for claim in read_register(PAPER).claims}
HEAD = """# Which claims can be decided

For each claim and model of `verdicts.json`: what the model can show (of each part), and the verdicts of two synthetic
models, numbers without weights: one that satisfies the claim / one that breaks it. They are as many as were measured,
within that range and beside the model's random weights. Written by `python experiments/paper/decidable.py --write`.

"""


def synthetic(key: str, part: dict) -> tuple[Outcome, Outcome]:
    """What the rule says to two made-up numbers: halfway to each end of the range from what the verdict takes."""
    rule, n = Rule(**part["rule"]), part["n"]
    draws = tuple(part["random"]["draws"]) if part["random"] is not None and COMPARED[key] else None
    low, high = (
        end if end is not None else other
        for end, other in zip(part["attainable"], (-inf, inf), strict=True)
    )
    outcomes = []
    chance = None if draws is None else Chance(Estimate(0.0, 0.0, 0.0, n, 0.0), draws)
    for bound, sign in zip(bounds(rule, chance), (rule.sign, -rule.sign), strict=True):
        end = high if sign > 0 else low
        value = (bound + end) / 2 if abs(end) < inf else bound + sign
        half = abs(value - bound) / 8
        exact = None if part["exact"] is None else 1e-6
        found = Estimate(value, value - half, value + half, n, half, exact, None, part["floor"])
        if draws is not None:
            apart = value - sum(draws) / len(draws)
            chance = Chance(Estimate(apart, apart - half, apart + half, n, half), draws)
        outcomes.append(
            decide(rule, found, chance, (low, high), lambda end: with_unit(end, part["kind"]))
        )
    return outcomes[0], outcomes[1]


def both(key: str, verdict: dict) -> tuple[Outcome, list[Outcome]]:
    """A claim of all its parts: satisfied, and broken in each of them in turn."""
    parts = [synthetic(key, part) for part in verdict["parts"]]
    yes = [supports for supports, _ in parts]
    return together(yes), [
        together([*yes[:i], no, *yes[i + 1 :]]) for i, (_, no) in enumerate(parts)
    ]


def cell(claim: dict, verdict: dict) -> str:
    """Range, and the two verdicts; or why there are none."""
    if claim["table"] == "identity" or not verdict["parts"]:
        return verdict["why"] if not verdict["parts"] else "arithmetic"
    ranges = []
    for part in verdict["parts"]:
        low, high = part["attainable"]
        ends = ["any" if end is None else with_unit(end, part["kind"]) for end in (low, high)]
        ranges.append("any value" if low is high else f"{ends[0]} to {ends[1]}")
    yes, broken = both(claim["key"], verdict)
    no = next((one for one in broken if one.word != "contradicted"), broken[0])
    undecided = [one for one in (yes, no) if one.word == "not testable here"]
    words = f"not testable here ({undecided[0].why})" if undecided else f"{yes.word} / {no.word}"
    return f"{'; '.join(ranges)}: {words}"


def table(stored: dict) -> str:
    """All claims by all models."""
    names = [model["name"] for model in stored["models"]]
    lines = ["| claim | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for claim in stored["claims"]:
        cells = [cell(claim, claim["verdicts"][name]) for name in names]
        lines.append("| " + " | ".join([f"`{claim['key']}`", *cells]) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = table(json.loads((HERE / "verdicts.json").read_text(encoding="utf-8")))
    if "--write" in sys.argv:
        TABLE.write_text(text, encoding="utf-8")
    else:
        print(text)
