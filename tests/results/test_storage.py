"""A stored result is the same result, and opens without this library."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import mechattn as ma
from mechattn.commands.stored_results import summary
from mechattn.errors import OptionError, OutputError
from mechattn.model import weights
from mechattn.store.objects import SCHEMA, Location


def assert_same(loaded, result):
    assert loaded.provenance == json.loads(json.dumps(result.provenance))
    for name, dataset in result.datasets.items():
        xr.testing.assert_identical(loaded[name], dataset)
        for variable, expected in dataset.variables.items():
            if expected.dtype.kind in "fi":
                assert loaded[name][variable].values.tobytes() == expected.values.tobytes()


@pytest.fixture(scope="module")
def saved(slash_result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    slash_result.save(folder / "result.zarr")
    return folder


@pytest.fixture
def stored(saved, tmp_path):
    """The result of two conditions on disk, in a folder of the test's own."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "result.zarr"


def test_round_trip_and_again(slash_result, tmp_path):
    """At an address, and from there into a folder."""
    slash_result.save("memory://tests/result.zarr")
    loaded = ma.load_result("memory://tests/result.zarr")
    assert_same(loaded, slash_result)
    assert f"digest of the numbers: {slash_result.digest()}\n" in summary(loaded)
    loaded.save(tmp_path / "again.zarr")
    assert_same(ma.load_result(tmp_path / "again.zarr"), slash_result)


def test_weights_are_hashed_once_until_they_change(checkpoint, monkeypatch):
    model = ma.load_model(str(checkpoint), verify=False)
    hashed = []
    sha256 = weights.hashlib.sha256
    monkeypatch.setattr(weights.hashlib, "sha256", lambda: hashed.append(1) or sha256())
    first = weights.weights_hash(model)
    assert weights.weights_hash(model) == first
    assert len(hashed) == 1
    weight = model.blocks[0].mlp.out.weight
    with torch.no_grad():
        weight[3, 5] += 1e-4
    second = weights.weights_hash(model)
    weight.data.mul_(2)
    assert len({first, second, weights.weights_hash(model)}) == 3
    assert len(hashed) == 3


def test_it_opens_in_plain_xarray(slash_result, stored):
    """In a process that cannot import this library."""
    code = f"""
import sys; sys.modules["mechattn"] = None
import xarray as xr
tree = xr.open_datatree({str(stored)!r}, engine="zarr")
received = tree["received_attention"].received
print(received.attrs["units"], float(received.sum()), list(map(str, tree["sequences"].condition.values)))
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    total = float(slash_result["received_attention"].received.sum())
    assert out.stdout.strip() == f"probability {total} ['baseline', 'slash']"


def test_at_an_address_an_interrupted_save_is_refused(slash_result, monkeypatch):
    address = "memory://tests/interrupted.zarr"
    write = Location.write

    def dying(place, name, content):
        if b"provenance" in content:  # the last write never comes
            raise OSError("connection lost")
        write(place, name, content)

    monkeypatch.setattr(Location, "write", dying)
    with pytest.raises(
        OutputError,
        match=r"could not be written .*connection lost.* the result there is incomplete",
    ):
        slash_result.save(address)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="is incomplete"):
        ma.load_result(address)
    slash_result.save(address)
    assert ma.load_result(address).conditions == slash_result.conditions


def test_an_address_of_no_kind_or_without_a_result(slash_result):
    with pytest.raises(OutputError, match=r"nosuch://.*Protocol not known"):
        slash_result.save("nosuch://bucket/result.zarr")
    with pytest.raises(OutputError, match="there is no stored result at memory://"):
        ma.load_result("memory://tests/nothing.zarr")


def test_no_pickle_and_no_code_from_a_file():
    sources = "".join(path.read_text() for path in Path(ma.__file__).parent.rglob("*.py"))
    assert not re.search(
        r"allow_pickle|import pickle|cloudpickle|torch\.load|np\.load|joblib|(?<![.\w])(eval|exec)\(",
        sources,
    )


def test_another_schema_is_refused(stored):
    root = stored / "zarr.json"
    root.write_text(
        root.read_text().replace(f'"mechattn_schema": {SCHEMA}', '"mechattn_schema": 99')
    )
    with pytest.raises(OutputError, match="has schema 99"):
        ma.load_result(stored)


def test_dataframe_is_tidy(slash_result):
    table = slash_result.to_dataframe("received_attention")
    row = dict(prompt="3", condition="slash", layer=1, head=2, segment="question")
    rows = table[(table[list(row)] == pd.Series(row)).all(axis=1)]
    expected = slash_result["received_attention"].received_by_segment.sel(row).item()
    assert rows.received_by_segment.item() == pytest.approx(expected)
    with pytest.raises(OptionError, match="'received'"):
        slash_result.to_dataframe("received_attention", "recieved")
    with pytest.raises(OptionError, match="'received_attention'"):
        slash_result["focus"]


def test_a_result_answers_as_a_mapping_and_by_labels(slash_result):
    assert slash_result.keys() == list(slash_result) == slash_result._ipython_key_completions_()
    some = slash_result.sel(head=[1, 5], layer=2)
    whole = slash_result.compare("slash").set_index(["layer", "head"])
    part = some.compare("slash").set_index(["layer", "head"])
    assert list(part.index) == [(2, 1), (2, 5)]
    np.testing.assert_allclose(part.change, whole.change.loc[list(part.index)])
    assert part.change.iloc[0] != part.change.iloc[1], "negative control"
    one = slash_result.sel(head="L2H5")
    assert one["received_attention"].received_by_segment.sizes["head"] == 1
    np.testing.assert_allclose(one.compare("slash").change, whole.change.loc[[(2, 5)]])
    ids = slash_result["sequences"].prompt
    assert slash_result.sel(prompt=ids[:4]).compare("slash").n.iloc[0] == 4
    assert slash_result.sel(prompt=ids[0]).conditions == slash_result.conditions
    assert slash_result.sel(condition=["slash", "baseline"]).conditions == ["baseline", "slash"]
    for labels, message in (
        ({"token": 3}, "no dimension 'token'"),
        ({"head": "L9H1"}, "9"),
        ({"layer": 0, "head": "L2H5"}, "that head is in layer 2"),
        ({"layer": {1}}, r"sel\(layer=\{1\}\): not all of these labels are in received_attention"),
        ({"layer": []}, r"sel\(layer=\[\]\) selects nothing of received_attention"),
    ):
        with pytest.raises(OptionError, match=message):
            slash_result.sel(**labels)


def test_a_selection_without_an_axis_is_not_written(slash_result, tmp_path):
    for labels, problem in (
        ({"layer": 1}, "received_attention has other layers"),
        ({"condition": "slash"}, "its first condition is not the baseline"),
    ):
        with pytest.raises(OutputError, match=f"this result cannot be stored: {problem}"):
            slash_result.sel(**labels).save(tmp_path / "part.zarr")
    assert list(tmp_path.iterdir()) == []


def test_a_segment_below_0_is_not_one_from_the_end(slash_result, tmp_path):
    sequences = slash_result["sequences"]
    changed = sequences.assign(segment_index=sequences.segment_index - 1)
    result = ma.Result(slash_result.datasets | {"sequences": changed}, slash_result.provenance)
    with pytest.raises(OutputError, match="have the segment -1, but there are only 7"):
        result.save(tmp_path / "r.zarr")
