"""Families, each loaded once: what its own modules show of it, streamed and not, and that it is left as it was."""

from functools import partial

import pytest
import torch

from mechattn.model.hooked import facts_of
from mechattn.model.hooks import attention_layers, norms_once
from mechattn.model.patch.streaming import fires_while_streamed, streaming
from mechattn.model.positions import boundary_of, takes_negative_ids, takes_position_ids
from mechattn.model.verify.checks import check_fused, check_streaming
from mechattn.model.verify.config_fields import unknown_fields
from tests.model.test_positions import TABLE_FAMILIES
from tests.model.test_streaming import state

TOKENS = torch.arange(5, 65)[None]
# Input hooks that TransformerLens fires only if a flag of cfg is set.
HOOKS_BY_FLAG = (
    "hook_mlp_in",
    "hook_attn_in",
    "hook_q_input",
    "hook_k_input",
    "hook_v_input",
    "hook_result",
)
ONCE = "_hf_autograd_forward_with_hooks"  # of norms, what is replaced
NO_POSITION_IDS = ("BLOOM", "Mamba (no attention)")
# What differs between families, once; tests/test_families.py loads, verifies and measures all of them.
DIFFERENT = (
    "Llama",  # grouped heads, rotary positions
    "Gemma 2",  # capped scores, windows, norms after attention
    "GPT-2",  # learned positions
    "BLOOM",  # ALiBi
    "GPT-OSS",  # sinks, mixtures of experts
    "DeepSeek-V3 (latent attention)",
    "Qwen3-Next (hybrid)",
    "Mamba (no attention)",
)
# Their attention is written out, so that its pattern is not read through identity values.
EAGER = ("Gemma 2", "BLOOM", "GPT-OSS")


def seen_by_hooks(model):
    """What each hook sees in one pass that fires in a streamed pass too."""
    names = []
    for name in model.hook_dict:
        short_name = name.split(".", 2)[-1]
        if fires_while_streamed(short_name) and not name.endswith(HOOKS_BY_FLAG):
            names.append(name)
    seen = {}

    def keep(name, value, hook):  # by the name that was asked for, as one hook has several
        seen[name] = value

    with torch.no_grad():
        model.run_with_hooks(TOKENS, fwd_hooks=[(name, partial(keep, name)) for name in names])
    return seen


@pytest.mark.parametrize("family", DIFFERENT)
def test_a_family_passes_every_check_of_its_own(family, shared):
    report = facts_of(shared(family)).report
    assert report.passed, str(report)
    assert report["neighbours"].difference < 1e-5
    reaches_far = family not in NO_POSITION_IDS
    assert ("at positions" in report["neighbours"].detail) == reaches_far
    if family == "Mamba (no attention)":
        assert report["kernel"].outcome == "not checked"
        return
    assert report["kernel"].outcome == "passed"
    assert ("identity" in report["kernel"].detail) == (family not in EAGER)


@pytest.mark.parametrize("family", DIFFERENT)
def test_a_family_has_no_unknown_field_and_no_boundary(family, shared):
    native = facts_of(shared(family)).native
    assert unknown_fields(native.config) == {}
    assert boundary_of(native) is None
    if attention_layers(shared(family)) and takes_position_ids(shared(family)):
        assert takes_negative_ids(shared(family)) == (family not in TABLE_FAMILIES)


@pytest.mark.parametrize("family", DIFFERENT)
def test_norms_computed_once_change_no_bit(family, shared):
    model = shared(family)
    own_attributes = [set(vars(module)) for module in model.modules()]
    norms = [module for module in model.modules() if hasattr(type(module), ONCE)]
    assert norms
    with torch.no_grad():
        before = model(TOKENS[:, :12])
        with norms_once(model):
            assert all(ONCE in vars(norm) for norm in norms), "wherever a norm lies"
            once = model(TOKENS[:, :12])
    assert torch.equal(once, before)
    assert [set(vars(module)) for module in model.modules()] == own_attributes


@pytest.mark.parametrize("family", DIFFERENT[:-1])
def test_a_family_is_streamed_and_its_hooks_see_the_same(family, shared):
    model = shared(family)
    check = check_streaming(model)
    assert check.outcome == "passed", str(check)
    assert check_fused(model).outcome == "passed"
    before = state(model)
    plain = seen_by_hooks(model)
    with streaming(model, attention_layers(model), lambda layer, rows: None):
        streamed = seen_by_hooks(model)
    assert state(model) == before
    assert {"blocks.1.attn.hook_z", "blocks.1.hook_resid_post"} <= set(plain)
    assert set(streamed) == set(plain)
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(streamed[name], value, atol=5e-5, rtol=1e-3)
