"""The commands, run as a user runs them."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.commands import figures
from mechattn.commands.main import main
from mechattn.commands.run_config import read_config
from mechattn.jobs.executors import Local
from tests.results.small import small_result
from tests.tiny_families import tiny_model


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs one in this process, which has imported everything, and in a folder of the test's own: what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["mechattn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = "".join(capsys.readouterr())
        assert (ended.value.code or 0) == code, printed
        return printed

    return run


@pytest.mark.parametrize("given", [None, "active"])
def test_threads_that_wait_sleep(given, monkeypatch, here):
    """OpenMP's spin, which costs several times as much where the cores are shared; what the user has set stays."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    here("--version")
    assert os.environ["OMP_WAIT_POLICY"] == (given or "passive")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['mechattn', '--help']\n"
        "from mechattn.commands.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformer_lens', 'xarray', 'plotly', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "figures" in out
    assert out.strip().endswith("[]")


def test_import_is_lazy():
    code = (
        "import sys, mechattn; print('torch' in sys.modules); sys.modules['torch'] = None\n"
        "try: mechattn.ReceivedAttention\n"
        "except ImportError as error: print(error.name)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["False", "torch"], "not imported, until it is needed"


def test_every_public_name_is_there():
    for name in ma.__all__:
        assert getattr(ma, name) is not None
    with pytest.raises(AttributeError, match="attribute runn"):
        ma.runn
    for module in (ma.render, ma.interventions, ma.analyses, ma.conditions):
        shown = [name for name in dir(module) if not name.startswith("_")]
        assert not any(inspect.ismodule(getattr(module, name)) for name in shown)
    assert sorted(ma.__all__) == sorted(dir(ma))


@pytest.fixture
def of_heads(tokenizer, tmp_path):
    """Makes a checkpoint of a layer with so many heads, in a folder that is named after them."""

    def make(heads):
        shape = {"hidden_size": 4 * heads, "num_attention_heads": heads, "head_dim": 4}
        shape |= {"num_key_value_heads": max(heads // 7, 1), "num_hidden_layers": 1}
        folder = tmp_path / f"heads-{heads}"
        tiny_model("Llama", len(tokenizer), **shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def test_models_with_different_head_counts_share_a_page(of_heads, tmp_path, here, monkeypatch):
    """With a text, a count and a place of the user's own; the figures that stand open are those of one head."""
    draw = figures.lead_sections

    def of_one_head(result, choice):
        return draw(result, choice) if result.provenance["model"]["heads"] == 1 else []

    monkeypatch.setattr(figures, "lead_sections", of_one_head)
    models = ["--model", of_heads(1), "--model", of_heads(14)]
    out = tmp_path / "out"
    inserted = ["--text", " .", "--count", 8, "--place", "middle", "--dtype", "bfloat16"]
    asked = [*models, *inserted, "--prompts", "word-problems", "--limit", 6, "--out", out]
    assert f"Open {out / 'index.html'} in a browser" in here("figures", *asked)
    text = (out / "index.html").read_text()
    assert "6 prompts of word-problems, as plain text, after “" in text
    words = "8 “ .” (meaningless), or the same number of tokens of random sentences (sentence), in the middle"
    assert words in text
    for heads in (1, 14):
        assert f"heads-{heads} (" in text
        result = ma.load_result(out / f"heads-{heads}.zarr")
        assert result["received_attention"].sizes["prompt"] == 6
        assert result.provenance["model"]["verified"]
        assert result.provenance["model"]["dtype"] == "bfloat16"
        assert result.provenance["conditions"]["sentence"]["options"]["place"] == "middle"
        segments = result["sequences"].segment_index.sel(condition=["meaningless", "sentence"])
        assert ((segments == SEGMENTS.index("inserted")).sum("pos") == 8).all()


def test_a_missing_chat_template_is_refused_before_loading(tmp_path, here, monkeypatch):
    monkeypatch.setattr("mechattn.commands.figures.load_model", None)
    asked = ("--model", "toy:llama", "--prompts", "word-problems", "--chat-template")
    refusal = here("figures", *asked, "--out", tmp_path, code=2)
    assert "the tokenizer of toy:llama has no chat template; give --no-chat-template" in refusal
    config = tmp_path / "c.toml"
    config.write_text(
        'model = "toy:llama"\n[prompts]\nsource = "word-problems"\n[output]\nresult = "r.zarr"\n'
    )
    assert "has no chat template" in here("run", config, "--chat-template", code=2)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatting(checkpoint, tmp_path):
    """A checkpoint whose tokenizer has a chat template."""
    folder = tmp_path / "chatting"
    shutil.copytree(checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def read_and_stopped(model, prompts, conditions, *_, **__):
    """In the place of a run: says what the model would read first."""
    raise ma.MechattnError(
        model.tokenizer.decode(conditions["slash"].apply(prompts[0], model).tokens)
    )


def test_the_chat_template_is_the_default_where_there_is_one(chatting, tmp_path, here, monkeypatch):
    monkeypatch.setattr("mechattn.commands.figures.run", read_and_stopped)
    asked = ("figures", "--model", chatting, "--prompts", "word-problems", "--limit", 6)
    system = ("--system", "Be brief.", "--out", tmp_path / "out")
    assert "<system>Be brief.\n<user>" in here(*asked, *system, code=2)
    assert "<system>" not in here(*asked, *system, "--no-chat-template", code=2)


def test_run_takes_another_system_prompt_and_template(chatting, tmp_path, here, monkeypatch):
    def read_by(self, job, chunks):
        raise ma.MechattnError(job.decides["token_ids"]["first"])

    monkeypatch.setattr(Local, "parts", read_by)
    config = tmp_path / "c.toml"
    config.write_text(
        f'model = "{chatting}"\n[prompts]\nsource = "word-problems"\nlimit = 3\n[output]\nresult = "r.zarr"\n'
    )
    refusal = here("run", config, "--system", "Be brief.", code=2)
    assert "<system>Be brief.\n<user>" in refusal


def test_the_configs_of_the_experiments_are_read():
    paths = list((Path(__file__).parents[1] / "experiments").rglob("*.toml"))
    assert paths != []
    for path in paths:
        assert read_config(path).models, path


def test_verify_prints_the_report_and_fails_where_a_model_does(here):
    printed = here("verify", "toy:llama")
    assert printed.startswith("toy:llama (LlamaForCausalLM, float32; transformer-lens ")
    assert ": passed" in printed
    assert "Missing argument" in here("verify", code=2)


@pytest.fixture
def interrupted(monkeypatch, interruptible):
    """Small results in place of computed ones; and Ctrl-C, once, at the second chunk."""
    pressed = []

    def held_up(self, job, chunks):
        for number, chunk in enumerate(chunks):
            if number == 1 and not pressed:
                pressed.append(number)
                signal.raise_signal(signal.SIGINT)
            yield chunk, small_result(chunk)

    monkeypatch.setattr(Local, "parts", held_up)
    for module in ("reading", "writing"):
        monkeypatch.setattr(f"mechattn.store.{module}.problem_of", lambda *given: None)


def test_shards_merge_and_ctrl_c_ends_with_a_sentence(tmp_path, here, interrupted):
    """In two shards, one of them interrupted and continued; then merged."""
    config = tmp_path / "config.toml"
    config.write_text(
        'model = "toy:llama"\nverify = false\nchunk = 1\n[prompts]\nsource = "word-problems"\nlimit = 3\n'
        '[output]\nresult = "r.zarr"\n'
    )
    stopped = here("run", config, "--shard", "1/2", code=130)
    assert re.search(
        r"mechattn: stopped; 1 of 2 chunks are done and kept in .*; rerun the command to resume",
        stopped,
    )
    assert "Traceback" not in stopped
    assert len(list(tmp_path.glob("r-1-of-2.zarr.parts/*.zarr"))) == 1
    for shard in ("1/2", "2/2"):
        here("run", config, "--shard", shard)
    here("merge", "whole.zarr", "r-2-of-2.zarr", "r-1-of-2.zarr")
    merged = ma.load_result(tmp_path / "whole.zarr")
    assert merged["sequences"].prompt.values.tolist() == ["0", "1", "2"]
    refusal = here("merge", "all.zarr", "r-1-of-2.zarr", "r-1-of-2.zarr", code=2)
    assert "prompt 0 is in two of the results" in refusal
    assert "no section [evaluation]" in here("evaluate", config, code=2)


def test_an_error_is_a_sentence_not_a_traceback(tmp_path, here):
    refusal = here("figures", "--model", "toy:lama", "--out", tmp_path, code=2)
    assert refusal.startswith("mechattn: there is no toy 'toy:lama'; the toys are ")
    assert "toy:llama" in refusal
    assert "Traceback" not in refusal


@pytest.mark.parametrize("command", ["figures", "paper"])
def test_a_page_at_an_address_is_refused(command, tmp_path, here):
    refusal = here(command, "--model", "toy:llama", "--out", "s3://bucket/x", code=2)
    assert "is an address, but this can only be written to a folder of this machine" in refusal
    assert list(tmp_path.iterdir()) == []


def test_the_first_look_names_every_command(here):
    printed = here()
    for name in (
        "figures",
        "verify",
        "run",
        "evaluate",
        "show",
        "report",
        "export",
        "export-netcdf",
        "--install-completion",
    ):
        assert name in printed
    assert "[evaluation]" in here("evaluate", "--help"), "which Rich takes for markup"
    assert here("--version").strip() == f"mechattn {ma.__version__}"


QUESTIONS = [
    f"{name} has {i + 3} pears and eats {i}. How many are left?" for i, name in enumerate("ABCDEF")
]


def test_figures_of_a_file_show_its_text_alone(tmp_path, here, monkeypatch):
    """Unless more is asked for; what is said at the start counts the prompts that there are, not those allowed."""
    file = tmp_path / "my.jsonl"
    rows = [{"question": text, "reply": "Answer: 3"} for text in QUESTIONS]
    file.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("mechattn.commands.figures.run", read_and_stopped)
    command = ["figures", "--prompts", file, "--model", "toy:llama", "--out", tmp_path]
    plain = here(*command, code=2)
    assert "toy:llama: 6 prompts with and without 55 inserted tokens." in plain
    inserted = " ".join(55 * "/")
    assert f"mechattn: <bos>{inserted}{QUESTIONS[0]}\n" in plain

    asked = ["--system", "Be brief.", "--answer-field", "reply", "--separator", "", "--count", 4]
    more = here(*command, *asked, "--place", "before_answer", code=2)
    assert f"mechattn: <bos>Be brief.\n{QUESTIONS[0]}\n////Answer: 3\n" in more


def test_show_and_report(slash_result, tmp_path, here):
    slash_result.save(tmp_path / "r.zarr")
    shown = here("show", tmp_path / "r.zarr")
    assert ma.render.verdict_words(slash_result) in shown
    assert "received_by_segment (probability) [prompt, condition, layer, head, segment]: " in shown
    here("report", tmp_path / "r.zarr", "--out", tmp_path / "a" / "page.html", "--heads", "1,2")
    page = (tmp_path / "a" / "page.html").read_text()
    assert page.count('<script type="application/json">') == 4
    assert "layer 0 heads 1, 2 (mean) with “slash”" in page


def test_a_report_says_what_it_cannot_show(toy, prompts, tmp_path, here):
    result = ma.run(toy, prompts[:2], {"slash": ma.MeaninglessTokens()})
    result.save(tmp_path / "r.zarr")
    page = tmp_path / "page.html"
    assert "Not shown: change_map: " in here("report", tmp_path / "r.zarr", "--out", page)
    before = page.read_text()
    assert "no verdict, since" in before
    ma.run(toy, prompts[:2], None, ma.analyses.MlpActivations()).save(tmp_path / "m.zarr")
    both = here("report", tmp_path / "r.zarr", tmp_path / "m.zarr")
    assert "Not shown: activation_histogram: " in both
    refusal = here("report", tmp_path / "r.zarr", "--out", page, "--layer", 9, code=2)
    assert "layer 9 was not measured" in refusal
    assert page.read_text() == before, "a wrong option leaves the page as it was"


def test_export_writes_what_compare_and_heads_give(slash_result, tmp_path, here):
    stored = tmp_path / "r.zarr"
    file = tmp_path / "a" / "heads.csv"
    slash_result.save(stored)
    assert f"Wrote {file}" in here("export", stored, "--csv", file)
    table = pd.read_csv(file)
    assert len(table) == 2 * 2 * 32, "quantities, conditions, heads"
    changed = table[table.condition == "slash"]
    rows = changed[changed["quantity"] == "mass"]
    compared = slash_result.compare("slash", quantity="mass", columns="all")
    compared = compared.rename(columns={"reference": "baseline"}).select_dtypes("number")
    columns = [name for name in compared if name in rows]
    assert len(columns) >= 19
    np.testing.assert_allclose(rows[columns], compared[columns], rtol=1e-12)
    values = slash_result.heads("mass", None, condition="slash").sort_values(["layer", "head"])
    np.testing.assert_allclose(rows.value_high, values.high, rtol=1e-12)
    about = [set(changed[name]) for name in ("segment", "change_units", "scale", "level", "n_of")]
    expected = [{"question"}, {"fraction"}, {"log-ratio"}, {0.95}, {"prompts"}]
    assert about == expected, "a file says what it holds"
    assert set(table.units) == {"probability"}
    assert set(table.result) == {str(stored)}
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    refusal = here("export", stored, "--csv", tmp_path / "mine.csv", code=2)
    assert "not a mechattn export" in refusal
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"
    assert "should end with .csv" in here("export", stored, "--csv", "heads.txt", code=2)


def test_export_to_netcdf_holds_every_array(slash_result, tmp_path, here):
    import xarray as xr

    slash_result.save(tmp_path / "r.zarr")
    export = partial(here, "export-netcdf", tmp_path / "r.zarr")
    assert f"Wrote {tmp_path / 'r.nc'}" in export(tmp_path / "r.nc")
    with xr.open_datatree(tmp_path / "r.nc", engine="h5netcdf") as tree:
        assert json.loads(tree.attrs["provenance"])["model"]["name"] == "toy:llama"
        for name, dataset in slash_result.datasets.items():
            for label, expected in dataset.variables.items():
                np.testing.assert_array_equal(
                    tree[name][label].values.astype(expected.dtype), expected.values
                )
    assert "exists; choose another name" in export(tmp_path / "r.nc", code=2)
    assert "should end with .nc" in export("r.cdf", code=2)


def test_export_with_too_few_prompts_keeps_other_rows(slash_result, toy, prompts, tmp_path, here):
    ma.run(toy, prompts[:2], {"slash": ma.MeaninglessTokens()}).save(tmp_path / "few.zarr")
    refusal = here("export", "few.zarr", "--csv", "few.csv", code=2)
    assert "there is nothing to export: received, baseline: there are 2 prompts" in refusal
    assert not (tmp_path / "few.csv").exists()
    slash_result.save(tmp_path / "whole.zarr")
    printed = here("export", "whole.zarr", "few.zarr", "--csv", "both.csv")
    assert "few.zarr: received, baseline: there are 2 prompts" in printed
    here("export", "whole.zarr", "few.zarr", "--csv", "both.csv")  # its own file is replaced
    assert set(pd.read_csv(tmp_path / "both.csv").result) == {"whole.zarr"}
