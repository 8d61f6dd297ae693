"""A checksum after the end of a NetCDF file: the HDF5 library can crash on a damaged one, so damage is found first.

It detects damage, not intent: anyone who changes a file on purpose can seal it again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mechattn.errors import OutputError

_SEAL, _BYTES = b"mechattn checksum ", 16  # after the end of the file, which HDF5 ignores


def seal(path: Path) -> None:
    """Append the checksum to a file."""
    made = _SEAL + _checksum(path, path.stat().st_size)
    with open(path, "ab") as out:
        out.write(made)


def is_sealed(path: Path) -> bool:
    """Whether the file has a checksum that matches."""
    size = path.stat().st_size - len(_SEAL) - _BYTES
    with open(path, "rb") as stored:
        stored.seek(max(size, 0))
        return stored.read(len(_SEAL) + _BYTES) == _SEAL + _checksum(path, size)


def check_seal(path: Path) -> None:
    """Refuse a file without a matching checksum."""
    if not is_sealed(path):
        raise OutputError(
            f"the result at {path} is damaged or not mechattn's: its checksum is missing or does not match"
        )


def _checksum(path: Path, size: int) -> bytes:
    """The checksum of the first bytes of a file."""
    made = hashlib.blake2b(digest_size=_BYTES)
    with open(path, "rb") as stored:
        while size > 0 and (some := stored.read(min(size, 2**20))):
            made.update(some)
            size -= len(some)
    return made.digest()
