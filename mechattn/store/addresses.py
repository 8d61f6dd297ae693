"""Where results are stored: a path on this machine, or an fsspec address such as "s3://bucket/result.zarr"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mechattn.errors import OutputError

_NAME, _PATH = 255, 4095  # bytes, on the file systems in use
_HERE = ("file://", "local://")  # fsspec's names for this machine


def is_address(path: str | Path) -> bool:
    """Whether this is an fsspec address, such as "s3://bucket/result.zarr", rather than a local path."""
    return "://" in str(path) and not str(path).startswith(_HERE)


def as_place(path: str | Path) -> str | Path:
    """An address unchanged, anything else as an absolute path."""
    if not isinstance(path, (str, Path)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/llama.zarr"')
    here = str(path).partition("://")[2] if str(path).startswith(_HERE) else path
    return str(path) if is_address(path) else Path(here).absolute()


def check_name(path: str | Path) -> None:
    """Refuse names that no file system accepts, before trying."""
    text = str(path)
    if re.search("[\0\ud800-\udc7f\udd00-\udfff]", text):  # those between stand for bytes that are not UTF-8
        raise OutputError(f"{text!r:.80} contains a NUL or half of a surrogate pair, which no file name may; remove it")
    stored = text.encode("utf-8", "surrogatepass")
    if len(stored) > _PATH or max(map(len, stored.split(b"/"))) > _NAME:
        raise OutputError(
            f'"{text[:40]}…" is too long: file systems allow {_NAME} bytes for a name and {_PATH:,} for a path'
        )


def filesystem(address: str) -> Any:
    """The file system of an address."""
    import fsspec

    return fsspec.url_to_fs(address)[0]
