"""Reads a block of an array from regions in a folder: finds each piece by its object's index and checks its checksum.

At an address, Zarr reads the same numbers. In a folder it would take half a millisecond per piece of about ten
kilobytes, and a page of a large result reads half a million pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mechattn.results.lazy import Key
from mechattn.results.regions import ALONE, CHECKSUM, FILL, INDEX, Region

_NOTHING = 2**64 - 1  # in an index: the piece does not exist


class _Cut(NamedTuple):
    """The part of a dimension in one object.

    Args:
        number: The index of the object.
        inside: The positions within the object.
        outside: The positions within the block.
    """

    number: int
    inside: range
    outside: slice


def read_block(folder: Path, region: Region, key: Key) -> np.ndarray:
    """Read a block of an array, given by a number or slice for each dimension.

    Args:
        folder: The folder of the array.
        region: How the array is split.
        key: The block to read.

    Raises:
        ValueError: A checksum does not match.
        OSError: An object cannot be read; a missing object is filled with the array's fill value.
    """
    spans = [range(*at.indices(size)) if isinstance(at, slice) else range(at, at + 1)
             for at, size in zip(key, region.shape)]  # fmt: skip
    dtype = np.dtype(region.dtype)
    made = np.full([len(span) for span in spans], FILL[dtype.kind], dtype)
    for cuts in product(*(_cuts(span, width) for span, width in zip(spans, region.shard))):
        path = folder.joinpath("c", *(str(cut.number) for cut in cuts))
        if path.is_file():
            _read_object(path, region, cuts, made)
    return made.squeeze(tuple(axis for axis, at in enumerate(key) if not isinstance(at, slice)))


def _cuts(span: range, width: int) -> Iterator[_Cut]:
    """The objects, each of a given width, that a range of positions falls in."""
    at = 0
    while at < len(span):
        number = span[at] // width
        end = min(len(span), -(-((number + 1) * width - span[0]) // span.step))
        yield _Cut(number, range(span[at] - number * width, span[end - 1] - number * width + 1, span.step),
                   slice(at, end))  # fmt: skip
        at = end


def _read_object(path: Path, region: Region, cuts: Seq[_Cut], made: np.ndarray) -> None:
    """Copy the part of a block that is in one object."""
    grid = [whole // part for whole, part in zip(region.shard, region.piece)]
    alone = [dim in ALONE for dim in region.dims]
    with open(path, "rb", buffering=0) as stored:
        length = INDEX * prod(grid)
        index = _checked(stored, region.object_bytes - length - CHECKSUM, length + CHECKSUM)
        places = np.frombuffer(index, "<u8").reshape(*grid, 2)
        wanted = product(*(enumerate(cut.inside) if one else [(0, 0)] for cut, one in zip(cuts, alone)))
        for some in wanted:
            offset, size = (int(number) for number in places[tuple(place for _, place in some)])
            if offset == _NOTHING:
                continue
            values = np.frombuffer(_checked(stored, offset, size), np.dtype(region.dtype).newbyteorder("<"))
            inside = tuple(0 if one else slice(c.inside.start, c.inside.stop, c.inside.step)
                           for c, one in zip(cuts, alone))  # fmt: skip
            outside = tuple(cut.outside.start + order if one else cut.outside
                            for cut, one, (order, _) in zip(cuts, alone, some))  # fmt: skip
            made[outside] = values.reshape(region.piece)[inside]


def _checked(file: FileIO, offset: int, size: int) -> bytes:
    """Read bytes of a file, check their trailing checksum and return them without it."""
    import google_crc32c  # the library that Zarr uses

    file.seek(offset)
    content = file.read(size)
    if len(content) != size:
        raise ValueError(f"{len(content)} of {size} bytes")
    stored, inner = content[-CHECKSUM:], content[:-CHECKSUM]
    if google_crc32c.value(inner).to_bytes(CHECKSUM, "little") != stored:
        raise ValueError("its checksum does not match")
    return inner
