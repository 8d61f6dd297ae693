"""Turns the results of ``measure.py`` into numbers that the docs quote, and into a page of tables.

    python experiments/real/tables.py out/real-runs experiments/real/2026-11-25

Writes the numbers as JSON and the tables as Markdown. Means are over prompts, with 95 % t
intervals; shares of attention and their changes are in points of 100.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats

import mechattn as ma

PAYERS = ["first", "template", "system", "inserted", "question"]
CAUSES = ["distance", "mass", "hidden states"]
MARGIN = 0.05  # a head changes if its attention changes by more than 5 %, with q < 0.05
Triple = list[float]  # mean, and the ends of its 95 % interval


def interval(values: np.ndarray) -> Triple:
    """Mean and 95 % t interval over prompts."""
    mean = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return [mean, mean - half, mean + half]


def points(array: xr.DataArray) -> Triple:
    """A share of attention, averaged over everything but prompts, in points of 100."""
    others = [dim for dim in array.dims if dim != "prompt"]
    return interval(100 * array.mean(others).values)


def budget_of(budget: xr.Dataset, condition: str) -> dict[str, Any]:
    """The change of each payer, and the question's change by cause."""
    chosen = budget.sel(condition=condition)
    change = {payer: points(chosen.change.sel(segment=payer)) for payer in PAYERS}
    by_cause = chosen.by_cause.sel(segment="question")
    causes = {cause: points(by_cause.sel(cause=cause)) for cause in CAUSES}
    return {"change": change, "question by cause": causes}


def by_layer(budget: xr.Dataset, condition: str) -> dict[str, list[Triple]]:
    """For each layer: what the inserted tokens take, and the question's change in all and by cause."""
    chosen = budget.sel(condition=condition)
    question = chosen.sel(segment="question")
    layers = budget.layer.values
    rows = {
        "inserted": [points(chosen.attention.sel(segment="inserted", layer=n)) for n in layers],
        "question": [points(question.change.sel(layer=n)) for n in layers],
    }
    for cause in CAUSES:
        rows[cause] = [points(question.by_cause.sel(cause=cause, layer=n)) for n in layers]
    return rows


def relative(change: xr.DataArray, baseline: xr.DataArray) -> Triple:
    """Change as a percentage of the baseline: the ratio of the means over layers and heads."""
    others = [dim for dim in change.dims if dim != "prompt"]
    return interval(100 * (change.mean(others) / baseline.mean(others)).values)


def question_percent(budget: xr.Dataset, condition: str) -> dict[str, Any]:
    """The question's relative change: over all layers, in layer 0, and in each head of layer 0."""
    question = budget.sel(segment="question")
    change = question.change.sel(condition=condition)
    baseline = question.attention.sel(condition="baseline")
    first_layer = int(budget.layer.values[0])
    heads = [
        relative(change.sel(layer=first_layer, head=h), baseline.sel(layer=first_layer, head=h))
        for h in budget["head"].values
    ]
    return {
        "all layers": relative(change, baseline),
        "layer 0": relative(change.sel(layer=first_layer), baseline.sel(layer=first_layer)),
        "heads of layer 0": heads,
    }


def heads_that_change(result: ma.Result, condition: str) -> dict[str, int]:
    """How many heads give the question more, or less, by more than the margin and with q < 0.05."""
    table = result.compare(condition, quantity="received", segment="question")
    sure = table.q_difference < 0.05
    return {
        "heads": len(table),
        "rise": int((table.change > 0).sum()),
        "rise beyond the margin": int((sure & (table.change > MARGIN)).sum()),
        "fall beyond the margin": int((sure & (table.change < -MARGIN)).sum()),
    }


def per_token(result: ma.Result, condition: str) -> dict[str, Any]:
    """Attention to one inserted token, and in how many heads it exceeds that to a question's token."""
    received = result["received_attention"].received_by_segment.sel(condition=condition)
    inserted = received.sel(segment="inserted").mean("prompt")
    question = received.sel(segment="question").mean("prompt")
    by_layer_mean = inserted.mean("head")
    return {
        "least": float(by_layer_mean.min()),
        "most": float(by_layer_mean.max()),
        "heads above a question's token": int((inserted > question).sum()),
    }


def numbers_of(result: ma.Result) -> dict[str, Any]:
    """Everything that the docs quote of one run."""
    budget = result["attention_budget"]
    conditions = [name for name in result.conditions if name != "baseline"]
    first = budget.attention.sel(condition="baseline", segment="first")
    about = result.provenance["model"]
    return {
        "model": about["name"],
        "layers": about["layers"],
        "heads of a layer": about["heads"],
        "prompts": budget.sizes["prompt"],
        "first token's share": points(first),
        "budget": {name: budget_of(budget, name) for name in conditions},
        "layer 0": {name: budget_of(budget.sel(layer=[0]), name) for name in conditions},
        "by layer": {"slash": by_layer(budget, "slash")},
        "question in percent": {name: question_percent(budget, name) for name in conditions},
        "heads": {name: heads_that_change(result, name) for name in conditions},
        "per inserted token": {name: per_token(result, name) for name in conditions},
        "sentence": ma.render.verdict_words(result, "slash"),
    }


def rounded(numbers: Any) -> Any:
    """The same numbers to four digits after the point; None where there is none."""
    if isinstance(numbers, dict):
        return {name: rounded(value) for name, value in numbers.items()}
    if isinstance(numbers, list):
        return [rounded(value) for value in numbers]
    if isinstance(numbers, float):
        return None if np.isnan(numbers) else round(numbers, 4)
    return numbers


def written(triple: Triple, digits: int = 1) -> str:
    """A mean with half the width of its interval: −0.1 ± 0.5; a dash for a text that is not there."""
    mean, low, high = triple
    if np.isnan(mean):
        return "—"
    return f"{mean:+.{digits}f} ± {(high - low) / 2:.{digits}f}".replace("-", "−")


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def budget_table(runs: dict[str, dict[str, Any]], part: str) -> list[str]:
    """Payers and causes for each run and condition, as lines of a Markdown table."""
    header = ["run", "condition", *PAYERS, *(f"question: {cause}" for cause in CAUSES)]
    lines = [row(header), row(["---"] * len(header))]
    for name, numbers in runs.items():
        for condition, budget in numbers[part].items():
            payers = [written(budget["change"][payer]) for payer in PAYERS]
            causes = [written(budget["question by cause"][cause]) for cause in CAUSES]
            lines.append(row([name, condition, *payers, *causes]))
    return lines


def percent_table(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The question's relative change, its range over the heads of layer 0, and heads that change."""
    header = ["run", "condition", "all layers (%)", "layer 0 (%)", "its heads", "heads that rise",
              "fall > 5 %", "rise > 5 %"]  # fmt: skip
    lines = [row(header), row(["---"] * len(header))]
    for name, numbers in runs.items():
        for condition, percent in numbers["question in percent"].items():
            heads = [triple[0] for triple in percent["heads of layer 0"]]
            counts = numbers["heads"][condition]
            lines.append(
                row(
                    [
                        name,
                        condition,
                        written(percent["all layers"]),
                        written(percent["layer 0"]),
                        f"{min(heads):+.0f} to {max(heads):+.0f}".replace("-", "−"),
                        f"{counts['rise']} of {counts['heads']}",
                        str(counts["fall beyond the margin"]),
                        str(counts["rise beyond the margin"]),
                    ]
                )
            )
    return lines


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    runs = {}
    for path in sorted(folder.glob("*.zarr")):
        runs[path.stem] = numbers_of(ma.load_result(path))

    text = json.dumps(rounded(runs), indent=1, ensure_ascii=False)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    lines = [
        f"# Real models, {target.name}",
        "",
        "Attention of the question's queries; means over all heads, ± half of a 95 % interval over",
        "prompts (t). Made by `make real`; the numbers are in the JSON file beside this page.",
        "",
        "## Who pays, and why: change in points of 100, all layers",
        "",
        *budget_table(runs, "budget"),
        "",
        "## The same in layer 0",
        "",
        *budget_table(runs, "layer 0"),
        "",
        "## The question's attention, relative to its baseline",
        "",
        *percent_table(runs),
        "",
    ]
    target.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
