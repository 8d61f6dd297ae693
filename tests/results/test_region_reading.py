"""A block that is read from regions without Zarr is the one that Zarr reads."""

import google_crc32c
import numpy as np
import pytest

from mechattn.results import region_reading
from mechattn.results.region_reading import read_block
from mechattn.results.regions import Region, encoded

DIMS = ("prompt", "condition", "layer", "segment", "pos")
SHAPE = (11, 3, 4, 2, 300)  # chunks of 4, the last one short; more than an object along the positions
BEFORE = ("condition", "layer")


@pytest.fixture(scope="module", params=["float32", "float16", "int32"])
def stored(request, tmp_path_factory):
    import zarr

    folder = tmp_path_factory.mktemp("array")
    values = np.random.default_rng(0).integers(-99, 99, SHAPE).astype(request.param)
    region = Region(DIMS, SHAPE, request.param, 4, {})
    array = region.create(zarr.storage.LocalStore(folder), "x")
    for number in range(3):
        if number == 1:
            values[4:8, ..., 256:] = array.fill_value  # an object that is not there: its prompts were shorter
        for name, content in encoded(values[4 * number : 4 * number + 4], region, number).items():
            if not (number == 1 and name.endswith("/1")):
                path = folder / "x" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return folder / "x", region, array, values


KEYS = [
    (slice(None), slice(None), slice(None), slice(None), slice(None)),
    (slice(3, 9), 1, slice(1, 3), slice(None), 270),
    (slice(10, 11), slice(0, 3, 2), 3, slice(1, 2), slice(250, 260)),
    (slice(1, 11, 3), slice(None), slice(0, 4, 3), 0, slice(0, 300, 7)),
    (5, 2, 0, 1, slice(0, 0)),
]


@pytest.mark.parametrize("key", KEYS)
def test_it_is_what_zarr_reads(stored, key):
    folder, region, array, values = stored
    got = read_block(folder, region, key)
    np.testing.assert_array_equal(got, values[key])
    np.testing.assert_array_equal(got, array[key])
    assert got.dtype == values.dtype


@pytest.mark.parametrize("key", KEYS)
def test_what_an_earlier_version_wrote_is_read(key, tmp_path):
    """Its pieces held all segments, in the order in which Zarr itself writes them."""
    import zarr

    values = np.random.default_rng(1).standard_normal(SHAPE, dtype=np.float32)
    before = Region(DIMS, SHAPE, "float32", 4, {}, BEFORE)
    array = before.create(zarr.storage.LocalStore(tmp_path), "x")
    array[...] = values
    region = Region.stored(DIMS, SHAPE, "float32", 4, {}, array.chunks)
    assert region.alone == BEFORE
    np.testing.assert_array_equal(read_block(tmp_path / "x", region, key), values[key])
    with pytest.raises(ValueError, match="it is divided differently"):
        Region.stored(DIMS, SHAPE, "float32", 4, {}, (4, 1, 2, 2, 256))


def test_the_layers_of_a_segment_are_read_at_once(stored, monkeypatch):
    """They lie one after another; negative control: all segments of a layer do not."""
    folder, region, _, _ = stored
    counts = []
    real = region_reading._checked
    monkeypatch.setattr(region_reading, "_checked", lambda *given: counts.append(given[2]) or real(*given))
    every = slice(None)
    read_block(folder, region, (slice(0, 4), 1, every, 1, slice(0, 9)))
    assert counts == [1, 4]  # the index, and four layers
    counts.clear()
    read_block(folder, region, (slice(0, 4), 1, 2, every, slice(0, 9)))
    assert counts == [1, 1, 1]


def test_a_changed_byte_is_noticed_where_it_is_read(stored):
    folder, region, _, _ = stored
    path = next(p for p in sorted((folder / "c" / "2").rglob("*")) if p.is_file())
    content = path.read_bytes()
    try:
        path.write_bytes(
            bytes([content[0] ^ 1]) + content[1:]
        )  # in the piece of the first condition, segment and layer
        every = slice(None)
        with pytest.raises(ValueError, match="its checksum does not match"):
            read_block(folder, region, (every, 0, 0, every, every))
        read_block(folder, region, (every, 1, 0, every, every))
        read_block(folder, region, (slice(0, 8), 0, 0, every, every))
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 12])
def test_pieces_of_another_size_are_refused(stored, tmp_path, size):
    """A crafted index, with a checksum that is right."""
    folder, region, _, _ = stored
    content = (folder / "c/0/0/0/0/0").read_bytes()
    length = 16 * int(np.prod(region.pieces))
    index = np.frombuffer(content[-length - 4 : -4], "<u8").copy()
    index[1] = size
    check = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    crafted = tmp_path / "c/0/0/0/0/0"
    crafted.parent.mkdir(parents=True)
    crafted.write_bytes(content[: -length - 4] + index.tobytes() + check)
    with pytest.raises(ValueError, match="its index names pieces of another size"):
        read_block(tmp_path, region, (slice(0, 4), slice(None), slice(None), slice(None), slice(0, 256)))
