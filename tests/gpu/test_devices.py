"""Models on several devices, offloaded to memory and disk, and quantised: the numbers of the model as it was."""

from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from numpy.testing import assert_array_equal

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.errors import ModelError
from mechattn.functional.attention import BLOCK
from mechattn.model.hooked import facts_of
from mechattn.model.weights import weights_hash
from tests.gpu.conftest import FILLED, PROBLEMS, plain
from tests.gpu.imitated import FIRST, SECOND, Imitated, dispatched, where

SLASH = FILLED["slash"]
CONDITIONS = {
    **FILLED,
    "unshifted": SLASH.unshifted(),
    "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.3, layers=(0, 3))),
    "ablation": ma.Baseline(intervention=ma.interventions.HeadAblation(((0, 1), (3, 2)))),
    "knockout": ma.Baseline(
        intervention=ma.interventions.AttentionKnockout("question", "first", layers=(0, 3))
    ),
}
ENGINES = ("fused", "hooks")
MASKED = {"masked": SLASH.masked()}
EVERY = [
    make() for make in ANALYSES if make is not ma.analyses.ScoreDecomposition
]  # undefined under RoPE


def parts(model, first, second, home="cpu"):
    """A device map: the first layers, and all before them, on one device; the others, and all after them, elsewhere."""
    count = len(model.model.layers)
    layers = {f"model.layers.{n}": first if n < count // 2 else second for n in range(count)}
    end = "cpu" if home == "cpu" else second
    tied = model.config.tie_word_embeddings
    ends = {"model.norm": end, "lm_head": home if tied else end}
    return {"model.embed_tokens": home, "model.rotary_emb": home, **layers, **ends}


@pytest.fixture(scope="module")
def whole(tokenizer):
    return ma.load_model(plain("toy:llama", torch.float32), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def measured(whole):
    return ma.run(whole, PROBLEMS, CONDITIONS, EVERY, layers=[0, 2], keep="prompts")


@pytest.fixture(scope="module")
def by_engine(whole):
    return {engine: ma.run(whole, PROBLEMS, MASKED, engine=engine) for engine in ENGINES}


@pytest.fixture(scope="module")
def offloaded(tokenizer):
    """A model whose weights all lie elsewhere, and are brought for each call of a module (test_a_name_takes_a_device_map: a disk)."""
    native = cpu_offload(plain("toy:llama", torch.float32), execution_device="cpu")
    assert all(parameter.is_meta for parameter in native.parameters())
    return ma.load_model(native, tokenizer=tokenizer)


def assert_same(result, expected):
    """To the bit."""
    assert result.datasets.keys() == expected.datasets.keys()
    for name, dataset in expected.datasets.items():
        for variable in dataset:
            ours, theirs = result[name][variable].values, dataset[variable].values
            if theirs.dtype.kind in "fiu":
                assert_array_equal(ours, theirs, err_msg=f"{name}, {variable}")


def recorded(model):
    """A run under interventions whose tensors were recorded from this model."""
    questions = ma.load_prompts("word-problems", limit=4)
    prompts, other = questions[:2], questions[2:]
    interventions = ma.interventions
    affine = ma.record_affine(model, prompts, SLASH.unshifted(), layers=[0, 3])
    means = ma.head_means(model, other)
    filler = interventions.KVPatch(
        "inserted", ma.record_keys_values(model, prompts, ma.MeaninglessTokens(".", 9))
    )
    conditions = {
        "affine": ma.Baseline(intervention=affine),
        "means": ma.Baseline(intervention=interventions.HeadAblation(((0, 1), (3, 2)), means)),
        "transplant": SLASH.under(filler),
    }
    return ma.run(model, prompts, conditions, [ma.ReceivedAttention(), ma.analyses.HeadUpdates()])


def effects(model, prompts, at="z", method="attribution"):
    """Of patched outputs of heads: by gradients, and exact."""
    patched = ma.patch(model, prompts, SLASH, at=at, method=method, direction="denoising")
    return patched.effects.effect.values


def answers(model):
    made = ma.evaluate(model, ma.load_prompts("word-problems", limit=2), FILLED, new_tokens=8)
    return list(made.to_dataframe()["text"])


def test_offloaded_numbers_are_the_models_own_to_the_bit(offloaded, measured):
    assert facts_of(offloaded).report.passed
    result = ma.run(offloaded, PROBLEMS, CONDITIONS, EVERY, layers=[0, 2], keep="prompts")
    assert_same(result, measured)
    about, expected = (each.provenance["model"] for each in (result, measured))
    assert about["weights_hash"] == expected["weights_hash"]
    assert about["device"] == "cpu"


def test_the_comparison_would_notice_another_order(measured):  # negative control
    datasets = {name: dataset.isel(prompt=[1, 0]) for name, dataset in measured.datasets.items()}
    with pytest.raises(AssertionError, match="received"):
        assert_same(replace(measured, datasets=datasets), measured)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_takes_an_offloaded_model(engine, offloaded, by_engine):
    assert_same(ma.run(offloaded, PROBLEMS, MASKED, engine=engine), by_engine[engine])


@pytest.fixture(scope="module")
def acted_on(whole):
    """What the model as it was gives when it is patched, answers, and is acted on."""
    prompts = ma.load_prompts("word-problems", limit=2, with_answer=True)
    return prompts, effects(whole, prompts), answers(whole), recorded(whole)


def test_an_offloaded_model_is_patched_answers_and_is_acted_on(offloaded, acted_on):
    prompts, patched, answered, acted = acted_on
    assert_array_equal(effects(offloaded, prompts), patched)
    assert answers(offloaded) == answered
    assert_same(recorded(offloaded), acted)


def test_a_name_takes_a_device_map(tmp_path, whole):
    device_map = parts(plain("toy:llama", torch.float32), "cpu", "disk")
    made = ma.load_model("toy:llama", device_map=device_map, offload_folder=tmp_path)
    assert weights_hash(made) == weights_hash(whole)
    assert_same(ma.run(made, PROBLEMS, FILLED), ma.run(whole, PROBLEMS, FILLED))


@pytest.fixture(scope="module")
def spread(tokenizer):
    """The model on two devices that are imitated."""
    model = plain("toy:llama", torch.float32)
    device_map = parts(model, FIRST, SECOND, home=FIRST)
    with Imitated():
        return ma.load_model(dispatched(model, device_map), tokenizer=tokenizer)


def test_two_devices_that_are_imitated(spread, measured, by_engine):
    """Operations that mix devices raise, as on two cards: each layer's values are reduced where the layer lies."""
    with Imitated():
        lies = {where(parameter) for parameter in spread.original_model.parameters()}
        result = ma.run(spread, PROBLEMS, CONDITIONS, EVERY, layers=[0, 2], keep="prompts")
        results = {engine: ma.run(spread, PROBLEMS, MASKED, engine=engine) for engine in ENGINES}
    assert lies == {FIRST, SECOND}
    assert facts_of(spread).report.passed
    assert result.provenance["model"]["device"] == "xpu:0"
    assert_same(result, measured)
    for engine in ENGINES:
        assert_same(results[engine], by_engine[engine])


def test_patching_answers_and_interventions_on_two_devices_that_are_imitated(
    spread, acted_on, monkeypatch
):
    # Blocks as large as on a CPU, whose sums are added in the same order.
    monkeypatch.setattr("mechattn.functional.attention.rows_of_block", lambda *_: BLOCK)
    prompts, patched, answered, acted = acted_on
    with Imitated():
        on_two = effects(spread, prompts), answers(spread), recorded(spread)
    assert_array_equal(on_two[0], patched)
    assert on_two[1] == answered
    assert_same(on_two[2], acted)


def test_the_imitation_would_notice_tensors_that_meet():
    with Imitated():
        here, there = torch.ones(2).to(FIRST), torch.ones(2, device=SECOND)
        assert (here.device, (here + 1).device, there.device) == (FIRST, FIRST, SECOND)
        with pytest.raises(RuntimeError, match=r"tensors on \['xpu:0', 'xpu:1'\]"):
            here + there
        with pytest.raises(TypeError, match="to numpy"):
            here.numpy()
        assert (here + there.to(FIRST)).cpu().tolist() == [2, 2]


class EightBit(torch.nn.Linear):
    """A linear layer whose weight is stored in 8 bits with a scale for each row, as quantisers store it."""

    def __init__(self, given):
        super().__init__(given.in_features, given.out_features, given.bias is not None)
        self.scale = given.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (given.weight.detach() / self.scale).round().to(torch.int8)
        self.weight, self.bias = torch.nn.Parameter(rounded, requires_grad=False), given.bias

    def dequantised(self):
        return self.weight.float() * self.scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.dequantised(), self.bias)


def in_eight_bits(quantised):
    """The toy with the weights of its layers in 8 bits, or with the same numbers in float32."""
    model = plain("toy:llama", torch.float32)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    made = EightBit(linear)
                    if quantised:
                        setattr(part, name, made)
                    else:
                        linear.weight.data = made.dequantised()
    model.is_quantized = quantised
    return model


@pytest.fixture(scope="module")
def quantised(tokenizer):
    return ma.load_model(in_eight_bits(True), tokenizer=tokenizer)


def test_a_quantised_model_is_measured_without_weights(quantised, tokenizer, measured):
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift()]
    same = ma.load_model(in_eight_bits(False), tokenizer=tokenizer)
    result, expected = (
        ma.run(model, PROBLEMS, CONDITIONS, analyses) for model in (quantised, same)
    )
    assert_same(result, expected)
    assert facts_of(quantised).report.passed
    ours, before = (each["received_attention"].received_by_segment for each in (result, measured))
    assert float(abs(ours - before).max()) > 1e-4, "other numbers than those of the weights before"
    prompts = ma.load_prompts("word-problems", limit=2, with_answer=True)
    ours, theirs = (effects(model, prompts, ["L0H1"], "exact") for model in (quantised, same))
    assert_array_equal(ours, theirs)


def test_uses_of_quantised_weights_are_refused(quantised, tokenizer):
    unverified = ma.load_model(in_eight_bits(True), tokenizer=tokenizer, verify=False)
    problems = ma.load_prompts("word-problems", limit=2)
    answered = ma.load_prompts("word-problems", limit=2, with_answer=True)
    for refused, message in (
        (
            lambda: ma.run(quantised, PROBLEMS, analyses=ma.analyses.HeadUpdates()),
            "load it unquantised",
        ),
        (
            lambda: ma.run(unverified, PROBLEMS, analyses=ma.analyses.DirectLogits()),
            "load it unquantised",
        ),
        (lambda: effects(quantised, answered), "have no gradients: load"),
        (lambda: ma.evaluate(quantised, problems), "a second model cannot share them"),
        (lambda: ma.random_weights(quantised), "its weights are quantised"),
    ):
        with pytest.raises(ModelError, match=message):
            refused()
