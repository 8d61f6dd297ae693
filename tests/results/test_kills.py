"""Killed at every fifth file operation: the old one or the new one, whole, and the next call works and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.evaluation.answer_file import kept_answers
from mechattn.store.atomic_writes import delete_leftovers, write_whole
from mechattn.store.objects import Location
from mechattn.store.writing import write_objects, write_root
from tests.evaluation import by_hand
from tests.kills import each_kill, each_operation, killed_at
from tests.results.small import Ready, copied, emptied, names, numbers, numbers_at, resumed


def test_save_over_an_older_result(small_results, tmp_path):
    """The new one of a trial is the old one of the next."""
    path, turn = tmp_path / "r.zarr", small_results[:2]
    turn[0].save(path)
    outcomes = set()
    for _ in each_kill(tmp_path, turn.reverse, lambda: turn[0].save(path), step=23):
        new, old = map(numbers, turn)
        stored = numbers_at(path)
        assert stored in (old, new)
        outcomes.add(stored == new)
        turn[0].save(path)
        assert numbers_at(path) == new
        assert names(tmp_path) == ["r.zarr"]
    assert outcomes == {False, True}


@pytest.fixture(scope="module")
def halfway(small_results, tmp_path_factory):
    """A folder as it is when the old result has been moved away, and the new one has not got its name."""
    folder = tmp_path_factory.mktemp("halfway")
    path = folder / "r.zarr"
    small_results[0].save(path)
    moved_away = []
    with each_operation(folder, lambda: moved_away.append(not path.exists())):
        small_results[0].save(path)
    with killed_at(folder, moved_away.index(True)):
        small_results[1].save(path)
    assert not path.exists()
    return folder


def test_between_the_two_renames_the_new_one_is_found(small_results, halfway, tmp_path, capsys):
    copied(halfway, tmp_path)
    (left,) = tmp_path.iterdir()
    assert numbers_at(tmp_path / "r.zarr") == numbers(small_results[1])
    words = f"the result of {tmp_path / 'r.zarr'} was found complete in {left}"
    assert words in capsys.readouterr().err
    assert names(tmp_path) == ["r.zarr"]


def test_the_result_is_found_if_deleting_failed(small_results, halfway, tmp_path, monkeypatch):
    copied(halfway, tmp_path)
    monkeypatch.setattr(shutil, "rmtree", os.rmdir)  # which deletes empty folders only
    assert numbers_at(tmp_path / "r.zarr") == numbers(small_results[1])


def test_killed_while_it_is_found(small_results, halfway, tmp_path):
    path = tmp_path / "r.zarr"

    def before():
        copied(halfway, tmp_path)

    for _ in each_kill(tmp_path, before, lambda: ma.load_result(path), step=3):
        assert numbers_at(path) == numbers(small_results[1])
        delete_leftovers(path)  # as the next save does
        assert names(tmp_path) == ["r.zarr"]


def test_what_a_living_process_is_writing_is_left_alone(small_results, tmp_path):
    path = tmp_path / "r.zarr"

    def meanwhile(new):
        small_results[1].save(path)  # sweeps what the dead have left
        assert new.parent.exists()
        new.mkdir()
        (new / "late").write_text("")

    write_whole(path, meanwhile)
    assert names(tmp_path) == ["r.zarr"]
    assert names(path) == ["late"]


def test_a_new_folder_that_another_process_sweeps_away(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"

    def swept(**options):
        monkeypatch.undo()
        folder = tempfile.mkdtemp(**options)
        delete_leftovers(path)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    write_whole(path, Path.touch)
    assert names(tmp_path) == ["a.txt"]


def test_a_run_in_chunks_over_another_result(small_job, small_results, tmp_path, tmp_path_factory):
    """The older result or the new one is there, and the same call computes no kept chunk again."""
    older = tmp_path_factory.mktemp("older")
    *chunks, third = small_results
    third.save(older / "r.zarr")
    path, expected = tmp_path / "r.zarr", numbers(ma.merge_results(chunks))

    def run():
        ma.run_job(small_job, path, executor=Ready(chunks, []))

    for _ in each_kill(tmp_path, lambda: copied(older, tmp_path), run, step=151):
        assert resumed(small_job, path, chunks) in (expected, numbers(third))
        assert numbers_at(path) == expected
        assert names(tmp_path) == ["r.zarr"]


def test_answers(tmp_path):
    path = tmp_path / "e.jsonl"
    every = [by_hand.answer(number) for number in range(4)]
    about = {"conditions": {"baseline": ""}, "seed": 0}

    def work():
        with kept_answers(path, about) as file:
            for answer in every:
                if (answer.prompt, answer.condition, answer.sample) not in file.answers:
                    file.add(answer)

    had = []
    for _ in each_kill(tmp_path, lambda: emptied(tmp_path), work):
        if path.exists():
            stored = ma.load_evaluation(path).answers
            assert list(stored) == every[: len(stored)]
            had.append(len(stored))
        work()
        assert list(ma.load_evaluation(path).answers) == every
        assert names(tmp_path) == ["e.jsonl"]
    assert set(had) == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_the_trial_finds_a_save_that_is_not_whole(small_results, tmp_path):  # negative control
    path, (old, new, _) = tmp_path / "r.zarr", small_results

    def before():
        emptied(tmp_path)
        old.save(path)

    def in_its_place():
        shutil.rmtree(path)
        write_root(new, write_objects(new, Location(str(path))))

    bad = 0
    for _ in each_kill(tmp_path, before, in_its_place, step=11):
        try:
            bad += numbers_at(path) not in (numbers(old), numbers(new))
        except OutputError:
            bad += 1
    assert bad > 0


def test_a_finished_run_is_done_and_changes_nothing(small_job, small_results, tmp_path, capsys):
    """So that it can be used where nothing can be written."""
    path = tmp_path / "r.zarr"
    executor = Ready(small_results, [])
    first = numbers(ma.run_job(small_job, path, executor=executor))
    executor.asked.clear()
    with killed_at(tmp_path, 0) as died:
        assert numbers(ma.run_job(small_job, path, executor=executor)) == first
    assert (died, executor.asked) == ([], [])
    assert "r.zarr already holds the result of this run" in capsys.readouterr().err
    with killed_at(tmp_path, 0) as died:  # negative control
        ma.run_job(small_job, path, executor=executor, fresh=True)
    assert died


def test_two_runs_of_one_folder(small_job, small_results, tmp_path):
    class Meanwhile(Ready):
        def parts(self, job, chunks):
            with pytest.raises(OutputError, match="another process is computing this result"):
                ma.run_job(job, tmp_path / "r.zarr", executor=Ready(self.results, []))
            yield from super().parts(job, chunks)

    result = ma.run_job(small_job, tmp_path / "r.zarr", executor=Meanwhile(small_results, []))
    assert numbers(result) == numbers(ma.merge_results(small_results[:2]))


def test_chunks_that_cannot_be_locked(small_job, tmp_path):
    (tmp_path / "r.zarr.parts" / "lock").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"finished chunks cannot be kept in .*IsADirectoryError"):
        ma.run_job(small_job, tmp_path / "r.zarr")


SIGKILL = """
import os, signal, sys
from itertools import count
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from mechattn.store import reading, writing
from mechattn.store.writing import save_result
from tests.kills import killed_at
from tests.results.small import numbers, numbers_at, small_result

reading.problem_of = writing.problem_of = lambda *given: None
old, new = small_result(0), small_result(1)
path, wanted = Path(sys.argv[1]) / "r.zarr", {numbers(old), numbers(new)}
for operation in count(step=5):
    child = os.fork()
    if not child:
        with killed_at(path.parent, operation, die=lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save_result(new, path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert numbers_at(path) in wanted | {None}, operation
    old, new = new, old
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(operation, [p.name for p in path.parent.iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_with_a_real_sigkill(tmp_path):
    """Old and new change places each time, and nothing is put in order between the kills."""
    command = [sys.executable, "-c", SIGKILL, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    operations, left = done.stdout.split(maxsplit=1)
    assert int(operations) > 30
    assert left.strip() == "['r.zarr']"
