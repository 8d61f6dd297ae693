"""Streamed models: the same numbers, every other hook, and a model that is left as it was."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import mechattn as ma
from mechattn.analysis.analysis import AnalysisBase, Quantity
from mechattn.errors import ModelError, OptionError
from mechattn.functional import attention as functional
from mechattn.model import hooks
from mechattn.model.patch import streaming as attention_calls
from mechattn.model.patch.streaming import streaming, why_not_streamed
from mechattn.model.verify.checks import check_streaming
from tests.tiny_families import bridge_of, tiny_model


@pytest.fixture
def model(shared):
    return shared("Gemma 2")


def state(model):
    """What streaming touches."""
    config = model.original_model.config
    attentions = [model.blocks[layer].attn for layer in hooks.attention_layers(model)]
    parts = [(vars(a).get("forward"), vars(a).get("_reconstruct_attention")) for a in attentions]
    return [config._attn_implementation, *parts]


@pytest.mark.parametrize("family", ["Gemma 2", "GPT-2", "Qwen3-Next (hybrid)"])
def test_a_measuring_pass_keeps_no_keys_and_values(family, shared, monkeypatch):
    """Generation needs them; a forward pass that measures would hold those of every layer, and copy them."""
    from transformers import cache_utils

    kept = []
    for kind in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        update = getattr(cache_utils, kind).update

        def counting(*args, update=update, **kwargs):
            kept.append(args)
            return update(*args, **kwargs)

        monkeypatch.setattr(getattr(cache_utils, kind), "update", counting)
    model = shared(family)
    tokens = torch.arange(5, 13)[None]
    with torch.no_grad():
        model(tokens)
    assert kept, "the model keeps them where nobody says otherwise, so that the test would notice"
    kept.clear()
    for last_layer in (hooks.attention_layers(model)[0], model.cfg.n_layers - 1):
        hooks.forward_to(model, tokens, last_layer, [])
        assert not kept


def test_the_factor_of_gpt2s_scores():
    """Divided by the number of the layer, and by no root, if the configuration says so; TransformerLens knows the first alone."""
    by_layer = bridge_of(tiny_model("GPT-2", scale_attn_by_inverse_layer_idx=True), verify=False)
    assert check_streaming(by_layer).outcome == "passed"
    without_root = bridge_of(tiny_model("GPT-2", scale_attn_weights=False))
    assert "not divided" in ma.verify_model(without_root).mended[0]
    assert check_streaming(without_root).outcome == "passed"


def test_a_module_that_ignores_the_mask_is_noticed(monkeypatch):
    """GPT-J calls no attention function that transformers can exchange, and is told of no mask either."""
    monkeypatch.setitem(attention_calls.REPLACEMENTS, "AttentionBridge", attention_calls._delegated)
    model = bridge_of(tiny_model("GPT-J"))
    assert why_not_streamed(model, hooks.attention_layers(model)) is None
    assert "cannot be replaced" in check_streaming(model).detail
    result = ma.run(model, "Tom has 3 apples and gives 2 to Mia.")
    assert result.provenance["engine"] == "hooks"
    assert "cannot be replaced" in result.provenance["engine_reason"]
    with pytest.raises(ModelError, match="cannot be streamed"):
        ma.run(model, "Tom has 3 apples and gives 2 to Mia.", engine="streaming")


FAULTS = {
    "window": ("Mistral", lambda a: replace(a, window=a.window + 1)),
    "sinks": ("GPT-OSS", lambda a: replace(a, sinks=None)),
    "slopes": ("Falcon-RW (ALiBi)", lambda a: replace(a, bias=2 * a.bias)),
    "heads": ("Llama", lambda a: replace(a, k=a.k.flip(1))),
    "values": ("DeepSeek-V3 (latent attention)", lambda a: replace(a, v=a.v.flip(1))),
    "scale": ("Llama", lambda a: replace(a, scale=1.05 * a.scale)),
    "cap": ("Gemma 2", lambda a: replace(a, softcap=None)),
    "rotation": ("Llama", lambda a: replace(a, q=a.q.roll(1, 2))),
}


def spoil_attention(monkeypatch, fault):
    """From now on, what is streamed has this fault."""
    rows = functional.attention_by_rows
    _, spoil = FAULTS[fault]

    def spoilt(attention, see, block):
        return rows(spoil(attention), see, block)

    monkeypatch.setattr("mechattn.model.patch.streaming.attention_by_rows", spoilt)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_streamed_is_noticed(fault, shared, monkeypatch):
    model = shared(FAULTS[fault][0])
    assert check_streaming(model).outcome == "passed"
    spoil_attention(monkeypatch, fault)
    assert check_streaming(model).outcome == "limited"


@pytest.mark.parametrize(
    ("name", "dtype"), [("toy:llama", torch.float16), ("toy:falcon", torch.bfloat16)]
)
def test_half_precision_is_streamed_though_the_hooks_round_their_scores(name, dtype, shared):
    model = shared(name, dtype=dtype, verify=False)
    check = check_streaming(model)
    assert check.outcome == "passed", str(check)
    assert "root mean square" in check.detail
    assert ma.run(model, "Tom has 3 apples.").provenance["engine"] == "streaming"


@pytest.mark.parametrize("fault", ["sinks", "heads"])
def test_a_fault_larger_than_rounding_is_noticed_in_half_precision(fault, monkeypatch):
    """In bfloat16, which rounds most; a scale that is 5 % off changes no more than rounding does: float32 tells."""
    native = tiny_model(FAULTS[fault][0]).bfloat16()
    model = bridge_of(native, verify=False)
    spoil_attention(monkeypatch, fault)
    check = check_streaming(model)
    assert check.outcome == "limited"
    assert "patterns" in check.detail


@dataclass(frozen=True)
class Rotated(AnalysisBase):
    """An analysis of a hook that no streamed model fires."""

    name: ClassVar[str] = "rotated"
    captures: ClassVar[tuple[str, ...]] = ("attn.hook_rot_q",)
    quantities: ClassVar[dict] = {"norm": Quantity(("head",), "", "of the rotated queries")}

    def start(self, batch, heads):
        return {"norm": torch.zeros(len(batch.tokens), heads)}

    def add_captures(self, sums, captures):
        sums["norm"] += captures.tensors["attn.hook_rot_q"].norm(dim=(-1, -2))

    def values(self, sums, batch, window):
        return sums


def test_analyses_of_silenced_hooks_use_hooks(shared):
    model = shared("Llama")
    result = ma.run(model, "Tom has 3 apples.", analyses=Rotated())
    assert (result["rotated"].norm > 0).all()
    assert (
        result.provenance["engine_reason"] == "not streamed: attn.hook_rot_q fires only with hooks"
    )
    with pytest.raises(
        OptionError, match=r"'attn\.hook_rot_q', which doesn't fire while attention is streamed"
    ):
        ma.run(model, "Tom has 3 apples.", analyses=Rotated(), engine="streaming")


def test_the_model_is_restored_after_errors_and_nesting(model):
    before = state(model)
    outer, inner = [], []
    tokens = torch.arange(5, 35)[None]
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        streaming(model, hooks.attention_layers(model), lambda layer, rows: None),
    ):
        raise RuntimeError("on purpose")
    assert state(model) == before
    with (
        torch.no_grad(),
        streaming(model, hooks.attention_layers(model), lambda layer, rows: outer.append(layer)),
    ):
        middle = state(model)
        with streaming(model, [0], lambda layer, rows: inner.append(layer)):
            model(tokens)
        assert state(model) == middle
        assert (outer, set(inner)) == ([], {0})
        model(tokens)
    assert set(outer) == {0, 1}
    assert state(model) == before


def test_another_window_than_the_models_is_noticed(model, monkeypatch):
    monkeypatch.setattr(hooks, "attention_window", lambda model, layer: 5)
    with (
        pytest.raises(ModelError, match="layer 0 attends in a window of 8, but mechattn assumed 5"),
        streaming(model, [0], lambda layer, rows: None),
    ):
        model(torch.arange(5, 35)[None])


def test_only_the_layers_asked_for_are_computed():
    model = bridge_of(tiny_model("Llama"))
    reached = []
    model.hook_dict["blocks.1.attn.hook_q"].add_perma_hook(lambda value, hook: reached.append(1))
    model.hook_dict["unembed.hook_out"].add_perma_hook(
        lambda value, hook: reached.append(value.shape[1])
    )
    ma.load_model(model)
    for engine in ("streaming", "hooks"):
        ma.run(model, "Tom has 3 apples.", engine=engine)  # compares and verifies first, if need be
        reached.clear()
        ma.run(model, "Tom has 3 apples.", layers=[0], engine=engine)
        assert reached == []
        ma.run(model, "Tom has 3 apples.", engine=engine)
        assert reached == [1], "one pass, and no logits, which nobody asked for"
    reached.clear()
    hooks.forward_to(model, torch.arange(5)[None], model.cfg.n_layers - 1, [])
    assert reached == [1, 1], "a pass that nothing ends, and the logits of one position"


def test_nan_is_refused_with_the_layer(shared):
    hf_model = tiny_model("Llama")
    hf_model.model.layers[1].self_attn.k_proj.weight.data[0] = torch.nan
    model = bridge_of(hf_model, verify=False)
    model._mechattn.streaming = check_streaming(shared("Llama"))
    with pytest.raises(ModelError, match=r"layer 1 of .* gives NaN"):
        ma.run(model, "Tom has 3 apples.", engine="streaming")
