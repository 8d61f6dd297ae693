"""How large a result will be is foretold from its job."""

from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.commands.run_config import run_from_config
from mechattn.jobs import job as sizes
from mechattn.jobs.job import announced, foretold
from mechattn.store.pieces import in_regions

CONDITIONS = {"slash": ma.MeaninglessTokens(count=5)}


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job(
        "toy:llama",
        prompts[:5],
        CONDITIONS,
        options=ma.RunOptions(layers=[0]),
        chunk=2,
        verify=False,
    )


@pytest.mark.parametrize("positions", ["moments", "prompts"])
@pytest.mark.parametrize("inserted", ["slash", "masked", "text"])
def test_the_bytes_are_about_those_of_the_result(toy, prompts, positions, inserted):
    """Of moments all but the tokens are known; of positions the lengths are a guess, by letters."""
    every = {
        "slash": ma.MeaninglessTokens(count=40),
        "masked": ma.MeaninglessTokens(count=40).masked(),
        "text": ma.conditions.Text("/ " * 40),
    }
    conditions, analyses = (
        {"c": every[inserted]},
        [ma.ReceivedAttention(), ma.analyses.AttentionFocus()],
    )
    result = ma.run(toy, prompts[:5], conditions, analyses, layers=[1], positions=positions)
    real = sum(
        v.nbytes for d in result.datasets.values() for v in d.variables.values() if in_regions(v)
    )
    job = ma.Job(
        "toy:llama",
        prompts[:5],
        conditions,
        analyses,
        options=ma.RunOptions(layers=[1], positions=positions),
    )
    assert 0.6 < foretold(job) / real < 1.7
    assert foretold(replace(job, options=replace(job.options, layers=None))) > 3 * foretold(
        job
    )  # negative control: four layers


def test_half_the_room(job):
    tokens = sizes.stored_bytes([], 1, 8, 5, 2, 0, 0, "moments")
    assert 0.5 < foretold(replace(job, values="float16")) / foretold(job) < 0.9
    assert tokens[sizes.TOKENS] == 5 * 8


def test_a_model_whose_size_nobody_says(job):
    unknown = replace(job, model="nobody/nothing-there")
    assert foretold(unknown) is None
    assert announced(unknown, "r.zarr") is None


def test_a_size_is_said_from_one_gibibyte_on(job, monkeypatch):
    assert announced(job, "r.zarr") is None
    monkeypatch.setattr(sizes, "LARGE", foretold(job))
    assert (
        announced(job, "r.zarr")
        == "r.zarr: about 1 MiB of per-prompt values, which are stored chunk by chunk and read in blocks"
    )


def test_by_a_config_and_by_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        'model = "toy:llama"\nlayers = [0]\nverify = false\n[prompts]\nsource = "word-problems"\n'
        'limit = 3\n[conditions.slash]\ncount = 2\n[output]\nresult = "r.zarr"\n'
    )
    (tmp_path / "c.toml").write_text(text)
    assert run_from_config(tmp_path / "c.toml", values="float16")
    assert ma.load_result("r.zarr")["received_attention"].received_by_segment.dtype == "float16"
    assert run_from_config(tmp_path / "c.toml")
    result = ma.load_result("r.zarr")
    assert result["received_attention"].received_by_segment.dtype == "float32"
