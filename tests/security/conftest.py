"""What the attacks share: a small result, and the same result on disk."""

import shutil

import pytest

import mechattn as ma


@pytest.fixture(scope="session")
def small(toy):
    """A result of three prompts."""
    return ma.run(
        toy, ma.load_prompts("word-problems", limit=3), {"slash": ma.MeaninglessTokens(count=5)}, progress=False
    )


@pytest.fixture(scope="session")
def saved(small, tmp_path_factory):
    """It as a folder and as a file; copy them before changing anything."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("r.zarr", "r.nc"):
        small.save(folder / name)
    return folder


@pytest.fixture
def stored(saved, tmp_path):
    """A folder in Zarr format of one's own."""
    shutil.copytree(saved / "r.zarr", tmp_path / "r.zarr")
    return tmp_path / "r.zarr"


@pytest.fixture
def stored_file(saved, tmp_path):
    """A NetCDF file of one's own."""
    shutil.copy(saved / "r.nc", tmp_path / "r.nc")
    return tmp_path / "r.nc"
