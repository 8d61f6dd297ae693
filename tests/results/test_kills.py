"""Killed at each file operation: the old one or the new one, whole, and the next call works and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mechattn as ma
from mechattn.errors import OptionError, OutputError
from mechattn.evaluation.answer_file import kept
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer
from mechattn.jobs.resumable_run import parts_folder
from mechattn.render.html_views import GENERATOR, save_page
from mechattn.results.arrays import digest
from mechattn.results.provenance import versions
from mechattn.store import pieces
from mechattn.store.atomic_writes import write_whole
from mechattn.store.objects import Store
from mechattn.store.result_bytes import packed
from mechattn.store.saving import merge_stored
from tests.kills import each_kill


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job(
        "toy:llama", prompts[:2], {"slash": ma.MeaninglessTokens(count=2)}, chunk=1, verify=False
    )


@pytest.fixture(scope="module", autouse=True)
def smallest_results():
    """What a result must hold to be read is asked elsewhere: here each array more is ten file operations more.

    So is what a run says of its size, for which the config of the model is read. Versions are looked up once, and files
    are flushed by one thread, as sixteen take longer to begin than so few files take.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.jobs.resumable_run.announced", lambda *given: None)
        patch.setattr("mechattn.results.provenance.versions", cache(versions))
        patch.setattr("mechattn.store.atomic_writes._AT_ONCE", 1)
        for check in ("check_provenance", "check_datasets"):
            patch.setattr(f"mechattn.store.zarr_checks.{check}", lambda *given: None)
        yield


def one(place):
    """A result of one prompt, as small as can be: each of its arrays is some ten file operations."""
    sequences = {"place": (("prompt",), np.array([place]), {"units": "index"})}
    about = {
        "model": {"name": "m"},
        "prompts": {"count": 1, "hash": f"{place:016x}"},
        "conditions": {},
        "analyses": {},
    }
    return ma.Result({"sequences": xr.Dataset(sequences, {"prompt": [str(place)]})}, about)


@pytest.fixture(scope="module")
def shards():
    return [one(place) for place in range(3)]


@pytest.fixture(scope="module")
def chunks(shards):
    return [packed(shard) for shard in shards]


@dataclass(frozen=True)
class Ready:
    """An executor that has computed the chunks before."""

    chunks: list
    asked: list

    def parts(self, job, chunks):
        self.asked.extend(chunks)
        for chunk in chunks:
            yield chunk, self.chunks[chunk]


def numbers(result):
    return digest(result.datasets)


def emptied(folder):
    """Threads of Zarr that a killed save has left may still be deleting, or writing, their last file meanwhile."""
    for _ in range(100):
        for path in list(folder.iterdir()):
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not names(folder):
            return
    raise AssertionError(f"{folder} cannot be emptied: {names(folder)}")


def copied(folder, to):
    """Everything in a folder in place of everything in another."""
    emptied(to)
    shutil.copytree(folder, to, dirs_exist_ok=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_save_over_an_older_result(shards, tmp_path):
    """The new one of a trial is the old one of the next."""
    path, (new, old) = tmp_path / "r.zarr", (turn := shards[:2])
    new.save(path)
    seen = set()
    for _ in each_kill(tmp_path, turn.reverse, lambda: turn[0].save(path)):
        new, old = map(numbers, turn)
        found = numbers(ma.load_result(path))
        assert found in (old, new)
        seen.add(found == new)
        turn[0].save(path)
        assert numbers(ma.load_result(path)) == new
        assert names(tmp_path) == ["r.zarr"]
    assert seen == {False, True}


def test_the_first_save(shards, tmp_path):
    name = "r.zarr"
    path = tmp_path / name
    for _ in each_kill(tmp_path, lambda: emptied(tmp_path), lambda: shards[0].save(path)):
        if path.exists():
            assert numbers(ma.load_result(path)) == numbers(shards[0])
        else:
            with pytest.raises(OutputError, match="there is no stored result"):
                ma.load_result(path)
        shards[0].save(path)
        assert names(tmp_path) == [name]


def between_the_renames(shards, folder):
    """Killed when the old result had been moved away, and the new one had not got its name."""
    path = folder / "r.zarr"
    shards[0].save(path)

    def before():
        for left in folder.iterdir():
            if left != path:
                shutil.rmtree(left)

    for _ in each_kill(folder, before, lambda: shards[1].save(path)):
        if not path.exists():
            return
    raise AssertionError("there is no such moment")


@pytest.fixture(scope="module")
def halfway(shards, tmp_path_factory):
    """What a folder looks like then."""
    folder = tmp_path_factory.mktemp("halfway")
    between_the_renames(shards, folder)
    return folder


def test_between_the_two_renames_the_new_one_is_found(shards, halfway, tmp_path, capsys):
    copied(halfway, tmp_path)
    assert not (tmp_path / "r.zarr").exists()
    (left,) = tmp_path.iterdir()
    assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(shards[1])
    assert (
        f"the result of {tmp_path / 'r.zarr'} was found complete in {left}"
        in capsys.readouterr().err
    )
    assert names(tmp_path) == ["r.zarr"]


def test_a_target_that_was_killed_halfway_is_seen(shards, halfway, tmp_path):
    """It is not there under its name, and it is not lost by a merge to which it does not belong."""
    copied(halfway, tmp_path)
    shards[2].save(tmp_path / "2.zarr")
    with pytest.raises(OptionError, match="exists and is not a merge of"):
        merge_stored(str(tmp_path / "r.zarr"), [str(tmp_path / "2.zarr")])
    assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(shards[1])


def test_killed_while_it_is_found(shards, halfway, tmp_path):
    for _ in each_kill(
        tmp_path, lambda: copied(halfway, tmp_path), lambda: ma.load_result(tmp_path / "r.zarr")
    ):
        assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(shards[1])
        shards[2].save(tmp_path / "r.zarr")
        assert names(tmp_path) == ["r.zarr"]


def test_where_it_cannot_be_put_back_it_is_named(halfway, tmp_path, monkeypatch):
    copied(halfway, tmp_path)
    (left,) = tmp_path.iterdir()

    def refuse(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(
        OutputError,
        match=f"was found complete in {left}.*Read-only file system.*rename .*new.zarr to ",
    ):
        ma.load_result(tmp_path / "r.zarr")


def test_what_a_living_process_is_writing_is_left_alone(shards, tmp_path):
    path = tmp_path / "r.zarr"

    def meanwhile(new):
        shards[1].save(path)  # sweeps what the dead have left
        assert new.parent.exists()
        new.mkdir()
        (new / "late").write_text("")

    write_whole(path, meanwhile)
    assert names(tmp_path) == ["r.zarr"]
    assert names(path) == ["late"]


def test_a_page(tmp_path):
    path, old, new = tmp_path / "p.html", f'{GENERATOR}">old', f'{GENERATOR}">new'

    def before():
        emptied(tmp_path)
        save_page(path, old)

    seen = set()
    for _ in each_kill(tmp_path, before, lambda: save_page(path, new)):
        assert path.read_text() in (old, new)
        seen.add(path.read_text())
        save_page(path, new)
        assert path.read_text() == new
        assert names(tmp_path) == ["p.html"]
    assert seen == {old, new}


def killed_at_each_operation(folder, job, shards, older, executor):
    """The older result, if there is one, or the new one; the same call then computes no kept chunk again."""
    path, expected = folder / "r.zarr", numbers(ma.merge_results(shards))
    before = partial(copied, older, folder) if older else partial(emptied, folder)
    for _ in each_kill(folder, before, lambda: ma.run_job(job, path, executor=executor([]))):
        found = numbers(ma.load_result(path)) if older or path.exists() else None
        assert found in (expected, numbers(shards[0]) if older else None)
        have = len(shards) if found == expected else len(list(parts_folder(path).glob("*-*.zip")))
        asked = []
        assert numbers(ma.run_job(job, path, executor=executor(asked))) == expected
        assert len(asked) == len(shards) - have
        assert numbers(ma.load_result(path)) == expected
        assert names(folder) == ["r.zarr"]


@pytest.mark.parametrize("older", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_in_chunks(job, chunks, shards, tmp_path, tmp_path_factory, older):
    """Beside an empty place, and over the result of another run; no chunk that was kept is computed again."""
    if older:
        older = tmp_path_factory.mktemp("older")
        shards[0].save(older / "r.zarr")
    killed_at_each_operation(tmp_path, job, shards[:2], older, lambda asked: Ready(chunks, asked))


def answers(count, condition="baseline"):
    return [
        GradedAnswer(str(i), condition, 0, "4", (5,), "4", "4", True, True, -0.5)
        for i in range(count)
    ]


def test_answers(tmp_path):
    path, every = tmp_path / "e.jsonl", answers(4)
    about = {"conditions": {"baseline": ""}, "seed": 0}

    def work():
        with kept(path, about) as file:
            for answer in every:
                if (answer.prompt, answer.condition, answer.sample) not in file.answers:
                    file.add([answer])

    had = []
    for _ in each_kill(tmp_path, lambda: emptied(tmp_path), work):
        if path.exists():
            found = ma.load_evaluation(path).answers
            assert list(found) == every[: len(found)]
            had.append(len(found))
        work()
        assert list(ma.load_evaluation(path).answers) == every
        assert names(tmp_path) == ["e.jsonl"]
    assert set(had) == {0, 1, 2, 3, 4}


def test_an_evaluation_saved_over_another(tmp_path):
    path = tmp_path / "e.jsonl"
    old, new = (Evaluation(tuple(answers(count)), {"seed": 0}) for count in (2, 3))

    def before():
        emptied(tmp_path)
        old.save(path)

    for _ in each_kill(tmp_path, before, lambda: new.save(path)):
        assert len(ma.load_evaluation(path).answers) in (2, 3)
        new.save(path)
        assert names(tmp_path) == ["e.jsonl"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_the_trial_finds_a_save_that_is_not_whole(shards, tmp_path):  # negative control
    path, (old, new, _) = tmp_path / "r.zarr", shards

    def before():
        emptied(tmp_path)
        old.save(path)

    def in_its_place():
        shutil.rmtree(path)
        pieces.copied(new, Store(path))

    bad = 0
    for _ in each_kill(tmp_path, before, in_its_place):
        try:
            bad += numbers(ma.load_result(path)) not in (numbers(old), numbers(new))
        except OutputError:
            bad += 1
    assert bad > 10


SIGKILL = """
import os, signal, sys
from itertools import count
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from mechattn.store.result_bytes import unpacked
from mechattn.store.result_bytes import packed
from mechattn.results.arrays import digest
from mechattn.store.reading import load_result
from mechattn.store.saving import save_result
from tests.kills import killed_at
from mechattn.store import zarr_checks

zarr_checks.check_provenance = zarr_checks.check_datasets = lambda *given: None
root = Path(sys.argv[1])
old, new = (unpacked((root / name).read_bytes()) for name in ("old", "new"))
path, wanted = root / "folder" / "r.zarr", {digest(old.datasets), digest(new.datasets)}
save_result(old, path)
for operation in count():
    child = os.fork()
    if not child:
        with killed_at(path.parent, operation, die=lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save_result(new, path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert digest(load_result(path).datasets) in wanted, operation
    old, new = new, old
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(operation, [p.name for p in path.parent.iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_with_a_real_sigkill(chunks, tmp_path):
    """Old and new change places each time, and nothing is put in order between the kills."""
    (tmp_path / "folder").mkdir()
    for name, chunk in zip(("old", "new"), chunks, strict=False):
        (tmp_path / name).write_bytes(chunk)
    command = [sys.executable, "-c", SIGKILL, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    operations, left = done.stdout.split(maxsplit=1)
    assert int(operations) > 30
    assert left.strip() == "['r.zarr']"
