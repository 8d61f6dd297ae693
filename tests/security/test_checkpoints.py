"""A checkpoint runs no code of its own and asks nobody anything, whatever else loads meanwhile."""

import io
import json
import shutil
import sys
import threading

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import mechattn as ma
from mechattn.commands.run_config import check_in_model
from mechattn.errors import ModelError
from mechattn.model.booting import transformers_restored
from mechattn.model.checkpoint import layers_and_heads
from mechattn.model.own_code import as_trusted


@pytest.fixture
def own(checkpoint, tmp_path, monkeypatch):
    """A maker of checkpoints with a module that makes a file when it is imported; standard input says yes to all."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))

    def make(module, class_name, tokenizer=None, **config):
        folder = tmp_path / f"own-{module}-{class_name}"
        shutil.copytree(checkpoint, folder)
        for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer or {})):
            (folder / name).write_text(
                json.dumps(json.loads((folder / name).read_text()) | changes)
            )
        (folder / f"{module}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nclass {class_name}: pass\n"
        )
        return str(folder)

    return make


def nothing_happened(tmp_path):
    return not (tmp_path / "ran").exists() and sys.stdin.tell() == 0


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}, {"trust_remote_code": None}])
def test_a_config_of_its_own_is_refused_without_a_question(own, tmp_path, options):
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    place = own("own", "Own", model_type="own", auto_map=auto)
    with pytest.raises(ModelError, match=r"its own code.*trust_remote_code=True"):
        ma.load_model(place, **options)
    with pytest.raises(ModelError, match=r"its own code.*trust_remote_code=True"):
        layers_and_heads(place)
    with pytest.raises(ModelError, match=r"its own code.*trust_remote_code=True"):
        check_in_model(place, [0], [])
    assert nothing_happened(tmp_path)


def test_a_tokenizer_of_its_own(own, tmp_path):
    place = own(
        "own",
        "Own",
        {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
    )
    with pytest.raises(ModelError, match=r"its own code.*trust_remote_code=True"):
        ma.load_model(place)
    assert nothing_happened(tmp_path)


@pytest.mark.parametrize(
    ("module", "architecture", "auto"),
    [
        ("modeling_internlm2", "InternLM2ForCausalLM", {}),
        ("modeling_bd3lm", "BD3LM", {"AutoModelForMaskedLM": "modeling_bd3lm.BD3LM"}),
    ],
)
def test_an_architecture_whose_code_transformer_lens_imports(
    own, tmp_path, module, architecture, auto
):
    """It does so whatever ``trust_remote_code`` says; the last one is asked about by transformers as well."""
    place = own(module, architecture, architectures=[architecture], auto_map=auto)
    with pytest.raises(ModelError):
        ma.load_model(place, trust_remote_code=False)
    assert nothing_happened(tmp_path)


def test_without_the_guard_transformer_lens_runs_that_code(own, tmp_path):  # negative control
    from transformer_lens.model_bridge import TransformerBridge

    place = own(
        "modeling_internlm2", "InternLM2ForCausalLM", architectures=["InternLM2ForCausalLM"]
    )
    with transformers_restored(), pytest.raises(AttributeError):
        TransformerBridge.boot_transformers(place, trust_remote_code=False)
    assert (tmp_path / "ran").exists()


def test_who_trusts_it_is_not_asked_and_has_it_run(own, tmp_path):  # negative control
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    with pytest.raises(ModelError):  # the class is none that could be loaded
        ma.load_model(own("own", "Own", model_type="own", auto_map=auto), trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert sys.stdin.tell() == 0


def test_left_open_transformers_asks(own):  # negative control
    auto = {"AutoConfig": "own.Own"}
    with pytest.raises(AttributeError):
        AutoModelForCausalLM.from_pretrained(own("own", "Own", model_type="own", auto_map=auto))
    assert sys.stdin.tell() > 0


def imports_code(place):
    """Whether somebody else's code, in this thread, runs a checkpoint's own."""
    try:
        AutoConfig.from_pretrained(place, trust_remote_code=True)
    except ModelError:
        return False
    except Exception:  # the class that was imported is none of a configuration
        return True
    return True


def test_overlapping_loads_are_guarded_to_their_ends(own):
    """The first ends in the middle of the second: each step of one waits for the other's."""
    place = own("own", "Own", model_type="own", auto_map={"AutoConfig": "own.Own"})
    first_in, second_in, looked, first_out = (threading.Event() for _ in range(4))
    ran = {}

    def first():
        with as_trusted(None):
            first_in.set()
            looked.wait(60)
        first_out.set()

    def second():
        first_in.wait(60)
        with as_trusted(None):
            second_in.set()
            first_out.wait(60)
            ran["second, when the first has ended"] = imports_code(place)
        ran["second, afterwards"] = imports_code(place)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    second_in.wait(60)
    ran["somebody else, meanwhile"] = imports_code(place)
    looked.set()
    for thread in threads:
        thread.join()
    ran["somebody else, afterwards"] = imports_code(place)
    assert ran.pop("second, when the first has ended") is False
    assert all(ran.values())
