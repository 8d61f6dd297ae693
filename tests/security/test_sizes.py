"""A result takes the memory that its files take, whatever it declares; what is no plain file is not opened."""

import json
import os
import re
import socket
import tracemalloc

import pytest
import zarr

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.store.objects import checksum, digest_of


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


def listed(folder, *names):
    """List objects that an attacker has changed, with the right checksums and seal."""
    root = folder / "zarr.json"
    about = json.loads(root.read_text())
    attrs = about["attributes"]
    for name in names:
        if (folder / name).exists():
            attrs["objects"][name] = checksum((folder / name).read_bytes())
        else:
            del attrs["objects"][name]
    root.write_text(
        json.dumps(
            about
            | {"attributes": attrs | {"digest": digest_of(attrs["provenance"], attrs["objects"])}}
        )
    )


def declare(folder, name, **changes):
    path = folder / name / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    listed(folder, f"{name}/zarr.json")


def constant(folder):
    """An array of which nothing is stored: 6 GB of zeros."""
    zarr.open_group(folder, mode="r+")["sequences"].create_array(
        "zeros", shape=(1_600_000_000,), chunks=(1_600_000_000,), dtype="f4", dimension_names=["k"],
        compressors=None,
    )  # fmt: skip
    listed(folder, "sequences/zeros/zarr.json")


def longer(folder):
    """A stored array that says it is longer."""
    about = json.loads((folder / "sequences/place/zarr.json").read_text())
    grid = {"name": "regular", "configuration": {"chunk_shape": [10**9]}}
    assert about["shape"] == [3]
    declare(folder, "sequences/place", shape=[10**9], chunk_grid=grid)


def many(folder):
    """More chunks than anybody makes."""
    name = "received_attention/received_by_segment"
    about = json.loads((folder / name / "zarr.json").read_text())
    declare(folder, name, shape=[10**15, *about["shape"][1:]])


def texts(folder):
    """An object that says it holds four thousand million texts: numpy would take 32 GB for them."""
    name = "sequences/prompt/c/0"
    (folder / name).write_bytes(b"\xff\xff\xff\xff" + (folder / name).read_bytes()[4:])
    listed(folder, name)


def chunk_of(folder):
    """A file of a stored array."""
    return next(p for p in (folder / "received_attention/received/c").rglob("*") if p.is_file())


def cut(folder):
    """An object with half of its bytes, and the right checksum."""
    path = chunk_of(folder)
    path.write_bytes(path.read_bytes()[:1000])
    listed(folder, path.relative_to(folder).as_posix())


def lost(folder):
    """An object that is neither there nor listed, and would read as NaN."""
    path = chunk_of(folder)
    path.unlink()
    listed(folder, path.relative_to(folder).as_posix())


@pytest.mark.parametrize("attack", [constant, longer, many, texts, cut, lost])
def test_what_is_declared_is_there(stored, attack, monkeypatch):
    attack(stored)
    monkeypatch.setattr("xarray.open_datatree", None)  # refused before Zarr sees it
    words, used = peak(stored)
    assert re.search("is damaged|is not in the format", words), words
    assert used < 16


@pytest.mark.parametrize("attack", [constant, texts, lost])
def test_without_the_check_it_is_read(stored, attack, monkeypatch):  # negative control
    """Zarr would take the memory (here the check that refuses it is what fails), or read NaN."""
    attack(stored)

    def opened(*given, **options):
        raise OutputError("stop")

    monkeypatch.setattr("mechattn.store.reading._check_objects", lambda *given: None)
    monkeypatch.setattr("xarray.open_datatree", opened)
    with pytest.raises(OutputError, match="stop"):
        ma.load_result(stored)


def test_listing_again_is_no_attack(stored):  # negative control
    listed(stored, "sequences/zarr.json", "sequences/prompt/c/0")
    assert ma.load_result(stored).conditions == ["baseline", "slash"]


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))  # the name of a socket is short


def link_to_secret(path):
    target = path.parent.parent / "target"
    target.write_bytes(b"secret")
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("where", "make"),
    [
        ("chunk", os.mkfifo),
        ("chunk", lambda path: path.symlink_to("/dev/zero")),
        ("metadata", link_to_secret),
        ("metadata", socket_at),
        ("beside", lambda path: path.symlink_to(path.parents[2])),
    ],
)
def test_pipes_sockets_devices_and_links_in_a_result(stored, where, make, monkeypatch):
    monkeypatch.chdir(stored)
    path = {
        "chunk": chunk_of(stored),
        "metadata": stored / "sequences/zarr.json",
        "beside": stored / "sequences/notes",
    }[where]
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(
        OutputError,
        match="is not a plain file, but a stored result contains only plain files",
    ):
        ma.load_result(stored)


@pytest.mark.parametrize("folder", ["", "sequences"])
def test_what_a_file_manager_leaves_behind_hinders_nobody(stored, folder):
    before = ma.load_result(stored)
    (stored / folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    result = ma.load_result(stored)
    assert result.digest() == before.digest()
    result.save(stored)
    assert not (stored / folder / ".DS_Store").exists()


def test_a_file_that_is_not_listed(stored):
    (stored / "notes.txt").write_text("somebody's own")
    with pytest.raises(OutputError, match=r"holds notes\.txt too, which mechattn did not write"):
        ma.load_result(stored)
