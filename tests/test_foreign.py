"""Folders full of somebody's files, listed before and after every command: nothing in them is changed or gone."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.errors import MechattnError
from mechattn.render.html_views import View

CONFIG = """
model = "toy:llama"
layers = [0]
verify = false
[prompts]
source = "word-problems"
limit = 3
[conditions.slash]
count = 2
[evaluation]
out = "{out}"
new_tokens = 2
[output]
result = "{result}"
{page}
[[analyses]]
kind = "{analysis}"
"""


@pytest.fixture(autouse=True)
def sooner(toy, monkeypatch):
    """One loaded model, and pages without figures and map: what is written where does not depend on them."""
    monkeypatch.setattr("mechattn.pages.page.page_json", lambda *models: "")
    for module in ("mechattn.jobs.job", "mechattn.commands.evaluate"):
        monkeypatch.setattr(f"{module}.load_model", lambda *args, **options: toy)
    for module in ("mechattn.pages.page", "mechattn.commands.stored_results"):
        monkeypatch.setattr(f"{module}.sections_of", lambda *args: ([], []))


@pytest.fixture(scope="module")
def result(toy, prompts):
    return ma.run(toy, prompts[:3], {"slash": ma.MeaninglessTokens(count=2)}, layers=[0])


@pytest.fixture(scope="module")
def full(result, tmp_path_factory):
    """What is somebody's, under every name that a command could write to."""
    import xarray as xr
    import zarr

    folder = tmp_path_factory.mktemp("full")
    for name in ("climate.zarr", "toy-llama.zarr", "archive/data.zarr"):
        zarr.open_group(folder / name, mode="w").create_array("temperature", data=np.arange(5.0))
        (folder / name / "thesis.tex").write_text("ten years")
    result.save(folder / "noted.zarr")
    (folder / "noted.zarr" / "notes.md").write_text("look at head 3")
    result.save(folder / "grown.zarr")
    xr.Dataset({"mine": ("x", np.ones(3))}).to_zarr(
        folder / "grown.zarr", group="mine", mode="a", consolidated=False, zarr_format=3
    )
    result.save(folder / "in-array.zarr")
    (folder / "in-array.zarr" / "sequences" / "place" / "c" / "notes.txt").write_text("mine")
    result.save(folder / "linked-in.zarr")
    (folder / "linked-in.zarr" / "archive").symlink_to("../archive")
    (folder / "link.zarr").symlink_to("archive/data.zarr")
    (folder / "dangling.zarr").symlink_to("archive/gone.zarr")
    result.save(folder / "ours.zarr")
    for name in (
        "thesis.tex",
        "index.html",
        "report.html",
        "answers.jsonl",
        "result.zarr",
        "odd.zarr/zarr.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"<html>my {name}")
    beside = (
        "new.zarr.parts/thesis.tex", "new.zarr.parts/photos.zip", "new.zarr.parts/draft.new", "other.zarr.parts/deep/er/x",
        ".ours.zarr.backup/data", ".ours.zarr.abcd1234/new.zarr/x", ".ours.zarr.mechattn-mybackup/data",
        ".ours.zarr.mechattn-copy_old/old/zarr.json", ".ours.zarr.part", ".free.zarr.backup/data", "free.zarr.probe",
        ".answers.jsonl.part", ".free.jsonl.part", ".free.html.mechattn-thesis_1/new.html",
    )  # fmt: skip
    for name in beside:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


@pytest.fixture
def folder(full, tmp_path, monkeypatch):
    shutil.copytree(full, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(folder):
    """Every file, folder and link, with what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            )
    return found


def untouched(before, folder):
    after = listed(folder)
    return {name: content for name, content in before.items() if after.get(name) != content}


def invoked(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(done.exception, MechattnError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)


def configured(command, result="free.zarr", page="", out="free.jsonl", options=()):
    analysis = "SegmentFlow"  # whose result has few files
    if page:
        analysis = "ReceivedAttention"
        page = f'page = "{page}"\nheads = [0]'
    text = CONFIG.format(result=result, out=out, page=page, analysis=analysis)
    Path("config.toml").write_text(text)
    invoked(command, "config.toml", *options)


FOREIGN = ["climate.zarr", "noted.zarr", "grown.zarr", "in-array.zarr", "linked-in.zarr", "link.zarr",
           "result.zarr", "odd.zarr"]  # fmt: skip
NAMED = {
    "noted.zarr": "notes.md", "grown.zarr": "mine/", "in-array.zarr": "sequences/place/c/notes.txt",
    "linked-in.zarr": "archive",
}  # fmt: skip


@pytest.mark.parametrize("how", ["file://", "run", "merge"])
def test_a_place_that_holds_something_else(result, folder, how):
    before = listed(folder)
    tried = {
        "run": lambda name: configured("run", result=name),
        "merge": lambda name: invoked("merge", name, "ours.zarr"),
    }
    for name in FOREIGN:
        words = rf"{name}.* (exists and is not a stored result|holds .*{NAMED.get(name, '')}.* did not write|is not a plain file|is a folder)"
        if name == "link.zarr":
            words = r"data\.zarr exists and is not a stored result"
        with pytest.raises(MechattnError, match=words):
            tried.get(how, lambda name: result.save(f"{how}{folder}/{name}"))(name)
    assert untouched(before, folder) == {}


@pytest.mark.parametrize("how", ["page", "report", "run", "evaluate"])
def test_a_file_that_is_something_else(result, folder, how):
    before = listed(folder)
    tried = {
        "page": lambda name: result.page(name, heads=[0]),
        "report": lambda name: invoked("report", "ours.zarr", "--out", name),
        "run": lambda name: configured("run", page=name),
        "evaluate": lambda name: configured("evaluate", out=name),
    }
    for name in ("thesis.tex", "index.html", "report.html", "answers.jsonl"):
        words = rf"{name} (exists and was not written by mechattn.*--force.*force=True|.*is not an evaluation)"
        with pytest.raises(MechattnError, match=words):
            tried[how](name)
    assert untouched(before, folder) == {}


def test_force_means_it(result, folder):  # negative control
    before = listed(folder)
    View("<p>seen</p>").save("thesis.tex", force=True)
    View("<p>again</p>").save("thesis.tex")  # it is ours now
    result.page("index.html", heads=[0], force=True)
    invoked("report", "ours.zarr", "--out", "report.html", "--force")
    configured("run", page="answers.jsonl", options=["--force"])
    assert set(untouched(before, folder)) == {
        "thesis.tex",
        "index.html",
        "report.html",
        "answers.jsonl",
    }


def small_job(prompts):
    analyses = [ma.analyses.SegmentFlow()]  # whose result has few files
    return ma.Job(
        "toy:llama", prompts, None, analyses, options=ma.RunOptions(layers=0), verify=False
    )


def test_what_somebody_has_where_chunks_are_kept_stays(folder, prompts):
    before = listed(folder)
    for name in ("new.zarr", "other.zarr"):
        ma.run_job(small_job(prompts[:1]), name)
    assert untouched(before, folder) == {}
    assert sorted(os.listdir("new.zarr.parts")) == ["draft.new", "photos.zip", "thesis.tex"]


def test_a_place_that_is_free_among_them(folder):
    """Written, replaced, written anew and written through a link; what lies beside it stays, copies of the same name too."""
    before = {
        path: content
        for path, content in listed(folder).items()
        if not path.startswith("ours.zarr")
    }
    names_before = set(os.listdir(folder))
    configured("run", page="free.html")
    invoked("report", "free.zarr", "--out", "free.html")
    configured("run", result="ours.zarr", options=["--fresh"])
    for name in ("free.zarr", "ours.zarr"):
        assert ma.load_result(name)["sequences"].sizes["prompt"] == 3
    invoked("merge", "dangling.zarr", "free.zarr")
    invoked("merge", "all.zarr", "dangling.zarr")
    configured("evaluate")
    assert untouched(before, folder) == {}
    written = {"config.toml", "free.zarr", "free.html", "free.jsonl", "all.zarr"}
    assert set(os.listdir(folder)) == names_before | written
    assert sorted(os.listdir("archive")) == ["data.zarr", "gone.zarr"]


def test_what_somebody_adds_while_it_runs(folder, prompts):
    """To the folder of chunks: it stays, and so does the folder."""
    from mechattn.jobs.executors import Local

    class Adds:
        def parts(self, job, chunks):
            Path("free.zarr.parts/notes.txt").write_text("mine")
            yield from Local().parts(job, chunks)

    ma.run_job(small_job(prompts[:1]), "free.zarr", executor=Adds())
    assert os.listdir("free.zarr.parts") == ["notes.txt"]


def test_what_somebody_adds_to_a_result_while_it_is_replaced(folder, result, monkeypatch):
    """The new result is refused its place, and everything stays."""
    from mechattn.store import writing

    result.save("mine.zarr")
    write = writing.write_root

    def write_slowly(result, listing):
        write(result, listing)
        Path("mine.zarr/notes.txt").write_text("mine")

    monkeypatch.setattr(writing, "write_root", write_slowly)
    before = listed(folder)
    with pytest.raises(MechattnError, match=r"mine\.zarr is a stored result that holds notes\.txt"):
        result.save("mine.zarr")
    assert untouched(before, folder) == {}
    assert Path("mine.zarr/notes.txt").read_text() == "mine"


def test_at_an_address(result):
    import fsspec

    files = fsspec.filesystem("memory")
    result.save("memory://foreign/noted.zarr")
    mine = ("c.zarr/thesis.tex", "free.zarr.probe", "noted.zarr/notes.md")
    files.pipe({f"/foreign/{name}": b"mine" for name in mine})
    files.pipe("/foreign/c.zarr/zarr.json", b'{"attributes": {}}')
    before = {name: files.cat_file(name) for name in files.find("/foreign")}
    for name, words in (
        ("c.zarr", "exists and is not a stored result"),
        ("noted.zarr", r"is a stored result that holds notes\.md too"),
    ):
        with pytest.raises(MechattnError, match=f"{name} {words}"):
            result.save(f"memory://foreign/{name}")
    for _ in range(2):
        result.save("memory://foreign/free.zarr")
    assert {name: files.cat_file(name) for name in before} == before


def test_the_list_finds_what_is_changed(folder):  # negative control
    before = listed(folder)
    (folder / "thesis.tex").write_text("other")
    (folder / "answers.jsonl").unlink()
    (folder / "link.zarr").unlink()
    (folder / "link.zarr").mkdir()
    assert set(untouched(before, folder)) == {
        "thesis.tex",
        "answers.jsonl",
        "link.zarr",
    }
