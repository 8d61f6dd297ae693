"""Writing results: a Zarr folder, here or at an address, or a NetCDF file; plain xarray opens both."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.places import as_place, check_name, check_netcdf, filesystem, is_address
from mechattn.results.result import Result
from mechattn.results.schema import COMPLETE, as_tree
from mechattn.results.seal import seal


def check_writable(path: str | Path) -> None:
    """Find out before the work whether a file or folder can be written at this place.

    Raises:
        OutputError: The folder cannot be made or written to.
    """
    check_name(path)
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
        OutputError: It doesn't end with .zarr or .nc, holds something that is no result, or cannot be written.
    """
    check_name(path)
    place = as_place(path)
    suffix = Path(str(place)).suffix
    if suffix not in (".zarr", ".nc") or (suffix == ".nc" and is_address(path)):
        raise OutputError(
            f'"{path}" should end with ".zarr" (a Zarr folder, here or at an address) or ".nc" (one NetCDF file, here)'
        )
    if isinstance(place, str):
        _check_address(place)
        return
    if suffix == ".nc":
        check_netcdf()
    if place.exists() and not _is_result(place):
        raise OutputError(f"{place} exists and is no stored result; choose another name, or move it away")
    check_writable(place)


def save_result(result: Result, path: str | Path) -> None:
    """Write a result, whole or not at all: beside its name first, then under it; at an address with a last mark.

    Raises:
        OutputError: The place cannot be written, is full, or holds something that is no result.
    """
    check_result_place(path)
    place = as_place(path)
    if isinstance(place, str):
        _save_at_address(result, place)
    elif place.suffix == ".nc":
        write_whole(place, lambda new: _write_netcdf(result, new))
    else:
        write_whole(place, lambda new: as_tree(result, _text()).to_zarr(new, consolidated=False))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder under a new name beside its own, and rename it when it is whole.

    Raises:
        OutputError: It could not be written; what was there before still is, and nothing else.
    """
    new = None
    try:
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        write(new / f"new{path.suffix}")
        if path.exists():
            os.replace(path, new / "old")
        try:
            os.replace(new / f"new{path.suffix}", path)
        except OSError:
            if (new / "old").exists():
                os.replace(new / "old", path)
            raise
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}. Nothing of it is left; make room, or choose "
            "another place"
        ) from error
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def _write_netcdf(result: Result, path: Path) -> None:
    """The file, and after its end its checksum."""
    as_tree(result, object).to_netcdf(path, engine="h5netcdf")
    seal(path)


def _save_at_address(result: Result, address: str) -> None:
    import zarr

    try:
        as_tree(result, _text()).to_zarr(address, mode="w", consolidated=False)
        zarr.open_group(address, mode="r+").attrs[COMPLETE] = True
    except Exception as error:  # each kind of address has errors of its own
        raise OutputError(
            f"{address} could not be written ({type(error).__name__}: {error}); what is there is no whole result, and "
            "load_result will say so"
        ) from error


def _check_address(address: str) -> None:
    """Whether a file can be made at this address, and nothing else is there."""
    try:
        files = filesystem(address)
        if files.exists(address) and not files.exists(f"{address}/zarr.json"):
            raise OutputError(f"{address} exists and is no stored result; choose another name")
        files.pipe_file(f"{address}.probe", b"")
        files.rm_file(f"{address}.probe")
    except OutputError:
        raise
    except ImportError as error:
        raise OutputError(f"{address}: {error}") from None  # fsspec says which package to install
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise OutputError(f"nothing can be written to {address} ({reason}); choose another place") from None


def _is_result(place: Path) -> bool:
    if place.suffix == ".zarr":
        return (place / "zarr.json").exists()
    import h5netcdf

    try:
        with h5netcdf.File(place) as stored:
            return "mechattn_schema" in stored.attrs
    except OSError:
        return False


def _text() -> Any:
    """Variable-length texts: fixed-length ones have no stable Zarr 3 format."""
    return np.dtypes.StringDType()
