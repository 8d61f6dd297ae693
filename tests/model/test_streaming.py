"""Streamed models: the same numbers, every other hook, and a model that is left as it was."""

import pytest
import torch

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model import hooks
from mechattn.model.architectures import FAMILIES, tiny_model
from mechattn.model.patch.streaming import streaming, why_not
from mechattn.model.verify.checks import check_streaming

STREAMED = {
    "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3-Next (hybrid)", "Gemma 1", "Gemma 2", "Gemma 3", "BLOOM",
    "Falcon-RW (ALiBi)", "GPT-2", "OPT", "Phi", "OLMo", "OLMo 2", "Cohere", "GLM", "Granite", "StableLM", "StarCoder2",
}  # fmt: skip


@pytest.fixture
def model(tokenizer):
    return ma.load_model(tiny_model("Gemma 2", len(tokenizer)), tokenizer=tokenizer)


def windows(model):
    return {layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)}


def state(model):
    """What streaming touches."""
    config = model.original_model.config
    attentions = [model.blocks[layer].attn for layer in hooks.attention_layers(model)]
    parts = [(vars(a).get("forward"), vars(a).get("_reconstruct_attention")) for a in attentions]
    return [config._attn_implementation, *parts]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_streamed_or_said_not_to_be(family, tokenizer):
    model = ma.load_model(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)
    if not hooks.attention_layers(model):
        return
    before = state(model)
    check = check_streaming(model)
    assert (check.outcome == "passed") == (family in STREAMED), str(check)
    assert check.detail
    assert state(model) == before


@pytest.mark.parametrize("family", ["Llama", "Gemma 2", "Falcon-RW (ALiBi)", "GPT-2", "Qwen3-Next (hybrid)"])
@pytest.mark.parametrize("layers", [None, [0]])
def test_a_measuring_pass_keeps_no_keys_and_values(family, layers, tokenizer, monkeypatch):
    """Generation needs them; a forward pass that measures would hold those of every layer, and copy them."""
    from transformers import cache_utils

    kept = []
    for kind in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        update = getattr(cache_utils, kind).update

        def counting(*args, update=update, **kwargs):
            kept.append(args)
            return update(*args, **kwargs)

        monkeypatch.setattr(getattr(cache_utils, kind), "update", counting)
    model = ma.load_model(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)
    tokens = torch.arange(5, 13)[None]
    with torch.no_grad():
        model(tokens)
    assert kept, "the model keeps them where nobody says otherwise, so that the test would notice"
    first = hooks.attention_layers(model)[0]
    last = model.cfg.n_layers - 1 if layers is None else first
    kept.clear()
    hooks.forward_to(model, tokens, last, [])
    assert not kept


def test_gpt_j_would_see_the_future_and_is_noticed(tokenizer):
    """It never asks for the attention function, and gets no mask."""
    model = ma.load_model(tiny_model("GPT-J", len(tokenizer)), tokenizer=tokenizer)
    assert not why_not(model)
    assert "exchangeable" in check_streaming(model).detail
    result = ma.run(model, "Tom has 3 apples and gives 2 to Mia.", progress=False)
    assert result.provenance["engine"] == "hooks"
    assert "exchangeable" in result.provenance["engine_reason"]
    with pytest.raises(ModelError, match="cannot be streamed"):
        ma.run(model, "Tom has 3 apples and gives 2 to Mia.", engine="streaming", progress=False)


def test_hooks_of_the_parts_still_fire_and_interventions_still_act(model):
    tokens = torch.arange(5, 95)[None]
    names = [f"blocks.1.attn.hook_{part}" for part in "qkvz"] + ["blocks.1.hook_resid_post", "blocks.1.hook_mlp_out"]
    captured, streamed = {}, {}
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[(n, lambda v, hook, n=n: captured.update({n: v})) for n in names])
        zeroed = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 0)])
        with streaming(model, windows(model), lambda layer, rows: None):
            model.run_with_hooks(tokens, fwd_hooks=[(n, lambda v, hook, n=n: streamed.update({n: v})) for n in names])
            again = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 0)])
            plain = model(tokens)
    for name in names:
        torch.testing.assert_close(streamed[name], captured[name], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(again, zeroed, atol=2e-4, rtol=1e-4)
    assert (again - plain).abs().max() > 0.1


def test_the_model_is_put_back_after_an_exception_and_when_nested(model):
    before = state(model)
    outer, inner = [], []
    tokens = torch.arange(5, 35)[None]
    with pytest.raises(RuntimeError, match="on purpose"), streaming(model, windows(model), lambda layer, rows: None):
        raise RuntimeError("on purpose")
    assert state(model) == before
    with torch.no_grad(), streaming(model, windows(model), lambda layer, rows: outer.append(layer)):
        middle = state(model)
        with streaming(model, {0: windows(model)[0]}, lambda layer, rows: inner.append(layer)):
            model(tokens)
        assert state(model) == middle
        assert (outer, set(inner)) == ([], {0})
        model(tokens)
    assert set(outer) == {0, 1}
    assert state(model) == before


def test_another_window_than_the_models_is_noticed(model):
    wrong = dict.fromkeys(windows(model), 5)
    with (
        pytest.raises(ModelError, match="layer 0 attends in a window of 8, and mechattn took it for 5"),
        streaming(model, wrong, lambda layer, rows: None),
    ):
        model(torch.arange(5, 35)[None])


def test_only_the_layers_asked_for_are_computed(tokenizer):
    model = ma.load_model(tiny_model("Llama", len(tokenizer)), tokenizer=tokenizer)
    reached = []
    model.hook_dict["blocks.1.attn.hook_q"].add_perma_hook(lambda value, hook: reached.append(1))
    model.hook_dict["unembed.hook_out"].add_perma_hook(lambda value, hook: reached.append(value.shape[1]))
    ma.load_model(model)
    for engine in ("streaming", "hooks"):
        ma.run(model, "Tom has 3 apples.", engine=engine, progress=False)  # compares and verifies first, if need be
        reached.clear()
        ma.run(model, "Tom has 3 apples.", layers=[0], engine=engine, progress=False)
        assert reached == []
        ma.run(model, "Tom has 3 apples.", engine=engine, progress=False)
        assert reached == [1], "one pass, and no logits, which nobody asked for"
    reached.clear()
    hooks.forward_to(model, torch.arange(5)[None], model.cfg.n_layers - 1, [])
    assert reached == [1, 1], "a pass that nothing ends, and the logits of one position"


def test_nan_is_refused_with_the_layer(tokenizer):
    hf_model = tiny_model("Llama", len(tokenizer))
    hf_model.model.layers[1].self_attn.k_proj.weight.data[0] = torch.nan
    model = ma.load_model(hf_model, tokenizer=tokenizer, verify=False)
    model._mechattn.streaming = check_streaming(ma.load_model(tiny_model("Llama", len(tokenizer)), tokenizer=tokenizer))
    with pytest.raises(ModelError, match=r"layer 1 of .* gives NaN"):
        ma.run(model, "Tom has 3 apples.", engine="streaming", progress=False)
