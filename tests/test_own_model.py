"""The first commands on somebody's own model: a tokenizer that cuts "/" in two, a device and a dtype."""

import json
import shutil

import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.commands.figures import make_figures
from mechattn.commands.run_config import run_from_config
from mechattn.errors import MechattnError
from tests.figures_config import figures_config


@pytest.fixture(scope="module")
def halving(checkpoint, tmp_path_factory):
    """A checkpoint whose tokenizer reads "/" as "zq", of which it makes two tokens, and one of the blank between two."""
    folder = tmp_path_factory.mktemp("halving") / "ckpt"
    shutil.copytree(checkpoint, folder)
    about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    about["normalizer"] = {"type": "Replace", "pattern": {"String": "/"}, "content": "zq"}
    (folder / "tokenizer.json").write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(MechattnError, match="55 tokens are not a whole number of '/'"):
        ma.run(str(folder), "Why?", {"slash": ma.MeaninglessTokens()})
    return str(folder)


def inserted(result, name):
    sequences = result["sequences"].sel(condition=name)
    return set((sequences.segment_index == SEGMENTS.index("inserted")).sum("pos").values.tolist())


def write(folder, sections, **top):
    path = folder / "c.toml"
    lines = [
        f"{name} = {json.dumps(value)}"
        for name, value in {"verify": False, "layers": [0], **top}.items()
    ]
    path.write_text(
        "\n".join(lines) + f'\n{sections}\n[prompts]\nsource = "word-problems"\nlimit = 3\n'
        f'[output]\nresult = "{folder}/r.zarr"\n'
    )
    return path


def test_figures_take_the_nearest_count_and_say_so(halving, tmp_path, capsys, monkeypatch):
    """The control is as long."""
    conditions_run = {}

    def instead_of_a_run(model, prompts, conditions, *_, **__):
        conditions_run.update(conditions)
        raise KeyboardInterrupt

    monkeypatch.setattr("mechattn.commands.figures.run", instead_of_a_run)
    with pytest.raises(KeyboardInterrupt):
        make_figures(figures_config(tmp_path / "out", [halving], "word-problems", 6, 1, [0, 1]))
    assert "cannot make 55 tokens of '/'; 56 are inserted" in capsys.readouterr().err
    assert {name: condition.count for name, condition in conditions_run.items()} == {
        "slash": 56,
        "sentence": 56,
    }


def test_a_config_without_a_count_suits_the_tokenizer(halving, tmp_path):
    sections = '[conditions.slash]\n[conditions.sentence]\nkind = "RandomSentence"\n[conditions.eight]\ncount = 8\n'
    written = run_from_config(write(tmp_path, sections, model=halving))
    assert written == [tmp_path / "r.zarr"]
    result = ma.load_result(tmp_path / "r.zarr")
    assert {name: inserted(result, name) for name in ("slash", "sentence", "eight")} == {
        "slash": {56},
        "sentence": {56},
        "eight": {8},
    }
    assert result.provenance["conditions"]["slash"]["options"]["count"] == 56


def test_a_count_that_a_config_gives_is_exact(halving, tmp_path):
    with pytest.raises(
        MechattnError, match=r"55 tokens are not a whole number of '/'.* count=53 or 56"
    ):
        run_from_config(write(tmp_path, "[conditions.slash]\ncount = 55\n", model=halving))


def test_a_device_and_a_dtype_in_a_config(checkpoint, tmp_path):
    run_from_config(write(tmp_path, "", model=str(checkpoint), device="cpu", dtype="bfloat16"))
    about = ma.load_result(tmp_path / "r.zarr").provenance["model"]
    assert (about["device"], about["dtype"]) == ("cpu", "bfloat16")


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta"])
def test_a_device_that_is_not_there(checkpoint, tmp_path, device):
    with pytest.raises(MechattnError, match=r"^device="):
        run_from_config(write(tmp_path, "", model=str(checkpoint), device=device))
