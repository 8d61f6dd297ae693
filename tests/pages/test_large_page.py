"""A page of a stored result that goes through blocks within a little memory is the page of the result in memory."""

import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing
from xarray.core.indexing import LazilyIndexedArray

import mechattn as ma
from mechattn.commands.stored_results import heads_table, report
from mechattn.contrast import quantities
from mechattn.errors import MemoryOptionError
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page_data import shown_model_data
from mechattn.results.arrays import lazy_bytes
from mechattn.store.objects import Listing
from tests.pages.read import unpacked

SMALL = "320KiB"  # a layer or two at a time


class LazyArray(BackendArray):
    """An array whose blocks are read by a function."""

    def __init__(self, shape, dtype, read):
        self.shape, self.dtype, self.read = shape, dtype, read

    def __getitem__(self, key):
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self.read
        )


pytestmark = pytest.mark.usefixtures("read_on_demand")


@pytest.fixture(scope="module")
def place(toy, tmp_path_factory):
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift(), ma.analyses.MlpActivations()]
    conditions = {"slash": ma.MeaninglessTokens(count=5), "sentence": ma.RandomSentence(count=5)}
    prompts = ma.load_prompts("word-problems", limit=13)
    made = ma.run(toy, prompts, conditions, analyses, layers=[0, 1, 2], keep="prompts")
    path = tmp_path_factory.mktemp("large") / "large.zarr"
    replace(made, provenance={**made.provenance, "chunk": 4}).save(path)
    return path


@pytest.fixture(scope="module")
def measured(place):
    """All of it in memory."""
    lazy = ma.load_result(place)
    made = replace(
        lazy,
        datasets={name: dataset.copy(deep=True).load() for name, dataset in lazy.datasets.items()},
    )
    assert not lazy_bytes(made)
    return made


def of_received(result):
    """The part that is about received attention."""
    names = ("sequences", "received_attention")
    return replace(result, datasets={name: result.datasets[name] for name in names})


def test_every_number_of_the_page_is_the_same(measured, place, monkeypatch):
    blocks = []

    def counted(*args, **options):
        blocks.append(quantities.layer_blocks(*args, **options))
        return blocks[-1]

    expected = shown_model_data(ShownModel(of_received(measured)))
    monkeypatch.setattr("mechattn.contrast.differences.layer_blocks", counted)
    data = shown_model_data(ShownModel(of_received(ma.load_result(place, memory=SMALL))))
    assert any(len(layers) > 1 for layers in blocks)
    assert_same(data, expected)


def assert_same(value, expected):
    """Nested values of two pages, their arrays to six digits: blocks add up in another order."""
    assert type(value) is type(expected)
    if isinstance(value, dict) and "data" in value:
        np.testing.assert_allclose(unpacked(value), unpacked(expected), rtol=1e-6, atol=1e-9)
    elif isinstance(value, dict):
        assert value.keys() == expected.keys()
        for name, item in value.items():
            assert_same(item, expected[name])
    elif isinstance(value, list):
        for item, expected_item in zip(value, expected, strict=True):
            assert_same(item, expected_item)
    else:
        assert value == expected


@pytest.mark.filterwarnings("ignore:.*left out")
def test_every_figure_and_table_is_the_same(measured, place):
    lazy = ma.load_result(place)
    draw = ma.render
    for make in (
        lambda of: draw.by_layer(of, "scale"),
        lambda of: draw.changes(of, ["slash", "sentence"], layer=1),
        lambda of: draw.received_attention(of, 2, top=2),
        lambda of: draw.change_map(of, "sentence", "mass"),
    ):
        assert rounded(make(replace(lazy, memory=SMALL)).to_json()) == rounded(
            make(measured).to_json()
        )

    for memory, make in (
        ("60KiB", lambda of: of.stability("slash", top=3, splits=20)),
        (
            "60KiB",
            lambda of: of.stability(top=2, layer=1, conditions=["slash", "sentence"], splits=20),
        ),
        ("9KiB", lambda of: of.agreement("slash", "sentence")),
        ("300KiB", lambda of: of.compare("slash", segment=None, resamples=99, columns="all")),
        (SMALL, lambda of: heads_table(of_received(of))[0]),
    ):
        got = make(replace(lazy, memory=memory))
        table = make(measured)
        # Labels that were stored are texts of another kind.
        pd.testing.assert_frame_equal(got, table, rtol=1e-12, check_dtype=False)

    assert replace(lazy, memory=SMALL).resolution("slash") == measured.resolution("slash")
    assert lazy_bytes(lazy)


def test_too_little_memory_is_refused_before_reading(place, tmp_path, monkeypatch):
    real = Listing.read

    def read(listing, name):
        assert "received_by_segment/c/" not in name, "it was read"
        return real(listing, name)

    monkeypatch.setattr(Listing, "read", read)

    with pytest.raises(
        MemoryOptionError, match=r"of 13 prompts takes 1 MiB, and memory='20KiB' allows less; give"
    ):
        report([place], tmp_path / "page.html", memory="20KiB")

    assert not (tmp_path / "page.html").exists()
    loaded = ma.load_result(place, memory="1KiB")
    for call in (lambda: loaded.stability("slash", top=3), loaded.resolution,
                 lambda: replace(loaded, memory="9KiB").compare("slash", segment=None)):  # fmt: skip
        with pytest.raises(MemoryOptionError, match="allows less; give more"):
            call()


def rounded(text):
    """JSON with its numbers to ten digits: blocks add up in another order."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.10g}", text)


def many(measured, prompts):
    """The same prompts again and again, none of them in memory."""

    def again(variable):
        def read(key):
            rows = np.atleast_1d(np.arange(prompts)[key[0]])
            values = small[(slice(None), *key[1:])][rows % len(small)]
            return values if isinstance(key[0], slice) else values[0]

        small = variable.values
        array = LazyArray((prompts, *small.shape[1:]), small.dtype, read)
        return xr.Variable(variable.dims, LazilyIndexedArray(array), variable.attrs)

    made = {}
    for name, dataset in measured.datasets.items():
        each = [label for label, v in dataset.variables.items() if v.dims[:1] == ("prompt",)]
        lazy = {label: again(dataset[label].variable) for label in each if dataset[label].ndim > 1}
        made[name] = (
            dataset.drop_vars(each)
            .assign_coords(prompt=[f"{i:05d}" for i in range(prompts)])
            .assign(lazy)
        )

    made["sequences"]["place"] = xr.Variable("prompt", np.arange(prompts))
    return replace(measured, datasets=made)


def peak(call):
    """The memory that a call takes at most, in MiB, and what it returns."""
    tracemalloc.start()
    try:
        value = call()
        return tracemalloc.get_traced_memory()[1] / 2**20, value
    finally:
        tracemalloc.stop()


def test_the_memory_is_kept_to(measured):
    """Of 12,000 prompts; and with more allowed, more is taken (negative control)."""
    result = many(measured, 12000)

    def compared(memory):
        return replace(result, memory=memory).compare("slash", resamples=99, columns="all")

    compared("13MiB")  # what is imported and drawn once
    little, table = peak(lambda: compared("13MiB"))
    much, expected = peak(lambda: compared("1GiB"))
    assert little < 13 < much
    pd.testing.assert_frame_equal(table, expected, rtol=1e-12)
    assert table.attrs == expected.attrs
