"""A large result at an address of S3, on a server of this machine: written, merged, read lazily.

`make test-extra` puts s3fs and moto, which nothing else needs, on the path; without them this file fails.
"""

from dataclasses import replace

import pandas as pd
import pytest

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.results.arrays import lazy_bytes
from mechattn.store.objects import Location, location_of
from mechattn.store.writing import merge_stored


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket of a server on the loopback address."""
    import fsspec
    from moto import server as moto

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir("large")
        yield "s3://large"
    server.stop()


@pytest.fixture(scope="module")
def job(prompts):
    slash = {"slash": ma.MeaninglessTokens(count=2)}
    options = ma.RunOptions(layers=[0])
    return ma.Job("toy:llama", prompts[:4], slash, options=options, chunk=2, verify=False)


@pytest.fixture(scope="module")
def small(job, tmp_path_factory):
    """The same in a folder."""
    return ma.run_job(job, tmp_path_factory.mktemp("small") / "small.zarr")


def test_a_large_run_at_an_address(bucket, job, small, tmp_path, tmp_path_factory, monkeypatch):
    """One shard lies at the address, the other in a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mechattn.store.reading.SHARE_READ_AT_ONCE", 0)
    monkeypatch.setattr("mechattn.store.reading.SMALL_ARRAY", 0)
    result = ma.run_job(job, f"{bucket}/r.zarr")
    assert lazy_bytes(result)
    assert result.digest() == small.digest()
    place = location_of(f"{bucket}/r.zarr")
    place.file_system.rm_file(
        place.object_path("received_attention/received_by_segment/c/1/0/0/0/0")
    )
    assert ma.run_job(job, f"{bucket}/r.zarr").digest() == small.digest()
    folder = tmp_path_factory.mktemp("shards")
    ma.run_job(job, f"{bucket}/s.zarr", shard="2/2")
    ma.run_job(job, folder / "s.zarr", shard="1/2")
    merge_stored(f"{bucket}/all.zarr", [folder / "s-1-of-2.zarr", f"{bucket}/s-2-of-2.zarr"])
    merged = ma.load_result(f"{bucket}/all.zarr")
    assert merged.conditions == small.conditions
    pd.testing.assert_frame_equal(
        merged.compare("slash", resamples=99, columns="all"),
        small.compare("slash", resamples=99, columns="all"),
        rtol=1e-12,
    )
    assert not list(tmp_path.iterdir())


class Killed(BaseException):
    """In place of SIGKILL."""


def test_a_run_that_was_killed_goes_on(bucket, job, small, tmp_path, monkeypatch):
    """Over an older result, of which nothing is mixed in; at each object in tests/results/test_addresses.py."""
    monkeypatch.chdir(tmp_path)
    place = f"{bucket}/killed.zarr"
    ma.run_job(replace(job, options=ma.RunOptions(seed=1, layers=[1])), place)
    write, left = Location.write, [40]

    def dying(self, name, content):
        left[0] -= self.folder is None
        if left[0] < 0:
            raise Killed
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Location, "write", dying)
        with pytest.raises(Killed):
            ma.run_job(job, place)
    with pytest.raises(OutputError, match="is incomplete"):
        ma.load_result(place)
    assert ma.run_job(job, place).digest() == small.digest()
    assert not list(tmp_path.iterdir())
