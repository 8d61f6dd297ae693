"""A run in chunks: the same bytes however it was cut, interrupted or damaged, and a sentence where it cannot go on."""

import shutil
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

import mechattn as ma
from mechattn.errors import Interrupted, OptionError, OutputError, PromptTooLong
from mechattn.jobs import job as jobs
from mechattn.jobs.executors import Local
from mechattn.jobs.job import Worker
from mechattn.jobs.resumable_run import chunks_folder, parse_shard, shard_place
from mechattn.results.arrays import digest
from mechattn.store.objects import Place
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
    """Seven prompts in four chunks, of which the last is of one."""
    conditions = {"random": ma.conditions.RandomTokens(count=5)}
    return ma.Job(
        "toy:llama",
        prompts[:7],
        conditions,
        options=ma.RunOptions(layers=[0], seed=3),
        chunk=2,
        verify=False,
        command="a test",
    )


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    return ma.run_job(job, tmp_path_factory.mktemp("undisturbed") / "r.zarr")


@dataclass(frozen=True)
class Stops:
    """Computes some chunks, and then something happens."""

    after: int
    error: BaseException

    def parts(self, job, chunks):
        made = Local().parts(job, chunks)
        for number in count():
            if number == self.after:
                raise self.error
            yield next(made)


def stopped(job, path, after=2, error=None):
    with pytest.raises((RuntimeError, Interrupted)) as raised:
        ma.run_job(job, path, executor=Stops(after, error or RuntimeError("power cut")))
    return raised.value


@pytest.fixture(scope="module")
def begun(job, tmp_path_factory):
    """Where one chunk is kept, which nothing that is refused changes."""
    path = tmp_path_factory.mktemp("begun") / "r.zarr"
    stopped(job, path, 1)
    return path


def numbered(prompts):
    return [ma.Prompt(f"Tom has {n} apples.", id=str(n)) for n in range(prompts)]


def numbers(result):
    return digest(result.datasets)


def test_it_is_one_pass_over_the_same_chunks(job, undisturbed, toy):
    parts = []
    for places in job.chunks:
        some = [job.prompts[place] for place in places]
        parts.append(run_part(toy, some, job.conditions, places=places, **vars(job.options)))
    merged = ma.merge_results(parts)
    assert numbers(merged) == numbers(undisturbed)
    assert undisturbed.provenance["prompts"] == ma.run(toy, job.prompts).provenance["prompts"]
    assert (undisturbed.provenance["chunk"], undisturbed.provenance["command"]) == (2, "a test")


def test_a_run_of_one_chunk_is_a_plain_run(job, toy, tmp_path):
    made = ma.run_job(replace(job, chunk=64), tmp_path / "r.zarr")
    assert numbers(made) == numbers(ma.run(toy, job.prompts, job.conditions, **vars(job.options)))
    assert numbers(ma.load_result(tmp_path / "r.zarr")) == numbers(made)
    assert [path.name for path in tmp_path.iterdir()] == ["r.zarr"]


def test_shards_in_any_order_are_the_whole(job, undisturbed, tmp_path):
    for number in (3, 1, 2):
        ma.run_job(job, tmp_path / "r.zarr", shard=f"{number}/3")
    names = [f"r-{number}-of-3.zarr" for number in (2, 3, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    merged = ma.merge_results([ma.load_result(tmp_path / name) for name in names])
    for name, dataset in undisturbed.datasets.items():
        for variable in dataset:
            ours, theirs = merged[name][variable], dataset[variable]
            if "prompt" in theirs.dims or theirs.dtype.kind not in "f":
                assert ours.identical(theirs), variable
            else:
                assert abs(ours - theirs).max() < 1e-10


def test_after_a_crash_and_after_ctrl_c_the_same_call_goes_on(
    job, undisturbed, tmp_path, monkeypatch
):
    path = tmp_path / "r.zarr"
    stopped(job, path)
    assert not path.exists()
    computed = []
    part = Worker.part
    monkeypatch.setattr(
        Worker, "part", lambda self, chunk: computed.append(chunk) or part(self, chunk)
    )
    error = stopped(job, path, 1, KeyboardInterrupt())
    assert str(error).startswith("stopped; 3 of 4 chunks are done and kept in ")
    assert "rerun the command to resume" in str(error)
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)
    assert computed == [2, 3]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_damaged_chunks_are_named_and_computed_again(job, undisturbed, tmp_path, capsys):
    """One has another byte, one lacks a file, one is another's, and one is beyond the last."""
    path = tmp_path / "r.zarr"
    stopped(job, path, 4)
    chunks = [chunks_folder(path) / f"{number:05d}.zarr" for number in range(5)]
    shutil.copytree(chunks[3], chunks[4])
    shutil.rmtree(chunks[2])
    shutil.copytree(chunks[3], chunks[2])
    files = [
        max((p for p in chunk.rglob("c/**/*") if p.is_file()), key=lambda p: p.stat().st_size)
        for chunk in chunks[:2]
    ]
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    files[1].unlink()
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)
    said = capsys.readouterr().err
    for number in (0, 1, 2, 4):
        assert f"; computing chunk {number} again" in said
    assert "chunk 3 again" not in said, "a whole one is kept"


def test_a_chunk_that_cannot_be_read_is_not_thrown_away(job, undisturbed, tmp_path, monkeypatch):
    path = tmp_path / "r.zarr"
    stopped(job, path, 3)
    read = Place.read

    def stale(place, name):
        if place.path.name == "00001.zarr" and name != "zarr.json":
            raise OSError(116, "Stale file handle")
        return read(place, name)

    monkeypatch.setattr(Place, "read", stale)
    with pytest.raises(OutputError, match=r"00001\.zarr cannot be read: .*Stale file handle"):
        ma.run_job(job, path)
    monkeypatch.undo()
    assert len(list(chunks_folder(path).glob("*.zarr"))) == 3
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)


def test_begun_anew_when_that_is_asked(job, undisturbed, tmp_path, monkeypatch):
    path = tmp_path / "r.zarr"
    stopped(replace(job, options=OTHER_SEED), path, 2)
    with pytest.raises(OptionError, match="keeps chunks of another run: seed"):
        ma.run_job(job, path)
    assert len(list(chunks_folder(path).glob("*.zarr"))) == 2
    assert numbers(ma.run_job(job, path, fresh=True)) == numbers(undisturbed)
    computed = []
    part = Worker.part
    monkeypatch.setattr(
        Worker, "part", lambda self, chunk: computed.append(chunk) or part(self, chunk)
    )
    ma.run_job(job, path, fresh=True)
    assert computed == [0, 1, 2, 3], "a finished result too is computed again"


def test_a_finished_run_called_again_is_done(job, undisturbed, tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.zarr"
    ma.run_job(job, path)
    before = {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in [path, *path.rglob("*")] if p.is_file()
    }
    monkeypatch.setattr(Worker, "part", lambda self, chunk: pytest.fail("computed again"))
    again = ma.run_job(job, path)
    assert numbers(again) == numbers(undisturbed)
    assert "r.zarr already holds the result of this run" in capsys.readouterr().err
    assert before == {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in [path, *path.rglob("*")] if p.is_file()
    }
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(
        pytest.fail.Exception, match="computed again"
    ):  # another job, and other chunks of this one
        ma.run_job(replace(job, options=OTHER_SEED), path)
    path.rename(tmp_path / "r-1-of-2.zarr")
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        ma.run_job(job, path, shard="1/2")


def test_merged_shards_are_the_finished_run(job, tmp_path, monkeypatch):
    from mechattn.store.writing import merge_stored

    for number in (1, 2):
        ma.run_job(job, tmp_path / "r.zarr", shard=f"{number}/2")
    places = [str(tmp_path / f"r-{number}-of-2.zarr") for number in (1, 2)]
    merge_stored(str(tmp_path / "r.zarr"), places[:1])
    monkeypatch.setattr(Worker, "part", lambda self, chunk: pytest.fail("computed again"))
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        ma.run_job(job, tmp_path / "r.zarr")
    merge_stored(str(tmp_path / "r.zarr"), places)
    assert ma.run_job(job, tmp_path / "r.zarr").provenance["job"] == job.fingerprint


def test_the_chunks_stay_until_the_result_can_be_read(job, undisturbed, tmp_path, monkeypatch):
    """A file system that gives back something else than it was given."""
    path, write = tmp_path / "r.zarr", Place.write

    def rotten(place, name, content):
        spoiled = name == "received_attention/received/c/0/0/0/0" and "parts" not in str(place)
        write(place, name, bytes([content[0] ^ 1]) + content[1:] if spoiled else content)

    monkeypatch.setattr(Place, "write", rotten)
    with pytest.raises(OutputError, match="what was just written cannot be read back"):
        ma.run_job(job, path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.zarr.parts"]
    assert len(list(chunks_folder(path).glob("*.zarr"))) == 4
    monkeypatch.undo()
    monkeypatch.setattr(Worker, "part", lambda self, chunk: pytest.fail("computed again"))
    assert numbers(ma.run_job(job, path)) == numbers(undisturbed)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"options": OTHER_SEED}, "seed was 3 and is now 4"),
        ({"conditions": {"slash": ma.MeaninglessTokens(count=6)}}, "conditions was"),
        ({"analyses": [ma.ReceivedAttention(queries="all")]}, "analyses was None"),
        (
            {"prompts": [ma.Prompt("Tom has 3 apples.")]},
            "prompts was 7 with the hash .* and is now 1 with the hash",
        ),
        ({"dtype": "bfloat16"}, "dtype was 'auto'"),
    ],
)
def test_parts_of_another_run_are_refused_by_name(job, begun, change, field):
    with pytest.raises(
        OptionError,
        match=rf"keeps chunks of another run: {field}.*start again: mechattn run --fresh",
    ):
        ma.run_job(replace(job, **change), begun)
    assert len(list(chunks_folder(begun).glob("*.zarr"))) == 1


@pytest.mark.parametrize("seen", [True, False])
def test_a_model_that_changes_between_runs_is_found(job, tmp_path, checkpoint, seen, monkeypatch):
    """In its place, so that only the weights tell: at once where the files are here, else after one chunk."""
    from safetensors.torch import load_file, save_file

    if not seen:
        monkeypatch.setattr("mechattn.jobs.job.stored_hash", lambda name: None)
    folder, path = tmp_path / "model", tmp_path / "r.zarr"
    shutil.copytree(checkpoint, folder)
    mine = replace(job, model=str(folder), prompts=numbered(3), chunk=1)
    stopped(mine, path, 1)
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in sorted(weights) if "q_proj" in n)
    weights[name][0, 0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = (
        r"of another run: weights was "
        if seen
        else r"don't belong together: model\.weights_hash is"
    )
    with pytest.raises(OptionError, match=message):
        ma.run_job(replace(mine), path)
    assert len(list(chunks_folder(path).glob("*.zarr"))) == 1
    if seen:
        ma.run_job(replace(mine), path, fresh=True)
        weights[name][0, 0] += 0.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        monkeypatch.setattr(Worker, "part", lambda self, chunk: pytest.fail("computed again"))
        with pytest.raises(
            pytest.fail.Exception, match="computed again"
        ):  # a finished result is not taken for it
            ma.run_job(replace(mine), path)


def own_key(path, change=("", "")):
    """The analysis of the how-to, from a file that is read anew."""
    import importlib.util
    import sys

    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-an-analysis.md").read_text()
    (code,) = [
        part.split("\nanalyses = ")[0]
        for part in page.split("```python\n")
        if "class KeyBack" in part
    ]
    assert change[0] in code
    path.write_text(code.replace(*change) if change[0] else code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KeyBack()


def test_a_class_of_ones_own_goes_on(job, tmp_path, monkeypatch):
    """As the how-to writes it, in a second process too; not where its source is another."""
    path = tmp_path / "r.zarr"
    first, second = own_key(tmp_path / "one.py"), own_key(tmp_path / "two.py")
    assert repr(first) != repr(second), "two objects at two addresses"
    mine = replace(job, analyses=[first])
    stopped(mine, path)
    other = own_key(tmp_path / "three.py", (".sum(-1)", ".mean(-1)"))
    with pytest.raises(
        OptionError, match=r"keeps chunks of another run: analyses was \[KeyBack\[source "
    ):
        ma.run_job(replace(job, analyses=[other]), path)
    computed = []
    part = Worker.part
    monkeypatch.setattr(
        Worker, "part", lambda self, chunk: computed.append(chunk) or part(self, chunk)
    )
    made = ma.run_job(replace(job, analyses=[second]), path)
    assert computed == [2, 3]
    assert numbers(made) == numbers(ma.run_job(mine, tmp_path / "undisturbed.zarr"))
    computed.clear()
    ma.run_job(replace(job, analyses=[own_key(tmp_path / "four.py")]), path)
    assert computed == []


def test_a_prompt_that_cannot_be_used_is_found_before_the_first_chunk(job, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.engine.run.measure_batch", None)
    with pytest.raises(PromptTooLong, match="prompt 6 "):
        ma.run_job(
            replace(job, prompts=[*numbered(6), ma.Prompt("word " * 1200, id="6")]),
            tmp_path / "r.zarr",
        )


def test_every_shard_calibrates_for_the_whole_run(job, tmp_path, monkeypatch):
    """What an analysis learns from the prompts does not depend on the shard."""
    seen = []
    calibrated = ma.analyses.MlpActivations.calibrated

    def spy(self, model, layers, measured):
        seen.append(len(measured))
        return calibrated(self, model, layers, measured)

    monkeypatch.setattr(ma.analyses.MlpActivations, "calibrated", spy)
    mine = replace(job, analyses=[ma.analyses.MlpActivations()], chunk=4)
    shards = [ma.run_job(mine, tmp_path / "r.zarr", shard=f"{n}/2") for n in (1, 2)]
    assert seen == [7, 7]  # once a process, not once a chunk
    assert ma.merge_results(shards)["mlp_activations"].sizes["prompt"] == 7


@pytest.mark.parametrize("shard", ["3", "0/4", "5/4", "a/b", "1/0", "-1/2", ""])
def test_a_shard_that_is_none(shard):
    with pytest.raises(OptionError, match='write the third of 16 as "3/16"'):
        parse_shard(shard)


def test_a_shard_without_chunks(job, tmp_path):
    with pytest.raises(
        OptionError, match=r"shard 5/5 has nothing to do: 7 prompts in chunks of 2 make 4 chunks"
    ):
        ma.run_job(job, tmp_path / "r.zarr", shard="5/5")


def test_places():
    assert shard_place("out/llama.zarr", (3, 16)) == "out/llama-3-of-16.zarr"
    assert shard_place("s3://b/llama.v2.zarr", (1, 2)) == "s3://b/llama.v2-1-of-2.zarr"
    assert shard_place("llama.zarr", (1, 1)) == "llama.zarr"
    assert chunks_folder("s3://b/llama.zarr").name == "llama.zarr.parts"
    assert str(chunks_folder("/a/b.zarr")) == "/a/b.zarr.parts"
