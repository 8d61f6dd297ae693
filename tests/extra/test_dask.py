"""A large result in dask: its blocks can be the store's regions, and give the numbers that are read without dask.

`make test-extra` puts dask on the path, which nothing else needs; without it this file fails.
"""

import dask
import dask.array
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.results.merge import merge_results
from mechattn.store.objects import Listing
from tests.conftest import run_part

pytestmark = pytest.mark.usefixtures("read_on_demand")


@pytest.fixture(scope="module")
def small(toy, prompts):
    return ma.run(toy, prompts[:7], {"slash": ma.MeaninglessTokens(count=5)}, layers=[0])


@pytest.fixture(scope="module")
def large(small, tmp_path_factory):
    about = {**small.provenance, "chunk": 3}
    place = tmp_path_factory.mktemp("dask") / "r.zarr"
    ma.Result(small.datasets, about).save(place)
    return ma.load_result(place)


@pytest.mark.parametrize(
    "name", ["received_by_segment", "mass_by_segment", "received_by_segment_uniform"]
)
def test_blocks_are_the_regions_and_the_numbers_are_the_same(small, large, name):
    expected = small["received_attention"][name]
    cut = large["received_attention"][name].chunk(prompt=large.provenance["chunk"])
    assert isinstance(cut.data, dask.array.Array)
    assert cut.chunks[0] == (3, 3, 1)
    assert cut.chunks[1:] == tuple((size,) for size in expected.shape[1:])
    with dask.config.set(scheduler="threads", num_workers=4):
        assert_array_equal(cut.compute(), expected)
        means = (cut.mean("prompt") / cut.isel(condition=0).mean("prompt")).compute()
    wanted = expected.values.astype(np.float64).mean(0)
    assert_allclose(means, wanted / wanted[0], rtol=1e-5)


def test_nothing_is_read_before_it_is_computed(large, monkeypatch):
    names, read = [], Listing.read
    monkeypatch.setattr(
        Listing, "read", lambda listing, name: names.append(name) or read(listing, name)
    )
    mean = large["received_attention"].chunk(prompt=3).received_by_segment.mean("prompt")
    assert names == []
    mean.compute()
    assert len(names) == 3, "one for each block of prompts"


def test_a_merge_of_results_in_any_order(toy, prompts, small, tmp_path):
    """Its rows do not lie as in the stores, and a block takes some of each."""
    parts, conditions = [[0, 3, 4, 6], [1, 2, 5]], {"slash": ma.MeaninglessTokens(count=5)}
    for number, places in enumerate(parts):
        some = [prompts[place] for place in places]
        made = run_part(toy, some, conditions, layers=[0], places=places)
        made.save(tmp_path / f"{number}.zarr")
    merged = merge_results([ma.load_result(tmp_path / f"{number}.zarr") for number in (0, 1)])
    got = merged["received_attention"].received_by_segment.chunk(prompt=2)
    assert got.chunks[0] == (2, 2, 2, 1)
    assert_allclose(got.compute(), small["received_attention"].received_by_segment, rtol=1e-5)
