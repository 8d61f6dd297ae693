"""Models as people leave them: what was changed after loading is noticed before a run."""

import pytest
import torch
from torch.testing import assert_close

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.hooked import measuring
from tests.tiny_families import bridge_of, tiny_model

QUESTIONS = ["Tom has 3 apples. How many?", "What is 3 + 4? I want to know."]
DROPOUT = 0.5


@pytest.fixture
def model(tokenizer):
    return bridge_of(tiny_model("GPT-2", len(tokenizer), attn_pdrop=DROPOUT, resid_pdrop=DROPOUT))


def received(model):
    return ma.run(model, QUESTIONS)["received_attention"].received.values


# Train mode.


def test_train_mode_gives_the_values_of_eval_mode_and_stays(model):
    expected = received(model)
    model.train()
    assert_close(received(model), expected, rtol=0, atol=0, equal_nan=True)
    assert model.training
    assert model.original_model.transformer.drop.training


def test_dropout_would_be_seen(model):
    model.train()
    tokens = torch.arange(12)[None]
    assert not torch.equal(model(tokens), model(tokens))


# Weights, parts, dtype, attention.


def edit_without_a_trace(model):
    model.original_model.transformer.h[0].attn.c_attn.weight.data[:, 3] += 1


def edit_an_embedding_that_no_probe_reads(model):
    with torch.no_grad():
        model.original_model.transformer.wte.weight[-1] *= 2


def put_in_an_adapter(model):
    mlp = model.original_model.transformer.h[0].mlp
    mlp.c_fc = torch.nn.Sequential(mlp.c_fc)


def change_the_attention(model):
    model.original_model.config._attn_implementation = "sdpa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_without_a_trace, "weights of .* were edited"),
        (edit_an_embedding_that_no_probe_reads, "weights of .* were edited"),
        (put_in_an_adapter, r"is Sequential where .* was\. Adapters are merged"),
        (change_the_attention, "attention is 'sdpa' and was 'eager'"),
    ],
)
def test_a_changed_model_is_refused(model, change, message):
    change(model)
    for use in (lambda: ma.run(model, QUESTIONS), lambda: ma.load_model(model)):
        with pytest.raises(ModelError, match=f"changed after it was verified: .*{message}"):
            use()


def test_a_changed_model_can_be_measured_as_unverified(model):
    edit_without_a_trace(model)
    ma.load_model(model, verify=False)
    assert not ma.run(model, QUESTIONS).provenance["model"]["verified"]


def halve_the_output(model):
    model.add_hook("blocks.0.hook_attn_out", lambda values, hook: values / 2)


def halve_the_mlp(model):
    model.blocks[0].mlp.register_forward_hook(lambda module, inputs, values: values / 2)


@pytest.mark.parametrize("add_hook", [halve_the_output, halve_the_mlp])
def test_a_later_hook_that_changes_values_is_refused(model, add_hook):
    add_hook(model)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"has hooks at blocks\.0\.\S+ that change its values"):
            ma.run(model, QUESTIONS)


def test_a_removed_or_reading_hook_is_accepted(model):
    seen = []
    halve_the_output(model)
    with pytest.raises(ModelError):
        ma.run(model, QUESTIONS)
    model.reset_hooks()
    model.add_hook("blocks.0.hook_attn_out", lambda values, hook: seen.append(values.shape))
    assert ma.run(model, QUESTIONS).provenance["model"]["verified"]
    assert seen


# Rotary frequencies, which model.to(dtype) rounds.


def test_a_dtype_given_to_load_model_leaves_the_frequencies(tokenizer):
    given = tiny_model("Llama", len(tokenizer))
    expected = given.model.rotary_emb.inv_freq.clone()
    model = bridge_of(given, dtype=torch.bfloat16)
    assert next(model.parameters()).dtype is torch.bfloat16
    assert ma.run(model, QUESTIONS).provenance["model"]["dtype"] == "bfloat16"
    assert torch.equal(model.original_model.model.rotary_emb.inv_freq, expected)


def test_frequencies_that_were_rounded_before_are_named(tokenizer):
    given = tiny_model("Llama", len(tokenizer)).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="rotary frequencies of this LlamaForCausalLM are rounded"):
        bridge_of(given)


# What the process has set for torch.


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def plain(tokenizer):
    return bridge_of(tiny_model("Llama", len(tokenizer)))


def test_the_default_dtype_changes_nothing(plain, default_dtype):
    expected = received(plain)
    default_dtype(torch.float64)
    assert_close(received(plain), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.get_default_dtype() is torch.float64


def test_values_and_gradients_are_those_outside_the_block(plain):
    prompts = [ma.Prompt("What is 3 + 4?", answer=" 7"), ma.Prompt("What is 5 + 1?", answer=" 6")]

    def measured():
        patched = ma.patch(
            plain,
            prompts,
            ma.MeaninglessTokens("/", 3),
            method="attribution",
            direction="denoising",
        )
        return received(plain), patched.effects.effect.values

    expected = measured()
    for block in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with block:
            inside = measured()
        for got, outside in zip(inside, expected, strict=True):
            assert_close(got, outside, rtol=0, atol=0, equal_nan=True)


def test_threads_that_overlap_leave_the_default_dtype_as_it_was(default_dtype):
    """Two models: the first thread leaves while the second still measures."""
    default_dtype(torch.float64)
    first = measuring(object())
    second = measuring(object())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_default_dtype() is torch.float32
    second.__exit__(None, None, None)
    assert torch.get_default_dtype() is torch.float64
