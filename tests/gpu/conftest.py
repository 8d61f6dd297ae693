"""The devices that the tests of this folder run on, and models whose numbers do not depend on the device."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.model.checkpoint import toy_folder, toy_names, toy_tokenizer
from tests.analysis.plain import loop_over_experts
from tests.tiny_families import tiny_model

THERE = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}
PROBLEMS = [
    "Tom has 3 apples and gives 2 to Mia. How many apples are left?",
    "A box holds 12 pens. How many hold 36?",
]
# On the CPU these show that the tests themselves work; all others are compared there by tests/analysis and tests/model.
ON_CPU = {
    "name": ("toy:gemma3", "GPT-OSS", "Falcon-RW (ALiBi)"),
    "length": (300,),
    "dtype": (torch.float32,),
    "at": (["L0H1", "L2H3"],),
}
FILLED = {"slash": ma.MeaninglessTokens("/", 9)}


def pytest_collection_modifyitems(items):
    """All that stands here is a test of devices; on the CPU a few families, toys and lengths are enough."""
    for item in list(items):
        if "tests/gpu/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if values.get("device") != "cpu":
            continue
        if any(name in values and values[name] not in few for name, few in ON_CPU.items()):
            items.remove(item)


@pytest.fixture(params=THERE, scope="module")
def device(request):
    """Each kind of device; what is not on this machine is skipped."""
    if not THERE[request.param]():
        pytest.skip(f"torch {torch.__version__} sees no {request.param} device")
    return request.param


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no cuda device")


def plain(name, dtype, wide=False, scale=1.0):
    """A toy, or a tiny model of a family with weights of this scale, rounded to a dtype and held in it or in float64."""
    if name in toy_names():
        made = AutoModelForCausalLM.from_pretrained(toy_folder(name), dtype=torch.float32)
    else:
        made = tiny_model(name, len(toy_tokenizer("toy:llama")))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    made = made.to(dtype)
    if wide:
        made = made.double()
        loop_over_experts(made)
    return made


def hooked(name, dtype, device, scale=1.0):
    """The model on a device, and the same weights in float64 on the CPU."""
    tokenizer = toy_tokenizer(name if name in toy_names() else "toy:llama")
    exact = ma.load_model(
        plain(name, dtype, wide=True, scale=scale), tokenizer=tokenizer, verify=False
    )
    return ma.load_model(plain(name, dtype, scale=scale), tokenizer=tokenizer, device=device), exact
