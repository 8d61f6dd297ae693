"""The commands for stored results: ``report``, ``show``, ``export`` and ``export-netcdf``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import xarray as xr

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE
from mechattn.contrast.quantities import head_quantities, segment_of, variable_of
from mechattn.contrast.table import CHANGE_COLUMNS, DIFFERENCE_COLUMNS
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.first_screen import ShownModel, verdict_sentences
from mechattn.pages.page import labelled_rows, sections_of, write_results
from mechattn.pages.sections import Drawing, HeadChoice
from mechattn.render.figure_declaration import FIGURES, check_heads
from mechattn.render.html_views import check_page_place
from mechattn.results.arrays import names_of_means, with_texts_as
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import check_writable, write_whole
from mechattn.store.reading import load_result

# The columns of an exported table.
COLUMNS = [
    "result",
    "model",
    "quantity",
    "segment",
    "units",
    "condition",
    "layer",
    "head",
    "value",
    "value_low",
    "value_high",
    "uniform",
    "baseline",
    "scale",
    "change_units",
    *CHANGE_COLUMNS,
    *DIFFERENCE_COLUMNS,
    "p_beyond",
    "q_beyond",
    "p_difference",
    "q_difference",
    "level",
    "n",
    "n_of",
]
# The figures that lead every page, so that they are not drawn again below.
LEADING = ("attention_budget", "received_attention", "received_by_model")


def report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    top: int = 3,
    command: str = "",
    memory: str = MEMORY,
    force: bool = False,
) -> list[str]:
    """Write a page of stored results with all their figures.

    Args:
        paths: The stored results.
        out: The page.
        layer: The layer of the figures; by default that of the head that changes most for the lines
            that lead the page, and the first that was measured for all others.
        heads: The heads of the lines; by default the data choose them.
        top: The number of heads to choose.
        command: The command line, which the page repeats.
        memory: How much memory each figure may take, as for ``load_result``.
        force: Whether a page that mechattn did not write is replaced.

    Returns:
        The figures that could not be shown, each with the reason.

    Raises:
        OptionError: A layer was not measured, or there is no such head.
        OutputError: A result cannot be read, or the page cannot be written.
    """
    check_page_place(out, force)
    results = [load_result(path, memory=memory) for path in paths]
    for result in results:
        measured_layers = result.provenance["measured_layers"]
        if layer is not None and layer not in measured_layers:
            raise OptionError(f"layer {layer} was not measured; the result has {measured_layers}")
        if heads is not None:
            head_count = int(result.provenance["model"]["heads"])
            check_heads(heads, range(head_count))

    choice = HeadChoice(layer, heads, top)
    sections, missing = sections_of(results, _figures_of_any(results, layer), choice)
    write_results(results, out, sections, command, force, choice)
    return missing


def figures_of(result: Result, layer: int | None = None) -> list[Drawing]:
    """The figures of a result, in the order of its analyses, without those that lead every page.

    Figures of a single layer show ``layer``, by default the first that was measured.
    """
    if layer is None:
        layer = int(result.provenance["measured_layers"][0])
    analysis_ranks: dict[str | None, int] = {
        analysis_class().name: rank for rank, analysis_class in enumerate(ANALYSES)
    }

    # By analysis; within an analysis, figures of one condition before those of a comparison.
    drawings_by_rank: dict[tuple[int, bool], list[Drawing]] = {}
    for kind, figure in FIGURES.items():
        if kind in LEADING:
            continue
        for options in figure.in_report(result, layer):
            dataset = figure.dataset_name(result, options)
            # An analysis that the user wrote comes last.
            rank = (analysis_ranks.get(dataset, len(ANALYSES)), figure.compares)
            drawings_by_rank.setdefault(rank, []).append((figure.draw, options))

    return [drawing for rank in sorted(drawings_by_rank) for drawing in drawings_by_rank[rank]]


def summary(result: Result) -> str:
    """A summary of a stored result as text: verdicts, quantities with their sizes, provenance."""
    lines = [repr(result), "", *verdict_sentences([ShownModel(result)]), ""]
    for name, dataset in result.datasets.items():
        sizes = [f"{dim} {size}" for dim, size in dataset.sizes.items()]
        lines.append(f"{name}: {', '.join(sizes)}")

        counts_and_variances = set()
        for mean in names_of_means(dataset):
            counts_and_variances |= {f"{mean}_n", f"{mean}_variance"}
        for quantity in sorted(set(map(str, dataset)) - counts_and_variances):
            lines.append(f"  {quantity}{_details(dataset[quantity])}")

    lines += ["", f"digest of the numbers: {result.digest()}"]
    lines += [f"{name}: {value}" for name, value in labelled_rows(result.provenance)]
    return "\n".join(lines)


def export_csv(paths: Sequence[str | Path], out: Path, memory: str = MEMORY) -> list[str]:
    """Write a CSV file with a row per result, quantity, condition, layer and head.

    Args:
        paths: The stored results.
        out: The file.
        memory: How much memory each table may take, as for ``load_result``.

    Returns:
        The quantities without rows, each with the reason.

    Raises:
        OptionError: The file has another extension, or exists and is not such a table; or no result
            has a number for each head.
    """
    if out.suffix != ".csv":
        raise OptionError(f'"{out.name}" should end with .csv')
    check_writable(out)
    if out.exists() and not _is_export(out):
        raise OptionError(
            f"{out} exists and is not a mechattn export, so it is not replaced; choose another name"
        )

    tables = []
    missing = []
    for path in paths:
        result = load_result(path, memory=memory)
        table, refusals = heads_table(result)
        if not table.empty:
            model_name = result.provenance["model"]["name"]
            tables.append(table.assign(result=str(path), model=model_name))
        for refusal in refusals:
            if len(paths) > 1:
                refusal = f"{path}: {refusal}"
            missing.append(refusal)

    if not tables:
        raise OptionError(f"there is nothing to export: {missing[0]}")
    write_whole(out, lambda new_path: pd.concat(tables).to_csv(new_path, index=False))
    return missing


def export_netcdf(path: str | Path, out: Path) -> None:
    """Write all arrays and the provenance of a result to one NetCDF file, with a group for each
    analysis.

    Args:
        path: The stored result.
        out: The file.

    Raises:
        OptionError: The file has another extension or exists, or h5netcdf is not installed.
    """
    if out.suffix != ".nc":
        raise OptionError(f'"{out.name}" should end with .nc')
    check_writable(out)
    if out.exists():
        raise OptionError(f"{out} exists; choose another name, or delete it")

    if find_spec("h5netcdf") is None:
        raise OptionError('a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]"')

    result = load_result(path)
    datasets = {
        f"/{name}": with_texts_as(object, dataset)  # HDF5 accepts texts of no other dtype
        for name, dataset in result.datasets.items()
    }
    tree = xr.DataTree.from_dict(datasets)
    tree.attrs = {"provenance": json.dumps(result.provenance)}
    write_whole(out, lambda new_path: tree.to_netcdf(new_path, engine="h5netcdf"))


def heads_table(result: Result) -> tuple[pd.DataFrame, list[str]]:
    """Make a table of every quantity with one number per head, in every condition.

    Returns:
        The table, and the quantities without rows, each with the reason.

    Raises:
        MemoryOptionError: The memory of the result is too small.
    """
    tables: list[pd.DataFrame] = []
    missing: list[str] = []
    for quantity in head_quantities(result):
        variable = variable_of(result, quantity)
        segment = segment_of(variable, "question")
        units = variable.attrs.get("units", "")
        for condition in result.conditions:
            try:
                rows = _rows(result, quantity, condition)
            except MemoryOptionError:
                raise
            except OptionError as error:
                missing.append(f"{quantity}, {condition}: {error}")
            else:
                tables.append(rows.assign(segment=segment, units=units))

    if not tables:
        missing = missing or ["the run measured no numbers per head"]
        return pd.DataFrame(columns=COLUMNS), missing
    table = pd.concat(tables, ignore_index=True)
    return table.reindex(columns=COLUMNS), missing


def _figures_of_any(results: Sequence[Result], layer: int | None) -> list[Drawing]:
    """The figures of the first result, and then those that only a later result has."""
    drawings: list[Drawing] = []
    distinct_figures = []
    for result in results:
        for draw, options in figures_of(result, layer):
            # A figure is drawn once, with the condition and layer of the first result that has it.
            figure = (draw, {**options, "condition": None, "layer": None})
            if figure not in distinct_figures:
                distinct_figures.append(figure)
                drawings.append((draw, options))
    return drawings


def _details(values: xr.DataArray) -> str:
    """The units, dimensions and description of a quantity."""
    details = ""
    if "units" in values.attrs:
        details += f" ({values.attrs['units']})"
    dims = ", ".join(str(dim) for dim in values.dims)
    details += f" [{dims}]"
    if "description" in values.attrs:
        details += f": {values.attrs['description']}"
    return details


def _is_export(path: Path) -> bool:
    """Whether a file begins with the header of an exported table."""
    if not path.is_file():  # opening a pipe or a device may have effects
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip() == ",".join(COLUMNS)


def _rows(result: Result, quantity: str, condition: str) -> pd.DataFrame:
    """The rows of a quantity in one condition: the value of each head and, unless the condition is
    the baseline, its change from the baseline."""
    values = result.heads(quantity, None, condition=condition)
    exported_names = {quantity: "value", "low": "value_low", "high": "value_high"}
    table = values.sort_values(["layer", "head"]).rename(columns=exported_names)
    table = table.assign(
        quantity=quantity,
        condition=condition,
        n_of=values.attrs["unit"],
        level=values.attrs["level"],
    )
    if condition == BASELINE:
        return table

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cells of a head that cannot be compared stay empty
        changes = result.compare(condition, quantity=quantity, columns="all")

    changes = changes.rename(columns={"reference": "baseline"})
    new_columns = [name for name in COLUMNS if name in changes and name not in table]
    changes = changes[["layer", "head", *new_columns]]
    return table.merge(changes, on=["layer", "head"], how="left")
