"""Sound models pass, and each way to break one fails the check that it should."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.checkpoint import toy_folder, toy_names
from mechattn.model.hooked import facts_of
from mechattn.model.hooks import attention_layers, pattern_hook
from mechattn.model.verify.checks import _kernel
from mechattn.model.verify.layer_checks import ProbedHooks, checks_of_layers
from tests.tiny_families import bridge_of, tiny_model

TEXT = "Tom has 3 apples and gives 2 to Mia."


@pytest.fixture
def llama():
    return bridge_of(tiny_model("Llama"), verify=False)


def failed(report):
    return {check.name for check in report.checks if check.outcome == "failed"}


@pytest.mark.parametrize("name", toy_names())
def test_every_toy_is_itself(name, shared):
    report = facts_of(shared(name)).report
    assert report.passed, str(report)
    assert not report.not_checked
    assert not report.limited
    assert report["logits"].difference < 1e-5, "float32: far inside of the tolerance"


def test_half_precision_passes_and_is_bounded(toy, prompts):
    """Patterns in half precision, statistics in float32: received attention within 5 % of the peak."""
    half = ma.load_model("toy:llama", dtype=torch.bfloat16, verify=False)
    assert ma.verify_model(half).passed
    slash = {"slash": ma.MeaninglessTokens()}
    got, exact = (
        ma.run(model, prompts[:2], slash)["received_attention"].received_by_segment
        for model in (half, toy)
    )
    assert got.dtype == "float32"
    assert 0 < float(abs(got - exact).max()) < 0.05 * float(exact.max())


def test_large_scores_in_half_precision_are_told_from_a_fault():
    """As in Qwen2.5, whose queries and keys have large biases: float32 passes, bfloat16 cannot hold the scores."""
    reports = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(toy_folder("toy:llama"), dtype=torch.float32)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 6
            layer.self_attn.k_proj.weight.data *= 6
        hooked = bridge_of(model, dtype=dtype, verify=False)
        reports[dtype] = ma.verify_model(hooked)
    assert reports[torch.float32].passed
    assert "kernel" in failed(reports[torch.bfloat16])
    assert "load the model with dtype=torch.float32" in reports[torch.bfloat16]["kernel"].remedy


def heads_in_another_order(model):
    """Behind the hooks."""
    projection = model.blocks[1].attn.o.original_component
    projection.register_forward_pre_hook(lambda _, args: (args[0].roll(16, -1),))


def keys_swapped(model):
    """The keys of one key-value head for another's."""
    model.blocks[1].attn.k.hook_out.add_perma_hook(lambda k, hook: k.roll(k.shape[-1] // 2, -1))


def alibi_doubled(model):
    """As eager attention of transformers counts it, which mechattn mends."""
    for block in model.blocks:
        del block.attn._reconstruct_attention


def sink_dropped(model):
    model.blocks[0].attn.hook_pattern.add_perma_hook(
        lambda pattern, hook: pattern / pattern.sum(-1, keepdim=True)
    )


def window_off_by_one(model):
    model.original_model.config.sliding_window += 1


def mask_shifted_by_one(model):
    attention = model.blocks[0].attn
    forward = attention.forward

    def shifted(*args, attention_mask=None, **kwargs):
        return forward(*args, attention_mask=attention_mask.roll(1, -1), **kwargs)

    object.__setattr__(attention, "forward", shifted)  # else it goes to the wrapped module


# The family, the checks that fail, and the first layer in which they can.
FAULTS = {
    heads_in_another_order: ("Llama", {"logits", "heads"}, 1),
    keys_swapped: ("Llama", {"logits", "kernel"}, 1),
    alibi_doubled: ("Falcon-RW (ALiBi)", {"logits", "kernel"}, 0),
    sink_dropped: ("GPT-OSS", {"logits", "kernel", "neighbours"}, 0),
    window_off_by_one: ("Mistral", {"logits", "kernel"}, 0),
    mask_shifted_by_one: ("Llama", {"logits", "kernel", "rows", "neighbours"}, 0),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fails_its_checks(fault):
    family, names, layer = FAULTS[fault]
    model = bridge_of(tiny_model(family), verify=False)
    assert bool(facts_of(model).mended) == (fault is alibi_doubled)
    fault(model)
    report = ma.verify_model(model)
    assert failed(report) == names
    for check in report.checks:
        if check.outcome == "failed":
            assert check.difference > 100 * check.tolerance
            is_of_layer = check.name not in ("logits", "neighbours")
            assert check.layer >= layer if is_of_layer else check.layer is None


@pytest.mark.parametrize(
    ("hook", "change", "check"),
    [
        ("blocks.1.attn.hook_pattern", lambda value: value / 2, "rows"),
        ("blocks.1.attn.hook_z", lambda value: value.roll(1, 2), "values"),
        ("hook_embed", lambda value: value * (1 + 0.1 * (len(value) > 1)), "neighbours"),
    ],
)
def test_each_check_of_the_parts_can_fail(llama, hook, change, check):
    llama.hook_dict[hook].add_perma_hook(lambda value, hook: change(value))
    assert check in failed(ma.verify_model(llama))


def test_a_layer_without_a_pattern_at_its_hook_is_reported(toy):
    pattern = torch.rand(1, 2, 3, 3)
    values = {pattern_hook(layer): pattern for layer in (0, 2, 3)}
    check = _kernel(toy, values, [pattern] * 4, "", torch.float32)
    assert check.outcome == "not checked"
    assert "no pattern of its shape at the hooks of layers [1]" in check.detail


def test_what_only_some_analyses_need_is_limited(llama):
    """A block whose output is doubled has no parts that add up."""
    llama.hook_dict["blocks.1.hook_resid_post"].add_perma_hook(lambda value, hook: value * 2)
    assert "residual" in ma.verify_model(llama).limited


def test_a_window_is_probed_or_said_not_to_be():
    model = bridge_of(tiny_model("Mistral"), verify=False)
    assert "does not reach" not in ma.verify_model(model)["rows"].detail
    wide = tiny_model("Mistral")
    wide.config.sliding_window = 200
    hooked = bridge_of(wide, verify=False)
    assert "does not reach the window of 200" in ma.verify_model(hooked)["rows"].detail
    assert "does not reach" not in ma.verify_model(hooked, length=210)["rows"].detail


def test_an_unverified_model_is_measured_only_by_request(llama):
    point = llama.hook_dict["blocks.1.attn.hook_pattern"]
    point.add_perma_hook(lambda pattern, hook: pattern.roll(pattern.shape[-1] // 9, 1))
    assert failed(ma.verify_model(llama)), "by more tokens than loading reads"
    with pytest.raises(ModelError, match="hooks at"):
        ma.run(llama, TEXT)
    ma.load_model(llama, verify=False)
    assert ma.run(llama, TEXT).provenance["model"]["verified"] is False
    with pytest.raises(ModelError, match="hooks at"):
        ma.load_model(llama, verify=True)
    point.remove_hooks(including_permanent=True)
    described = ma.run(llama, TEXT).provenance["model"]
    assert (described["verified"], described["weights"]) == (True, "raw")


def test_a_bridge_made_elsewhere_is_verified_and_mended(tokenizer, shared):
    from transformer_lens.model_bridge import TransformerBridge

    def boot(family):
        model = tiny_model(family)
        model.config.architectures = [type(model).__name__]
        bridge = TransformerBridge.boot_transformers("tiny", hf_model=model, tokenizer=tokenizer)
        bridge.cfg.default_prepend_bos = True
        return bridge

    ours = shared("Falcon-RW (ALiBi)")
    results = [ma.run(model, TEXT) for model in (ours, boot("Falcon-RW (ALiBi)"))]
    received = [result["received_attention"].received for result in results]
    np.testing.assert_allclose(*received, atol=1e-6, rtol=0)
    assert results[1].provenance["model"]["mended"]
    processed = boot("Llama")
    processed.enable_compatibility_mode(disable_warnings=True)
    wrong = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError):
        ma.verify_model(processed, native=wrong)
    assert facts_of(processed).native is not wrong, "a failed call leaves the model as it was"
    assert facts_of(processed).to_verify
    assert "processed" in ma.verify_model(processed)["logits"].detail
    assert not ma.verify_model(processed, native=tiny_model("Llama", seed=1)).passed
    assert "given as native" in ma.verify_model(processed)["logits"].remedy
    assert facts_of(ma.load_model(processed, verify=False)).native is None
    assert ma.verify_model(processed, native=tiny_model("Llama")).passed


def test_a_second_model_leaves_the_classes_alone():
    """TransformerLens issue 1795: booting a Llama replaced the eager attention of Gemma's modules."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma3 import modeling_gemma3

    bridge_of(tiny_model("Llama", seed=1), verify=False)
    for module in (modeling_gemma2, modeling_gemma3):
        assert module.eager_attention_forward.__module__ == module.__name__


def test_native_twin_shares_the_parameters(shared):
    llama = shared("Llama")
    own = {p.data_ptr() for p in facts_of(llama).native.parameters()}
    assert own <= {p.data_ptr() for p in llama.original_model.parameters()}


def test_one_model_object_is_hooked_twice_with_the_same_weights():
    """TransformerLens replaces the modules of what it hooks; a bridge of such modules has other heads."""
    plain = tiny_model("Llama")
    first = bridge_of(plain, verify=False)
    with pytest.warns(UserWarning, match="was hooked before"):
        second = bridge_of(plain)
    tokens = torch.arange(5, 25)[None]
    assert facts_of(second).report.passed
    assert torch.equal(first(tokens), second(tokens))
    weights = [next(model.original_model.parameters()) for model in (first, second)]
    assert weights[0].data_ptr() == weights[1].data_ptr()


def test_layers_without_attention_are_left_out(shared):
    model = shared("Qwen3-Next (hybrid)")
    assert attention_layers(model) == [1]
    assert ma.run(model, TEXT)["received_attention"].layer.values.tolist() == [1]


@pytest.mark.parametrize(("fault", "outcome"), [(0.0, "passed"), (60.0, "limited")])
def test_a_massive_entry_in_bfloat16_is_no_fault(toy, fault, outcome):
    """An entry of 12,000 is rounded to a multiple of 64, which is half the root mean square of the others."""
    torch.manual_seed(0)
    parts = {name: torch.randn(1, 24, 576) for name in ("resid_pre", "attn_out", "mlp_out")}
    parts["resid_pre"][0, 0, 0] = 12_000
    parts["attn_out"][0, 0, 0] = 40
    parts["mlp_out"][0, 0, 0] = 40
    rounded = {name: value.bfloat16() for name, value in parts.items()}
    after = rounded["resid_pre"] + rounded["attn_out"] + rounded["mlp_out"]
    after = after.float()
    after[0, 5, 5] += fault
    by_name = {f"blocks.0.hook_{name}": value.float() for name, value in rounded.items()}
    by_name["blocks.0.hook_resid_post"] = after
    shown = ProbedHooks(toy, by_name, torch.bfloat16, 24)
    checks = {check.name: check for check in checks_of_layers(shown)}
    assert checks["residual"].outcome == outcome
    exact = sum(value.float() for value in rounded.values())
    apart = (exact - after).abs().max() / after.square().mean().sqrt()
    assert apart > 0.15, "negative control: a sum in float32 is further away than the tolerance"
