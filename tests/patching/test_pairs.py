"""Patching between two versions of a prompt, against plain forward passes of transformers with hooks by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import ModelError, OptionError, PromptError
from mechattn.model.checkpoint import toy_tokenizer
from mechattn.patching.answer_metrics import chosen_metric
from tests.conftest import loaded_once
from tests.model.unusual import unusual_model
from tests.patching.plain_runs import plain_logits, plain_toy
from tests.tiny_families import tiny_model

LONGER = [
    ma.Prompt(tokens=(1, 20, 30, 31, 32, 40, 41, 9 + i), answer_tokens=(60,), counterpart=(1, 20, 35, 40, 41, 9 + i),
              other_answer=(61,), id=str(i))
    for i in range(3)
]  # fmt: skip


@pytest.fixture(scope="module")
def wide():
    return loaded_once("toy:llama", dtype=torch.float64), plain_toy()


def difference(native, tokens, module, source=None, partners=(), columns=slice(None)):
    """logit[60] − logit[61] before the last token, and what a module returns, with some rows of another run's."""
    seen = []

    def exchange(value):
        value = value.clone()
        for place, source_place in partners:
            value[place, columns] = source[source_place, columns]
        seen.append(value)
        return value

    with torch.no_grad():
        logits = plain_logits(native, tokens, writing={module: exchange})[-2]
    return float(logits[60] - logits[61]), *seen


PARTS = {"attn_out": "model.layers.1.self_attn", "mlp_out": "model.layers.1.mlp", "resid_post": "model.layers.1",
         "q": "model.layers.1.self_attn.q_proj", "k": "model.layers.1.self_attn.k_proj",
         "v": "model.layers.1.self_attn.v_proj"}  # fmt: skip
PARTNERS = [(0, 0), (1, 1), (5, 3), (6, 4), (7, 5), (8, 6)]  # in LONGER: prompt, counterpart


@pytest.mark.parametrize(
    ("part", "direction"),
    [
        ("attn_out", "denoising"),
        ("mlp_out", "noising"),
        ("resid_post", "noising"),
        ("q", "noising"),
        ("k", "denoising"),
        ("v", "denoising"),
    ],
)
def test_parts_of_versions_of_other_lengths_against_hooks_by_hand(wide, part, direction):
    model, native = wide
    site, columns = 1, slice(None)
    if part in "qkv":
        site, columns = (1, 2), slice(2 * model.cfg.d_head, 3 * model.cfg.d_head)
    patched = ma.patch(
        model, LONGER, Counterpart(), at=ma.Sites(part, [site]), direction=direction, controls=()
    ).effects
    module = PARTS[part]
    misaligned = []
    for index, prompt in enumerate(LONGER):
        base, source = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        partners = PARTNERS
        if direction == "denoising":
            base, source = source, base
            partners = [(theirs, mine) for mine, theirs in PARTNERS]
        shifted = [(to, at - (at > 1)) for to, at in partners]
        before, _ = difference(native, base, module)
        whole, values = difference(native, source, module)
        after, _ = difference(native, base, module, values, partners, columns)
        wrong, _ = difference(native, base, module, values, shifted, columns)
        assert float(patched.effect[index].squeeze()) == pytest.approx(after - before, abs=2e-5)
        assert float(patched.whole[index]) == pytest.approx(whole - before, abs=2e-5)
        misaligned.append(abs(wrong - after))
    assert max(misaligned) > 1e-4, "the oracle would notice tokens that are misaligned by one"


def test_positions_add_up_where_they_should(wide):
    """The stream after the last layer: only the last token before the answer has an effect, and it has all of it."""
    model, _ = wide
    sites = ma.Sites("resid_post", by="position")
    made = ma.patch(model, LONGER, Counterpart(), at=sites, direction="denoising")
    effect = made.effects.effect
    last = effect.sel(layer=3)
    np.testing.assert_allclose(last.sel(position=7), made.effects.whole, atol=2e-5)
    assert float(abs(last.sel(position=[5, 6, 8])).max()) < 2e-5
    positions = effect.position.values
    assert positions.tolist() == [2, 3, 4, 5, 6, 7, 8], "before, both runs are the same"
    without_partner = effect.isel(prompt=0, layer=0).isnull().values
    assert positions[without_partner].tolist() == [2, 3, 4]
    table = made.table().set_index(["layer", "position"])
    assert {position for _, position in table.index} == {5, 6, 7, 8}
    assert table.share[3, 7] == pytest.approx(1, abs=1e-4), "the corrupted version is 0"
    assert list(ma.render.patching_map(made).data[0].x) == [5, 6, 7, 8]


def test_bad_answers_and_positions_are_refused_in_words(wide):
    model, _ = wide
    same = [replace(prompt, other_answer=(60,)) for prompt in LONGER]
    one_answer = [replace(prompt, other_answer="") for prompt in LONGER]
    shorter = ma.Prompt(tokens=(1, 20, 30), counterpart=(1, 20, 31), answer_tokens=(60,), id="x")
    by_position = {"at": ma.Sites("resid_post", by="position")}
    for prompts, options, error, words in (
        (same, {}, PromptError, "both answers of prompt 0 .* are the same tokens"),
        (one_answer, {"metric": "logit_diff"}, PromptError, "has no other answer, which metric="),
        ([*LONGER, shorter], by_position, OptionError, "prompts have 4 to 9 tokens"),
    ):
        with pytest.raises(error, match=words):
            ma.patch(model, prompts, Counterpart(), **options)


def test_prompts_with_another_answer_use_logit_diff():
    with_both = ma.Prompt(tokens=(1, 2), answer_tokens=(3,), other_answer=(4,))
    with_one = ma.Prompt(tokens=(1, 2), answer_tokens=(3,))
    assert chosen_metric(None, [with_both, with_both]) == "logit_diff"
    assert chosen_metric(None, [with_both, with_one]) == "logprob"
    assert chosen_metric("kl", [with_both]) == "kl"


def test_blocks_whose_outputs_are_multiplied():
    """Granite's blocks fire TransformerLens's hooks of their outputs for its own functions alone."""
    tokenizer = toy_tokenizer("toy:llama")
    plain, same = (
        tiny_model("Granite", len(tokenizer), residual_multiplier=0.22).double() for _ in range(2)
    )
    model = ma.load_model(same, tokenizer=tokenizer)
    prompt = LONGER[0]
    clean, corrupted = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
    for part in ("attn_out", "mlp_out"):
        patched = ma.patch(model, [prompt], Counterpart(), at=ma.Sites(part, [1]), controls=())
        _, values = difference(plain, corrupted, PARTS[part])
        before, _ = difference(plain, clean, PARTS[part])
        after, _ = difference(plain, clean, PARTS[part], values, PARTNERS)
        assert abs(after - before) > 1e-3
        effect = float(patched.effects.effect.squeeze())
        assert effect == pytest.approx(after - before, abs=2e-5)


def test_a_part_that_a_layer_lacks_is_refused(tokenizer):
    """No single module of a Granite with experts gives what the MLP adds."""
    model = ma.load_model(unusual_model("Granite hybrid NoPE", len(tokenizer)), tokenizer=tokenizer)
    with pytest.raises(ModelError, match=r"layer 1 of .* has no hook of mlp_out"):
        ma.patch(model, LONGER, Counterpart(), at="mlp_out")
