"""Results as small as can be, of one prompt each, and an executor that has computed them before."""

import shutil
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xarray as xr

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.jobs.resumable_run import chunks_folder


def small_result(place, value=0.5):
    """A result of one prompt with one array; each array more is ten file operations more."""
    sequences = {"place": (("prompt",), np.array([place]), {"units": "index"})}
    values = {"v": (("prompt", "x"), np.full((1, 2), value + place), {"units": "1"})}
    coords = {"prompt": [str(place)]}
    about = {
        "model": {"name": "m"},
        "prompts": {"count": 1, "hash": f"{place:016x}"},
        "conditions": {},
        "analyses": {},
    }
    datasets = {"v": xr.Dataset(values, coords), "sequences": xr.Dataset(sequences, coords)}
    return ma.Result(datasets, about)


@dataclass(frozen=True)
class Ready:
    """An executor that has computed the chunks before, and notes those that it is asked for."""

    results: list
    asked: list

    def parts(self, job, chunks):
        self.asked.extend(chunks)
        for chunk in chunks:
            yield chunk, self.results[chunk]


def numbers(result):
    return result.digest()


def numbers_at(path):
    """The numbers of what is stored; None where nothing is, or nothing whole."""
    try:
        return numbers(ma.load_result(path))
    except OutputError as error:
        if "there is no stored result" not in str(error) and "is incomplete" not in str(error):
            raise
        return None


def resumed(job, path, chunks):
    """What is stored before the same call goes on, which computes no kept chunk again."""
    expected, stored = numbers(ma.merge_results(chunks)), numbers_at(path)
    kept = len(chunks)
    if stored != expected:
        kept = len(list(chunks_folder(path).glob("[0-9]*.zarr")))
    executor = Ready(chunks, [])
    assert numbers(ma.run_job(job, path, executor=executor)) == expected
    assert len(executor.asked) == len(chunks) - kept
    return stored


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def emptied(folder):
    """Threads of Zarr that a killed save has left may still be writing their last file meanwhile."""
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
