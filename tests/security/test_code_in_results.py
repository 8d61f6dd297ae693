"""A stored result runs no code: Zarr's older format, where a file may ask for a pickle, is never read."""

import json
import pickle

import numcodecs.pickles
import pytest
import xarray as xr

import mechattn as ma
from mechattn.errors import OutputError
from tests.security.test_sizes import declare, listed


class Runs:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def attack(folder, marker):
    """A group of format 2 with a pickle as a filter; a directory called zarr.json lets Zarr fall back to it."""
    group = folder / "sequences"
    for path in (folder, group):
        (path / "zarr.json").mkdir(parents=True, exist_ok=True)
        (path / ".zgroup").write_text('{"zarr_format": 2}')
    about = {"model": {"name": "m"}, "prompts": {"hash": "0"}, "conditions": {}, "analyses": {}}
    (folder / ".zattrs").write_text(
        json.dumps({"mechattn_schema": 1, "provenance": json.dumps(about)})
    )
    filters = [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}]
    kind = {
        "shape": [1],
        "chunks": [1],
        "dtype": "|O",
        "fill_value": None,
        "order": "C",
        "zarr_format": 2,
    }
    for name in ("prompt", "condition"):
        (group / name).mkdir()
        (group / name / ".zarray").write_text(
            json.dumps(kind | {"compressor": None, "filters": filters})
        )
        (group / name / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": [name]}))
        (group / name / "0").write_bytes(pickle.dumps(Runs(marker)))
    return folder


@pytest.fixture
def as_before(monkeypatch):
    """Decodes a pickle wherever a file asks for one, as numcodecs did up to 0.16.5."""
    monkeypatch.setattr(numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True)


def test_a_folder_called_zarr_json_runs_nothing(as_before, tmp_path):
    place = attack(tmp_path / "evil.zarr", tmp_path / "ran")
    with pytest.raises(OutputError, match="there is no stored result"):
        ma.load_result(place)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_without_the_guard_the_attack_runs_code(as_before, tmp_path):  # negative control
    place = attack(tmp_path / "evil.zarr", tmp_path / "ran")
    with pytest.raises(TypeError):  # what is unpickled is no text
        xr.open_datatree(place, engine="zarr", consolidated=False)
    assert (tmp_path / "ran").exists()


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": [BYTES, {"name": "numcodecs.pickle"}]},
        {"codecs": [BYTES, ZSTD]},
        {"codecs": [{"name": "sharding_indexed"}]},
        {"zarr_format": 2},
        {"data_type": "variable_length_bytes"},
        {"chunk_grid": {"name": "rectangular"}},
        {"node_type": "link"},
        {"shape": [-1]},
    ],
)
def test_codecs_and_formats_that_mechattn_does_not_write(stored, monkeypatch, change):
    monkeypatch.setattr(xr, "open_datatree", None)  # refused before Zarr sees it
    declare(stored, "received_attention/received", **change)
    with pytest.raises(
        OutputError,
        match=r"received_attention/received/zarr\.json .* is not in the format that mechattn writes",
    ):
        ma.load_result(stored)


@pytest.mark.parametrize("content", ["{", "3", "[" * 100_000, "\ud800"])
def test_metadata_that_is_none(stored, content):
    (stored / "sequences" / "zarr.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    listed(stored, "sequences/zarr.json")
    with pytest.raises(
        OutputError, match=r"sequences/zarr\.json .* is not in the format that mechattn writes"
    ):
        ma.load_result(stored)
