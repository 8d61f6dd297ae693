"""Results at an address, where nothing can be renamed: killed, written by two at once, or full."""

import errno
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.store.objects import Location, location_of
from tests.kills import Killed
from tests.results.small import (
    Ready,
    emptied,
    names,
    numbers,
    numbers_at,
    resumed,
    small_result,
)

AT = "memory://killed"
PLACE = f"{AT}/r.zarr"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder where chunks of a run at an address are kept; nothing is at the address."""
    monkeypatch.chdir(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return tmp_path


@contextmanager
def killed_in_memory(operation):
    """Die at an operation that changes something in the memory of fsspec, from 0."""
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
    for operation in count(step=17):
        before()
        with killed_in_memory(operation) as died:
            work()
        if not died:
            assert operation > 16, "the work changes nothing at this address"
            return
        yield operation


def test_a_run_that_is_killed(small_job, small_results, folder):
    """Nothing half-written is ever taken for a result, and the same call goes on, over what a kill has left too."""
    *chunks, older = small_results
    outcomes = set()

    def before():
        emptied(folder)
        MemoryFileSystem.store.clear()
        older.save(PLACE)

    def run():
        ma.run_job(small_job, PLACE, executor=Ready(chunks, []))

    for _ in each_kill_in_memory(before, run):
        outcomes.add(resumed(small_job, PLACE, chunks))
        assert names(folder) == []
    assert {None, numbers(older)} <= outcomes
    assert outcomes <= {None, numbers(ma.merge_results(chunks)), numbers(older)}


@pytest.mark.parametrize("path", ["r.zarr", PLACE])
def test_a_disk_that_fills_at_any_object(small_job, small_results, folder, monkeypatch, path):
    """It is said, what is kept is used, and what is of the older result is there, or said to be gone."""
    chunks = small_results[:2]
    write, left = Location.write, [10**6]
    run = partial(ma.run_job, small_job, path)

    def full(place, name, content):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(place, name, content)

    monkeypatch.setattr(Location, "write", full)
    run(executor=Ready(chunks, []))
    needed = 10**6 - left[0]
    assert needed > 8
    for room in range(1, needed, 29):
        emptied(folder)
        MemoryFileSystem.store.clear()
        left[0] = room
        with pytest.raises(OutputError, match="No space left on device"):
            run(executor=Ready(chunks, []))
        left[0] = 10**6
        assert resumed(small_job, path, chunks) is None


@pytest.mark.parametrize("ends", [False, True])
def test_two_runs_at_one_address(small_job, small_results, folder, monkeypatch, ends):
    """Each from a folder of its own, where no lock can tell: the one that began first stops, and mixes nothing in."""
    others = [small_result(0), small_result(1, 0.25)]
    for name in ("one", "two"):
        (folder / name).mkdir()
    check, began = Location.check_begun, []

    def meanwhile(place, mark):
        """Another run begins to send its result, or ends, before this one writes its root."""
        began.append(mark)
        if len(began) == 1:
            monkeypatch.chdir(folder / "two")
            if ends:
                ma.run_job(small_job, PLACE, executor=Ready(others, []))
            else:
                location_of(PLACE).begin()
            monkeypatch.chdir(folder / "one")
        check(place, mark)

    monkeypatch.setattr(Location, "check_begun", meanwhile)
    monkeypatch.chdir(folder / "one")
    with pytest.raises(
        OutputError, match=r"another run has begun to write to memory://killed/r\.zarr after"
    ):
        ma.run_job(small_job, PLACE, executor=Ready(small_results, []))
    assert numbers_at(PLACE) == (numbers(ma.merge_results(others)) if ends else None)
    monkeypatch.chdir(folder / "two")
    expected = numbers(ma.merge_results(others))
    assert numbers(ma.run_job(small_job, PLACE, executor=Ready(others, []))) == expected
    assert names(folder / "two") == []


def test_foreign_files_survive_deleting_an_unfinished_result(small_results, folder):
    small_results[0].save(PLACE)
    location_of(PLACE).begin()
    location_of(PLACE).write("v/v/c/0/0", b"half of it")
    small_results[1].save(PLACE)  # over what is left of a result

    location_of(PLACE).begin()
    location_of(PLACE).write("notes.txt", b"mine")
    with pytest.raises(OutputError, match=r"holds notes\.txt too, which mechattn did not write"):
        small_results[0].save(PLACE)
    assert location_of(PLACE).read("notes.txt") == b"mine"


def test_a_result_is_not_saved_where_it_is_read_from(small_results, folder, read_on_demand):
    """The old one would be deleted before it is read; a folder is replaced when the new one is complete."""
    small_results[0].save(PLACE)
    small_results[0].save("r.zarr")
    with pytest.raises(OutputError, match=r"still read from memory://.*save it to another address"):
        ma.load_result(PLACE).save(f"{PLACE.replace('://', ':///')}/")
    ma.load_result("r.zarr").save("r.zarr")
    assert numbers_at(PLACE) == numbers_at("r.zarr") == numbers(small_results[0])
