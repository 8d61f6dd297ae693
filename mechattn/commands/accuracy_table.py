"""An evaluation as a Markdown table: accuracy, and the difference from the baseline."""

from __future__ import annotations

from typing import Any

from mechattn.axes import BASELINE
from mechattn.evaluation.evaluation import Evaluation

HEADER = (
    "condition",
    "right",
    "95 %",
    "against the baseline, points",
    "p",
    "gained, lost",
    "detectable, points",
    "unread",
    "unfinished",
)


def accuracy_table(evaluation: Evaluation) -> str:
    """The table, with cautions before it and the methods after it."""
    accuracies = evaluation.accuracy()
    tests = f"score and t intervals, sign flips, over {accuracies.attrs['unit']}"
    lines = []
    for caution in evaluation.cautions:
        lines += [f"**{caution}**", ""]

    lines.append(_row(HEADER))
    lines.append("|---" * len(HEADER) + "|")
    for row in accuracies.to_dict("records"):
        cells = [
            row["condition"],
            f"{100 * row['accuracy']:.1f} %",
            f"{100 * row['low']:.1f} to {100 * row['high']:.1f}",
        ]
        if row["condition"] == BASELINE:
            cells += [""] * 4
        else:
            change = evaluation.compare(row["condition"])
            if "only_first" in change:
                tests = "Wilson's and Newcombe's intervals, McNemar's test (mid-p)"
            cells += _change_cells(change)

        cells += [row["unread"], row["unfinished"]]
        lines.append(_row(cells))

    first = accuracies.iloc[0]
    lines += [
        "",
        f"n = {first.n}; {tests}; detectable: found with 80 % power. The {first.condition} can fall by"
        f" {100 * first.accuracy:.1f} points.",
    ]
    return "\n".join(lines)


def _change_cells(change: Any) -> list[str]:
    """The difference from the baseline, its p, the problems that changed, what can be detected."""
    difference = f"{100 * change['difference']:+.1f}"
    interval = f"[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
    changed = ""
    if "only_first" in change:
        changed = f"{change['only_first']}, {change['only_second']}"

    return [
        f"{difference} {interval}",
        f"{change['p']:.2g}",
        changed,
        f"{100 * change['detectable']:.1f}",
    ]


def _row(cells: Any) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"
