"""A result that is larger than memory is read a block at a time, merged lazily, and gives the same numbers."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.contrast.quantities import slices
from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import lazy_bytes
from mechattn.results.merge import merge_results
from mechattn.results.result import in_half_the_space
from mechattn.store.writing import merge_stored
from tests.conftest import run_part

pytestmark = pytest.mark.usefixtures("read_on_demand")
PLACES = [[0, 3, 5], [1, 2, 4]]


@pytest.fixture(scope="module")
def parts(toy):
    """Two results of one run, with each prompt's positions."""
    prompts = ma.load_prompts("word-problems", limit=6)

    def run(places):
        some = [prompts[place] for place in places]
        conditions = {"slash": ma.MeaninglessTokens(count=5)}
        result = run_part(toy, some, conditions, keep="prompts", places=places)
        return replace(result, provenance={**result.provenance, "chunk": 3})

    return [run(places) for places in PLACES]


@pytest.fixture(scope="module")
def whole(parts):
    return merge_results(parts)


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    large = tmp_path_factory.mktemp("large")
    for number, part in enumerate(parts):
        part.save(large / f"{number}.zarr")
    return large


def test_a_large_result_is_equal_without_reading_prompts(parts, folder):
    part, loaded = parts[0], ma.load_result(folder / "0.zarr")
    assert not lazy_bytes(part)
    variables = [v for dataset in loaded.datasets.values() for v in dataset.variables.values()]
    lazy = [variable for variable in variables if not variable._in_memory]
    assert len(lazy) > 10
    assert all("prompt" in variable.dims for variable in lazy)
    assert loaded.digest() == part.digest()
    assert loaded.provenance == json.loads(json.dumps(part.provenance))
    loaded.compare("slash", resamples=99, columns="all")
    assert not any(variable._in_memory for variable in lazy)


def test_tables_are_the_same(whole, folder, monkeypatch):
    """Read when they are needed, and some layers at a time."""
    from mechattn.contrast import differences

    seen, blocks = [], differences.layer_blocks
    monkeypatch.setattr(
        differences, "layer_blocks", lambda *given: seen.append(blocks(*given)) or seen[-1]
    )
    lazy = merge_results([ma.load_result(folder / f"{number}.zarr") for number in (1, 0)])
    assert lazy.digest() == whole.digest()
    expected, read, by_layers = (
        result.compare("slash", resamples=99, columns="all")
        for result in (whole, lazy, replace(whole, memory="28KiB"))
    )
    assert [len(layers) > 1 for layers in seen] == [False, False, True]
    pd.testing.assert_frame_equal(read, expected, rtol=1e-12)
    pd.testing.assert_frame_equal(by_layers, expected, rtol=1e-12)
    assert by_layers.attrs == expected.attrs


@pytest.mark.parametrize("call", ["compare", "verdict"])
def test_too_little_memory_is_refused_before_reading(folder, call, monkeypatch):
    lazy = ma.load_result(folder / "0.zarr")
    monkeypatch.setattr(
        "mechattn.store.objects.Listing.read", lambda *given: pytest.fail("it was read")
    )
    with pytest.raises(OptionError, match=r"takes 1 MiB, and memory='1KiB' allows less; give"):
        getattr(replace(lazy, memory="1KiB"), call)(
            "slash", **({"matched": False} if call == "compare" else {})
        )
    with pytest.raises(OptionError, match='write it like "2GiB"'):
        ma.load_result(folder / "0.zarr", memory="0.0001KiB")


def test_fewer_resamples_are_advised_only_where_there_are_some():
    with pytest.raises(OptionError, match=r"--memory 3MiB\), or fewer resamples$"):
        slices(2, 2**20, "1MiB", "a layer", 2**21)
    with pytest.raises(OptionError, match=r"--memory 2MiB\)$"):
        slices(2, 2**21, "1MiB", "a prompt")


def test_two_results_are_one(whole, folder, tmp_path):
    target = str(tmp_path / "all.zarr")
    merge_stored(target, [str(folder / f"{number}.zarr") for number in (1, 0)])
    merged = ma.load_result(target)
    assert lazy_bytes(merged)
    sent = pickle.loads(pickle.dumps(merged))  # reads the same objects, when it needs them
    assert lazy_bytes(sent)
    assert sent.digest() == merged.digest() == whole.digest()


def test_half_the_space(parts, tmp_path):
    """float16 for what is of each prompt; moments stay as they are, and no interval moves by more than 0.05 %."""
    full = parts[0]
    in_half_the_space(full).save(tmp_path / "h.zarr")
    loaded = ma.load_result(tmp_path / "h.zarr")
    stored = loaded["received_attention"]
    assert stored.received_by_segment.dtype == np.float16
    assert_array_equal(stored.received, full["received_attention"].received)
    expected = full["received_attention"].received_by_segment.values
    assert_allclose(stored.received_by_segment.values, expected, rtol=2**-11, atol=2**-25)
    loaded_table, want = (r.compare("slash", resamples=99, columns="all") for r in (loaded, full))
    assert 0 < abs(loaded_table.difference - want.difference).max() < 2 * 2**-11


def test_a_number_too_large_for_half_is_refused(parts):
    dataset = parts[0]["received_attention"].copy(deep=True)
    dataset["received_by_segment"][:] = 1e6
    large = replace(parts[0], datasets={**parts[0].datasets, "received_attention": dataset})
    with pytest.raises(OptionError, match='received_by_segment is too large for values="float16"'):
        in_half_the_space(large)


@pytest.mark.parametrize("change", ["flipped", "lost"])
def test_only_its_own_objects_are_read(folder, tmp_path, change):
    path = shutil.copytree(folder / "1.zarr", tmp_path / "r.zarr")
    expected = ma.load_result(path)["received_attention"].received_by_segment.values
    loaded = ma.load_result(path)
    objects = path / "received_attention" / "received_by_segment" / "c"
    first, *_ = sorted(place for place in objects.rglob("*") if place.is_file())
    content = first.read_bytes()
    words = r"it is missing|it is not what was written here"
    results = [loaded]
    if change == "flipped":
        first.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        results.append(ma.load_result(path))
    else:
        first.unlink()
        with pytest.raises(OutputError, match=words):
            ma.load_result(path)
    for result in results:
        values = result["received_attention"].received_by_segment
        with pytest.raises(OutputError, match=words):
            values.values
        assert_array_equal(values[3:].values, expected[3:])  # the others are read
    with pytest.raises(OutputError, match=words):
        merge_stored(str(tmp_path / "copy.zarr"), [str(path)])
    assert not (tmp_path / "copy.zarr").exists()


@pytest.mark.parametrize("change", ["provenance", "objects"])
def test_the_root_is_sealed(folder, tmp_path, change):
    path = shutil.copytree(folder / "0.zarr", tmp_path / "r.zarr")
    about = json.loads((path / "zarr.json").read_text())
    attributes = about["attributes"]
    if change == "provenance":
        attributes["provenance"] = attributes["provenance"].replace("toy:llama", "llama-8b")
    else:
        attributes["objects"][next(iter(attributes["objects"]))] = "0" * 8
    (path / "zarr.json").write_text(json.dumps(about))
    with pytest.raises(OutputError, match="its provenance or its listing was changed"):
        ma.load_result(path)
