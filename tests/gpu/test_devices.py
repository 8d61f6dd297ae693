"""Models on several devices, offloaded to memory and disk, and quantised: the numbers of the model as it was."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.model.hooked import facts_of
from mechattn.model.weights import weights_hash
from tests.gpu.conftest import FILLED, PROBLEMS, plain
from tests.gpu.imitated import FIRST, SECOND, Imitated, dispatched, where

SLASH = FILLED["slash"]
CONDITIONS = {
    **FILLED,
    "masked": SLASH.masked(),
    "unshifted": SLASH.unshifted(),
    "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.3)),
    "ablation": ma.Baseline(intervention=ma.interventions.HeadAblation(((0, 1), (3, 2)))),
    "knockout": ma.Baseline(intervention=ma.interventions.Knockout("question", "bos", layers=(0, 3))),
}
UNDEFINED = {"toy:llama": ma.analyses.ScoreDecomposition}  # under RoPE


def every(name):
    return [make() for make in ANALYSES if make is not UNDEFINED.get(name)]


def parts(model, first, second, home="cpu"):
    """A device map: the first layers, and all before them, on one device; the others, and all after them, elsewhere."""
    inner = model.model
    count = len(inner.layers)
    layers = {f"model.layers.{n}": first if n < count // 2 else second for n in range(count)}
    tied = model.config.tie_word_embeddings
    ends = {"model.norm": second if home != "cpu" else "cpu", "lm_head": home if tied or home == "cpu" else second}
    return {"model.embed_tokens": home, "model.rotary_emb": home, **layers, **ends}


def half_on_disk(model, folder):
    return dispatch_model(model, parts(model, "cpu", "disk"), main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADED: dict[str, Callable] = {
    "memory": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "half on disk": half_on_disk,
}


@pytest.fixture(scope="module")
def whole(tokenizer):
    return ma.load_model(plain("toy:llama", torch.float32), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def measured(whole):
    return ma.run(whole, PROBLEMS, CONDITIONS, every("toy:llama"), positions="prompts")


@pytest.fixture(scope="module", params=OFFLOADED)
def offloaded(request, tokenizer, tmp_path_factory):
    made = OFFLOADED[request.param](plain("toy:llama", torch.float32), tmp_path_factory.mktemp("offloaded"))
    assert sum(parameter.is_meta for parameter in made.parameters()) > 10, "most weights are elsewhere"
    return ma.load_model(made, tokenizer=tokenizer)


def assert_same(result, expected):
    """To the bit."""
    assert result.datasets.keys() == expected.datasets.keys()
    for name, dataset in expected.datasets.items():
        for variable in dataset:
            ours, theirs = result[name][variable].values, dataset[variable].values
            if theirs.dtype.kind in "fiu":
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, {variable}")


def answers(model):
    made = ma.evaluate(model, ma.load_prompts("word-problems", limit=2), FILLED, new_tokens=20)
    return list(made.to_dataframe()["answer"])


def test_offloaded_numbers_are_the_models_own_to_the_bit(offloaded, measured):
    assert facts_of(offloaded).report.passed
    outcomes = {check.name: check.outcome for check in facts_of(offloaded).report.checks}
    assert outcomes["logits"] == outcomes["kernel"] == outcomes["heads"] == "passed", "against its own attention"
    result = ma.run(offloaded, PROBLEMS, CONDITIONS, every("toy:llama"), positions="prompts")
    assert_same(result, measured)
    about, expected = (each.provenance["model"] for each in (result, measured))
    assert about["weights_hash"] == expected["weights_hash"]
    assert about["device"] == "cpu"
    with pytest.raises(AssertionError, match="received"):  # negative control
        assert_same(ma.run(offloaded, PROBLEMS[::-1], CONDITIONS, every("toy:llama"), positions="prompts"), measured)


@pytest.mark.parametrize("engine", ["fused", "hooks"])
def test_each_engine_takes_an_offloaded_model(engine, offloaded, whole):
    options = {"conditions": CONDITIONS, "engine": engine}
    assert_same(ma.run(offloaded, PROBLEMS, **options), ma.run(whole, PROBLEMS, **options))


def test_an_offloaded_model_is_patched_and_answers(offloaded, whole):
    prompts = ma.load_prompts("word-problems", limit=2, with_answer=True)
    for at in ("z", ["L0H1", "L3H0"]):
        ours, theirs = (ma.patch(model, prompts, SLASH, at=at).effects for model in (offloaded, whole))
        np.testing.assert_array_equal(ours.effect.values, theirs.effect.values)
    assert answers(offloaded) == answers(whole)


def test_a_name_takes_a_device_map(tmp_path, whole):
    device_map = parts(plain("toy:llama", torch.float32), "cpu", "disk")
    made = ma.load_model("toy:llama", device_map=device_map, offload_folder=tmp_path)
    assert weights_hash(made) == weights_hash(whole)
    assert_same(ma.run(made, PROBLEMS, FILLED), ma.run(whole, PROBLEMS, FILLED))


@pytest.mark.parametrize("name", ["toy:llama", "toy:qwen2"])
def test_two_devices_that_are_imitated(name, tokenizer):
    """Operations that mix devices raise, as on two cards: each layer's values are reduced where the layer lies."""
    model = plain(name, torch.float32)
    expected = ma.load_model(plain(name, torch.float32), tokenizer=tokenizer)
    analyses = every("toy:llama")
    with Imitated():
        made = ma.load_model(dispatched(model, parts(model, FIRST, SECOND, home=FIRST)), tokenizer=tokenizer)
        lies = {where(parameter) for parameter in made.original_model.parameters()}
        result = ma.run(made, PROBLEMS, CONDITIONS, analyses, positions="prompts")
        through_hooks = ma.run(made, PROBLEMS, CONDITIONS, engine="hooks")
        fused = ma.run(made, PROBLEMS, engine="fused")
    assert lies == {FIRST, SECOND}
    assert facts_of(made).report.passed
    assert result.provenance["model"]["device"] == "xpu:0"
    assert_same(result, ma.run(expected, PROBLEMS, CONDITIONS, analyses, positions="prompts"))
    assert_same(through_hooks, ma.run(expected, PROBLEMS, CONDITIONS, engine="hooks"))
    assert_same(fused, ma.run(expected, PROBLEMS, engine="fused"))


def test_patching_and_answers_on_two_devices_that_are_imitated(tokenizer, whole):
    prompts = ma.load_prompts("word-problems", limit=2, with_answer=True)
    model = plain("toy:llama", torch.float32)
    with Imitated():
        made = ma.load_model(dispatched(model, parts(model, FIRST, SECOND, home=FIRST)), tokenizer=tokenizer)
        effects = {at: ma.patch(made, prompts, SLASH, at=at).effects.effect.values for at in ("z", "resid_post")}
        answered = answers(made)
    for at, effect in effects.items():
        np.testing.assert_array_equal(effect, ma.patch(whole, prompts, SLASH, at=at).effects.effect.values)
    assert answered == answers(whole)


def test_the_imitation_would_notice_tensors_that_meet():
    with Imitated():
        here, there = torch.ones(2).to(FIRST), torch.ones(2, device=SECOND)
        assert (here.device, (here + 1).device, there.device) == (FIRST, FIRST, SECOND)
        with pytest.raises(RuntimeError, match=r"tensors on \['xpu:0', 'xpu:1'\]"):
            here + there
        with pytest.raises(TypeError, match="to numpy"):
            here.numpy()
        assert (here + there.to(FIRST)).cpu().tolist() == [2, 2]
