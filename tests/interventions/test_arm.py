"""ARM on a running model: what it moves, and that nothing but a token's own key decides how."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.functional.activations import keyed_uniform, redistribute, token_keys
from mechattn.model.checkpoint import toy_folder
from mechattn.model.patch.nonlinearities import at_nonlinearity

ARM = ma.interventions.ARM(form="released_llama", p1=95.0, layers=(0, 1))


def seen_with(model, tokens, *interventions, prompts=()):
    """Activations of layers 0 and 1 as the model goes on with them, and logits."""
    got = {}

    def see(layer, pre, post):
        got[layer] = post.clone()

    from contextlib import ExitStack

    with ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention.on(model, prompts))
        stack.enter_context(at_nonlinearity(model, {0: see, 1: see}))
        with torch.no_grad():
            logits = model(tokens)
    return got, getattr(logits, "logits", logits)


@pytest.mark.parametrize("name", ["toy:llama", "toy:falcon"])  # with gated MLPs and without
def test_on_a_model_it_is_the_function(name, shared):
    model = shared(name)
    tokens = torch.arange(10, 50).view(2, 20)
    plain, before = seen_with(model, tokens)
    moved, after = seen_with(
        model, tokens, ma.interventions.ARM(form="released_llama", p1=95.0), prompts=["a", "b"]
    )
    keys = token_keys(0, ["a", "b"], torch.arange(20).expand(2, -1), 0, "arm")
    expected = redistribute(
        plain[0], keyed_uniform(keys, plain[0].shape[-1]), 0.13, 95.0, "released_llama"
    )
    assert_close(moved[0], expected, rtol=0, atol=0)
    assert 0.1 < (moved[0] != plain[0]).float().mean() < 0.3
    assert (after - before).abs().max() > 1e-3
    _, same = seen_with(model, tokens)
    assert torch.equal(same, before), "the model was not put back"


def of_mlps(model, prompts, conditions, memory="2GiB"):
    analysis = ma.analyses.MlpActivations("absolute", 0.01)
    result = ma.run(model, prompts, conditions, analysis, memory=memory, layers=[1, 3])
    return result["mlp_activations"]


def test_batches_and_order_decide_nothing(toy, short_prompts):
    """All prompts together, or one a batch and in another order: the same numbers but for rounding."""
    conditions = {
        "slash": ma.MeaninglessTokens("/", 20).under(ARM),
        "arm": ma.Baseline(intervention=ARM),
    }
    together = of_mlps(toy, short_prompts[:3], conditions)
    apart = of_mlps(toy, short_prompts[2::-1], conditions, memory="1KiB")
    apart = apart.sel(prompt=together.prompt)
    for name in ("l1_by_segment", "near_zero_by_segment", "token_change_by_segment"):
        np.testing.assert_allclose(together[name], apart[name], atol=2e-3, rtol=1e-4, err_msg=name)


def test_only_the_rows_of_its_condition_are_touched(toy, short_prompts):
    slash = ma.MeaninglessTokens("/", 20)
    alone = of_mlps(toy, short_prompts[:2], {"slash": slash}).l1_by_segment
    both = {"slash": slash, "arm": slash.under(ARM)}
    beside = of_mlps(toy, short_prompts[:2], both).l1_by_segment
    for condition in ("baseline", "slash"):
        np.testing.assert_allclose(
            alone.sel(condition=condition), beside.sel(condition=condition), rtol=1e-5
        )
    changed = beside.sel(condition="arm") / beside.sel(condition="slash")
    assert float(abs(changed - 1).max()) > 0.01


def test_the_whole_tensor_depends_on_the_batch(toy):
    tokens = torch.arange(10, 50).view(2, 20)
    arm = ma.interventions.ARM(scope="tensor", form="released_llama")
    both, _ = seen_with(toy, tokens, arm)
    alone, _ = seen_with(toy, tokens[1:], arm)
    assert float((both[0][1] - alone[0][0]).abs().max()) > 1e-2


def test_generation_with_a_cache_is_generation_without(toy):
    """Each new token gets the numbers of its own position."""
    tokens = torch.arange(10, 40)[None]
    native = toy._mechattn.native
    with ARM.on(native, ["a"]):
        cached = native.generate(tokens, max_new_tokens=6, do_sample=False)
        plain = native.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=False)
    without = native.generate(tokens, max_new_tokens=6, do_sample=False)
    assert torch.equal(cached, plain)
    hard = ma.interventions.ARM(form="released_llama", strength=3.0, layers=(0, 1, 2, 3))
    with hard.on(native, ["a"]):
        other = native.generate(tokens, max_new_tokens=6, do_sample=False)
    assert not torch.equal(other, without)
    with ARM.on(toy, ["a"]):
        bridged = toy.generate(tokens, max_new_tokens=6, do_sample=False, verbose=False)
    assert torch.equal(bridged, cached)


def test_left_padding_changes_no_draw(toy):
    """Positions come from position_ids, so a padded prompt draws what it draws alone."""
    native = toy._mechattn.native
    tokens = torch.arange(10, 30)[None]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(tokens)], 1)
    with ARM.on(native, ["a"]), torch.no_grad():
        alone = native(tokens).logits
        ids = (mask.cumsum(-1) - 1).clamp(min=0)
        left = native(padded, attention_mask=mask, position_ids=ids).logits[:, 5:]
        wrong = native(padded, attention_mask=mask, position_ids=ids + 1).logits[:, 5:]
    assert_close(left, alone, atol=1e-4, rtol=1e-4)
    assert (wrong - alone).abs().max() > 1e-3


@pytest.mark.parametrize("control", ["random_direction", "random_channels", "shuffled_signs"])
def test_controls_change_as_much(toy, control):
    tokens = torch.arange(10, 50).view(2, 20)
    plain, _ = seen_with(toy, tokens)
    moved, _ = seen_with(toy, tokens, ma.interventions.ARM())
    controlled, _ = seen_with(toy, tokens, ma.interventions.ARM(control=control))
    change = moved[0] - plain[0]
    other = controlled[0] - plain[0]
    assert_close(other.norm(dim=-1), change.norm(dim=-1), rtol=1e-4, atol=1e-5)
    assert torch.cosine_similarity(change.flatten(), other.flatten(), dim=0).abs() < 0.2


@pytest.mark.parametrize(
    ("name", "form", "c", "p1"),
    [
        ("toy:llama", "released_llama", 0.32, 90.0),
        ("toy:qwen2", "released_qwen2", 0.13, 99.5),
        ("toy:gemma3", "gemma", 0.25, 85.0),
        ("toy:falcon", "paper", 0.13, 99.5),
    ],
)
def test_the_form_is_that_of_the_models_family(name, form, c, p1):
    model = AutoModelForCausalLM.from_pretrained(toy_folder(name))
    arm = ma.interventions.ARM.for_model(model, layers=1)
    assert (arm.form, arm.c, arm.p1, arm.layers) == (form, c, p1, 1)
    assert ma.interventions.ARM.for_model(model, c=0.2).c == 0.2


def test_a_model_without_a_configuration_has_no_family():
    with pytest.raises(
        ma.MechattnError, match=r"a Linear has no configuration .*give form, c and p1"
    ):
        ma.interventions.ARM.for_model(torch.nn.Linear(1, 1))
