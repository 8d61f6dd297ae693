"""Power is lost at any moment: the old one or the new one, whole, and the same call goes on; nothing that ended is lost."""

from dataclasses import dataclass

import pytest

import mechattn as ma
from mechattn.errors import Interrupted, OutputError
from mechattn.render.html_views import GENERATOR, save_page
from mechattn.store import atomic_writes
from mechattn.store.result_bytes import packed
from tests.power import power_losses, write
from tests.results.test_kills import Ready, emptied, names, numbers, smallest_results  # noqa: F401
from tests.results.test_large_kills import shard


@pytest.fixture(scope="module")
def shards():
    return [shard(0), shard(1)]


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job(
        "toy:llama", prompts[:2], {"slash": ma.MeaninglessTokens(count=2)}, chunk=1, verify=False
    )


@pytest.fixture
def disk(tmp_path):
    """Where a run writes, and where what a loss of power leaves of it is put."""
    for name in ("now", "after"):
        (tmp_path / name).mkdir()
    return tmp_path / "now", tmp_path / "after"


def each_state(after, states):
    for state in states:
        emptied(after)
        write(state, after)
        yield


def found_at(path):
    """The numbers of what is stored; None where nothing is."""
    try:
        return numbers(ma.load_result(path))
    except OutputError as error:
        if "there is no stored result" not in str(error):
            raise
        return None


def test_a_result_saved_over_another(shards, disk):
    (now, after), name = disk, "r.zarr"
    old, new = map(numbers, shards)
    shards[0].save(now / name)
    seen = []
    for _ in each_state(after, power_losses(now, lambda: shards[1].save(now / name))):
        seen.append(found_at(after / name))
        assert set(names(after)) - {name} == set() or seen[-1] in (old, new)
    assert set(seen) == {old, new}
    assert seen[-2:] == [new, new]
    assert len(seen) > 5


def test_a_page_saved_over_another(disk):
    now, after = disk
    save_page(now / "p.html", f'{GENERATOR}">old')
    losses = power_losses(now, lambda: save_page(now / "p.html", f'{GENERATOR}">new'))
    seen = [(after / "p.html").read_text()[-3:] for _ in each_state(after, losses)]
    assert set(seen) == {"old", "new"}
    assert seen[-2:] == ["new", "new"]


@pytest.mark.parametrize("older", [False, True])
def test_a_large_run(job, shards, disk, older):
    """Over the result of another run, or none."""
    (now, after), expected = disk, numbers(ma.merge_results(shards))
    if older:
        shards[0].save(now / "r.zarr")
    losses = power_losses(
        now, lambda: ma.run_job(job, now / "r.zarr", executor=Ready([*map(packed, shards)], []))
    )
    seen = []
    for number, _ in enumerate(each_state(after, losses)):
        seen.append(found_at(after / "r.zarr"))
        if number % 6 == 0 or seen[-2:-1] != seen[-1:]:
            assert (
                numbers(
                    ma.run_job(job, after / "r.zarr", executor=Ready([*map(packed, shards)], []))
                )
                == expected
            )
            assert names(after) == ["r.zarr"]
    assert set(seen) == {expected, numbers(shards[0]) if older else None}
    assert seen[-2:] == [expected, expected]


def test_the_trial_finds_what_is_not_flushed(shards, disk, monkeypatch):  # negative control
    now, after = disk
    shards[0].save(now / "r.zarr")
    monkeypatch.setattr(atomic_writes, "flush", lambda paths: None)
    bad = 0
    for _ in each_state(after, power_losses(now, lambda: shards[1].save(now / "r.zarr"))):
        try:
            bad += found_at(after / "r.zarr") is None
        except OutputError:
            bad += 1
    assert bad


@dataclass(frozen=True)
class Stopping:
    """Another executor, interrupted after its first chunk."""

    of: object

    def parts(self, job, chunks):
        yield next(iter(self.of.parts(job, chunks)))
        raise KeyboardInterrupt


def empty(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def test_empty_files_of_an_interrupted_run(job, shards, tmp_path, capsys):
    """Such as other systems leave: the run begins again, as the chunks may be of another one."""
    path, expected = tmp_path / "r.zarr", numbers(ma.merge_results(shards))
    executor = Ready([packed(one) for one in shards], [])
    with pytest.raises(Interrupted):
        ma.run_job(job, path, executor=Stopping(executor))
    empty(tmp_path)
    assert numbers(ma.run_job(job, path, executor=executor)) == expected
    assert names(tmp_path) == ["r.zarr"]
    assert "job.json, which says to which run they belong, is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["r.zarr", "p.html"])
def test_empty_files_are_replaced(shards, tmp_path, name):
    """There is nothing to lose; a folder with anything else in it is left alone."""
    save = (lambda path: save_page(path, GENERATOR)) if name == "p.html" else shards[0].save
    save(tmp_path / name)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    empty(tmp_path)
    save(tmp_path / name)
    assert all(path.stat().st_size for path in content)
    if name == "r.zarr":
        empty(tmp_path)
        path, stored = next(
            (path, stored) for path, stored in content.items() if "/c/" in str(path)
        )
        path.write_bytes(stored)
        with pytest.raises(OutputError, match="exists and is not a stored result"):
            save(tmp_path / name)
