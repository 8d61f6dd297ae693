"""The layout of a stored result: a tree of datasets, a digest of their content, and the schema's number.

Schema 5: a sharded store that is read lazily (``large_store.py``); ``objects`` has a digest of each object.
Schema 3: one group per analysis; at the root ``mechattn_schema``, ``provenance`` (JSON), ``layout``, ``digest`` and
``contents``, the names of all arrays, which distinguish our files from other people's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import MechattnError, OutputError
from mechattn.results.digest import TEXT, digest, layout, plain_attributes
from mechattn.results.result import Result
from mechattn.store.large_store import SCHEMA as LARGE
from mechattn.store.large_store import Store, opened
from mechattn.store.regions import Region
from mechattn.store.required_parts import check_datasets, check_provenance

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 3
COMPLETE = "complete"  # written last at an address, where renaming is not possible


def as_tree(result: Result, text: Any) -> xr.DataTree:
    """A result as a tree of datasets."""
    import xarray as xr

    about = json.dumps(result.provenance)
    tree = xr.DataTree.from_dict({f"/{name}": _with_texts(one, text) for name, one in result.datasets.items()})
    tree.attrs = {
        "mechattn_schema": SCHEMA,
        "provenance": about,
        "layout": layout(result.datasets),
        "digest": digest(result.datasets, about),
        "contents": sorted(f"{name}/{label}" for name, one in result.datasets.items() for label in one.variables),
    }
    return tree


def from_tree(
    tree: xr.DataTree, where: object, place: str | Path = "", regions: Mapping[str, Region] | None = None
) -> Result:  # fmt: skip
    """A result from its tree, checked against its digest."""
    found = tree.attrs.get("mechattn_schema")
    readers = _READERS | {LARGE: partial(_read_large, regions=regions or {}, place=place)}
    if found is None:
        raise OutputError(f"{where} is not a result of mechattn: it has no schema")
    if not isinstance(found, (int, np.integer)) or found not in readers:
        known = ", ".join(map(str, readers))
        raise OutputError(f"the result at {where} has schema {found}; this version of mechattn reads schemas {known}")
    try:
        about = json.loads(tree.attrs["provenance"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise OutputError(f"the result at {where} lacks its provenance ({error!r}): it is damaged") from None
    check_provenance(about, where)
    result = readers[int(found)](tree, about, where)
    check_datasets(result.datasets, about, where)
    return replace(result, datasets=_in_order(result.datasets, about))


def _in_order(datasets: Mapping[str, xr.Dataset], about: Mapping[str, Any]) -> dict[str, xr.Dataset]:
    """As the run had its analyses, quantities by their names: Zarr lists both in another order each time."""
    names = [name for name in about["analyses"] if name in datasets]
    names += sorted(set(datasets) - set(names))
    made = {}
    for name in names:
        of = datasets[name]  # with all its coordinates: those of no quantity too
        by_name = {label: of.variables[label] for label in sorted(of.data_vars, key=str)}
        made[name] = of.drop_vars(list(by_name)).assign(by_name)
    return made


def _read_sealed(tree: xr.DataTree, about: dict[str, Any], where: object) -> Result:
    lazy = _datasets(tree)
    if layout(lazy) != tree.attrs.get(
        "layout"
    ):  # before anything is read, since a changed shape could require any amount of memory
        raise OutputError(f"the result at {where} is damaged: its variables are not those that were written; {_REDO}")
    datasets = {name: dataset.load() for name, dataset in lazy.items()}
    if digest(datasets, tree.attrs["provenance"]) != tree.attrs.get("digest"):
        raise OutputError(f"the result at {where} is damaged: its numbers are not those that were written; {_REDO}")
    return Result(datasets, about)


def _read_large(
    tree: xr.DataTree, about: dict[str, Any], where: object, regions: Mapping[str, Region], place: str | Path
) -> Result:  # fmt: skip
    return replace(opened(tree, _datasets(tree), regions, Store(place), where), provenance=about)


_REDO = "run it again, or restore a copy"
_READERS = {SCHEMA: _read_sealed}


def _datasets(tree: xr.DataTree) -> dict[str, xr.Dataset]:
    """The datasets of a tree as a run makes them, not loaded yet."""
    found = {}
    for name, node in tree.children.items():
        dataset = node.to_dataset().drop_encoding()
        dataset.attrs = plain_attributes(dataset.attrs)
        for variable in dataset.variables.values():
            variable.attrs = plain_attributes(variable.attrs)
        found[str(name)] = dataset
    return found


def _with_texts(dataset: xr.Dataset, text: Any) -> xr.Dataset:
    made = {n: (v.dims, v.values.astype(text), v.attrs) for n, v in dataset.variables.items() if v.dtype.kind in TEXT}
    coords = {name: value for name, value in made.items() if name in dataset.coords}
    return dataset.drop_encoding().assign_coords(coords).assign({n: v for n, v in made.items() if n not in coords})


def read_errors(where: object, error: Exception) -> MechattnError:
    """Turn errors of file readers into ours, with a sentence; our own errors pass unchanged."""
    if isinstance(error, MechattnError):
        return error
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return OutputError(f"the result at {where} cannot be read ({type(error).__name__}: {reason}); {_REDO}")
