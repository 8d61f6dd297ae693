"""What is published names no home and no user: files by their names, addresses without passwords; paths by request."""

import json
import shutil

import pytest

import mechattn as ma
from mechattn.commands.run_config import run_from_config
from mechattn.results.provenance import command_of, name_of
from tests.pages.read import whole

PRIVATE = ("jane.doe", "secret-project")


@pytest.fixture
def home(checkpoint, tmp_path):
    """A checkpoint and prompts in somebody's home."""
    folder = tmp_path / "jane.doe" / "secret-project"
    shutil.copytree(checkpoint, folder / "ckpt")
    rows = [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(home, **top):
    lines = [
        f"{name} = {json.dumps(value)}"
        for name, value in {
            "model": str(home / "ckpt"),
            "verify": False,
            "layers": [0],
            **top,
        }.items()
    ]
    path = home / "config.toml"
    path.write_text(
        "\n".join(lines)
        + f'\n[prompts]\nsource = "{home}/prompts.jsonl"\n[conditions.slash]\ncount = 5\n'
        f'[output]\nresult = "{home}/r.zarr"\npage = "{home}/p.html"\n'
    )
    return path


def published(home):
    """All that is in the result and on the page."""
    files = b"".join(path.read_bytes() for path in (home / "r.zarr").rglob("*") if path.is_file())
    return files.decode("utf-8", "replace") + whole(home / "p.html")


WORDS = ["run", "CONFIG", "--address", "ray://jane:SECRET@head:10001"]


@pytest.mark.parametrize("paths", [False, True])  # the latter is the negative control
def test_config_runs_publish_paths_only_by_request(home, paths):
    path = config(home, paths=paths)
    run_from_config(path, [str(path) if word == "CONFIG" else word for word in WORDS])
    text = published(home)
    about = ma.load_result(home / "r.zarr").provenance
    assert about["model"]["name"] == "ckpt"
    assert "SECRET" not in text
    if paths:
        assert about["model"]["path"] == str(home / "ckpt")
        assert str(path) in about["command"]
        assert text.count("jane.doe") >= 3
    else:
        assert [word for word in PRIVATE if word in text] == []
        assert about["command"] == "mechattn run config.toml --address ray://…@head:10001"


def test_a_file_of_answers(home):
    model = ma.load_model(str(home / "ckpt"), verify=False)
    prompts = ma.load_prompts(str(home / "prompts.jsonl"), limit=2)
    out = home / "answers.jsonl"
    first = ma.evaluate(model, prompts, new_tokens=2, out=out)
    assert "jane.doe" not in out.read_text(encoding="utf-8")
    assert ma.evaluate(model, prompts, new_tokens=2, out=out).answers == first.answers


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("toy:llama", "toy:llama"),
        ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-Math-1.5B"),
        ("gpt2", "gpt2"),
        ("/", "/"),
        ("/home/jane/ckpt/", "ckpt"),
        ("~/models/ckpt", "ckpt"),
        ("./ckpt", "ckpt"),
        ("models/llama/step4000", "step4000"),
        ("C:\\Users\\jane\\ckpt", "ckpt"),
        (
            "/home/jane/.cache/huggingface/hub/models--Qwen--Qwen2.5-Math-1.5B/snapshots/0a1b",
            "Qwen/Qwen2.5-Math-1.5B",
        ),
        ("~/hub/models--gpt2/snapshots/0a1b", "gpt2"),
        ("s3://jane:SECRET@bucket/r.zarr", "s3://…@bucket/r.zarr"),
    ],
)
def test_names_of_places(place, name):
    assert name_of(place) == name


def test_commands():
    line = "figures --model /home/jane/ckpt --out=/home/jane/out --heads 2,3,4 --limit 64"
    words = line.split()
    assert command_of(words) == "mechattn figures --model ckpt --out=out --heads 2,3,4 --limit 64"
    assert command_of(words, paths=True) == "mechattn " + line
