"""Results on disk: a Zarr folder that plain xarray opens too (``xarray.open_datatree``)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.result import Result

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 1


def check_writable(path: str | Path) -> None:
    """Find out before the work whether a file or folder can be written at this place.

    Raises:
        OutputError: The folder cannot be made or written to.
    """
    path = Path(path).absolute()
    folder = path.parent
    if path.suffix != ".zarr" and path.is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"nothing can be written to {folder}: {error.strerror or error}; choose another place"
        ) from None


def check_result_place(path: str | Path) -> None:
    """Find out before the work whether a result can be stored under this name.

    Raises:
        OutputError: It doesn't end with .zarr, holds something that is no result, or cannot be written.
    """
    path = Path(path).absolute()
    if path.suffix != ".zarr":
        raise OutputError(f'a result is saved as a Zarr folder, "{path.name}" should end with ".zarr"')
    if path.exists() and not (path / "zarr.json").exists():
        raise OutputError(f"{path} exists and is no stored result; choose another name, or move it away")
    check_writable(path)


def save_result(result: Result, path: str | Path) -> None:
    """Write a result as a Zarr folder: into a new folder beside it first, then under its name.

    Raises:
        OutputError: The place cannot be written, or holds something that is no result.
    """
    import xarray as xr

    path = Path(path).absolute()
    check_result_place(path)
    tree = xr.DataTree.from_dict({f"/{name}": _with_zarr_strings(d) for name, d in result.datasets.items()})
    tree.attrs = {"mechattn_schema": SCHEMA, "provenance": json.dumps(result.provenance)}
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        tree.to_zarr(new / "new", consolidated=False)
        if path.exists():
            os.replace(path, new / "old")
        try:
            os.replace(new / "new", path)
        except OSError:
            if (new / "old").exists():
                os.replace(new / "old", path)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def load_result(path: str | Path) -> Result:
    """Read what :func:`save_result` wrote.

    Raises:
        OutputError: There is no stored result here, or one of another schema.
    """
    import xarray as xr

    path = Path(path)
    if not (path / "zarr.json").exists():
        raise OutputError(f"there is no stored result at {path}")
    tree = xr.open_datatree(path, engine="zarr", consolidated=False)
    found = tree.attrs.get("mechattn_schema")
    if found != SCHEMA:
        raise OutputError(f"the result at {path} has schema {found}; this version of mechattn reads schema {SCHEMA}")
    datasets = {name: node.to_dataset().load() for name, node in tree.children.items()}
    tree.close()
    return Result(datasets, json.loads(tree.attrs["provenance"]))


def _with_zarr_strings(dataset: xr.Dataset) -> xr.Dataset:
    """Text as variable-length strings: fixed-length ones have no stable Zarr 3 format."""
    texts = {name: value for name, value in dataset.coords.items() if value.dtype.kind in "US"}
    return dataset.assign_coords({n: (v.dims, v.values.astype(np.dtypes.StringDType())) for n, v in texts.items()})
