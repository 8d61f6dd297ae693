"""A run in chunks: the same bytes however it was cut, interrupted or damaged, and a sentence where it cannot go on."""

import importlib.util
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import mechattn as ma
from mechattn.errors import Interrupted, OptionError, OutputError, PromptTooLong
from mechattn.jobs import job as jobs
from mechattn.jobs.executors import Local
from mechattn.jobs.job import Worker
from mechattn.jobs.resumable_run import chunks_folder, parse_shard, shard_place
from mechattn.results.arrays import datasets_digest
from mechattn.store.objects import Place
from mechattn.store.writing import merge_stored
from tests.conftest import run_part

OTHER_SEED = ma.RunOptions(layers=[0], seed=4)


@pytest.fixture(scope="module", autouse=True)
def loaded_once(toy):
    """Workers of toy:llama share one model, which none of them changes; those of other dtypes and files load their own."""
    load = jobs.load_model

    def loaded(name, *, dtype, **options):
        return toy if (name, dtype) == ("toy:llama", "auto") else load(name, dtype=dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "load_model", loaded)
        yield


@pytest.fixture(scope="module")
def job(prompts):
    """Five prompts in three chunks, of which the last is of one; of an analysis with few arrays to store."""
    return ma.Job(
        "toy:llama",
        prompts[:5],
        {"random": ma.conditions.RandomTokens(count=5)},
        [ma.analyses.SegmentFlow()],
        options=ma.RunOptions(layers=[0], seed=3),
        chunk=2,
        verify=False,
        command="a test",
    )


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    return ma.run_job(job, tmp_path_factory.mktemp("undisturbed") / "r.zarr")


@pytest.fixture
def computed(monkeypatch):
    """The chunks that are computed from now on."""
    chunks = []
    part = Worker.part

    def noting(worker, chunk):
        chunks.append(chunk)
        return part(worker, chunk)

    monkeypatch.setattr(Worker, "part", noting)
    return chunks


@dataclass(frozen=True)
class Stops:
    """Computes some chunks, and then something happens."""

    after: int
    error: BaseException

    def parts(self, job, chunks):
        parts = Local().parts(job, chunks)
        for _ in range(self.after):
            yield next(parts)
        raise self.error


def stopped(job, path, after=2, error=None):
    error = error or RuntimeError("power cut")
    with pytest.raises((RuntimeError, Interrupted)) as raised:
        ma.run_job(job, path, executor=Stops(after, error))
    return raised.value


def numbers(result):
    return datasets_digest(result.datasets)


def kept_chunks(path):
    return len(list(chunks_folder(path).glob("*.zarr")))


def test_it_is_one_pass_over_the_same_chunks(job, undisturbed, toy):
    parts = []
    for places in job.chunks:
        part = [job.prompts[place] for place in places]
        options = vars(job.options)
        parts.append(run_part(toy, part, job.conditions, job.analyses, places=places, **options))
    assert numbers(ma.merge_results(parts)) == numbers(undisturbed)
    assert undisturbed.provenance["prompts"]["count"] == 5
    assert (undisturbed.provenance["chunk"], undisturbed.provenance["command"]) == (2, "a test")


def test_a_run_of_one_chunk_is_a_plain_run(job, toy, tmp_path):
    result = ma.run_job(replace(job, chunk=64), tmp_path / "r.zarr")
    plain = ma.run(toy, job.prompts, job.conditions, job.analyses, **vars(job.options))
    assert numbers(result) == numbers(plain)
    assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(result)
    assert [path.name for path in tmp_path.iterdir()] == ["r.zarr"]


def test_merged_shards_are_the_whole_run(job, tmp_path, computed):
    """In any order; moments over prompts too, which are merged."""
    job = replace(job, analyses=[ma.ReceivedAttention()], prompts=job.prompts[:3])
    path = tmp_path / "r.zarr"
    for number in (2, 1):
        ma.run_job(job, path, shard=f"{number}/2")
    places = [tmp_path / f"r-{number}-of-2.zarr" for number in (1, 2)]
    assert sorted(tmp_path.iterdir()) == places
    shards = list(map(str, places))
    merge_stored(str(path), shards[:1])
    stopped(job, path, 0)  # a shard alone is not the run: chunks are asked for
    shutil.rmtree(path)

    merge_stored(str(path), shards)
    computed.clear()
    merged = ma.run_job(job, path)
    assert merged.provenance["job"] == job.fingerprint
    assert computed == []

    whole = ma.run_job(job, tmp_path / "whole.zarr")
    for name, dataset in whole.datasets.items():
        for variable, theirs in dataset.items():
            ours = merged[name][variable]
            if "prompt" in theirs.dims or theirs.dtype.kind not in "f":
                assert ours.identical(theirs), variable
            else:
                assert abs(ours - theirs).max() < 1e-10


def test_after_a_crash_and_after_ctrl_c_the_same_call_goes_on(job, undisturbed, tmp_path, computed):
    path = tmp_path / "r.zarr"
    stopped(job, path, 1)
    assert not path.exists()
    error = stopped(job, path, 1, KeyboardInterrupt())
    assert str(error).startswith("stopped; 2 of 3 chunks are done and kept in ")
    assert "rerun the command to resume" in str(error)
    computed.clear()
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)
    assert computed == [2]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_damaged_chunks_are_named_and_computed_again(job, undisturbed, tmp_path, capsys):
    """One has another byte, one is another's, and one is beyond the last."""
    path = tmp_path / "r.zarr"
    stopped(job, path, 3)
    chunks = [chunks_folder(path) / f"{number:05d}.zarr" for number in range(4)]
    shutil.copytree(chunks[2], chunks[3])
    shutil.rmtree(chunks[1])
    shutil.copytree(chunks[2], chunks[1])
    files = [file for file in chunks[0].rglob("c/**/*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)
    messages = capsys.readouterr().err
    for number in (0, 1, 3):
        assert f"; computing chunk {number} again" in messages
    assert "chunk 2 again" not in messages, "a whole one is kept"


def test_a_chunk_that_cannot_be_read_is_not_thrown_away(job, tmp_path, monkeypatch):
    path = tmp_path / "r.zarr"
    stopped(job, path, 2)
    read = Place.read

    def stale(place, name):
        if place.folder.name == "00001.zarr" and name != "zarr.json":
            raise OSError(116, "Stale file handle")
        return read(place, name)

    monkeypatch.setattr(Place, "read", stale)
    with pytest.raises(OutputError, match=r"00001\.zarr cannot be read: .*Stale file handle"):
        ma.run_job(job, path)
    assert kept_chunks(path) == 2


def test_begun_anew_when_that_is_asked(job, undisturbed, tmp_path, computed):
    path = tmp_path / "r.zarr"
    stopped(replace(job, options=OTHER_SEED), path, 1)
    with pytest.raises(OptionError, match="keeps chunks of another run: seed"):
        ma.run_job(job, path)
    assert kept_chunks(path) == 1
    computed.clear()
    assert numbers(ma.run_job(job, path, fresh=True)) == numbers(undisturbed)
    assert computed == [0, 1, 2]


def contents(path):
    return {
        file: (file.stat().st_mtime_ns, file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_finished_run_called_again_is_done(job, undisturbed, tmp_path, computed, capsys):
    path = tmp_path / "r.zarr"
    ma.run_job(job, path)
    before = contents(path)
    computed.clear()
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)
    assert computed == []
    assert "r.zarr already holds the result of this run" in capsys.readouterr().err
    assert contents(path) == before
    stopped(replace(job, options=OTHER_SEED), path, 0)  # another run: chunks are asked for


def test_the_chunks_stay_until_the_result_can_be_read(job, undisturbed, tmp_path, monkeypatch):
    """A file system that gives back something else than it was given."""
    path = tmp_path / "r.zarr"
    write = Place.write

    def rotten(place, name, content):
        is_spoiled = name.startswith("segment_flow/flow/c/") and "parts" not in str(place)
        write(place, name, bytes([content[0] ^ 1]) + content[1:] if is_spoiled else content)

    monkeypatch.setattr(Place, "write", rotten)
    with pytest.raises(OutputError, match="what was just written cannot be read back"):
        ma.run_job(job, path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.zarr.parts"]
    assert kept_chunks(path) == 3
    monkeypatch.undo()
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)


def test_parts_of_another_run_are_refused_by_name(job, tmp_path):
    path = tmp_path / "r.zarr"
    stopped(job, path, 1)
    for change, field in (
        ({"options": OTHER_SEED}, "seed was 3 and is now 4"),
        ({"conditions": {"slash": ma.MeaninglessTokens(count=6)}}, "conditions was"),
        ({"analyses": [ma.ReceivedAttention(queries="all")]}, r"analyses was \[SegmentFlow"),
        ({"prompts": job.prompts[:1]}, "prompts was 5 with the hash .* and is now 1 with the hash"),
        ({"dtype": "bfloat16"}, "dtype was 'auto'"),
    ):
        message = rf"keeps chunks of another run: {field}.*start again: mechattn run --fresh"
        with pytest.raises(OptionError, match=message):
            ma.run_job(replace(job, **change), path)
    assert kept_chunks(path) == 1


@pytest.mark.parametrize("files_are_here", [True, False])
def test_a_model_that_changes_between_runs_is_found(
    job, tmp_path, checkpoint, files_are_here, monkeypatch
):
    """In its place, so that only the weights tell: at once where the files are here, else after one chunk."""
    from safetensors.torch import load_file, save_file

    if not files_are_here:
        monkeypatch.setattr("mechattn.jobs.job.stored_hash", lambda name: None)
    folder = tmp_path / "model"
    path = tmp_path / "r.zarr"
    shutil.copytree(checkpoint, folder)
    own_job = replace(job, model=str(folder), prompts=job.prompts[:2], chunk=1)
    stopped(own_job, path, 1)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "q_proj" in name)
    weights[name][0, 0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"of another run: weights was "
    if not files_are_here:
        message = r"don't belong together: model\.weights_hash is"
    with pytest.raises(OptionError, match=message):
        ma.run_job(replace(own_job), path)
    assert kept_chunks(path) == 1


def key_back(path, change=("", "")):
    """The analysis of the how-to, from a file that is read anew."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-an-analysis.md").read_text()
    blocks = [block for block in page.split("```python\n") if "class KeyBack" in block]
    code = blocks[0].split("\nanalyses = ")[0]
    assert change[0] in code
    path.write_text(code.replace(*change) if change[0] else code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KeyBack()


def test_a_class_of_ones_own_goes_on(job, tmp_path, computed):
    """As the how-to writes it, in a second process too; not where its source is another."""
    path = tmp_path / "r.zarr"
    first = key_back(tmp_path / "first.py")
    second = key_back(tmp_path / "second.py")
    assert repr(first) != repr(second), "two objects at two addresses"
    stopped(replace(job, analyses=[first]), path)
    other = key_back(tmp_path / "other.py", (".sum(-1)", ".mean(-1)"))
    with pytest.raises(OptionError, match=r"another run: analyses was \[KeyBack\[source "):
        ma.run_job(replace(job, analyses=[other]), path)
    computed.clear()
    ma.run_job(replace(job, analyses=[second]), path)
    assert computed == [2]


def test_a_prompt_that_cannot_be_used_is_found_before_the_first_chunk(job, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.engine.run.measure_batch", None)
    too_long = ma.Prompt("word " * 1200, id="6")
    with pytest.raises(PromptTooLong, match="prompt 6 "):
        ma.run_job(replace(job, prompts=[*job.prompts, too_long]), tmp_path / "r.zarr")


def test_every_shard_calibrates_for_the_whole_run(job, tmp_path, monkeypatch):
    """What an analysis learns from the prompts does not depend on the shard."""
    counts = []
    calibrated = ma.analyses.MlpActivations.calibrated

    def spy(self, model, layers, measured):
        counts.append(len(measured))
        return calibrated(self, model, layers, measured)

    monkeypatch.setattr(ma.analyses.MlpActivations, "calibrated", spy)
    own_job = replace(job, analyses=[ma.analyses.MlpActivations("absolute", 0.01)], chunk=1)
    ma.run_job(own_job, tmp_path / "r.zarr", shard="1/3")
    assert counts == [5], "once a process, not once a chunk"


@pytest.mark.parametrize("shard", ["3", "5/4", "a/b"])
def test_a_shard_that_is_none(shard):
    with pytest.raises(OptionError, match='write the third of 16 as "3/16"'):
        parse_shard(shard)


def test_a_shard_without_chunks(job, tmp_path):
    message = r"shard 5/5 has nothing to do: 5 prompts in chunks of 2 make 3 chunks"
    with pytest.raises(OptionError, match=message):
        ma.run_job(job, tmp_path / "r.zarr", shard="5/5")


def test_places():
    assert shard_place("out/llama.zarr", (3, 16)) == "out/llama-3-of-16.zarr"
    assert shard_place("s3://b/llama.v2.zarr", (1, 2)) == "s3://b/llama.v2-1-of-2.zarr"
    assert shard_place("llama.zarr", (1, 1)) == "llama.zarr"
    assert chunks_folder("s3://b/llama.zarr").name == "llama.zarr.parts"
    assert str(chunks_folder("/a/b.zarr")) == "/a/b.zarr.parts"
