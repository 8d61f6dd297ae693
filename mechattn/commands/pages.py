"""The commands ``figures``, ``report``, ``show`` and ``export``: models and results as pages, text and tables."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import head_quantities, kept, segment_of, variable_of
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.first_screen import ShownModel, flat, verdict_sentences
from mechattn.pages.lead_figures import Shown
from mechattn.pages.page import (
    heads_options,
    results_page,
)
from mechattn.render.figure_declaration import FIGURES, check_heads
from mechattn.render.html_views import check_page_place
from mechattn.results.arrays import TEXT
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import check_writable, write_whole
from mechattn.store.reading import load_result

COLUMNS = (
    "result", "model", "quantity", "segment", "units", "condition", "layer", "head", "value", "value_low",
    "value_high", "uniform", "baseline", "scale", "change_units", "change", "change_low", "change_high", "change_null",
    "difference", "difference_low", "difference_high", "null",
    "beyond", "beyond_low", "beyond_high", "p_beyond", "q_beyond", "p_difference", "q_difference", "level", "n", "n_of",
)  # fmt: skip
LEADING = ("attention_budget", "received_attention", "received_by_model")  # of lead_figures
Figures = list[tuple[Callable, Mapping[str, Any]]]


def report(
    places: Seq[str | Path], out: str | Path, layer: int | None = None, heads: Seq[int] | None = None,
    command: str = "", force: bool = False, top: int = 3, memory: str = MEMORY,
) -> list[str]:  # fmt: skip
    """Write a page of stored results with all their figures; return what could not be shown and why."""
    check_page_place(out, force)
    results = [load_result(place, memory=memory) for place in places]
    for result in results:
        measured, count = (
            result.provenance["measured_layers"],
            int(result.provenance["model"]["heads"]),
        )
        if layer is not None and layer not in measured:
            raise OptionError(f"layer {layer} was not measured; the result has {measured}")
        check_heads([0] if heads is None else heads, count)
    missing: list[str] = []
    figures = figures_of(results[0], layer, heads, top)
    results_page(results, out, figures, command, missing, force, Shown(layer, heads, top))
    return missing


def figures_of(
    result: Result, layer: int | None, heads: Seq[int] | None = None, top: int = 3
) -> Figures:
    """The figures for the analyses of a result that do not lead the page, in the order of the analyses."""
    layer = int(result.provenance["measured_layers"][0]) if layer is None else layer
    given = {"layer": layer} | heads_options(result, heads, top)
    found = [
        (at, one, options)
        for one in FIGURES.values()
        if one.draw.__name__ not in LEADING
        for at, options in one.shown(result, given)
    ]
    order = [make().name for make in ANALYSES]
    found.sort(
        key=lambda each: (
            order.index(each[0]) if each[0] in order else len(order),
            each[1].compares,
        )
    )
    return [(one.draw, options) for _, one, options in found]


def summary(result: Result) -> str:
    """A text summary of a stored result: verdicts, quantities with their sizes, and provenance."""
    lines = [repr(result), "", *verdict_sentences(ShownModel(result)), ""]
    for name, dataset in result.datasets.items():
        lines.append(f"{name}: {', '.join(f'{dim} {size}' for dim, size in dataset.sizes.items())}")
        for quantity in sorted(map(str, dataset)):
            if not quantity.endswith(
                ("_variance", "_n")
            ):  # stored over prompts in addition to each mean
                about = dataset[quantity].attrs
                units = f" ({about['units']})" if "units" in about else ""
                what = f": {about['description']}" if "description" in about else ""
                lines.append(
                    f"  {quantity}{units} [{', '.join(map(str, dataset[quantity].dims))}]{what}"
                )
    provenance = [f"{name}: {value}" for name, value in flat(result.provenance)]
    return "\n".join([*lines, "", f"digest of the numbers: {result.digest()}", *provenance])


def export_csv(places: Seq[str | Path], out: Path, memory: str = MEMORY) -> tuple[Path, list[str]]:
    """Write a CSV row per result, quantity, condition, layer and head; return the file, and what has no row and why."""
    if out.suffix != ".csv":
        raise OptionError(f'"{out.name}" should end with .csv')
    check_writable(out)
    if out.exists():
        with (
            open(out, encoding="utf-8", errors="replace") if out.is_file() else StringIO() as there
        ):
            ours = there.readline().strip() == ",".join(COLUMNS)
        if not ours:
            raise OptionError(
                f"{out} exists and is not a mechattn export, so it is not replaced; choose another name"
            )
    tables, missing = [], []
    for place in places:
        result = load_result(place, memory=memory)
        table, lacking = heads_table(result)
        tables.append(table.assign(result=str(place), model=result.provenance["model"]["name"]))
        missing += [f"{place}: {words}" if len(places) > 1 else words for words in lacking]
    write_whole(out, lambda new: pd.concat(tables).to_csv(new, index=False))
    return out, missing


def export_netcdf(places: Seq[str | Path], out: Path) -> Path:
    """Write all arrays of a stored result, with its provenance, to one NetCDF file, a group for each analysis."""
    if len(places) > 1:
        raise OptionError(
            f"a NetCDF file holds one result, and {len(places)} are given; export each to its own file"
        )
    if out.suffix != ".nc":
        raise OptionError(f'"{out.name}" should end with .nc')
    check_writable(out)
    if out.exists():
        raise OptionError(f"{out} exists; choose another name, or delete it")
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise OptionError('a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]"') from None
    result = load_result(places[0])
    datasets = {}
    for name, one in result.datasets.items():  # with texts of the kind that HDF5 takes
        texts = {n: v for n, v in one.variables.items() if v.dtype.kind in TEXT}
        made = {n: (v.dims, v.values.astype(object), v.attrs) for n, v in texts.items()}
        labels = {n: v for n, v in made.items() if n in one.coords}
        datasets[f"/{name}"] = one.assign_coords(labels).assign(
            {n: made[n] for n in made if n not in labels}
        )
    tree = xr.DataTree.from_dict(datasets)
    tree.attrs = {"provenance": json.dumps(result.provenance)}
    write_whole(out, lambda new: tree.to_netcdf(new, engine="h5netcdf"))
    return out


def heads_table(result: Result) -> tuple[pd.DataFrame, list[str]]:
    """Every quantity with one number per head, in every condition; and the quantities without rows, with the reason."""
    tables: list[pd.DataFrame] = []
    missing: list[str] = []
    for quantity in head_quantities(result):
        reference, variable = (
            kept(result, quantity, BASELINE, "question"),
            variable_of(result, quantity),
        )
        about = {
            "segment": segment_of(variable, "question"),
            "units": variable.attrs.get("units", ""),
        }
        for condition in result.conditions:
            of = (
                reference
                if condition == BASELINE
                else kept(result, quantity, condition, "question")
            )
            try:
                tables.append(_rows(of, reference, quantity, condition).assign(**about))
            except MemoryOptionError:
                raise
            except OptionError as error:
                missing.append(f"{quantity}, {condition}: {error}")
    if not tables:
        why = missing[0] if missing else "the run measured no numbers per head"
        raise OptionError(f"there is nothing to export: {why}")
    return pd.concat(tables, ignore_index=True).reindex(columns=list(COLUMNS)), missing


def _rows(of: Result, reference: Result, quantity: str, condition: str) -> pd.DataFrame:
    values = of.heads(quantity, None, condition=condition).sort_values(["layer", "head"])
    about = {"n_of": values.attrs["unit"], "level": values.attrs["level"]}
    values = values.rename(columns={quantity: "value", "low": "value_low", "high": "value_high"})
    values = values.assign(quantity=quantity, condition=condition, **about)
    if condition == BASELINE:
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head without a comparison has empty cells
        changes = Contrast(of, condition, quantity=quantity, other=reference).table()
    given = (*values.columns.drop(["layer", "head"]), "segment")
    columns = [name for name in COLUMNS if name in changes and name not in given]
    changes = changes.rename(columns={"reference": "baseline"})[["baseline", *columns]]
    return values.merge(changes, on=["layer", "head"], how="left")
