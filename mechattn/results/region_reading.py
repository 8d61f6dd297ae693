"""Reads a block of an array from regions in a folder: finds each piece by its object's index and checks its checksum.

At an address, Zarr reads the same numbers. In a folder it would take half a millisecond per piece of about ten
kilobytes, and a page of a large result needs hundreds of thousands; here, those that follow one another are one read.
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
from mechattn.results.regions import CHECKSUM, FILL, INDEX, Region, checksum

_NOTHING = 2**64 - 1  # in an index: the piece does not exist
_AT_ONCE = 2**20  # bytes of pieces that are read together


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
    grid = region.pieces
    alone = [axis for axis, dim in enumerate(region.dims) if dim in region.alone]
    within = [cut.inside if axis in alone else [0] for axis, cut in enumerate(cuts)]
    to = np.moveaxis(made[tuple(cut.outside for cut in cuts)], alone, range(len(alone)))[None]  # none may be alone
    inside = tuple(slice(c.inside.start, c.inside.stop, c.inside.step) for i, c in enumerate(cuts) if i not in alone)
    shape = [size for axis, size in enumerate(region.piece) if axis not in alone]
    with open(path, "rb", buffering=0) as stored:
        length = INDEX * prod(grid)
        index = _checked(stored, region.object_bytes - length - CHECKSUM, 1, length + CHECKSUM)
        places = index.view("<u8").reshape(*grid, 2)[np.ix_(*within)].reshape(-1, 2)
        if not ((places[:, 1] == region.piece_bytes) | (places[:, 0] == _NOTHING)).all():
            raise ValueError("its index names pieces of another size")
        order = np.argsort(places[:, 0])
        for some in _runs(places[order]):
            offset, size = places[order[some.start]].tolist()
            pieces = _checked(stored, offset, some.stop - some.start, size)
            values = pieces.view(np.dtype(region.dtype).newbyteorder("<")).reshape(-1, *shape)
            to[np.unravel_index(order[some], to.shape[: len(alone) + 1])] = values[(slice(None), *inside)]


def _runs(places: np.ndarray) -> Iterator[slice]:
    """Runs of pieces, sorted by place, that follow one another and can be read at once; missing ones are left out."""
    offset, size = places.T
    apart = (offset[1:] != offset[:-1] + size[:-1]) | (size[1:] != size[:-1])
    ends = [*(np.flatnonzero(apart) + 1).tolist(), len(places)]
    for start, end in zip([0, *ends], ends):
        if offset[start] != _NOTHING:
            step = max(1, _AT_ONCE // int(size[start]))
            yield from (slice(at, min(at + step, end)) for at in range(start, end, step))


def _checked(file: FileIO, offset: int, count: int, size: int) -> np.ndarray:
    """Read some pieces of a file, check their trailing checksums and return them without [piece, byte]."""
    file.seek(offset)
    content = file.read(count * size)
    if len(content) != count * size:
        raise ValueError(f"{len(content)} of {count * size} bytes")
    for end in range(size, len(content) + 1, size):
        if checksum(content[end - size : end - CHECKSUM]) != content[end - CHECKSUM : end]:
            raise ValueError("its checksum does not match")
    return np.frombuffer(content, np.uint8).reshape(count, size)[:, :-CHECKSUM]
