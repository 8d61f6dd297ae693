"""Results on disk or at an address: a Zarr folder or a NetCDF file, which plain xarray opens too."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.result import Result
from mechattn.results.schema import as_tree, from_tree, read_errors

if TYPE_CHECKING:
    import xarray as xr

_SEAL, _BYTES = b"mechattn checksum ", 16  # after the end of a NetCDF file, where HDF5 looks at nothing
_COMPLETE = "complete"  # written last at an address, where nothing can be renamed
_OPEN: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}  # "seconds" is a unit here, no time


def is_address(path: str | Path) -> bool:
    """Whether this is an address of fsspec, such as "s3://bucket/result.zarr", and no place on this machine."""
    return "://" in str(path) and not str(path).startswith("file://")


def as_place(path: str | Path) -> str | Path:
    """An address as it is, anything else as a path from the root."""
    return str(path) if is_address(path) else Path(str(path).removeprefix("file://")).absolute()


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
        OutputError: It doesn't end with .zarr or .nc, holds something that is no result, or cannot be written.
    """
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
        _check_netcdf()
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


def load_result(path: str | Path) -> Result:
    """Read what :func:`save_result` wrote, here or with an earlier version.

    Raises:
        OutputError: There is no stored result here, one of an unknown schema, or a damaged one.
    """
    import xarray as xr

    place = as_place(path)
    is_file = Path(str(place)).suffix == ".nc"
    if isinstance(place, Path) and not (place.is_file() if is_file else (place / "zarr.json").exists()):
        within = sorted(p.name for p in place.glob("*.zarr"))[:4] if place.is_dir() else []
        hint = f"; there is {', '.join(within)} in it" if within else ""
        there = ": what is there is neither a .zarr folder nor a .nc file of mechattn" if place.exists() else ""
        raise OutputError(f"there is no stored result at {path}{there}{hint}")
    if isinstance(place, Path) and is_file:
        _check_netcdf()
        _check_seal(place)
    kind: dict[str, Any] = {"engine": "h5netcdf"} if is_file else {"engine": "zarr", "consolidated": False}
    try:
        if isinstance(place, str) and not _filesystem(place).exists(f"{place}/zarr.json"):
            raise OutputError(f"there is no stored result at {path}")
        with xr.open_datatree(place, **kind, **_OPEN) as tree:
            _check_complete(tree, place)
            return from_tree(tree, path)
    except Exception as error:  # files, codecs and the network have errors of their own
        raise read_errors(path, error) from error


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
    """The file, and after its end a checksum: the HDF5 library can crash on a damaged file, so it must not see one."""
    as_tree(result, object).to_netcdf(path, engine="h5netcdf")
    seal = _SEAL + _checksum(path, path.stat().st_size)
    with open(path, "ab") as out:
        out.write(seal)


def _check_seal(path: Path) -> None:
    size = path.stat().st_size - len(_SEAL) - _BYTES
    with open(path, "rb") as stored:
        stored.seek(max(size, 0))
        whole = stored.read() == _SEAL + _checksum(path, size)
    if not whole:
        raise OutputError(f"the result at {path} is damaged, or was not written by mechattn: its checksum is another")


def _checksum(path: Path, size: int) -> bytes:
    """Of the first bytes of a file."""
    made = hashlib.blake2b(digest_size=_BYTES)
    with open(path, "rb") as stored:
        while size > 0 and (some := stored.read(min(size, 2**20))):
            made.update(some)
            size -= len(some)
    return made.digest()


def _save_at_address(result: Result, address: str) -> None:
    import zarr

    try:
        as_tree(result, _text()).to_zarr(address, mode="w", consolidated=False)
        zarr.open_group(address, mode="r+").attrs[_COMPLETE] = True
    except Exception as error:  # each kind of address has errors of its own
        raise OutputError(
            f"{address} could not be written ({type(error).__name__}: {error}); what is there is no whole result, and "
            "load_result will say so"
        ) from error


def _check_complete(tree: xr.DataTree, place: str | Path) -> None:
    if isinstance(place, str) and tree.attrs.get("mechattn_schema") == 2 and not tree.attrs.get(_COMPLETE):
        raise OutputError(f"the result at {place} was not written to its end; write it again")


def _check_address(address: str) -> None:
    """Whether a file can be made at this address, and nothing else is there."""
    try:
        files = _filesystem(address)
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


def _filesystem(address: str) -> Any:
    import fsspec

    return fsspec.url_to_fs(address)[0]


def _check_netcdf() -> None:
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise OutputError(
            'a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]", or save as .zarr, which needs nothing else'
        ) from None


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
