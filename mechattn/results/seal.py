"""A checksum after the end of a NetCDF file: the HDF5 library can crash on a damaged one, so it must not see it.

It tells damage, and no intent: whoever changes a file on purpose can seal it again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mechattn.errors import OutputError

_SEAL, _BYTES = b"mechattn checksum ", 16  # after the end of the file, where HDF5 looks at nothing


def seal(path: Path) -> None:
    """Put the checksum after the end."""
    made = _SEAL + _checksum(path, path.stat().st_size)
    with open(path, "ab") as out:
        out.write(made)


def is_sealed(path: Path) -> bool:
    """Whether the checksum is there, and is that of the file."""
    size = path.stat().st_size - len(_SEAL) - _BYTES
    with open(path, "rb") as stored:
        stored.seek(max(size, 0))
        return stored.read(len(_SEAL) + _BYTES) == _SEAL + _checksum(path, size)


def check_seal(path: Path) -> None:
    """Refuse a file without it.

    Raises:
        OutputError: It is another, or there is none.
    """
    if not is_sealed(path):
        raise OutputError(f"the result at {path} is damaged, or was not written by mechattn: its checksum is another")


def _checksum(path: Path, size: int) -> bytes:
    """Of the first bytes of a file."""
    made = hashlib.blake2b(digest_size=_BYTES)
    with open(path, "rb") as stored:
        while size > 0 and (some := stored.read(min(size, 2**20))):
            made.update(some)
            size -= len(some)
    return made.digest()
