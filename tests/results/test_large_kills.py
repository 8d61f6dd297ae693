"""Large results that are killed, that two write at once, or that find the disk full: here, and at an address."""

import errno
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.jobs.resumable_run import parts_folder
from mechattn.store.objects import Store
from mechattn.store.pieces import copied
from mechattn.store.result_bytes import packed
from mechattn.store.saving import merge_stored
from tests.kills import Killed, each_kill, killed_at
from tests.results.test_kills import Ready, emptied, names, numbers, one, smallest_results  # noqa: F401
from tests.results.test_kills import copied as in_place_of

AT = "memory://killed"


@pytest.fixture(scope="module", autouse=True)
def read_on_demand():
    """However small a result is, its per-prompt values are read when they are needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.store.reading.SHARE", 2**60)
        yield


def shard(place, value=0.5):
    """A result of one prompt, with one array in a region."""
    made = one(place)
    values = (("prompt", "x"), np.full((1, 2), value * place), {"units": "1"})
    return replace(made, datasets={"sequences": made["sequences"].assign(v=values)})


@pytest.fixture(scope="module")
def shards():
    return [shard(0), shard(1)]


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job("toy:llama", prompts[:2], {"slash": ma.MeaninglessTokens(count=2)}, chunk=1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder where chunks of a run at an address are kept; nothing is at the address."""
    monkeypatch.chdir(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return tmp_path


@contextmanager
def killed_in_memory(operation):
    """Die at an operation that changes something in the memory of fsspec, from 0; of deleting many each counts."""
    left, died = [operation], []

    def dying(method):
        def call(*given, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return method(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "rm_file"):
            patch.setattr(MemoryFileSystem, name, dying(getattr(MemoryFileSystem, name)))
        try:
            yield died
        except Killed:
            died.append(operation)


def each_kill_in_memory(before, work):
    for operation in count():
        before()
        with killed_in_memory(operation) as died:
            work()
        if not died:
            assert operation > 10, "the work changes nothing at this address"
            return
        yield operation


def found_at(place):
    """The numbers of what is stored; None where nothing is, or nothing whole."""
    try:
        return numbers(ma.load_result(place))
    except OutputError as error:
        if not re.search("there is no stored result|is incomplete", str(error)):
            raise
        return None


@pytest.mark.parametrize("older", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_at_an_address(job, shards, here, older):
    """Nothing half-written is ever taken for a result, and the same call goes on, over what a kill has left too."""
    place, expected = f"{AT}/r.zarr", numbers(ma.merge_results(shards))
    old, seen = (
        replace(shards[0], datasets={n: d.copy() for n, d in shards[0].datasets.items()}),
        set(),
    )

    def before():
        emptied(here)
        MemoryFileSystem.store.clear()
        if older:
            copied(old, Store(place))

    for _ in each_kill_in_memory(
        before, lambda: ma.run_job(job, place, executor=Ready([*map(packed, shards)], []))
    ):
        seen.add(found := found_at(place))
        have = 2 if found == expected else len(list(parts_folder(place).glob("*-*.zip")))
        asked = []
        assert (
            numbers(ma.run_job(job, place, executor=Ready([*map(packed, shards)], asked)))
            == expected
        )
        assert len(asked) == 2 - have
        assert names(here) == []
    assert seen <= {None, expected, numbers(old)}
    assert None in seen
    assert (numbers(old) in seen) is older


@pytest.mark.slow
def test_a_run_in_half_the_room(job, shards, tmp_path):
    half, path = replace(job, values="float16"), tmp_path / "r.zarr"
    expected = numbers(ma.run_job(half, path, executor=Ready([*map(packed, shards)], [])))
    assert expected != numbers(ma.merge_results(shards))
    for _ in each_kill(
        tmp_path,
        lambda: emptied(tmp_path),
        lambda: ma.run_job(half, path, executor=Ready([*map(packed, shards)], [])),
    ):
        assert not path.exists() or numbers(ma.load_result(path)) == expected
        assert (
            numbers(ma.run_job(half, path, executor=Ready([*map(packed, shards)], []))) == expected
        )
        assert names(tmp_path) == ["r.zarr"]


@pytest.mark.slow
@pytest.mark.parametrize("copy", [False, True])
def test_a_merge(shards, tmp_path, copy):
    """One shard had been merged before; now it is two, by their names or copied."""
    shared, out = tmp_path / "s", tmp_path / "s" / "all"
    out.mkdir(parents=True)
    places = [str(out / f"{number}.zarr") for number in range(2)]
    if copy:
        places = [str(shared / f"{number}.zarr") for number in range(2)]
    expected = [numbers(shards[0]), numbers(ma.merge_results(shards))]
    for place, made in zip(places, shards):
        copied(made, Store(Path(place)))
    merge_stored(str(out / "all.zarr"), places[:1], copy)
    before = shutil.copytree(out, tmp_path / "before")
    for _ in each_kill(
        out,
        lambda: in_place_of(before, out),
        lambda: merge_stored(str(out / "all.zarr"), places, copy),
    ):
        assert numbers(ma.load_result(out / "all.zarr")) in expected
        merge_stored(str(out / "all.zarr"), places, copy)
        assert numbers(ma.load_result(out / "all.zarr")) == expected[1]
        assert names(out) == (["all.zarr"] if copy else ["0.zarr", "1.zarr", "all.zarr"])


@pytest.mark.parametrize("copy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_merge_at_an_address(shards, here, copy):
    """Here nothing can be renamed: killed, there is the older one or none, and the same command goes on."""
    places, out = [f"{AT}/{number}.zarr" for number in range(2)], f"{AT}/all.zarr"
    expected = [numbers(shards[0]), numbers(ma.merge_results(shards))]
    for place, made in zip(places, shards):
        copied(made, Store(place))

    def before():
        if Store(out).names():
            MemoryFileSystem().rm(out, recursive=True)
        merge_stored(out, places[:1], True)

    seen = set()
    for _ in each_kill_in_memory(before, lambda: merge_stored(out, places, copy)):
        seen.add(found_at(out))
        merge_stored(out, places, copy)
        assert numbers(ma.load_result(out)) == expected[1]
    assert seen == {None, expected[0]} | ({expected[1]} & seen)
    assert [numbers(ma.load_result(place)) for place in places] == [
        numbers(made) for made in shards
    ]


@pytest.mark.parametrize("place", ["r.zarr", f"{AT}/r.zarr"])
def test_a_disk_that_fills_at_any_object(job, shards, here, monkeypatch, place):
    """It is said, what is written is used, and what is of the older result is there, or said to be gone."""
    expected, put = (
        numbers(ma.merge_results(shards)),
        (MemoryFileSystem if "://" in place else Path),
    )
    name = "pipe_file" if "://" in place else "write_bytes"
    write = getattr(put, name)
    left = [10**6]

    def full(self, *given, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *given, **options)

    monkeypatch.setattr(put, name, full)
    ma.run_job(job, place, executor=Ready([*map(packed, shards)], []))
    needed = 10**6 - left[0]
    assert needed > 8
    for room in range(1, needed):
        emptied(here)
        MemoryFileSystem.store.clear()
        left[0] = room
        with pytest.raises(OutputError, match="No space left on device"):
            ma.run_job(job, place, executor=Ready([*map(packed, shards)], []))
        left[0] = 10**6
        assert found_at(place) in (None, expected)
        have = len(list(parts_folder(place).glob("*-*.zip"))) if parts_folder(place).exists() else 0
        asked = []
        assert (
            numbers(ma.run_job(job, place, executor=Ready([*map(packed, shards)], asked)))
            == expected
        )
        assert len(asked) == 2 - have


def test_a_disk_that_is_full_while_a_merge_is_copied(shards, tmp_path, monkeypatch):
    places = [str(tmp_path / f"{number}.zarr") for number in range(2)]
    for place, made in zip(places, shards):
        copied(made, Store(Path(place)))
    merge_stored(str(tmp_path / "all.zarr"), places[:1], True)
    write, left = Path.write_bytes, [4]

    def full(self, content):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left on device"):
        merge_stored(str(tmp_path / "all.zarr"), places, True)
    monkeypatch.undo()
    assert numbers(ma.load_result(tmp_path / "all.zarr")) == numbers(shards[0])
    assert names(tmp_path) == ["0.zarr", "1.zarr", "all.zarr"]


@pytest.mark.parametrize("call", ["run", "merge", "copy"])
def test_files_of_somebody_at_an_address(job, shards, here, call):
    places = [f"{AT}/{number}.zarr" for number in range(2)]
    for place, made in zip(places, shards):
        copied(made, Store(place))
    out = f"{AT}/r.zarr"
    merge_stored(out, places[:1], True)
    Store(out).put("sequences/notes.txt", b"mine")
    before = {name: Store(out).get(name) for name in Store(out).names()}
    with pytest.raises(
        OutputError, match=r"holds sequences/notes\.txt too, which mechattn did not write"
    ):
        ma.run_job(
            job, out, executor=Ready([*map(packed, shards)], [])
        ) if call == "run" else merge_stored(out, places, call == "copy")
    assert {name: Store(out).get(name) for name in Store(out).names()} == before


@pytest.mark.parametrize("ends", [False, True])
def test_two_runs_at_one_address(job, shards, here, monkeypatch, ends):
    """Each from a folder of its own, where no lock can tell: the one that began first stops, and mixes nothing in."""
    place, others = f"{AT}/r.zarr", [shard(0), shard(1, 0.25)]
    for name in ("one", "two"):
        (here / name).mkdir()
    check, began = Store.check_begun, []

    def meanwhile(store, who):
        """Another run begins to send its result, or ends, before this one writes its root."""
        began.append(who)
        if len(began) == 1:
            monkeypatch.chdir(here / "two")
            if ends:
                ma.run_job(job, place, executor=Ready([*map(packed, others)], []))
            else:
                Store(place).begin()
            monkeypatch.chdir(here / "one")
        check(store, who)

    monkeypatch.setattr(Store, "check_begun", meanwhile)
    monkeypatch.chdir(here / "one")
    with pytest.raises(
        OutputError, match=r"another run has begun to write to memory://killed/r\.zarr after"
    ):
        ma.run_job(job, place, executor=Ready([*map(packed, shards)], []))
    assert found_at(place) == (numbers(ma.merge_results(others)) if ends else None)
    monkeypatch.chdir(here / "two")
    assert numbers(ma.run_job(job, place, executor=Ready([*map(packed, others)], []))) == numbers(
        ma.merge_results(others)
    )
    assert names(here / "two") == []


def test_two_runs_of_one_folder(job, shards, tmp_path):
    class Meanwhile(Ready):
        def parts(self, job, chunks):
            with pytest.raises(OutputError, match="another process is computing this result"):
                ma.run_job(job, tmp_path / "r.zarr", executor=Ready(self.chunks, []))
            yield from super().parts(job, chunks)

    made = ma.run_job(job, tmp_path / "r.zarr", executor=Meanwhile([*map(packed, shards)], []))
    assert numbers(made) == numbers(ma.merge_results(shards))


def test_a_finished_run_changes_nothing(job, shards, tmp_path):
    """So that it can be used where nothing can be written."""
    path, executor = tmp_path / "r.zarr", Ready([*map(packed, shards)], [])
    made = numbers(ma.run_job(job, path, executor=executor))
    with killed_at(tmp_path, 0) as died:
        assert numbers(ma.run_job(job, path, executor=executor)) == made
    assert not died
    with killed_at(tmp_path, 0) as died:  # negative control
        ma.run_job(job, path, executor=executor, fresh=True)
    assert died
