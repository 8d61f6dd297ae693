"""A checkpoint runs no code of its own, is read as no pickle and asks nobody anything, whatever else loads meanwhile."""

import io
import json
import shutil
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import mechattn as ma
from mechattn.commands.run_config import check_in_model
from mechattn.errors import ModelError
from mechattn.model import checkpoint as trust
from mechattn.model.checkpoint import as_trusted, layers_and_heads
from mechattn.model.load import classes_left_alone


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
    with classes_left_alone(), pytest.raises(AttributeError):
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


@pytest.fixture
def pickled(checkpoint, tmp_path):
    """The checkpoint with its weights as a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


def loads(place):
    """Whether somebody else's code, in this thread, can load a pickle."""
    try:
        AutoModelForCausalLM.from_pretrained(place)
    except OSError:
        return False
    return True


def test_two_loads_that_overlap_are_guarded_to_their_ends_and_leave_nothing(pickled):
    """The first ends in the middle of the second: each step of one waits for the other's.

    One model is made at a time: transformers changes torch while it makes one, for all threads.
    """
    first_in, second_in, looked, first_out = (threading.Event() for _ in range(4))
    found = {}

    def first():
        with as_trusted(None, pickled_weights=False):
            first_in.set()
            looked.wait(60)
        first_out.set()

    def second():
        first_in.wait(60)
        with as_trusted(None, pickled_weights=False):
            second_in.set()
            first_out.wait(60)
            found["second, when the first has ended"] = loads(pickled)
        found["second, afterwards"] = loads(pickled)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    second_in.wait(60)
    found["somebody else, meanwhile"] = loads(pickled)
    looked.set()
    for thread in threads:
        thread.join()
    found["somebody else, afterwards"] = loads(pickled)
    assert found == {
        "second, when the first has ended": False,
        "second, afterwards": True,
        "somebody else, meanwhile": True,
        "somebody else, afterwards": True,
    }


def test_what_is_wrapped_is_wrapped_once():
    with as_trusted(None, pickled_weights=False):
        wrapped = PreTrainedModel.__dict__["from_pretrained"]
    with as_trusted(True, pickled_weights=True):
        pass
    assert PreTrainedModel.__dict__["from_pretrained"] is wrapped
    assert trust._forbidden.get() is None


@pytest.mark.parametrize(
    ("part", "size"),
    [
        ("num_hidden_layers", -3),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**30),
        ("vocab_size", -5),
    ],
)
def test_sizes_that_no_model_has(checkpoint, tmp_path, part, size):
    folder = tmp_path / "sizes"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {part: size}))
    for load in (ma.load_model, layers_and_heads):
        with pytest.raises(
            ModelError,
            match=rf"has {part} = .*, but models have 1 to [\d,]+: is the file damaged\?",
        ):
            load(str(folder))
