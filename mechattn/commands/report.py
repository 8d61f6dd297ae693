"""The command ``mechattn report``: a page of stored results with the figures that their analyses have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mechattn.analysis.registry import ANALYSES
from mechattn.errors import OptionError
from mechattn.pages.page import heads_options, results_page
from mechattn.pages.verdict_words import flat, verdicts
from mechattn.render.declared import FIGURES
from mechattn.render.html import check_page_place
from mechattn.render.received_figures import check_heads
from mechattn.results.memory import MEMORY
from mechattn.results.result import Result
from mechattn.store.reading import load_result

Figures = list[tuple[Callable, Mapping[str, Any]]]


def report(
    places: Seq[str | Path],
    out: str | Path,
    layer: int | None = None,
    heads: Seq[int] | None = None,
    command: str = "",
    force: bool = False,
    choose: int = 3,
    memory: str = MEMORY,
) -> list[str]:
    """Write a page of stored results with all their figures; return what could not be shown and why."""
    check_page_place(out, force)
    results = [load_result(place, memory=memory) for place in places]
    for result in results:
        measured, count = result.provenance["measured_layers"], int(result.provenance["model"]["heads"])
        if layer is not None and layer not in measured:
            raise OptionError(f"layer {layer} was not measured; the result has {measured}")
        check_heads([0] if heads is None else heads, count)
    missing: list[str] = []
    results_page(results, out, figures_of(results[0], layer, heads, choose), command, missing, force)
    return missing


def figures_of(result: Result, layer: int | None, heads: Seq[int] | None = None, choose: int = 3) -> Figures:
    """The figures for the analyses of a result, in the order of the analyses, with their options."""
    layer = int(result.provenance["measured_layers"][0]) if layer is None else layer
    given = {"layer": layer} | heads_options(result, heads, choose)
    found = [(at, one, options) for one in FIGURES.values() for at, options in one.shown(result, given)]
    order = [make().name for make in ANALYSES]
    found.sort(key=lambda each: (order.index(each[0]) if each[0] in order else len(order), each[1].compares))
    return [(one.draw, options) for _, one, options in found]


def summary(result: Result) -> str:
    """A text summary of a stored result: verdicts, quantities with their sizes, and provenance."""
    lines = [repr(result), "", *verdicts(result), ""]
    for name, dataset in result.datasets.items():
        lines.append(f"{name}: {', '.join(f'{dim} {size}' for dim, size in dataset.sizes.items())}")
        for quantity in sorted(map(str, dataset)):
            if not quantity.endswith(("_variance", "_n")):  # stored over prompts in addition to each mean
                about = dataset[quantity].attrs
                units = f" ({about['units']})" if "units" in about else ""
                what = f": {about['description']}" if "description" in about else ""
                lines.append(f"  {quantity}{units} [{', '.join(map(str, dataset[quantity].dims))}]{what}")
    lines += [
        "",
        f"digest of the numbers: {result.digest()}",
        *(f"{name}: {value}" for name, value in flat(result.provenance)),
    ]
    return "\n".join(lines)
