"""A block that is read from regions without Zarr is the one that Zarr reads."""

import google_crc32c
import numpy as np
import pytest

from mechattn.store import region_reading
from mechattn.store.large_store import Store
from mechattn.store.region_reading import ObjectError, read_block
from mechattn.store.regions import Region, encoded, object_digest, tail_digest

DIMS = ("prompt", "condition", "layer", "segment", "pos")
SHAPE = (11, 3, 4, 2, 300)  # chunks of 4, the last one short; more than an object along the positions


@pytest.fixture(scope="module", params=["float32", "float16", "int32"])
def stored(request, tmp_path_factory):
    import zarr

    folder = tmp_path_factory.mktemp("array")
    values = np.random.default_rng(0).integers(-99, 99, SHAPE).astype(request.param)
    region = Region(DIMS, SHAPE, request.param, 4, {})
    array = region.create(zarr.storage.LocalStore(folder), "x")
    objects = {}
    for number in range(3):
        if number == 1:
            values[4:8, ..., 256:] = array.fill_value  # an object that is not there: its prompts were shorter
        for name, content in encoded(values[4 * number : 4 * number + 4], region, number).items():
            if not (number == 1 and name.endswith("/1")):
                path = folder / "x" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                objects[f"x/{name}"] = object_digest(content)
    return folder, region, array, values, objects


def block(stored, key):
    folder, region, _, _, objects = stored
    return read_block(Store(folder), "x", region, key, objects)


KEYS = [
    (slice(None), slice(None), slice(None), slice(None), slice(None)),
    (slice(3, 9), 1, slice(1, 3), slice(None), 270),
    (slice(10, 11), slice(0, 3, 2), 3, slice(1, 2), slice(250, 260)),
    (slice(1, 11, 3), slice(None), slice(0, 4, 3), 0, slice(0, 300, 7)),
    (5, 2, 0, 1, slice(0, 0)),
]


@pytest.mark.parametrize("key", KEYS)
def test_it_is_what_zarr_reads(stored, key):
    _, _, array, values, _ = stored
    got = block(stored, key)
    np.testing.assert_array_equal(got, values[key])
    np.testing.assert_array_equal(got, array[key])
    assert got.dtype == values.dtype


def test_the_layers_of_a_segment_are_read_at_once(stored, monkeypatch):
    """They lie one after another; negative control: all segments of a layer do not."""
    counts = []
    real = region_reading._checked
    monkeypatch.setattr(region_reading, "_checked", lambda *given: counts.append(len(given[1])) or real(*given))
    every = slice(None)
    block(stored, (slice(0, 4), 1, every, 1, slice(0, 9)))
    assert counts == [4]
    counts.clear()
    block(stored, (slice(0, 4), 1, 2, every, slice(0, 9)))
    assert counts == [1, 1]


def test_a_changed_byte_is_noticed_where_it_is_read(stored):
    folder, *_ = stored
    path = next(p for p in sorted((folder / "x/c/2").rglob("*")) if p.is_file())
    content = path.read_bytes()
    try:
        path.write_bytes(
            bytes([content[0] ^ 1]) + content[1:]
        )  # in the piece of the first condition, segment and layer
        every = slice(None)
        with pytest.raises(ObjectError, match="its checksum does not match"):
            block(stored, (every, 0, 0, every, every))
        block(stored, (every, 1, 0, every, every))
        block(stored, (slice(0, 8), 0, 0, every, every))
    finally:
        path.write_bytes(content)


def test_every_byte_of_an_object_counts(stored):
    """A changed bit anywhere changes its digest, or leaves it without one; so does a missing byte."""
    content = (stored[0] / "x/c/0/0/0/0/0").read_bytes()
    known = object_digest(content)
    for at in range(0, len(content), 97):
        assert object_digest(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]) != known
    tail = stored[1].tail_bytes
    for at in range(len(content) - tail, len(content), 3):
        assert object_digest(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]) != known
    assert {object_digest(content[:size]) for size in (0, 1, 20, 1000, len(content) - 1)} == {None}


@pytest.mark.parametrize("size", [0, 12])
def test_pieces_of_another_size_are_refused(stored, tmp_path, size):
    """A crafted index, with a digest that is right."""
    folder, region, *_ = stored
    content = (folder / "x/c/0/0/0/0/0").read_bytes()
    length = 16 * int(np.prod(region.pieces))
    index = np.frombuffer(content[-length - 4 : -4], "<u8").copy()
    index[1] = size
    check = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    crafted = tmp_path / "x/c/0/0/0/0/0"
    crafted.parent.mkdir(parents=True)
    content = content[: -length - 4] + index.tobytes() + check
    crafted.write_bytes(content)
    objects = {"x/c/0/0/0/0/0": tail_digest(content[-region.tail_bytes :])}
    with pytest.raises(ObjectError, match="its index names pieces of another size"):
        block((tmp_path, region, None, None, objects), (slice(0, 4), *[slice(None)] * 3, slice(0, 256)))
