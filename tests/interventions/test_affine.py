"""Predict, then intervene: λ and Σσ recorded with inserted tokens, and applied without them."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import mechattn as ma
from tests.tiny_families import tiny_model

SLASH = ma.MeaninglessTokens("/", 20)


def outputs(model, sequence, layer, *interventions, prompt=""):
    """z [pos, head, d_head] of one layer."""
    name = f"blocks.{layer}.attn.hook_z"
    with ExitStack() as stack, torch.no_grad():
        for intervention in interventions:
            stack.enter_context(intervention.on(model, [prompt]))
        _, cache = model.run_with_cache(sequence.tokens[None], names_filter=name)
    return cache[name][0].reshape(len(sequence), model.cfg.n_heads, -1).double()


@pytest.mark.parametrize(
    ("name", "layer"), [("toy:llama", 2), ("toy:gemma3", 0), ("toy:falcon", 2)]
)
def test_elsewhere_what_is_missing_is_rerouting_and_new_values(name, layer, short_prompts, shared):
    """z' − (λ z + Σσ), with λ and Σσ applied to the model's own z in layer 0, is what AffineShift calls the residual."""
    model = shared(name)
    prompt = short_prompts[1]
    recorded = ma.record_affine(model, [prompt], SLASH, layers=layer)
    baseline = ma.Baseline().apply(prompt, model)
    made = SLASH.apply(prompt, model)
    after = outputs(model, made, layer)
    applied = outputs(model, baseline, layer, recorded, prompt=prompt.id)
    missing = (after[~made.inserted] - applied).norm(dim=-1) / after[~made.inserted].norm(dim=-1)
    result = ma.run(
        model,
        [prompt],
        {"slash": SLASH},
        ma.analyses.AffineShift(per_query=True),
        keep="prompts",
    )
    at = result["affine_shift"].relative_error_at_by_origin_per_prompt.sel(
        condition="slash", layer=layer
    )[0]
    predicted = at.transpose("original_key", "head").values[: len(missing)]
    np.testing.assert_allclose(missing.numpy(), predicted, atol=2e-5)
    assert np.nanmax(predicted) > 0.01


def test_scale_alone_shift_alone_and_both(toy, short_prompts):
    prompt = short_prompts[0]
    recorded = ma.record_affine(toy, [prompt], SLASH, layers=1)
    baseline = ma.Baseline().apply(prompt, toy)
    z = outputs(toy, baseline, 1)
    affine = recorded.recorded[prompt.id][1]
    scale = affine.scale.double().T.unsqueeze(-1)
    shift = affine.shift.double().transpose(0, 1)
    for parts, expected in (
        ("both", scale * z + shift),
        ("scale", scale * z),
        ("shift", z + shift),
    ):
        got = outputs(toy, baseline, 1, recorded.only(parts), prompt=prompt.id)
        assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 16])
def test_chosen_numbers(width, toy, short_prompts):
    """The shift has one number per head, or d_head = 16."""
    baseline = ma.Baseline().apply(short_prompts[0], toy)
    z = outputs(toy, baseline, 2)
    shift = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    chosen = ma.interventions.AffineAttention(
        scale=torch.linspace(0.2, 1, 8), shift=shift, layers=2
    )
    got = outputs(toy, baseline, 2, chosen)
    expected = torch.linspace(0.2, 1, 8, dtype=torch.float64)[:, None] * z + shift.double()
    assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_run_replaces_tokens_by_the_map(toy, short_prompts):
    """The first MLP's activations move to where unshifted tokens move them; the scale alone does not get there."""
    recorded = ma.record_affine(toy, short_prompts[:3], SLASH.unshifted(), layers=0)
    conditions = {
        "tokens": SLASH.unshifted(),
        "map": ma.Baseline(intervention=recorded),
        "scale": ma.Baseline(intervention=recorded.only("scale")),
    }
    result = ma.run(toy, short_prompts[:3], conditions, ma.analyses.MlpActivations(), layers=[0])
    table = result.agreement("tokens", "map").set_index("other")
    assert table.cosine["map"] > 0.99999
    assert table.cosine["scale"] < 0.99
    data = result["mlp_activations"].token_change_by_segment.sel(segment="question", layer=0)
    np.testing.assert_allclose(data.sel(condition="map"), data.sel(condition="tokens"), atol=1e-5)
    assert repr(recorded) in result.provenance["conditions"]["map"]["written"]


def test_heads_are_ablated(toy, short_prompts):
    baseline = ma.Baseline().apply(short_prompts[0], toy)
    z = outputs(toy, baseline, 1)
    zero = outputs(toy, baseline, 1, ma.interventions.HeadAblation(((1, 2), (1, 5))))
    assert not zero[:, [2, 5]].any()
    assert_close(zero[:, [0, 1, 3, 4, 6, 7]], z[:, [0, 1, 3, 4, 6, 7]])
    means = ma.head_means(toy, short_prompts[2:4])
    mean = outputs(toy, baseline, 1, ma.interventions.HeadAblation(((1, 2),), means))
    every = [outputs(toy, ma.Baseline().apply(p, toy), 1) for p in short_prompts[2:4]]
    assert_close(mean[0, 2], torch.cat(every).mean(0)[2], atol=1e-6, rtol=1e-5)
    assert (mean[:, 2] == mean[0, 2]).all()


@pytest.mark.parametrize("how", ["generated", "right", "hooked"])
def test_prompts_beside_longer_ones_have_no_more_tokens(how, tokenizer, shared):
    """Each row of a padded batch is as the same prompt alone, under the map that was recorded for it."""
    model = shared("GPT-2")
    native = tiny_model("GPT-2", len(tokenizer))
    prompts = [
        ma.Prompt("Tom has 3 apples and buys 4.", id="long"),
        ma.Prompt("How many?", id="short"),
    ]
    recorded = ma.record_affine(model, prompts, SLASH, layers=1)
    rows = [ma.Baseline().apply(prompt, model).tokens for prompt in prompts]
    side = "right" if how == "right" else "left"

    def logits(rows):
        padding = {"batch_first": True, "padding_side": side}
        ids = torch.nn.utils.rnn.pad_sequence(rows, **padding)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], **padding)
        if how == "generated":
            made = native.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0,
                                   output_logits=True, return_dict_in_generate=True)  # fmt: skip
            return torch.stack(made.logits, 1)
        with torch.no_grad():
            if how == "right":
                return native(ids, attention_mask=mask).logits
            # Padding at position 1, as TransformerLens puts it.
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            return model(ids, attention_mask=mask, position_ids=positions)

    reader = model if how == "hooked" else native
    with recorded.on(reader, [prompt.id for prompt in prompts]):
        together = logits(rows)
    for index, prompt in enumerate(prompts):
        with recorded.on(reader, [prompt.id]):
            [alone] = logits([rows[index]])
        [without] = logits([rows[index]])
        length = len(alone)
        row = together[index, :length] if side == "right" else together[index, -length:]
        assert_close(row, alone, atol=1e-4, rtol=1e-4)
        assert (alone - without).abs().max() > 0.01, "negative control"
