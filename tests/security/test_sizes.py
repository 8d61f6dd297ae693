"""What a result unpacks to is known before anything is unpacked; what is no plain file is not opened."""

import json
import os
import socket
import tracemalloc

import numpy as np
import pytest
import zarr
from numcodecs.zstd import Zstd

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.store.files import files_at, files_in
from mechattn.store.unpacked_size import ALWAYS, BYTES, TIMES, Size
from mechattn.store.zarr_folder import check_folder, frame_size


def peak(place):
    """What loading a result says, and the most memory that numpy and Python took for it, in MiB."""
    tracemalloc.start()
    try:
        words = repr(ma.load_result(place))
    except OutputError as error:
        words = str(error)
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return words, used / 2**20


def constant(folder, length=1_600_000_000):
    """An array of which nothing is stored: 6 GB of zeros."""
    zarr.open_group(folder, mode="r+")["sequences"].create_array(
        "zeros", shape=(length,), chunks=(length,), dtype="f4", dimension_names=["k"]
    )


def packed(folder, length=2**25):
    """A chunk that unpacks to 256 MiB, and is stored in some kilobytes."""
    made = zarr.open_group(folder, mode="r+")["sequences"].create_array(
        "ones", shape=(length,), chunks=(length,), dtype="f8", dimension_names=["k"]
    )
    made[:] = 1.0


@pytest.mark.parametrize("bomb", [constant, packed])
def test_a_bomb_is_refused_before_memory_is_taken(stored, bomb):
    bomb(stored)
    words, used = peak(stored)
    assert "a machine. If you trust its source: load_result(…, most=" in words
    assert used < 64


def test_an_honest_result_takes_what_it_holds(stored, small):  # negative control of the figure above
    packed(stored, 2**24)  # 128 MiB, which are allowed; the digest then says that it was changed
    words, used = peak(stored)
    assert "is damaged" in words
    assert used < 64, "layout is compared before anything is read"


def test_the_limit_is_256_mib_or_a_thousand_times_and_can_be_raised():
    files = sum(BYTES[kind] for kind in ("float32", "int64"))
    assert files == 12
    for stored, most, needed, fits in (
        (10, None, ALWAYS, True),
        (10, None, ALWAYS + 1, False),
        (ALWAYS, None, TIMES * ALWAYS, True),
        (ALWAYS, None, TIMES * ALWAYS + 1, False),
        (10, ALWAYS + 1, ALWAYS + 1, True),
        (10, 5, 6, False),
    ):
        size = Size("here", stored, most)
        size.variables |= {"x": needed - 1, "y": 1}
        if fits:
            size.check()
        else:
            with pytest.raises(OutputError, match=f"most={needed}"):
                size.check()


def test_most_is_what_a_result_may_take(stored):
    needed = Size("here", 0)
    check_folder(files_in(stored), needed)
    total = sum(needed.variables.values())
    assert ma.load_result(stored, most=total).conditions == ["baseline", "slash"]
    with pytest.raises(OutputError, match=f"most={total}"):
        ma.load_result(stored, most=total - 1)


@pytest.mark.parametrize("name", ["received_attention/received", "sequences/first_prompt_text"])
def test_a_chunk_that_unpacks_to_another_size(stored, name, monkeypatch):
    """The array is small, as is the file; only the chunk's own header says what would be allocated."""
    path = next(p for p in (stored / name / "c").rglob("*") if p.is_file())
    path.write_bytes(Zstd().encode(np.zeros(ALWAYS + 4, np.uint8)))
    assert path.stat().st_size < 2**16
    monkeypatch.setattr("xarray.open_datatree", None)
    with pytest.raises(OutputError, match=r"does not have the size that it declares|would take 2\d\d MiB"):
        ma.load_result(stored)


def test_more_chunks_than_anybody_makes(stored):
    path = stored / "received_attention" / "received" / "zarr.json"
    about = json.loads(path.read_text())
    about["chunk_grid"]["configuration"]["chunk_shape"] = [1] * len(about["shape"])
    about["shape"][0] = 10**6
    path.write_text(json.dumps(about))
    with pytest.raises(OutputError, match=r"it declares [\d,]+ chunks"):
        ma.load_result(stored)


@pytest.mark.parametrize("size", [1, 255, 256, 65_535, 65_791, 65_792, 2**20, 2**24 + 7])
def test_the_size_of_a_frame_is_what_it_unpacks_to(size):
    content = np.random.default_rng(size).integers(0, 4, size, dtype=np.uint8)
    frame = Zstd().encode(content)
    assert frame_size(frame[:18]) == len(Zstd().decode(frame)) == size


def test_what_is_no_frame_has_no_size():
    frame = Zstd().encode(np.zeros(1000, np.uint8))
    unknown = frame[:4] + b"\x00" + frame[5:]  # the flags of a frame that doesn't say its size
    for header in (b"", b"\x1f\x8b" + bytes(16), frame[:5], unknown[:18]):
        assert frame_size(header) is None


@pytest.fixture(params=["pipe", "socket", "link to a file", "link to a folder", "link to nothing", "device"])
def odd(request, tmp_path):
    """Makes a path something else than a plain file."""

    def make(path):
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(os.path.relpath(path))
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            target = tmp_path / "target"
            if request.param == "link to a file":
                target.write_bytes(b"secret")
            elif request.param == "link to a folder":
                target.mkdir()
            path.symlink_to(target)

    return make


@pytest.mark.parametrize("where", ["chunk", "metadata", "beside"])
def test_pipes_sockets_devices_and_links_in_a_result(stored, odd, where, monkeypatch):
    monkeypatch.chdir(stored)  # the name of a socket is short
    chunk = next(p for p in (stored / "received_attention/received/c").rglob("*") if p.is_file())
    path = {"chunk": chunk, "metadata": stored / "sequences/zarr.json", "beside": stored / "sequences/notes"}[where]
    path.unlink(missing_ok=True)
    odd(path)
    with pytest.raises(
        OutputError, match=r"is a (link|named pipe|socket), but a stored result contains only plain files"
    ):
        ma.load_result(stored)


def test_a_result_that_is_a_link_itself_and_notes_within(stored, tmp_path):  # negative control
    (stored / "notes.txt").write_text("somebody's own")
    (tmp_path / "link.zarr").symlink_to(stored)
    assert ma.load_result(tmp_path / "link.zarr").conditions == ["baseline", "slash"]


def test_at_an_address_as_well(small):
    from fsspec import filesystem

    small.save("memory://security/r.zarr")
    files = files_at("memory://security/r.zarr")
    assert "sequences/zarr.json" in files.sizes
    assert ma.load_result("memory://security/r.zarr").conditions == ["baseline", "slash"]
    name = next(name for name in files.sizes if name.startswith("received_attention/received/c"))
    filesystem("memory").pipe_file(f"/security/r.zarr/{name}", Zstd().encode(np.zeros(2**20, np.uint8)))
    with pytest.raises(OutputError, match="does not have the size that it declares"):
        ma.load_result("memory://security/r.zarr")


def test_names_with_control_characters(stored, small, tmp_path):
    (stored / "sequences" / "\x1b[31m").mkdir()
    (stored / "sequences" / "\x1b[31m" / "x").write_text("")
    with pytest.raises(OutputError, match=r"called .*\\x1b\[31m"):
        ma.load_result(stored)


def test_a_pipe_in_the_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "r.zarr")
    with pytest.raises(OutputError, match="there is no stored result"):
        ma.load_result(tmp_path / "r.zarr")
