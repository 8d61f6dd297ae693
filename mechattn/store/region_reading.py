"""Reads a block of an array from regions: finds each piece by its object's index, and checks both.

Each time, the object is compared with the digest that the result has of it: one of another chunk, array or run is
noticed, even if it was put there after the result was opened. Zarr would read the same numbers without that, but takes
half a millisecond per piece of about ten kilobytes, and a page of a large result needs hundreds of thousands; here,
those that follow one another are one read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mechattn.results.lazy_arrays import Key
from mechattn.store.regions import ALONE, CHECKSUM, FILL, Region, checksum, tail_digest

if TYPE_CHECKING:
    from mechattn.store.large_store import Store

_AT_ONCE = 2**20  # bytes of pieces that are read together
_THREADS = 16  # at an address


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


class ObjectError(Exception):
    """An object is missing, or is not the one that was written.

    Args:
        chunk: Its chunk.
        why: What is wrong.
    """

    def __init__(self, chunk: int, why: str) -> None:
        super().__init__(why)
        self.chunk = chunk


def read_block(store: Store, name: str, region: Region, key: Key, objects: Mapping[str, str]) -> np.ndarray:
    """Read a block of an array, given by a number or slice for each dimension."""
    spans = [range(*at.indices(size)) if isinstance(at, slice) else range(at, at + 1)
             for at, size in zip(key, region.shape)]  # fmt: skip
    dtype = np.dtype(region.dtype)
    made = np.full([len(span) for span in spans], FILL[dtype.kind], dtype)

    def read(cuts: Seq[_Cut]) -> None:
        at = "/".join([name, "c", *(str(cut.number) for cut in cuts)])
        try:
            if at in objects:
                _read_object(store, at, objects[at], region, cuts, made)
        except Exception as error:  # files and the network have their own errors
            raise ObjectError(cuts[0].number, _why(error)) from error

    found = product(*(_cuts(span, width) for span, width in zip(spans, region.shard)))
    if isinstance(store.place, str):  # slow to answer, but to many at once
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, found))
    else:
        list(map(read, found))
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


def _read_object(
    store: Store, name: str, known: str, region: Region, cuts: Seq[_Cut], made: np.ndarray
) -> None:  # fmt: skip
    """Copy the part of a block that is in one object."""
    length, size, count = region.object_bytes, region.piece_bytes, prod(region.pieces)
    (tail,) = store.ranges(name, [(length - region.tail_bytes, length)])
    if tail_digest(tail) != known:
        raise ValueError("it is not what was written here")
    sums = np.frombuffer(tail, np.uint8, count * CHECKSUM).reshape(count, CHECKSUM)
    index = np.frombuffer(tail, "<u8", 2 * count, count * CHECKSUM).reshape(*region.pieces, 2)
    alone = [axis for axis, dim in enumerate(region.dims) if dim in ALONE]
    within = [cut.inside if axis in alone else [0] for axis, cut in enumerate(cuts)]
    places = index[np.ix_(*within)].reshape(-1, 2)
    numbers, rest = np.divmod(places[:, 0], size)  # in the order in which the pieces are stored
    if rest.any() or (numbers >= count).any() or (places[:, 1] != size).any():
        raise ValueError("its index names pieces of another size")
    to = np.moveaxis(made[tuple(cut.outside for cut in cuts)], alone, range(len(alone)))[None]  # none may be alone
    inside = tuple(slice(c.inside.start, c.inside.stop, c.inside.step) for i, c in enumerate(cuts) if i not in alone)
    order = np.argsort(numbers)
    runs = list(_runs(numbers[order], max(1, _AT_ONCE // size)))
    spans = [(int(numbers[order[run.start]]) * size, (int(numbers[order[run.stop - 1]]) + 1) * size) for run in runs]
    for run, content in zip(runs, store.ranges(name, spans), strict=True):
        pieces = _checked(content, sums[numbers[order[run]]], size)
        values = pieces.view(np.dtype(region.dtype).newbyteorder("<"))
        values = values.reshape(-1, *(part for axis, part in enumerate(region.piece) if axis not in alone))
        to[np.unravel_index(order[run], to.shape[: len(alone) + 1])] = values[(slice(None), *inside)]


def _runs(numbers: np.ndarray, most: int) -> Iterator[slice]:
    """Runs of pieces, in order, that follow one another and are read at once."""
    ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, end in zip([0, *ends], ends):
        yield from (slice(at, min(at + most, end)) for at in range(start, end, most))


def _checked(content: bytes, sums: np.ndarray, size: int) -> np.ndarray:
    """Check the checksums of some pieces and return the pieces without them [piece, byte]."""
    if len(content) != len(sums) * size:
        raise ValueError(f"{len(content)} of {len(sums) * size} bytes")
    for end, known in zip(range(size, len(content) + 1, size), sums):
        if not checksum(content[end - size : end - CHECKSUM]) == content[end - CHECKSUM : end] == known.tobytes():
            raise ValueError("its checksum does not match")
    return np.frombuffer(content, np.uint8).reshape(-1, size)[:, :-CHECKSUM]


def _why(error: Exception) -> str:
    """What the error of a file, the network or a check says, in short."""
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
