"""Jobs, executors and commands that cannot be, refused before the work."""

import os

import pytest

import mechattn as ma
from mechattn.commands.figures import make_figures
from mechattn.commands.from_config import build_conditions
from mechattn.commands.run_config import read_config
from mechattn.errors import ModelError, OptionError
from mechattn.toml_sections import ConditionSection, tomllib
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
    with pytest.raises(OptionError, match='address and workers are for executor="ray"'):
        ma.run_job(job, tmp_path / "r.zarr", workers=2)


def test_a_config_can_ablate_heads_and_list_versions(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        "model = 'toy:llama'\n[prompts]\nsource = 'word-problems'\n[output]\nresult = 'r.zarr'\n"
        "[conditions.off]\nkind = 'Baseline'\nintervention = {kind = 'HeadAblation', heads = [[0, 1]]}\n"
        "[conditions.other]\nkind = 'Counterpart'\nversions = ['a', 'b']\n"
    )
    conditions = repr(build_conditions(read_config(path).conditions))
    assert "heads=((0, 1),)" in conditions
    assert "'other': Counterpart(versions=['a', 'b']" in conditions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[slash]\ncount = [5]\n['slash, count=5']\ncount = 7", "already is a condition 'slash, c"),
        (
            "[x]\nkind = 'Counterpart'\nversions = [1]",
            r"^conditions\.x\.versions: [^[]*\[1\][^[]*$",
        ),
        ("[slash]\ncount = [5, 5]", "two conditions 'count=5'; give each value once"),
        ("[slash]\ncount = [0]", r"slash\.count = \[0\]: give at least one value, beside 0"),
        ("[slash]\ntext = []", r"slash\.text: Input should be a valid string, not '\[\]'"),
        ("[slash]\nfoo = []", r"slash\.foo: there is no such key"),
        ("[x]\nkind = 'RepeatQuestion'\ncount = []", r"x\.count: there is no such key"),
        ("[slash]\ntext = 2026-11-27", r"slash\.text: Input should be a valid string"),
        ("[slash]\n[x]\nkind = 'Dots'", r"conditions\.x\.kind = 'Dots': choose one of"),
    ],
)
def test_conditions_that_cannot_be(text, message, toy):
    sections = {name: ConditionSection(**keys) for name, keys in tomllib.loads(text).items()}
    for tokenizer in (None, toy.tokenizer):
        with pytest.raises(OptionError, match=message):
            build_conditions(sections, tokenizer)


@pytest.mark.parametrize("models", [["A/ckpt", "B/Ckpt/"], ["toy:llama", "x/toy-llama"]])
def test_models_with_one_file_name_are_refused_early(tmp_path, models):
    path = tmp_path / "config.toml"
    text = f"model = {models}\n[prompts]\nsource = 'word-problems'\n[output]\nresult = '{{model}}.zarr'\n"
    path.write_text(text)
    message = (
        rf"config\.toml: the models '{models[0]}' and '{models[1]}' would both write to files named"
    )
    with pytest.raises(OptionError, match=message):
        read_config(path)
    with pytest.raises(OptionError, match="would both write to files named"):
        make_figures(figures_config(tmp_path / "out", models, "word-problems", 6, 0, [0]))
    path.write_text(text.replace(models[1], "B/other"))
    assert read_config(path).models == [models[0], "B/other"]
