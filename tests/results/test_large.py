"""A result in regions of a store is the same result, read lazily; several are one by a manifest."""

import errno
import json
import pickle
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import mechattn as ma
from mechattn.errors import OptionError, OutputError
from mechattn.results.arrays import is_lazy
from mechattn.results.merge import GROW, merge_results
from mechattn.store.objects import Store
from mechattn.store.pieces import copied, finish, write_chunk
from mechattn.store.result_bytes import packed
from mechattn.store.saving import merge_stored
from tests.conftest import run_part
from tests.results.remembering import Remembering

PLACES = [[0, 3, 4, 11, 12], [1, 2, 5, 6, 7, 8, 9, 10]]
RECEIVED = "received_attention/received_by_segment"


@pytest.fixture(scope="module", autouse=True)
def read_on_demand():
    """However small a result is, its per-prompt values are read when they are needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.store.reading.SHARE", 2**60)
        yield


@pytest.fixture(scope="module")
def parts(toy):
    """Two results of one run, with each prompt's positions."""
    prompts = ma.load_prompts("word-problems", limit=13)

    def run(places):
        analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift(), ma.analyses.MlpActivations()]
        some = [prompts[place] for place in places]
        conditions = {"slash": ma.MeaninglessTokens(count=5)}
        made = run_part(toy, some, conditions, analyses, positions="prompts", places=places)
        return replace(made, provenance={**made.provenance, "chunk": 3})

    return [run(places) for places in PLACES]


@pytest.fixture(scope="module")
def whole(parts):
    return merge_results(parts)


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    made = tmp_path_factory.mktemp("large")
    for number, part in enumerate(parts):
        copied(part, Store(made / f"{number}.zarr"))
    return made


@pytest.fixture
def stored(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def object_of(path, name=f"{RECEIVED}/c/1"):
    (found,) = [p for p in (path / name).rglob("*") if p.is_file()]
    return found


def root_of(path):
    return json.loads((path / "zarr.json").read_text())


def of_prompts(path):
    """The objects of arrays that are cut by prompts, and their checksums."""
    about = root_of(path)["attributes"]
    cut = tuple(f"{name}/c/" for name in about["by_prompt"])
    return {name: known for name, known in about["objects"].items() if name.startswith(cut)}


def change_root(path, change):
    about = root_of(path)
    change(about["attributes"])
    (path / "zarr.json").write_text(json.dumps(about))


def test_it_is_the_same_and_nothing_of_a_prompt_is_read(parts, folder):
    for number, part in enumerate(parts):
        loaded = ma.load_result(folder / f"{number}.zarr")
        assert is_lazy(loaded)
        assert not is_lazy(part)
        lazy = [
            v for d in loaded.datasets.values() for v in d.variables.values() if not v._in_memory
        ]
        assert len(lazy) > 20
        assert all("prompt" in variable.dims for variable in lazy)
        assert loaded.digest() == part.digest()
        assert loaded.provenance == json.loads(json.dumps(part.provenance))
        loaded.compare("slash", resamples=99)
        assert not any(variable._in_memory for variable in lazy)


def test_every_object_is_one_chunk_of_one_array(folder):
    """So no two writers touch one object: its number along the prompts is that of the chunk."""
    objects = of_prompts(folder / "1.zarr")
    numbers = {int(name.partition("/c/")[2].partition("/")[0]) for name in objects}
    assert numbers == {0, 1, 2}  # 8 prompts in chunks of 3
    there = {
        p.relative_to(folder / "1.zarr").as_posix()
        for p in (folder / "1.zarr").rglob("*")
        if p.is_file()
    }
    assert {*root_of(folder / "1.zarr")["attributes"]["objects"], "zarr.json"} == there


def test_it_opens_in_plain_xarray(parts, folder):
    with xr.open_datatree(folder / "0.zarr", engine="zarr", consolidated=False) as tree:
        for name in ("received_by_segment", "received_per_prompt", "mass_by_segment"):
            np.testing.assert_array_equal(
                tree["received_attention"][name], parts[0]["received_attention"][name]
            )


CASES = [
    ("received", None),
    ("received", "half"),
    ("mass", None),
    ("scale", None),
    ("near_zero", None),
]


@pytest.mark.parametrize(("quantity", "select"), CASES)
def test_tables_are_the_same(whole, folder, quantity, select):
    lazy = merge_results([ma.load_result(folder / f"{number}.zarr") for number in (1, 0)])
    expected = whole.compare("slash", quantity=quantity, select=select, resamples=99)
    got = lazy.compare("slash", quantity=quantity, select=select, resamples=99)
    pd.testing.assert_frame_equal(got, expected, rtol=1e-12)
    assert lazy.digest() == whole.digest()


@pytest.mark.parametrize(("quantity", "select"), CASES)
def test_some_layers_at_a_time_give_the_same(whole, quantity, select, monkeypatch):
    from mechattn.contrast import table

    seen, blocks = [], table.layer_blocks
    monkeypatch.setattr(
        table, "layer_blocks", lambda *given: seen.append(blocks(*given)) or seen[-1]
    )
    expected = whole.compare("slash", quantity=quantity, select=select, resamples=99)
    memory = "8KiB" if quantity == "near_zero" else "45KiB"
    got = replace(whole, memory=memory).compare(
        "slash", quantity=quantity, select=select, resamples=99
    )
    assert [len(layers) > 1 for layers in seen] == [False, True]
    assert got.attrs == expected.attrs
    pd.testing.assert_frame_equal(got, expected, rtol=1e-12)


def test_some_layers_at_a_time_where_one_has_nothing(whole):
    """A layer without the quantity is left out, and said to be; the family of tests is the smaller one."""
    dataset = whole["received_attention"].copy(deep=True)
    dataset["received_by_segment"].loc[{"layer": 1}] = np.nan
    made = replace(whole, datasets={**whole.datasets, "received_attention": dataset})
    tables = []
    for memory in ("2GiB", "45KiB"):
        with pytest.warns(
            UserWarning, match=r"8 of 32 cells are left out \(layer 1 head 0"
        ) as caught:
            tables.append(replace(made, memory=memory).compare("slash", resamples=99))
        assert caught[0].filename == __file__
    assert tables[0].attrs == tables[1].attrs
    assert len(tables[0]) == 24
    pd.testing.assert_frame_equal(*tables, rtol=1e-12)
    dataset["received_by_segment"][:] = 0.0
    for memory in ("2GiB", "45KiB"):
        with pytest.raises(OptionError, match="'received' has no ratio in any cell"):
            replace(made, memory=memory).compare("slash", resamples=99)


def test_heads_and_verdict_some_layers_at_a_time(whole, folder):
    lazy = merge_results([ma.load_result(folder / f"{number}.zarr") for number in (0, 1)])
    heads = [
        (options, whole.heads("received", **options))
        for options in ({"top": None}, {"top": 5, "select": "half"})
    ]
    expected = whole.verdict("slash")
    for of in (whole, lazy):
        for options, table in heads:
            got = replace(of, memory="20KiB").heads("received", **options)
            assert got.attrs == table.attrs
            pd.testing.assert_frame_equal(got, table, rtol=1e-12)
        got = replace(of, memory="320KiB").verdict("slash")
        for name in ("change", "null", "beyond", "above", "n", "unit"):
            close = name in ("change", "null")
            check = np.testing.assert_allclose if close else np.testing.assert_array_equal
            check(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("call", ["compare", "verdict"])
def test_a_memory_that_is_too_small_is_said_before_anything_is_read(folder, call, monkeypatch):
    lazy = ma.load_result(folder / "0.zarr")
    monkeypatch.setattr(
        "mechattn.store.reading.Listed._read", lambda *given: pytest.fail("it was read")
    )
    with pytest.raises(OptionError, match=r"takes 1 MiB, and memory='1KiB' allows less; give"):
        getattr(replace(lazy, memory="1KiB"), call)(
            "slash", **({"matched": False} if call == "compare" else {})
        )
    with pytest.raises(OptionError, match='write it like "2GiB"'):
        ma.load_result(folder / "0.zarr", memory="lots")


def test_a_changed_byte_names_the_prompts(stored):
    path = object_of(stored / "1.zarr")
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    loaded = ma.load_result(stored / "1.zarr")
    with pytest.raises(
        OutputError, match=r"chunk 1 of received_attention\.received_by_segment .* prompts 3 to 5"
    ):
        loaded["received_attention"].received_by_segment.load()
    assert np.isfinite(
        loaded["received_attention"].received_by_segment[:3, :, :, :, 4]
    ).all()  # the others are read


@pytest.mark.parametrize(
    ("change", "why"), [("missing", "it is missing"), ("short", "[0-9,]+ of [0-9,]+ bytes")]
)
def test_an_object_that_is_not_there_or_not_whole(stored, change, why):
    path = object_of(stored / "1.zarr")
    path.unlink() if change == "missing" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        OutputError, match=rf"chunk 1 of {RECEIVED.replace('/', '.')} .*{why}\): prompts 3 to 5"
    ):
        ma.load_result(stored / "1.zarr")


@pytest.mark.parametrize("change", ["provenance", "objects", "moments", "shape"])
def test_what_stands_beside_the_objects_is_sealed(stored, change):
    import zarr

    path = stored / "0.zarr"
    if change == "provenance":
        change_root(
            path,
            lambda about: about.update(
                provenance=about["provenance"].replace("toy:llama", "llama-8b")
            ),
        )
    elif change == "objects":
        change_root(
            path, lambda about: about["objects"].update({next(iter(about["objects"])): "0" * 16})
        )
    elif change == "moments":
        zarr.open_group(path, mode="r+")["received_attention/received"][0, 0, 0, 0] = 0.25
    else:
        array = path / RECEIVED / "zarr.json"
        array.write_text(
            array.read_text().replace('"shape": [\n    5,', '"shape": [\n    1000000000000,')
        )
    with pytest.raises(OutputError, match=r"damaged|conflicting sizes"):
        ma.load_result(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"crc32c"', '"zstd"'),
        ('"little"', '"big"'),
        ('"prompt"', '"layer"'),
        ('"float32"', '"bytes"'),
    ],
)
def test_a_region_that_is_cut_otherwise_is_refused(stored, old, new):
    array = stored / "0.zarr" / RECEIVED / "zarr.json"
    assert old in array.read_text()
    array.write_text(array.read_text().replace(old, new))
    with pytest.raises(
        OutputError,
        match=f"{RECEIVED}/zarr.json in the result at .* is not in the format that mechattn writes",
    ):
        ma.load_result(stored / "0.zarr")


@pytest.mark.parametrize(
    ("target", "copy"),
    [
        ("all.zarr", False),
        ("memory://large/all.zarr", False),
        pytest.param("all.zarr", True, marks=pytest.mark.slow),
        pytest.param("memory://large/copy.zarr", True, marks=pytest.mark.slow),
    ],
)
def test_two_results_are_one(whole, stored, target, copy):
    where = target if "://" in target else str(stored / target)
    sources = [str(stored / f"{number}.zarr") for number in (1, 0)]
    if "://" in target:
        sources = [f"memory://large/{number}.zarr" for number in (1, 0)]
        for source in sources:
            ma.load_result(stored / Path(source).name).save(source)
    for places in (sources[:1], sources):  # an earlier merge of some of them is replaced
        merge_stored(where, places, copy)
    merged = ma.load_result(where)
    assert is_lazy(merged)
    sent = pickle.loads(
        pickle.dumps(merged)
    )  # what another process gets reads the same objects, when it needs them
    assert is_lazy(sent)
    assert sent.digest() == merged.digest() == whole.digest()
    if "://" not in target:
        files = [p.relative_to(where).as_posix() for p in Path(where).rglob("*") if p.is_file()]
        assert (files == ["zarr.json"]) is not copy
        merge_stored(
            str(stored / "more.zarr"), [where], False
        )  # a manifest of a manifest names what that one names
        assert ma.load_result(stored / "more.zarr").digest() == whole.digest()


@pytest.mark.parametrize("where", ["here", "memory://named"])
def test_what_a_manifest_names_is_not_replaced_by_it(whole, stored, where):
    folder = stored if where == "here" else where
    every, *places = (f"{folder}/{name}.zarr" for name in ("all", 0, 1))
    if where != "here":
        for place in places:
            ma.load_result(stored / Path(place).name).save(place)
    merge_stored(every, places)
    for copy in (False, True):
        with pytest.raises(OptionError, match=r"0\.zarr is both a result to merge and the target"):
            merge_stored(places[0], [every], copy)
    if where != "here":
        with pytest.raises(OutputError, match=r"is still read from .*0\.zarr"):
            ma.load_result(every).save(places[0])
    assert ma.load_result(every).digest() == whole.digest()


def test_what_a_manifest_names_was_changed_or_is_gone(stored):
    merge_stored(str(stored / "all.zarr"), [str(stored / "0.zarr"), str(stored / "1.zarr")])
    before = (stored / "1.zarr" / "zarr.json").read_text()
    shutil.rmtree(stored / "1.zarr")
    with pytest.raises(OutputError, match=r"there is no stored result at .*1\.zarr"):
        ma.load_result(stored / "all.zarr")
    shutil.copytree(stored / "0.zarr", stored / "1.zarr")
    assert before != (stored / "1.zarr" / "zarr.json").read_text()
    with pytest.raises(OutputError, match=r"1\.zarr was changed after it became part of"):
        ma.load_result(stored / "all.zarr")


def test_a_part_that_was_made_again_is_merged_again(stored, whole):
    """The manifest holds names alone, so nothing is lost; one that names something else stays."""
    places = [str(stored / "0.zarr"), str(stored / "1.zarr")]
    merge_stored(str(stored / "all.zarr"), places)
    again = ma.load_result(places[1])
    again.provenance["seconds"] = 7.0
    copied(again, Store(stored / "new.zarr"))
    shutil.rmtree(places[1])
    (stored / "new.zarr").rename(places[1])
    with pytest.raises(OutputError, match=r"1\.zarr was changed after .* merge the results again"):
        ma.load_result(stored / "all.zarr")
    merge_stored(str(stored / "all.zarr"), places)
    assert ma.load_result(stored / "all.zarr").digest() == whole.digest()
    with pytest.raises(OptionError, match="is not a merge of"):
        merge_stored(str(stored / "all.zarr"), places[:1])
    with pytest.raises(OptionError, match="is not a merge of"):
        merge_stored(str(stored / "all.zarr"), places[:1], copy=True)


def test_half_of_it_in_half_the_room_is_refused(parts, stored):
    shutil.rmtree(stored / "1.zarr")
    about = write_chunk(Store(stored / "1.zarr"), 0, parts[1], 8, half=True)
    finish(Store(stored / "1.zarr"), about, {})
    with pytest.raises(
        OptionError, match=r"the type of \S+ is 'float(32|16)' in one and 'float(32|16)' in another"
    ):
        merge_stored(
            str(stored / "all.zarr"), [str(stored / f"{number}.zarr") for number in (0, 1)]
        )


def test_results_elsewhere_are_copied_or_refused(stored, folder):
    with pytest.raises(OptionError, match=r"cannot name it.*mechattn merge --copy"):
        merge_stored(str(stored / "all.zarr"), [str(folder / "0.zarr"), str(stored / "1.zarr")])
    assert not (stored / "all.zarr").exists()


@pytest.mark.parametrize(
    "name", ["../0.zarr", "/etc", "s3://bucket/0.zarr", "a/../../0.zarr", "", 7, None]
)
def test_a_manifest_of_somebody_names_nothing_elsewhere(stored, name):
    merge_stored(str(stored / "all.zarr"), [str(stored / "0.zarr"), str(stored / "1.zarr")])
    change_root(stored / "all.zarr", lambda about: about["manifest"][0].update(name=name))
    with pytest.raises(
        OutputError, match=f"names {re.escape(repr(name))}, which is not next to it"
    ):
        ma.load_result(stored / "all.zarr")


def test_half_the_room(parts, tmp_path):
    """float16 for what is of each prompt; moments stay as they are, and no interval moves by more than 0.05 %."""
    receipt = [
        write_chunk(Store(tmp_path / "h.zarr"), n, p, 8, half=True) for n, p in enumerate(parts[:1])
    ]
    finish(Store(tmp_path / "h.zarr"), receipt[0], {})
    loaded, full = ma.load_result(tmp_path / "h.zarr"), parts[0]
    stored = loaded["received_attention"]
    assert stored.received_by_segment.dtype == np.float16
    np.testing.assert_array_equal(stored.received, full["received_attention"].received)
    expected = full["received_attention"].received_by_segment.values
    np.testing.assert_allclose(
        stored.received_by_segment.values, expected, rtol=2**-11, atol=2**-25
    )
    got, want = (r.compare("slash", resamples=99) for r in (loaded, full))
    assert 0 < abs(got.difference - want.difference).max() < 2 * 2**-11


def test_a_number_too_large_for_half_is_refused(parts, tmp_path):
    dataset = parts[0]["received_attention"].copy(deep=True)
    dataset["received_by_segment"][:] = 1e6
    large = replace(parts[0], datasets={**parts[0].datasets, "received_attention": dataset})
    with pytest.raises(OptionError, match='received_by_segment is too large for values="float16"'):
        write_chunk(Store(tmp_path / "h.zarr"), 0, large, 8, half=True)


def written_elsewhere(place, source, number, some):
    """A chunk that another process writes."""
    result = ma.load_result(source)
    cut = {
        n: one.isel(prompt=some) if "prompt" in one.dims else one
        for n, one in result.datasets.items()
    }
    longest = max(max(one.sizes.get(dim, 0) for dim in GROW) for one in result.datasets.values())
    made = write_chunk(
        Store(Path(place)), number, replace(result, datasets=cut), 3, False, width=min(256, longest)
    )
    return made.provenance["objects"]


@pytest.mark.slow
def test_processes_write_at_the_same_time(parts, folder, tmp_path):
    """Two processes, the chunks in turn; what they write is what one writes."""
    expected = of_prompts(folder / "1.zarr")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = [slice(start, start + 3) for start in (0, 3, 6)]
        given = [
            (tmp_path / "n.zarr", folder / "1.zarr", number, some)
            for number, some in enumerate(rows)
        ]
        made = list(pool.map(written_elsewhere, *zip(*given, strict=True)))
    assert {name: digest for one in made for name, digest in one.items()} == expected


@pytest.fixture(scope="module")
def job(prompts):
    return ma.Job(
        "toy:llama",
        prompts[:5],
        {"slash": ma.MeaninglessTokens(count=2)},
        options=ma.RunOptions(layers=[0]),
        chunk=2,
        verify=False,
    )


@pytest.fixture(scope="module")
def computed():
    return {}


@pytest.fixture
def executor(computed):
    return Remembering(computed)


@pytest.fixture(scope="module")
def small(job, computed, tmp_path_factory):
    return ma.run_job(
        job, tmp_path_factory.mktemp("small") / "r.zarr", executor=Remembering(computed)
    )


@pytest.mark.parametrize("name", ["r.zarr", "memory://large-job/r.zarr"])
def test_a_large_job_is_the_same_and_mends_a_chunk(
    job, small, executor, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    result = ma.run_job(job, name, executor=executor)
    assert is_lazy(result)
    assert result.digest() == small.digest()
    assert set(result.provenance) == set(small.provenance)
    assert ma.run_job(job, name, executor=executor).digest() == small.digest()
    assert f"{name} already holds" in capsys.readouterr().err
    assert executor.asked == [0, 1, 2]
    store = Store(name if "://" in name else tmp_path / name)
    lost, changed = f"{RECEIVED}/c/1/0/0/0/0", f"{RECEIVED}/c/2/0/0/0/0"
    content = store.get(changed)
    store.remove(lost)
    store.put(changed, content[:9] + b"?" + content[10:])
    assert ma.run_job(job, name, executor=executor).digest() == small.digest()
    assert executor.asked == [0, 1, 2, 1, 2]
    assert "computing 2 of 3 chunks again" in capsys.readouterr().err
    assert store.get(changed) == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if "://" in name else ["r.zarr"])


@dataclass(frozen=True)
class Given:
    """An executor whose chunks are all the same."""

    content: bytes

    def parts(self, job, chunks):
        yield from ((chunk, self.content) for chunk in chunks)


def test_a_chunk_that_comes_out_otherwise_mends_nothing(toy, job, executor, tmp_path):
    """Another machine's last digits are not put beside the others."""
    ma.run_job(job, tmp_path / "r.zarr", executor=executor)
    store = Store(tmp_path / "r.zarr")
    store.remove(f"{RECEIVED}/c/1/0/0/0/0")
    other = ma.run(toy, job.prompts[2:4], {"slash": ma.MeaninglessTokens(count=3)}, layers=[0])
    with pytest.raises(OutputError, match=r"differs from the original in"):
        ma.run_job(job, tmp_path / "r.zarr", executor=Given(packed(other)))
    assert store.get(f"{RECEIVED}/c/1/0/0/0/0") is None


def test_shards_of_a_large_job_end_as_one_run(job, small, executor, tmp_path):
    for shard in ("2/2", "1/2"):
        ma.run_job(job, tmp_path / "s.zarr", shard=shard, executor=executor)
    merge_stored(
        str(tmp_path / "all.zarr"), [str(path) for path in sorted(tmp_path.glob("s-*.zarr"))]
    )
    merged = ma.load_result(tmp_path / "all.zarr")
    for name in ("received_by_segment", "mass_by_segment"):
        np.testing.assert_array_equal(
            merged["received_attention"][name], small["received_attention"][name]
        )
    assert merged.compare("slash", resamples=99).equals(small.compare("slash", resamples=99))


def test_files_of_somebody_stop_a_large_run(job, tmp_path):
    kept = tmp_path / "r.zarr.parts" / "store" / "received_attention"
    kept.mkdir(parents=True)
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(
        OutputError,
        match=r"holds store/received_attention/notes\.txt, which mechattn did not write",
    ):
        ma.run_job(job, tmp_path / "r.zarr")
    assert (kept / "notes.txt").read_text() == "mine"


def test_a_full_disk_keeps_the_chunks_before(job, small, executor, tmp_path, monkeypatch):
    put, left = Store.put, [20]

    def full(self, name, content):
        left[0] -= 1
        if left[0] < 0:
            monkeypatch.setattr(Path, "write_bytes", no_room)
        put(self, name, content)

    def no_room(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "put", full)
    with pytest.raises(
        OutputError, match=r"No space left on device\. Earlier chunks are kept; free some space"
    ):
        ma.run_job(job, tmp_path / "r.zarr", executor=executor)
    monkeypatch.undo()
    executor.asked.clear()
    done = len(list((tmp_path / "r.zarr.parts").glob("*.zip")))
    assert ma.run_job(job, tmp_path / "r.zarr", executor=executor).digest() == small.digest()
    assert done >= 1
    assert executor.asked == list(range(done, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "float64"}, 'choose "float32" or "float16"'),
    ],
)
def test_values_that_are_none(job, options, message):
    with pytest.raises(OptionError, match=message):
        replace(job, **options)
