"""A merge takes the place of an earlier merge of the same results, and of nothing else."""

import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.errors import OptionError
from mechattn.store.writing import merge_stored
from tests.conftest import run_part


@pytest.fixture(scope="module")
def made(toy, prompts, tmp_path_factory):
    """Three shards of a run, and one of a run with another seed."""
    folder = tmp_path_factory.mktemp("shards")
    for name, places, seed in (
        ("1", [0, 3], 0),
        ("2", [1, 4], 0),
        ("3", [2, 5], 0),
        ("other", [0, 3], 7),
    ):
        some = [prompts[place] for place in places]
        conditions = {"random": ma.conditions.RandomTokens(count=2)}
        result = run_part(toy, some, conditions, layers=0, seed=seed, places=places)
        result.save(folder / f"{name}.zarr")
    return folder


@pytest.fixture
def shards(made, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prompts_of(name):
    return ma.load_result(name)["sequences"].prompt.values.tolist()


@pytest.mark.parametrize("target", ["1.zarr", "other.zarr"])
def test_a_target_that_is_no_merge_of_them_stays(shards, target):
    """The target was forgotten, so the first shard stands in its place; or it is of another run."""
    before = ma.load_result(target).digest()
    done = CliRunner().invoke(app, ["merge", target, "2.zarr", "3.zarr"])
    assert isinstance(done.exception, OptionError)
    assert f"{target} exists and is not a merge of 2.zarr, 3.zarr" in str(done.exception)
    assert ma.load_result(target).digest() == before


@pytest.mark.parametrize("target", ["1.zarr", "./1.zarr", "../{folder}/1.zarr"])
def test_a_target_that_is_merged_itself(shards, target):
    target = target.format(folder=shards.name)
    with pytest.raises(OptionError, match="is both a result to merge and the target"):
        merge_stored(target, ["1.zarr", "2.zarr"])
    assert prompts_of("1.zarr") == ["0", "3"]


def test_an_address_that_is_merged_itself_under_another_spelling(shards):
    ma.load_result("1.zarr").save("memory://shards/one.zarr")
    for target in ("memory:///shards/one.zarr", "memory://shards/one.zarr/"):
        with pytest.raises(OptionError, match="is both a result to merge and the target"):
            merge_stored(target, ["memory://shards/one.zarr"])
    assert prompts_of("memory://shards/one.zarr") == ["0", "3"]


@pytest.mark.parametrize("target", ["all.zarr", "memory://shards/all.zarr"])
def test_an_earlier_merge_is_replaced(shards, target):  # negative control
    for places in (
        ["1.zarr"],
        ["1.zarr", "3.zarr"],
        ["3.zarr", "1.zarr"],
        ["2.zarr", "1.zarr", "3.zarr"],
    ):
        merge_stored(target, places)
    assert prompts_of(target) == [str(place) for place in range(6)]
    with pytest.raises(
        OptionError,
        match=r"exists and is not a merge of 1\.zarr, 3.zarr: its content would be lost",
    ):
        merge_stored(target, ["1.zarr", "3.zarr"])  # what it has of the second would be lost
    assert prompts_of(target) == [str(place) for place in range(6)]
