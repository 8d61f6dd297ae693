"""A result as bytes: a Zarr hierarchy in a zip, for the parts of a run that are stored or sent one by one."""

from __future__ import annotations

import io
import zipfile

import numpy as np

from mechattn.results.result import Result
from mechattn.results.schema import as_tree, from_tree, read_errors


def packed(result: Result) -> bytes:
    """The bytes of a result, which :func:`unpacked` takes; no pickle, and nothing that depends on the machine."""
    from zarr.storage import MemoryStore

    files: dict = {}
    as_tree(result, np.dtypes.StringDType()).to_zarr(MemoryStore(files), consolidated=False)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        for name in sorted(files):
            out.writestr(zipfile.ZipInfo(name), files[name].to_bytes())
    return made.getvalue()


def unpacked(content: bytes, where: object = "these bytes") -> Result:
    """The result that :func:`packed` made these bytes of.

    Raises:
        OutputError: They are not what it wrote.
    """
    import xarray as xr
    from zarr.core.buffer import default_buffer_prototype
    from zarr.storage import MemoryStore

    buffer = default_buffer_prototype().buffer
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as stored:
            files = {name: buffer.from_bytes(stored.read(name)) for name in stored.namelist()}
        tree = xr.open_datatree(MemoryStore(files, read_only=True), engine="zarr", consolidated=False)  # type: ignore[arg-type]
        return from_tree(tree, where)
    except Exception as error:  # zip, zarr, JSON and codecs have errors of their own
        raise read_errors(where, error) from error
