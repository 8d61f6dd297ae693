"""What the attacks share: a small result, and the same result on disk."""

import shutil

import pytest

import mechattn as ma


@pytest.fixture(scope="session")
def small(toy):
    """A result of three prompts."""
    return ma.run(
        toy, ma.load_prompts("word-problems", limit=3), {"slash": ma.MeaninglessTokens(count=5)}
    )


@pytest.fixture(scope="session")
def saved(small, tmp_path_factory):
    """It on disk; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("saved")
    small.save(folder / "r.zarr")
    return folder


@pytest.fixture
def stored(saved, tmp_path):
    """A folder of one's own."""
    shutil.copytree(saved / "r.zarr", tmp_path / "r.zarr")
    return tmp_path / "r.zarr"
