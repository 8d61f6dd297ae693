"""A stored result is the same result, and opens without this library."""

import numpy as np
import pytest
import xarray as xr

import mechattn as ma
from mechattn.errors import OptionError, OutputError


def test_round_trip(slash_result, tmp_path):
    slash_result.save(tmp_path / "result.zarr")
    loaded = ma.load_result(tmp_path / "result.zarr")
    assert loaded.provenance == slash_result.provenance
    assert loaded.conditions == ["baseline", "slash"]
    for name, dataset in slash_result.datasets.items():
        for variable in dataset:
            if dataset[variable].dtype.kind in "fi":
                assert loaded[name][variable].values.tobytes() == dataset[variable].values.tobytes()
            assert loaded[name][variable].attrs == dataset[variable].attrs
    first = [str(text) for text in loaded["sequences"].first_prompt_text.values.flat]
    assert first == [str(text) for text in slash_result["sequences"].first_prompt_text.values.flat]


def test_saving_again_replaces_it_and_leaves_nothing_else(slash_result, tmp_path):
    for _ in range(2):
        slash_result.save(tmp_path / "result.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["result.zarr"]


def test_an_interrupted_save_leaves_the_old_result(slash_result, tmp_path, monkeypatch):
    path = tmp_path / "result.zarr"
    slash_result.save(path)

    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(xr.DataTree, "to_zarr", fail)
    with pytest.raises(OSError, match="full"):
        slash_result.save(path)
    monkeypatch.undo()
    assert ma.load_result(path).conditions == ["baseline", "slash"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.zarr"]


def test_it_opens_in_plain_xarray(slash_result, tmp_path):
    slash_result.save(tmp_path / "result.zarr")
    tree = xr.open_datatree(tmp_path / "result.zarr", engine="zarr", consolidated=False)
    received = tree["received_attention"].received
    assert received.attrs["units"] == "probability"
    np.testing.assert_array_equal(received, slash_result["received_attention"].received)


def test_another_schema_is_refused(slash_result, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.results.storage.SCHEMA", 99)
    slash_result.save(tmp_path / "result.zarr")
    monkeypatch.undo()
    with pytest.raises(OutputError, match="has schema 99"):
        ma.load_result(tmp_path / "result.zarr")


def test_dataframe_is_tidy(slash_result):
    table = slash_result.to_dataframe("received_attention")
    assert {"prompt", "condition", "layer", "head", "segment", "received_by_segment"} <= set(table.columns)
    row = table.query("prompt == '3' and condition == 'slash' and layer == 1 and head == 2 and segment == 'question'")
    at = dict(prompt="3", condition="slash", layer=1, head=2, segment="question")
    expected = slash_result["received_attention"].received_by_segment.sel(at).item()
    assert row.received_by_segment.item() == pytest.approx(expected)
    assert len(slash_result.to_dataframe("received_attention", "received")) > 1000
    with pytest.raises(OptionError, match="'received'"):
        slash_result.to_dataframe("received_attention", "recieved")
    with pytest.raises(OptionError, match="'received_attention'"):
        slash_result["focus"]


def test_the_verdict_equals_scipy_on_the_table(slash_result):
    """Recomputed from the tidy table, without the library's statistics."""
    from scipy import stats

    table = slash_result.to_dataframe("received_attention", "received_by_segment")
    means = table[table.segment == "question"].groupby(["prompt", "condition"]).received_by_segment.mean().unstack()
    ratio = np.log(means["slash"] / means["baseline"])
    interval = stats.ttest_1samp(ratio, 0).confidence_interval(0.95)
    verdict = slash_result.verdict("slash")
    expected = np.expm1([ratio.mean(), interval.low, interval.high])
    np.testing.assert_allclose(verdict.change, expected, rtol=1e-5)
    assert verdict.beyond.shape == (4, 8)
    assert -0.6 < verdict.null.estimate < -0.3
    with pytest.raises(OptionError, match="'anser'"):
        slash_result.verdict("slash", segment="anser")
    with pytest.raises(OptionError, match="no condition 'slsh'"):
        slash_result.verdict("slsh")
