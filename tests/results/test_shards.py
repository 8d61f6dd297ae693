"""A merge takes the place of an earlier merge of the same results, and of nothing else."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.errors import OptionError
from mechattn.store.writing import merge_stored


@pytest.fixture(scope="module")
def shards(small_results, tmp_path_factory):
    """A folder with three shards of a run, and one of a run with another seed; the tests run in it."""
    folder = tmp_path_factory.mktemp("shards")
    first = small_results[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, shard in enumerate(small_results):
            shard.save(f"{number}.zarr")
        replace(first, provenance={**first.provenance, "seed": 7}).save("other.zarr")
        yield folder


def prompts_of(name):
    return ma.load_result(name)["sequences"].prompt.values.tolist()


def test_a_target_that_is_no_merge_of_them_stays(shards):
    """The target was forgotten, so the first shard stands in its place; or it is of another run."""
    for target in ("0.zarr", "other.zarr"):
        before = ma.load_result(target).digest()
        done = CliRunner().invoke(app, ["merge", target, "1.zarr", "2.zarr"])
        assert isinstance(done.exception, OptionError)
        assert f"{target} exists and is not a merge of 1.zarr, 2.zarr" in str(done.exception)
        assert ma.load_result(target).digest() == before


def test_a_target_that_is_merged_itself_under_any_spelling(shards):
    address = "memory://shards/one.zarr"
    ma.load_result("0.zarr").save(address)
    spellings = {
        "0.zarr": ["0.zarr", "./0.zarr", f"../{shards.name}/0.zarr"],
        address: ["memory:///shards/one.zarr", f"{address}/"],
    }
    for source, targets in spellings.items():
        for target in targets:
            with pytest.raises(OptionError, match="is both a result to merge and the target"):
                merge_stored(target, [source, "1.zarr"])
        assert prompts_of(source) == ["0"]


@pytest.mark.parametrize("target", ["all.zarr", "memory://shards/all.zarr"])
def test_an_earlier_merge_is_replaced(shards, target):  # negative control
    merge_stored(target, ["2.zarr", "0.zarr"])
    merge_stored(target, ["1.zarr", "0.zarr", "2.zarr"])
    assert prompts_of(target) == [str(place) for place in range(3)]
    with pytest.raises(
        OptionError,
        match=r"exists and is not a merge of 0\.zarr, 2.zarr: its content would be lost",
    ):
        merge_stored(target, ["0.zarr", "2.zarr"])  # what it has of the second would be lost
    assert prompts_of(target) == [str(place) for place in range(3)]
