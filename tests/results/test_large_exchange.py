"""A large result reads only its own objects: each of its array, its chunk and its run, there and the same to the end."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import mechattn as ma
from mechattn.errors import OutputError
from mechattn.store.objects import Store
from mechattn.store.saving import merge_stored
from tests.results.remembering import Remembering

ARRAY = "received_attention/received_by_segment"
NAMES = [f"{ARRAY}/c/{chunk}/0/0/0/0" for chunk in range(2)]
DAMAGED = r"chunk 0 of received_attention\.received_by_segment in the result at .*r\.zarr is damaged \({}\): prompts 0 to 1"


@pytest.fixture(scope="module", autouse=True)
def read_on_demand():
    """However small a result is, its per-prompt values are read when they are needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.store.reading.SHARE", 2**60)
        yield


@pytest.fixture(scope="module")
def job(prompts):
    conditions = {"slash": ma.MeaninglessTokens(count=2)}
    return ma.Job(
        "toy:llama",
        prompts[:4],
        conditions,
        options=ma.RunOptions(layers=[0]),
        chunk=2,
        verify=False,
    )


@pytest.fixture(scope="module")
def other(job):
    """Another run, of the same prompts: its objects have the same names and sizes."""
    return replace(job, options=ma.RunOptions(layers=[1]))


@pytest.fixture(scope="module")
def executor():
    return Remembering()


@pytest.fixture(scope="module")
def made(job, other, executor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    for name, one in (("r", job), ("other", other)):
        ma.run_job(one, folder / f"{name}.zarr", executor=executor)
    return folder


@pytest.fixture(params=["here", "memory"])
def place(request, made, tmp_path, monkeypatch):
    """The result of the job, and where to find the other one."""
    monkeypatch.chdir(tmp_path)
    if request.param == "here":
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return "r.zarr"
    for path in made.rglob("*"):
        if path.is_file():
            Store("memory://exchange").put(path.relative_to(made).as_posix(), path.read_bytes())
    return "memory://exchange/r.zarr"


def store_of(place):
    return Store(place if "://" in place else Path(place))


def received(result):
    return result["received_attention"].received_by_segment.values


@pytest.mark.parametrize("source", ["another chunk", "another run"])
def test_an_object_of_elsewhere_is_refused(job, executor, place, source, capsys):
    mine, right = store_of(place), ma.load_result(place).digest()
    theirs = mine if source == "another chunk" else store_of(place.replace("r.zarr", "other.zarr"))
    content = theirs.get(NAMES[source == "another chunk"])
    assert content != mine.get(NAMES[0])
    mine.put(NAMES[0], content)
    loaded = ma.load_result(place)
    with pytest.raises(OutputError, match=DAMAGED.format("it is not what was written here")):
        received(loaded)
    assert (
        loaded["received_attention"].received_by_segment[2:].values.size
    )  # the other chunk is read
    for target in ("copy.zarr", "memory://exchange-copy/r.zarr"):
        with pytest.raises(OutputError, match="it is not what was written here"):
            merge_stored(target, [place], copy=True)
        with pytest.raises(OutputError, match=r"no stored result|incomplete"):
            ma.load_result(target)
    assert ma.run_job(job, place, executor=executor).digest() == right
    assert "computing 1 of 2 chunks again" in capsys.readouterr().err


def test_what_vanishes_after_opening_is_named(place):
    loaded = ma.load_result(place)
    store_of(place).remove(NAMES[0])
    with pytest.raises(OutputError, match=DAMAGED.format("it is missing")):
        received(loaded)
    with pytest.raises(OutputError, match="it is missing"):
        loaded.save("saved.zarr")
    assert not Path("saved.zarr").exists()


def test_a_result_that_was_replaced_after_opening(job, other, executor, place):
    """By another run, or by nothing; what was computed again with the same numbers is read on."""
    loaded = ma.load_result(place)
    expected = received(loaded)
    ma.run_job(job, place, fresh=True)
    assert (received(loaded) == expected).any()
    ma.run_job(other, place, executor=executor, fresh=True)
    with pytest.raises(
        OutputError, match=r"r\.zarr was replaced or deleted after it was opened: load it again"
    ):
        received(loaded)
    assert not (received(ma.load_result(place)) == expected).all()
    loaded, store = ma.load_result(place), store_of(place)
    for name in store.names():
        store.remove(name)
    with pytest.raises(OutputError, match="was replaced or deleted after it was opened"):
        received(loaded)


@pytest.mark.parametrize("some", [False, True])
def test_a_result_saved_where_it_is_read_from(place, some):
    """A folder is replaced when the new one is complete; at an address the old one would be deleted before it is read."""
    loaded = ma.load_result(place)
    if some:
        cut = {
            name: d.isel(prompt=[1, 2]) if "prompt" in d.dims else d
            for name, d in loaded.datasets.items()
        }
        loaded = replace(loaded, datasets=cut)
    before, right = ma.load_result(place).digest(), loaded.digest()
    if "://" in place:
        with pytest.raises(
            OutputError, match=r"still read from memory://.*save it to another address"
        ):
            loaded.save(f"{place}/")
        assert ma.load_result(place).digest() == before
        loaded = replace(loaded, datasets={name: d.load() for name, d in loaded.datasets.items()})
    loaded.save(place)
    assert ma.load_result(place).digest() == right


@pytest.mark.parametrize(
    "name", ["c/x/0/0/0/0", "c/99/0/0/0/0", "c/0", "c/00/0/0/0/0", "x/c/0/0/0/0/0", "c/0/0/0/0/9"]
)
def test_names_that_no_object_has(job, executor, made, tmp_path, name):
    """In the root of somebody's store; a job that stores its result there computes it again."""
    shutil.copytree(made / "r.zarr", tmp_path / "r.zarr")
    root = tmp_path / "r.zarr" / "zarr.json"
    known = '"objects": {\n'
    assert known in root.read_text()
    root.write_text(
        root.read_text().replace(known, f'{known}"{ARRAY}/{name}": "0123456789abcdef",\n')
    )
    with pytest.raises(
        OutputError, match=f"is damaged: {ARRAY}/{name} belongs to none of its arrays"
    ):
        ma.load_result(tmp_path / "r.zarr")
    assert (
        ma.run_job(job, tmp_path / "r.zarr", executor=executor).digest()
        == ma.load_result(made / "r.zarr").digest()
    )
