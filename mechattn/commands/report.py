"""The commands ``mechattn report``, ``show`` and ``export``: stored results as a page, a text, and tables."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechattn.analysis import ANALYSES
from mechattn.axes import BASELINE
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import kept
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.first_screen import ShownModel, flat, verdict_sentences
from mechattn.pages.page import heads_options, results_page
from mechattn.pages.page_data import head_quantities
from mechattn.render.declared import FIGURES, check_heads
from mechattn.render.views import check_page_place
from mechattn.results.arrays import TEXT
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import check_writable, write_whole
from mechattn.store.reading import load_result

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

COLUMNS = (
    "quantity", "condition", "layer", "head", "value", "value_low", "value_high", "uniform", "baseline", "scale",
    "difference", "low", "high", "null", "beyond", "beyond_low", "beyond_high", "p", "q", "n", "unit",
)  # fmt: skip
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
    lines = [repr(result), "", *verdict_sentences(ShownModel(result)), ""]
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


def export_csv(place: str | Path, out: Path, memory: str = MEMORY) -> tuple[Path, list[str]]:
    """Write a CSV row per quantity, condition, layer and head; return the file, and what has no row and why."""
    _check_place(out)
    result = load_result(place, memory=memory)
    table, missing = heads_table(result)
    write_whole(out, lambda new: table.to_csv(new, index=False))
    return out, missing


def export_netcdf(place: str | Path, out: Path) -> Path:
    """Write all arrays of a stored result, with its provenance, to one NetCDF file, a group for each analysis."""
    if out.suffix != ".nc":
        raise OptionError(f'"{out.name}" should end with .nc')
    check_writable(out)
    if out.exists():
        raise OptionError(f"{out} exists; choose another name, or delete it")
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise OptionError('a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]"') from None
    import xarray as xr

    result = load_result(place)
    tree = xr.DataTree.from_dict({f"/{name}": _with_texts(one) for name, one in result.datasets.items()})
    tree.attrs = {"provenance": json.dumps(result.provenance)}
    write_whole(out, lambda new: tree.to_netcdf(new, engine="h5netcdf"))
    return out


def _with_texts(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with texts of the kind that HDF5 takes."""
    texts = {
        n: (v.dims, v.values.astype(object), v.attrs) for n, v in dataset.variables.items() if v.dtype.kind in TEXT
    }
    return dataset.assign_coords({n: v for n, v in texts.items() if n in dataset.coords}).assign(
        {n: v for n, v in texts.items() if n not in dataset.coords}
    )


def heads_table(result: Result) -> tuple[pd.DataFrame, list[str]]:
    """Every quantity with one number per head, in every condition; and the quantities without rows, with the reason."""
    import pandas as pd

    tables: list[pd.DataFrame] = []
    missing: list[str] = []
    for quantity in head_quantities(result):
        reference = kept(result, quantity, BASELINE, "question")
        for condition in result.conditions:
            of = reference if condition == BASELINE else kept(result, quantity, condition, "question")
            try:
                tables.append(_rows(of, reference, quantity, condition))
            except MemoryOptionError:
                raise
            except OptionError as error:
                missing.append(f"{quantity}, {condition}: {error}")
    if not tables:
        why = missing[0] if missing else "the run measured no numbers per head"
        raise OptionError(f"there is nothing to export: {why}")
    return pd.concat(tables, ignore_index=True).reindex(columns=list(COLUMNS)), missing


def _rows(of: Result, reference: Result, quantity: str, condition: str) -> pd.DataFrame:
    """The rows of one quantity in one condition."""
    values = of.heads(quantity, None, condition=condition).sort_values(["layer", "head"])
    values = values.rename(columns={quantity: "value", "low": "value_low", "high": "value_high"})
    values = values.assign(quantity=quantity, condition=condition, unit=values.attrs["unit"])
    if condition == BASELINE:
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head without a comparison has empty cells
        changes = Contrast(of, condition, quantity=quantity, other=reference).table()
    kept = [name for name in COLUMNS if name in changes and name not in ("n", "value")]
    changes = changes.rename(columns={"reference": "baseline"})[["baseline", *kept]]
    return values.merge(changes, on=["layer", "head"], how="left")


def _check_place(out: Path) -> None:
    """Check in advance that the file can be written and that an existing file was written by mechattn."""
    if out.suffix != ".csv":
        raise OptionError(f'"{out.name}" should end with .csv')
    check_writable(out)
    if out.exists() and not _is_ours(out):
        raise OptionError(f"{out} exists and is not a mechattn export, so it is not replaced; choose another name")


def _is_ours(out: Path) -> bool:
    if not out.is_file():
        return False
    with open(out, encoding="utf-8", errors="replace") as there:
        return there.readline().strip() == ",".join(COLUMNS)
