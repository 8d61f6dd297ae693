"""Interventions and MLP activations that cannot be are refused before any forward pass."""

import pytest
import torch

import mechattn as ma
from mechattn.analyses import MlpActivations
from mechattn.commands.run_config import run_from_config
from mechattn.errors import ModelError, OptionError
from mechattn.interventions import ARM, AffineAttention, HeadAblation, KVPatch, RecordedAffine
from mechattn.interventions.ablation import HeadMeans
from tests.tiny_families import tiny_model

PROMPT = "Tom has 3 apples."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ARM(c=-0.1), "c=-0.1: give a factor, 0 or more"),
        (lambda: ARM(c=1.2, form="gemma"), "c=1.2: give a share, 0 to 1"),
        (lambda: HeadAblation(((0, 1),), 3), "means=3: give what ma.head_means"),
        (lambda: ARM(layers="0"), "layers='0': give one or several layers"),
        (lambda: ARM(layers=True), "layers=True: give one or several layers"),
        (lambda: ARM(seed=-1), "seed=-1: give a whole number, at least 0"),
        (
            lambda: HeadAblation(((0, 1.0),)),
            r"give a tuple of \(layer, head\) pairs",
        ),
        (lambda: ARM(p1=0.995), "p1=0.995: give a percentile.* not a fraction"),
        (lambda: ARM(strength="a"), "strength='a': give a finite number"),
        (lambda: AffineAttention(scale=None), "scale=None: give a number or a"),
        (lambda: KVPatch("inserted", None), "from_=None: give what ma.record_"),
        (
            lambda: ARM(form="published"),
            "form='published': choose one of 'paper', 'released_llama', 'released_qwen2', 'gemma'",
        ),
        (
            lambda: MlpActivations("percentile"),
            "rule='percentile': choose one of 'quantile', 'mad', 'absolute'",
        ),
        (
            lambda: MlpActivations("quantile", 25),
            "value=25: give a quantile",
        ),
        (lambda: MlpActivations(value="0.25"), "value='0.25': give a finite number"),
        (lambda: MlpActivations("absolute", float("inf")), "value=inf: give a finite number"),
        (lambda: MlpActivations(edges=5), "edges=5: give a tuple of numbers"),
        (
            lambda: MlpActivations(edges=(0.0, float("nan"), 1.0)),
            "edges: give at least two numbers in increasing order",
        ),
    ],
)
def test_options(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_lists_and_iterators_are_stored_as_tuples():
    ablation = HeadAblation([[0, 1]])
    assert hash(ablation) == hash(HeadAblation(((0, 1),)))
    assert ARM(layers=iter((0, 1))).layers == (0, 1)


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (ARM(layers=9), "layer 9 is out of range"),
        (AffineAttention(scale=torch.ones(3)), "scale has the shape .* 8 heads"),
        (
            AffineAttention(shift=torch.zeros(3, 16)),
            r"give a number, or \[head d_head\] of 8 heads",
        ),
        (AffineAttention(shift=torch.zeros(8, 3)), "give d_head = 16"),
        (
            RecordedAffine({"other": {}}, 0, "elsewhere"),
            "prompt '0' was not recorded",
        ),
        (
            HeadAblation(((1, 0),), HeadMeans({0: torch.ones(8, 16)}, 3)),
            "not layer 1",
        ),
        (
            ARM,
            r"intervention=<class .*ARM\(\) \(with brackets\)",
        ),
    ],
)
def test_before_the_model_runs(no_forward, intervention, message):
    with pytest.raises(OptionError, match=message):
        ma.run(no_forward, PROMPT, {"x": ma.Baseline(intervention=intervention)})


def test_a_head_that_a_transformers_model_lacks(toy):
    with pytest.raises(OptionError, match="head 8 is out of range: the model has heads 0 to 7"):
        HeadAblation(((0, 8),)).check(toy.original_model, ())


def test_no_layer_of_a_transformers_model(toy):
    with pytest.raises(OptionError, match="give one or several layers"):
        AffineAttention(layers=()).check(toy.original_model, ())


def test_means_of_another_model(toy):
    ablation = HeadAblation(((0, 1),), HeadMeans({0: torch.ones(8, 7)}, 3))
    with pytest.raises(OptionError, match="means come from another model"), ablation.on(toy):
        toy(torch.arange(5)[None])


def test_the_baseline_stays_the_baseline(no_forward):
    with pytest.raises(OptionError, match='"baseline" inserts tokens or intervenes'):
        ma.run(no_forward, PROMPT, {"baseline": ma.Baseline(intervention=ARM())})


def assert_both_refuse(model, message):
    with pytest.raises(ModelError, match=message):
        ma.run(model, PROMPT, {"arm": ma.Baseline(intervention=ARM())})
    with pytest.raises(ModelError, match=message):
        ma.run(model, PROMPT, analyses=MlpActivations("absolute", 0.01))


def test_a_mixture_of_experts(shared):
    assert_both_refuse(shared("GPT-OSS"), r"layer \d is a mixture of experts")


def test_several_mlps():
    plain = tiny_model("Llama")
    plain.model.layers[0].another = torch.nn.Module()
    plain.model.layers[0].another.act_fn = torch.nn.SiLU()
    with pytest.raises(ModelError, match="layer 0 has several MLPs"):
        ARM().check(plain, ["0"])


def test_folded_weights_compute_the_nonlinearity_elsewhere():
    bridge = ma.load_model("toy:llama", verify=False)
    bridge.enable_compatibility_mode()
    model = ma.load_model(bridge, verify=False)
    assert_both_refuse(model, "layer 0 has run without its nonlinearity")


def test_nothing_to_record(toy):
    with pytest.raises(OptionError, match="prompt 0 has no inserted token under"):
        ma.record_affine(toy, PROMPT, ma.Baseline())


def test_no_agreement_without_the_analysis(slash_result):
    with pytest.raises(OptionError, match=r"run it with analyses=.*MlpActivations"):
        slash_result.agreement("slash", "slash")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('kind = "Baseline"', 'the "Baseline" is always run; give this one an intervention'),
        ('kind = "Baseline"\nintervention = { kind = "ARMM" }', r"did you mean 'ARM'"),
        (
            'kind = "Baseline"\nintervention = { kind = "ARM", p = 3 }',
            r"conditions\.x\.intervention\.p: there is no such",
        ),
    ],
)
def test_config(tmp_path, section, message):
    path = tmp_path / "config.toml"
    path.write_text(
        f'model = "toy:llama"\n[prompts]\nsource = "word-problems"\n[output]\nresult = "r.zarr"\n[conditions.x]\n{section}\n'
    )
    with pytest.raises(OptionError, match=message):
        run_from_config(path)
