"""Results on disk or at an address: a Zarr folder or a NetCDF file, which plain xarray opens too."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechattn.errors import OutputError
from mechattn.results.ours import check_ours, files_in
from mechattn.results.result import Result
from mechattn.results.schema import as_tree, digest, from_tree, read_errors
from mechattn.results.whole import check_writable, recover, write_whole

if TYPE_CHECKING:
    import xarray as xr

_SEAL, _BYTES = b"mechattn checksum ", 16  # after the end of a NetCDF file, where HDF5 looks at nothing
_COMPLETE = "complete"  # written last at an address, where nothing can be renamed
_HERE = ("file://", "local://")  # what fsspec calls this machine
_OPEN: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}  # "seconds" is a unit here, no time


def is_address(path: str | Path) -> bool:
    """Whether this is an address of fsspec, such as "s3://bucket/result.zarr", and no place on this machine."""
    return "://" in str(path) and not str(path).startswith(_HERE)


def as_place(path: str | Path) -> str | Path:
    """An address as it is, anything else as a path from the root."""
    here = str(path).partition("://")[2] if str(path).startswith(_HERE) else path
    return str(path) if is_address(path) else Path(here).absolute()


def check_result_place(path: str | Path) -> None:
    """Find out before the work whether a result can be stored under this name.

    Raises:
        OutputError: It doesn't end with .zarr or .nc, holds what mechattn did not write, or cannot be written.
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
    recover(place)
    if (there := Path(os.path.realpath(place))).exists():
        _check_ours(there)
    check_writable(place)


def save_result(result: Result, path: str | Path) -> None:
    """Write a result, whole or not at all: beside its name first, then under it; at an address with a last mark.

    Raises:
        OutputError: The place cannot be written, is full, or holds something that mechattn did not write; or what was
            written cannot be read again. What was there before still is.
    """
    check_result_place(path)
    place = as_place(path)
    if isinstance(place, str):
        _save_at_address(result, place)
    else:
        write_whole(place, lambda new: _write(result, new))


def load_result(path: str | Path) -> Result:
    """Read what :func:`save_result` wrote, here or with an earlier version.

    Raises:
        OutputError: There is no stored result here, one of an unknown schema, or a damaged one.
    """
    import xarray as xr

    place = as_place(path)
    is_file = Path(str(place)).suffix == ".nc"
    if isinstance(place, Path):
        recover(place)
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


def _write(result: Result, new: Path) -> None:
    """Write a result, and read it again: a file system may take what it doesn't give back."""
    if new.suffix == ".nc":
        _write_netcdf(result, new)
    else:
        as_tree(result, _text()).to_zarr(new, consolidated=False)
    _check_read_back(result, new)


def _check_read_back(result: Result, place: str | Path) -> None:
    try:
        same = digest(load_result(place).datasets) == digest(result.datasets)
    except OutputError as error:
        raise OutputError(f"what was just written cannot be read again: {error}") from error
    if not same:
        raise OutputError(f"what was just written to {place} reads as other numbers")


def _write_netcdf(result: Result, path: Path) -> None:
    """The file, and after its end a checksum: the HDF5 library can crash on a damaged file, so it must not see one."""
    as_tree(result, object).to_netcdf(path, engine="h5netcdf")
    seal = _SEAL + _checksum(path, path.stat().st_size)
    with open(path, "ab") as out:
        out.write(seal)


def _is_sealed(path: Path) -> bool:
    size = path.stat().st_size - len(_SEAL) - _BYTES
    with open(path, "rb") as stored:
        stored.seek(max(size, 0))
        return stored.read() == _SEAL + _checksum(path, size)


def _check_seal(path: Path) -> None:
    if not _is_sealed(path):
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
    _check_read_back(result, address)


def _check_complete(tree: xr.DataTree, place: str | Path) -> None:
    if isinstance(place, str) and tree.attrs.get("mechattn_schema") == 2 and not tree.attrs.get(_COMPLETE):
        raise OutputError(f"the result at {place} was not written to its end; write it again")


def _check_address(address: str) -> None:
    """Whether a file can be made at this address, and nothing else is there."""
    try:
        files, probe = _filesystem(address), f"{address}.mechattn-{os.urandom(8).hex()}"
        if files.exists(address):
            root = str(files._strip_protocol(address)).rstrip("/")
            found = [str(name).removeprefix(root).removeprefix("/") for name in files.find(address)]
            check_ours(address, found, lambda name: files.cat_file(f"{root}/{name}"))
        files.pipe_file(probe, b"")
        files.rm_file(probe)
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


def _check_ours(place: Path) -> None:
    """Refuse to replace what is at a place here, unless it is a result and nothing else."""
    try:
        if place.suffix == ".zarr" and place.is_dir():
            check_ours(place, files_in(place), lambda name: (place / name).read_bytes())
            return
        ours = place.suffix == ".nc" and place.is_file() and _is_sealed(place)
    except OSError as error:
        raise OutputError(f"{place} exists and cannot be looked at: {error.strerror or error}") from None
    if not ours:
        raise OutputError(
            f"{place} exists and is no stored result, or was changed since mechattn wrote it; choose another name, or "
            "move it away"
        )


def _check_netcdf() -> None:
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise OutputError(
            'a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]", or save as .zarr, which needs nothing else'
        ) from None


def _text() -> Any:
    """Variable-length texts: fixed-length ones have no stable Zarr 3 format."""
    return np.dtypes.StringDType()
