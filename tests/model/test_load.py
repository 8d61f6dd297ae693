"""Every way to hand over a model gives the same hooked model: raw weights, HookedTransformer names, native logits."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PersimmonConfig,
)

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model import booting
from mechattn.model.checkpoint import tokenizer_named
from mechattn.model.hooked import facts_of
from mechattn.model.hooks import attention_window
from mechattn.model.unloaded import unloaded
from mechattn.model.verify.verification import dtype_of
from tests.model.unusual import unusual_model
from tests.tiny_families import bridge_of, random_model, tiny_model

TEXT = "Tom has 3 apples and gives 2 to Mia."


def assert_received_alike(*models):
    """That two models give the same received attention."""
    first, second = (ma.run(model, TEXT)["received_attention"].received for model in models)
    np.testing.assert_allclose(first, second, atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def native(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def hooked(checkpoint):
    return ma.load_model(str(checkpoint))


def test_a_directory_gives_the_native_logits(hooked, native):
    model, tokenizer = native
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(hooked(tokens), model(tokens).logits, atol=1e-4, rtol=1e-4)
        assert model(tokens).logits.std() > 1, "weights so small would hide errors"


def test_a_directory_hides_an_alias_of_the_same_name(checkpoint, tmp_path, monkeypatch):
    """TransformerLens takes "gpt2" for the model on the hub, wherever the command runs."""
    (tmp_path / "gpt2").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert ma.load_model("gpt2", verify=False).cfg.n_layers == 3


def test_a_model_object_and_a_hooked_model_are_the_same(checkpoint, native, hooked):
    tokenizer = native[1]
    from_object = ma.load_model(LlamaForCausalLM.from_pretrained(checkpoint), tokenizer=tokenizer)
    assert from_object.tokenizer is tokenizer
    assert ma.load_model(from_object) is from_object
    assert_received_alike(from_object, hooked)


def test_weights_are_raw(native, hooked):
    """Folding a norm or centring a weight would change these."""
    own = dict(native[0].named_parameters())
    theirs = dict(hooked.original_model.named_parameters())
    scale = next(
        value for name, value in theirs.items() if "layers.0" in name and "input_layernorm" in name
    )
    torch.testing.assert_close(scale, own["model.layers.0.input_layernorm.weight"])


def test_half_precision_loads_as_float32_on_a_cpu(native, tmp_path, monkeypatch):
    model, tokenizer = native
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model.to(torch.float32)
    tokenizer.save_pretrained(tmp_path)
    path = str(tmp_path)
    assert dtype_of(ma.load_model(path, device="cpu", verify=False)) == torch.float32
    # On another device the checkpoint's: "meta" is one that every machine has.
    asked_for = {}
    monkeypatch.setattr(booting, "_boot", lambda *_, **options: asked_for.update(options))
    booting.hooked_checkpoint(path, None, "auto", "meta", {})
    assert asked_for["dtype"] == torch.bfloat16


def test_bos_follows_the_tokenizer(checkpoint, hooked):
    from tokenizers import processors

    assert hooked.cfg.default_prepend_bos is True

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    without = ma.load_model(model, tokenizer=tokenizer, verify=False)
    assert without.cfg.default_prepend_bos is False
    assert ma.Baseline().apply(ma.Prompt(TEXT), without).tokens[0] != tokenizer.bos_token_id


def test_a_sliding_window_is_found_and_counted(shared):
    """Windowed and full layers alternate; uniform attention in a window is 1 over its width."""
    model = shared("Gemma 2")
    assert [attention_window(model, layer) for layer in (0, 1)] == [8, None]
    result = ma.run(model, TEXT, keep="prompts")["received_attention"].isel(prompt=0, condition=0)
    assert result.received_uniform.sel(layer=0, key=9).item() == pytest.approx(1 / 8)


def test_what_transformer_lens_takes_is_passed_on(checkpoint, hooked):
    placed = ma.load_model(str(checkpoint), device_map={"": "cpu"}, n_ctx=128)
    assert facts_of(placed).report.passed
    assert placed.cfg.n_ctx == 128
    assert_received_alike(placed, hooked)


def test_a_granite_without_positions_is_mended():
    """TransformerLens puts an empty rotary embedding where the configuration leaves the type of positions out."""
    model = bridge_of(unusual_model("Granite hybrid without a type of positions"))
    assert facts_of(model).report.passed
    assert "no rotary embedding is called" in facts_of(model).report.mended[0]
    assert model.cfg.positional_embedding_type == "none"
    said = bridge_of(unusual_model("Granite hybrid NoPE"), verify=False)
    assert not facts_of(said).mended
    assert_received_alike(model, said)


def test_olmo_in_half_precision(shared):
    """Its rotation is computed in float32, and TransformerLens left queries there; values were in bfloat16."""
    half = bridge_of(tiny_model("OLMo"), dtype=torch.bfloat16)
    assert "rotated queries and keys" in facts_of(half).report.mended[0]
    assert not facts_of(shared("OLMo")).report.mended
    rounded, exact = (
        ma.run(model, TEXT, engine="hooks")["received_attention"].received_by_segment
        for model in (half, shared("OLMo"))
    )
    assert 0 < float(abs(rounded - exact).max()) < 0.1


def test_a_model_that_raises_is_refused_with_its_error():
    def broken_model():
        model = tiny_model("Llama")
        model.model.layers[1].mlp.forward = lambda x: x @ torch.zeros(3, 3)
        return model

    with pytest.raises(
        ModelError, match=r"cannot be used as a hooked model.*a few tokens raises RuntimeError"
    ):
        bridge_of(broken_model())
    hooked = bridge_of(broken_model(), verify=False)
    with pytest.raises(ModelError, match="raises RuntimeError"):
        ma.verify_model(hooked)


def test_an_architecture_without_an_adapter_is_refused(tokenizer):
    config = PersimmonConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(
        ModelError, match=r"cannot load 'PersimmonForCausalLM' as a hooked model: ValueError"
    ) as refused:
        bridge_of(random_model(config))
    assert len(str(refused.value)) < 500


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    """Its prompts are token ids; transformers alone would give it an empty tokenizer."""
    native = tiny_model("GPT-2", 7, bos_token_id=None, eos_token_id=None)
    native.save_pretrained(tmp_path)
    model = ma.load_model(tmp_path)
    assert model.tokenizer is None
    tokens = torch.tensor([[1, 2, 3, 2], [4, 5, 6, 0]])
    read = ma.run(model, tokens)["sequences"].tokens
    assert read.sel(condition="baseline").values.tolist() == tokens.tolist()
    with pytest.raises(
        ModelError, match=r"no tokenizer; pass one to load_model.* or give token ids as prompts"
    ):
        ma.run(model, "1 2 3")
    with pytest.raises(ModelError, match="has no tokenizer"):
        tokenizer_named(str(tmp_path))


def test_without_a_twin_generation_settings_end_answers(toy, monkeypatch):
    """A quantised one, whose parameters a second model cannot share."""
    monkeypatch.setattr(facts_of(toy), "native", None)
    monkeypatch.setattr(toy.original_model.generation_config, "eos_token_id", [3, 4])
    assert unloaded(toy).end >= {3, 4}
