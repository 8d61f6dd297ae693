"""How large a result will be is foretold from its job, and decides its form, unless that is asked for or begun."""

from dataclasses import dataclass, replace

import pytest

import mechattn as ma
from mechattn.commands.run_config import run_from_config
from mechattn.jobs import size_estimate as sizes
from mechattn.jobs.chunks import parts_folder
from mechattn.jobs.local import Local
from mechattn.jobs.size_estimate import announced, foretold, settled
from mechattn.results.lazy_arrays import is_lazy
from mechattn.store.regions import in_regions

CONDITIONS = {"slash": ma.MeaninglessTokens(count=5)}


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job("toy:llama", prompts[:5], CONDITIONS, layers=[0], chunk=2, verify=False)


@pytest.fixture(scope="module")
def small(job, tmp_path_factory):
    place = tmp_path_factory.mktemp("small") / "r.zarr"
    return ma.run_job(job, place), place


@pytest.fixture
def from_one_byte_on(monkeypatch):
    monkeypatch.setattr(sizes, "LARGE", 1)


@dataclass
class Dies:
    """The local executor, which computes one chunk alone."""

    asked: list

    def parts(self, job, chunks):
        self.asked.extend(chunks)
        yield from Local().parts(job, chunks[:1])
        raise KeyboardInterrupt


@pytest.mark.parametrize("positions", ["moments", "prompts"])
@pytest.mark.parametrize("inserted", ["slash", "masked", "text"])
def test_the_bytes_are_about_those_of_the_result(toy, prompts, positions, inserted):
    """Of moments all but the tokens are known; of positions the lengths are a guess, by letters."""
    every = {
        "slash": ma.MeaninglessTokens(count=40),
        "masked": ma.MeaninglessTokens(count=40).masked(),
        "text": ma.Text("/ " * 40),
    }
    conditions, analyses = {"c": every[inserted]}, [ma.ReceivedAttention(), ma.AttentionFocus()]
    result = ma.run(toy, prompts[:5], conditions, analyses, layers=[1], positions=positions, progress=False)
    real = sum(v.nbytes for d in result.datasets.values() for v in d.variables.values() if in_regions(v))
    job = ma.Job("toy:llama", prompts[:5], conditions, analyses, layers=[1], positions=positions)
    assert 0.6 < foretold(job) / real < 1.7
    assert foretold(replace(job, layers=None)) > 3 * foretold(job)  # negative control: four layers


def test_half_the_room(job):
    tokens = sizes.stored_bytes([], 1, 8, 5, 2, 0, 0, "moments")
    assert 0.5 < foretold(replace(job, values="float16")) / foretold(job) < 0.9
    assert tokens[sizes.TOKENS] == 5 * 8


def test_a_model_whose_size_nobody_says(job):
    unknown = replace(job, model="nobody/nothing-there")
    assert foretold(unknown) is None
    assert settled(unknown, "r.zarr", None, False).large is False
    assert announced(replace(unknown, large=False), "r.zarr") is None
    assert announced(replace(unknown, large=True), "r.zarr").startswith("r.zarr: each chunk is written directly")


def test_a_small_job_is_kept_as_ever_and_nothing_is_said(job, small, tmp_path, capsys):
    result, _ = small
    assert not is_lazy(result)
    assert job.fingerprint == replace(job, large=False).fingerprint == result.provenance["job"]
    ma.run_job(job, tmp_path / "r.zarr")
    assert "GiB" not in capsys.readouterr().err


def test_a_job_of_that_size_becomes_a_store_and_says_so(job, small, tmp_path, capsys, from_one_byte_on):
    made = ma.run_job(job, tmp_path / "r.zarr")
    assert is_lazy(made)
    assert made.digest() == small[0].digest()
    said = capsys.readouterr().err
    assert "r.zarr: about 1 MiB of per-prompt values: each chunk is written directly into one Zarr store" in said
    assert is_lazy(ma.run_job(job, tmp_path / "r.zarr"))
    assert "r.zarr already holds" in capsys.readouterr().err


def test_who_asks_for_it_gets_what_there_was(job, small, tmp_path, capsys, from_one_byte_on):
    made = ma.run_job(replace(job, large=False), tmp_path / "r.zarr")
    assert not is_lazy(made)
    assert made.digest() == small[0].digest()
    assert "held in memory when chunks are merged and when the result is loaded; large=True" in capsys.readouterr().err


@pytest.mark.parametrize("first", ["small", "large"])
def test_what_was_begun_goes_on_as_it_was_begun(job, small, tmp_path, monkeypatch, first):
    """An earlier version, or another size from which on a store is made: the chunks that are kept are used."""
    path = tmp_path / "r.zarr"
    monkeypatch.setattr(sizes, "LARGE", 1 if first == "large" else 2**30)
    with pytest.raises(ma.MechattnError, match="1 of 3 chunks are done"):
        ma.run_job(job, path, executor=Dies([]))
    assert parts_folder(path).is_dir()
    monkeypatch.setattr(sizes, "LARGE", 1 if first == "small" else 2**30)
    asked = []
    with pytest.raises(ma.MechattnError, match="2 of 3 chunks are done"):
        ma.run_job(job, path, executor=Dies(asked))
    assert asked == [1, 2]
    made = ma.run_job(job, path)
    assert is_lazy(made) is (first == "large")
    assert made.digest() == small[0].digest()
    again = ma.run_job(job, path)
    assert again.provenance["time"] == made.provenance["time"], "it is done, and is not made again in another form"
    assert is_lazy(ma.run_job(job, path, fresh=True)) is (first == "small")


@dataclass
class Elsewhere:
    """An executor whose worker sees other folders than this process does, and says where its cluster is."""

    folder: str
    address: str = "ray://head:10001"

    def parts(self, job, chunks):
        into = job.into and replace(job.into, place=self.folder)
        yield from Local().parts(replace(job, into=into), chunks)


def test_workers_that_see_other_folders(job, small, tmp_path, from_one_byte_on):
    """By itself nothing is written there; asked for, it is refused at the first chunk."""
    elsewhere, path = Elsewhere(str(tmp_path / "elsewhere")), tmp_path / "r.zarr"
    made = ma.run_job(job, path, executor=elsewhere)
    assert not is_lazy(made)
    assert made.digest() == small[0].digest()
    with pytest.raises(
        ma.MechattnError, match=r"chunk 0, but there is no \S+ in .*: a large result needs a folder that"
    ):
        ma.run_job(replace(job, large=True), path, executor=elsewhere)
    assert ma.load_result(path).digest() == made.digest()


def test_by_a_config_and_by_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        'model = "toy:llama"\nlayers = [0]\nverify = false\nlarge = true\n[prompts]\nsource = "word-problems"\n'
        'limit = 3\n[conditions.slash]\ncount = 2\n[output]\nresult = "r.zarr"\n'
    )
    (tmp_path / "c.toml").write_text(text)
    assert run_from_config(tmp_path / "c.toml", large=False)
    assert not is_lazy(ma.load_result("r.zarr"))
    assert run_from_config(tmp_path / "c.toml", values="float16")
    assert ma.load_result("r.zarr")["received_attention"].received_by_segment.dtype == "float16"
    assert run_from_config(tmp_path / "c.toml")
    result = ma.load_result("r.zarr")
    assert is_lazy(result)
    assert result["received_attention"].received_by_segment.dtype == "float32"
