"""A result as bytes, for parts of a run that are stored or sent one by one: a JSON header and the raw arrays.

Zarr would work, but takes some tenths of a second per part, and a long run has thousands. No pickles are used.
"""

from __future__ import annotations

import io
import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mechattn.errors import OutputError
from mechattn.results.arrays import TEXT, Key, LazyArray, lazy_variable
from mechattn.results.result import Result
from mechattn.store.reading import read_errors

_FORMAT = 2
_LARGE = 2**16  # bytes


def packed(result: Result) -> bytes:
    """The bytes of a result, which :func:`unpacked` takes."""
    arrays: list[bytes] = []
    datasets = {name: _packed_dataset(dataset, arrays) for name, dataset in result.datasets.items()}
    header = {"mechattn_packed": _FORMAT, "provenance": result.provenance, "datasets": datasets}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        for name, content in (
            ("header", json.dumps(header).encode()),
            *((str(i), a) for i, a in enumerate(arrays)),
        ):
            out.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()


def unpacked(stored: bytes | Path) -> Result:
    """The result from which :func:`packed` made these bytes; of a file, large arrays are read on demand."""
    later, where = (stored, str(stored)) if isinstance(stored, Path) else (None, "these bytes")
    try:
        with zipfile.ZipFile(later or io.BytesIO(stored)) as file:  # type: ignore[arg-type]
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise OutputError(
                    f"{where} is compressed, which mechattn never does: a few bytes could unpack to fill the memory"
                )
            header = json.loads(file.read("header"))
            if header["mechattn_packed"] != _FORMAT:
                raise OutputError(f"{where} was written by another version of mechattn")
            datasets = {
                name: _unpacked_dataset(one, file, later)
                for name, one in header["datasets"].items()
            }
        return Result(datasets, header["provenance"])
    except Exception as error:  # zip, JSON and xarray have their own errors
        raise read_errors(where, error) from error


def _packed_dataset(dataset: xr.Dataset, arrays: list[bytes]) -> dict[str, Any]:
    variables = {}
    for name, variable in dataset.variables.items():
        about = {
            "dims": variable.dims,
            "shape": variable.shape,
            "attrs": variable.attrs,
            "at": len(arrays),
        }
        if variable.dtype.kind in TEXT:
            arrays.append(json.dumps([str(text) for text in variable.values.flat]).encode())
            variables[name] = about | {"dtype": "text"}
        else:
            values = variable.values.astype(variable.dtype.newbyteorder("<"), copy=False)
            arrays.append(values.tobytes())
            variables[name] = about | {"dtype": values.dtype.str}
    return {"variables": variables, "coords": list(dataset.coords), "attrs": dataset.attrs}


def _unpacked_dataset(
    about: dict[str, Any], stored: zipfile.ZipFile, later: Path | None = None
) -> xr.Dataset:
    made: dict[str, Any] = {}
    for name, one in about["variables"].items():
        alone = one["dtype"] != "text" and "prompt" not in one["dims"] and len(one["dims"]) > 1
        if later is not None and alone and stored.getinfo(str(one["at"])).file_size > _LARGE:
            lazy = LazyArray(
                tuple(one["shape"]), np.dtype(one["dtype"]), partial(_read_later, one, later)
            )
            made[name] = lazy_variable(lazy, one["dims"], one["attrs"])
            continue
        content = stored.read(str(one["at"]))
        if one["dtype"] == "text":
            values = np.array(json.loads(content), dtype=np.dtypes.StringDType())
        else:
            values = np.frombuffer(content, dtype=np.dtype(one["dtype"])).copy()
        made[name] = (one["dims"], values.reshape(one["shape"]), one["attrs"])
    coords = {name: made.pop(name) for name in about["coords"]}
    return xr.Dataset(made, coords, about["attrs"])


def _read_later(one: dict[str, Any], path: Path, key: Key) -> np.ndarray:
    with zipfile.ZipFile(path) as stored:
        values = np.frombuffer(stored.read(str(one["at"])), dtype=np.dtype(one["dtype"]))
    return values.reshape(one["shape"])[key].copy()
