"""Jobs, executors and commands that cannot be, refused before the work."""

import pytest

import mechattn as ma
from mechattn.errors import OptionError


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": True}, {"threads": 0}, {"chunk": 2.5}])
def test_options_of_a_job(options, prompts):
    with pytest.raises(OptionError, match="give a whole number, 1 at least"):
        ma.Job("toy:llama", prompts, **options)


def test_executors_that_are_none(prompts, tmp_path):
    job = ma.Job("toy:llama", prompts)
    with pytest.raises(OptionError, match="executor='dask': choose one of"):
        ma.run_job(job, tmp_path / "r.zarr", executor="dask")
    with pytest.raises(OptionError, match='workers is for a cluster: say executor="ray" too'):
        ma.run_job(job, tmp_path / "r.zarr", workers=2)
