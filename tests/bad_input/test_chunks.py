"""Jobs, executors and commands that cannot be, refused before the work."""

import os

import pytest

import mechattn as ma
from mechattn.commands.figures import make_figures
from mechattn.commands.from_config import made_conditions
from mechattn.commands.run_config import read_config, run_from_config
from mechattn.errors import MechattnError, ModelError, OptionError, PromptError
from tests.figures_config import figures_config


def test_a_job_names_its_model(toy, prompts, tmp_path):
    with pytest.raises(
        ModelError,
        match=r"a job names its model.* but a TransformerBridge was given.* or use ma\.run",
    ):
        ma.Job(toy, prompts)
    assert ma.Job(tmp_path, prompts).model == str(tmp_path)
    (tmp_path / "model").mkdir()
    with os.scandir(tmp_path) as entries:
        assert ma.Job(next(entries), prompts).model == str(tmp_path / "model")


@pytest.mark.parametrize("options", [{"chunk": True}, {"threads": 0}])
def test_options_of_a_job(options, prompts):
    with pytest.raises(OptionError, match=r"give a whole number, at least 1$"):
        ma.Job("toy:llama", prompts, **options)


def test_executors_that_are_none(prompts, tmp_path):
    job = ma.Job("toy:llama", prompts)
    with pytest.raises(OptionError, match="executor='dask': choose one of"):
        ma.run_job(job, tmp_path / "r.zarr", executor="dask")
    with pytest.raises(OptionError, match='workers is for a cluster: add executor="ray"'):
        ma.run_job(job, tmp_path / "r.zarr", workers=2)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    good = b'{"question": "Tom has 3 apples."}\n'
    path.write_bytes(good * 2 + '{"question": "é"}\n'.encode("latin-1") + good)
    with pytest.raises(
        PromptError, match=r"line 3 of .*p\.jsonl is not UTF-8 text .*save the file as UTF-8"
    ):
        ma.load_prompts(str(path))
    assert len(ma.load_prompts(str(path), limit=2)) == 2


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Tom has 3 apples \\ud83d"}\n')
    with pytest.raises(PromptError, match="holds half of a surrogate pair"):
        ma.load_prompts(str(path))
    path.write_text('{"question": "Tom has 3 apples \\ud83c\\udf4e"}\n')  # a whole one is an apple
    assert ma.load_prompts(str(path))[0].question.endswith("\U0001f34e")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("chunk = 0", r"chunk: Input should be greater than or equal to 1"),
        ("values = 'float64'", r"values: Input should be 'float32' or 'float16'"),
        ("[output]\nresult = 'r.txt'", r'"r\.txt" should end with "\.zarr"'),
    ],
)
def test_keys_of_a_config(tmp_path, keys, message):
    path = tmp_path / "config.toml"
    lines = ["model = 'toy:llama'", keys.partition("[")[0]]
    sections = {"[prompts]": "source = 'word-problems'", "[output]": "result = 'r.zarr'"}
    for name, line in sections.items():
        lines.append(keys if keys.startswith(name) else f"{name}\n{line}")
    path.write_text("\n".join(lines))
    with pytest.raises(MechattnError, match=message):
        run_from_config(path)


@pytest.mark.parametrize("keys", ["condition = ['slash']", "reading = {}"])
def test_a_list_where_a_figure_takes_one_name(tmp_path, keys):
    path = tmp_path / "config.toml"
    path.write_text(
        "model = 'toy:llama'\n[prompts]\nsource = 'word-problems'\n[output]\nresult = 'r.zarr'\n"
        f"[[analyses]]\nkind = 'HeadUpdates'\n[[figures]]\nkind = 'update_map'\n{keys}\n"
    )
    with pytest.raises(OptionError, match=r"figures\[0\]\.(condition|reading): Input should be"):
        run_from_config(path)


def test_a_config_can_ablate_heads(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        "model = 'toy:llama'\n[prompts]\nsource = 'word-problems'\n[output]\nresult = 'r.zarr'\n"
        "[conditions.off]\nkind = 'Baseline'\nintervention = {kind = 'HeadAblation', heads = [[0, 1]]}\n"
    )
    assert "heads=((0, 1),)" in repr(made_conditions(read_config(path).conditions)["off"])


@pytest.mark.parametrize("models", [["A/ckpt", "B/Ckpt/"], ["toy:llama", "x/toy-llama"]])
def test_models_whose_files_have_one_name_are_found_when_the_config_is_read(tmp_path, models):
    path = tmp_path / "config.toml"
    text = f"model = {models}\n[prompts]\nsource = 'word-problems'\n[output]\nresult = '{{model}}.zarr'\n"
    path.write_text(text)
    message = (
        rf"config\.toml: the models '{models[0]}' and '{models[1]}' would both write to files named"
    )
    for read in (read_config, run_from_config):
        with pytest.raises(OptionError, match=message):
            read(path)
    with pytest.raises(OptionError, match="would both write to files named"):
        make_figures(figures_config(tmp_path / "out", models, "word-problems", 6, 0, [0]))
    path.write_text(text.replace(models[1], "B/other"))
    assert read_config(path).models == [models[0], "B/other"]
