"""A run in chunks: the same numbers however it was cut, interrupted or damaged, and a sentence where it cannot go on."""

import shutil
from dataclasses import dataclass, replace

import pytest

import mechattn as ma
from mechattn.errors import Interrupted, OptionError, OutputError, PromptTooLong
from mechattn.jobs import job as jobs
from mechattn.jobs.executors import Local
from mechattn.jobs.resumable_run import Shard, chunks_folder, parse_shard, shard_location
from mechattn.store.objects import Location
from mechattn.store.writing import merge_stored
from tests.conftest import run_part
from tests.results.small import Ready, names, numbers

OTHER_SEED = ma.RunOptions(seed=4)


@pytest.fixture(scope="module")
def job(prompts):
    """A job of three chunks, which the small results stand for."""
    conditions = {"random": ma.conditions.RandomTokens(count=5)}
    options = ma.RunOptions(seed=3)
    return ma.Job("toy:llama", prompts[:3], conditions, options=options, chunk=1, verify=False)


@pytest.fixture(scope="module")
def undisturbed(small_results):
    return numbers(ma.merge_results(small_results))


@pytest.fixture
def ready(small_results):
    """An executor that notes the chunks that it is asked for."""
    return Ready(small_results, [])


@dataclass(frozen=True)
class Stops(Ready):
    """Gives some chunks, and then something happens."""

    after: int
    error: BaseException

    def parts(self, job, chunks):
        parts = super().parts(job, chunks)
        for _ in range(self.after):
            yield next(parts)
        raise self.error


@pytest.fixture
def stop(job, small_results, tmp_path):
    """Runs the job until something happens: what it ended with."""

    def stopped(after, error=None, job=job):
        executor = Stops(small_results, [], after, error or RuntimeError("power cut"))
        with pytest.raises((RuntimeError, Interrupted)) as raised:
            ma.run_job(job, tmp_path / "r.zarr", executor=executor)
        return raised.value

    return stopped


def kept_chunks(path):
    return len(list(chunks_folder(path).glob("*.zarr")))


@pytest.fixture
def real_job(job, toy, monkeypatch):
    """A job that is computed, by workers who share one model; of an analysis with few arrays to store."""
    monkeypatch.setattr(jobs, "load_model", lambda name, **options: toy)
    analyses = [ma.analyses.SegmentFlow()]
    options = ma.RunOptions(layers=[0], seed=3)
    return replace(job, analyses=analyses, options=options, command="a test")


def test_it_is_one_pass_over_the_same_chunks(real_job, toy, tmp_path):
    job = replace(real_job, chunk=2)
    result = ma.run_job(job, tmp_path / "r.zarr")
    parts = []
    for places in job.chunks:
        part = [job.prompts[place] for place in places]
        options = vars(job.options)
        parts.append(run_part(toy, part, job.conditions, job.analyses, places=places, **options))
    assert numbers(ma.merge_results(parts)) == numbers(result)
    assert result.provenance["prompts"]["count"] == 3
    assert (result.provenance["chunk"], result.provenance["command"]) == (2, "a test")


def test_a_run_of_one_chunk_is_a_plain_run(real_job, toy, tmp_path):
    result = ma.run_job(replace(real_job, chunk=64), tmp_path / "r.zarr")
    options = vars(real_job.options)
    plain = ma.run(toy, real_job.prompts, real_job.conditions, real_job.analyses, **options)
    assert numbers(result) == numbers(plain)
    assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(result)
    assert names(tmp_path) == ["r.zarr"]


def test_merged_shards_are_the_whole_run(job, ready, undisturbed, stop, tmp_path):
    """In any order."""
    path = tmp_path / "r.zarr"
    for number in (2, 1):
        ma.run_job(job, path, shard=f"{number}/2", executor=ready)
    shards = ["r-1-of-2.zarr", "r-2-of-2.zarr"]
    assert names(tmp_path) == shards
    sources = [str(tmp_path / name) for name in shards]
    merge_stored(str(path), sources[:1])
    stop(0)  # a shard alone is not the run: chunks are asked for
    shutil.rmtree(path)

    merge_stored(str(path), sources)
    ready.asked.clear()
    merged = ma.run_job(job, path, executor=ready)
    assert ready.asked == []
    assert merged.provenance["job"] == job.fingerprint
    assert numbers(merged) == undisturbed


def test_the_same_call_resumes_after_crash_or_interrupt(job, ready, undisturbed, stop, tmp_path):
    path = tmp_path / "r.zarr"
    stop(1)
    assert not path.exists()
    error = stop(1, KeyboardInterrupt())
    assert str(error).startswith("stopped; 2 of 3 chunks are done and kept in ")
    assert "rerun the command to resume" in str(error)
    assert numbers(ma.run_job(job, path, executor=ready)) == undisturbed
    assert ready.asked == [2]
    assert names(tmp_path) == ["r.zarr"]


def test_damaged_chunks_are_named_and_computed_again(
    job, ready, undisturbed, stop, tmp_path, capsys
):
    """One has another byte, one is another's, and one is beyond the last."""
    path = tmp_path / "r.zarr"
    stop(3)
    chunks = [chunks_folder(path) / f"{number:05d}.zarr" for number in range(4)]
    shutil.copytree(chunks[2], chunks[3])
    shutil.rmtree(chunks[1])
    shutil.copytree(chunks[2], chunks[1])
    file = chunks[0] / "v" / "v" / "c" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert numbers(ma.run_job(job, path, executor=ready)) == undisturbed
    assert ready.asked == [0, 1], "a whole one is kept"
    assert capsys.readouterr().err.count("; this kept chunk is not used") == 3


def test_a_chunk_that_cannot_be_read_is_not_thrown_away(job, ready, stop, tmp_path, monkeypatch):
    path = tmp_path / "r.zarr"
    stop(2)
    read = Location.read

    def stale(place, name):
        if place.folder.name == "00001.zarr" and name != "zarr.json":
            raise OSError(116, "Stale file handle")
        return read(place, name)

    monkeypatch.setattr(Location, "read", stale)
    with pytest.raises(OutputError, match=r"00001\.zarr cannot be read .*Stale file handle"):
        ma.run_job(job, path, executor=ready)
    assert kept_chunks(path) == 2


def test_the_chunks_stay_until_the_result_can_be_read(
    job, ready, undisturbed, tmp_path, monkeypatch
):
    """A file system that gives back something else than it was given."""
    path = tmp_path / "r.zarr"
    write = Location.write

    def rotten(place, name, content):
        is_spoiled = name.startswith("v/v/c/") and "parts" not in str(place)
        write(place, name, bytes([content[0] ^ 1]) + content[1:] if is_spoiled else content)

    with monkeypatch.context() as patch:
        patch.setattr(Location, "write", rotten)
        with pytest.raises(OutputError, match="what was just written cannot be read back"):
            ma.run_job(job, path, executor=ready)
    assert names(tmp_path) == ["r.zarr.parts"]
    assert kept_chunks(path) == 3
    assert numbers(ma.run_job(job, path, executor=ready)) == undisturbed


def test_parts_of_another_run_are_refused_unless_fresh(job, ready, stop, tmp_path):
    path = tmp_path / "r.zarr"
    stop(1)
    for change, field in (
        ({"options": OTHER_SEED}, "seed was 3 and is now 4"),
        ({"conditions": {"slash": ma.MeaninglessTokens(count=6)}}, "conditions was"),
        ({"analyses": [ma.ReceivedAttention(queries="all")]}, r"analyses was None"),
        ({"prompts": job.prompts[:1]}, "prompts was {.count.: 3, .* and is now {.count.: 1, "),
        ({"dtype": "bfloat16"}, "dtype was 'auto'"),
    ):
        message = rf"keeps chunks of another run: {field}.*start again: mechattn run --fresh"
        with pytest.raises(OptionError, match=message):
            ma.run_job(replace(job, **change), path, executor=ready)
    assert kept_chunks(path) == 1
    ma.run_job(replace(job, options=OTHER_SEED), path, executor=ready, fresh=True)
    assert ready.asked == [0, 1, 2]


def test_weights_that_change_in_their_place_are_found(job, ready, stop, tmp_path, checkpoint):
    """At once, where their files are here."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    own_job = replace(job, model=str(folder))
    stop(1, job=own_job)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "q_proj" in name)
    weights[name][0, 0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OptionError, match="of another run: weights was "):
        ma.run_job(replace(own_job), tmp_path / "r.zarr", executor=ready)


def test_weights_that_change_elsewhere_are_found_after_a_chunk(job, small_results, stop, tmp_path):
    stop(1)
    about = small_results[1].provenance
    changed = about | {"model": about["model"] | {"weights_hash": "of others"}}
    results = [small_results[0], replace(small_results[1], provenance=changed)]
    with pytest.raises(OptionError, match=r"don't belong together: model\.weights_hash is"):
        ma.run_job(job, tmp_path / "r.zarr", executor=Ready(results, []))
    assert kept_chunks(tmp_path / "r.zarr") == 1


def test_an_unusable_prompt_is_found_before_any_chunk(real_job, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.engine.run.measure_batch", None)
    too_long = ma.Prompt("word " * 1200, id="6")
    job = replace(real_job, prompts=[*real_job.prompts, too_long])
    with pytest.raises(PromptTooLong, match="prompt 6 "):
        ma.run_job(job, tmp_path / "r.zarr")


def test_every_shard_calibrates_for_the_whole_run(real_job, monkeypatch):
    """What an analysis learns from the prompts does not depend on the shard."""
    counts = []
    calibrated = ma.analyses.MlpActivations.calibrated

    def spy(self, model, layers, measured):
        counts.append(len(measured))
        return calibrated(self, model, layers, measured)

    monkeypatch.setattr(ma.analyses.MlpActivations, "calibrated", spy)
    job = replace(real_job, analyses=[ma.analyses.MlpActivations("absolute", 0.01)])
    assert [chunk for chunk, _ in Local().parts(job, [0, 2])] == [0, 2]
    assert counts == [3], "once a process, not once a chunk"


@pytest.mark.parametrize("shard", ["3", "5/4", "a/b", 3])
def test_a_shard_that_is_none(shard):
    with pytest.raises(OptionError, match='write the third of 16 as "3/16"'):
        parse_shard(shard)


def test_a_shard_without_chunks(job, tmp_path):
    message = r"shard 5/5 has nothing to do: the job has 3 chunks"
    with pytest.raises(OptionError, match=message):
        ma.run_job(job, tmp_path / "r.zarr", shard="5/5")


def test_an_executor_of_the_user_gets_no_workers(job, ready, tmp_path):
    with pytest.raises(OptionError, match="or give them to your executor"):
        ma.run_job(job, tmp_path / "r.zarr", executor=ready, workers=2)


def test_places():
    assert shard_location("out/llama.zarr", Shard(3, 16)) == "out/llama-3-of-16.zarr"
    assert shard_location("s3://b/llama.v2.zarr", Shard(1, 2)) == "s3://b/llama.v2-1-of-2.zarr"
    assert chunks_folder("s3://b/llama.zarr").name == "llama.zarr.parts"
