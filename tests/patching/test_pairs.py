"""Patching between two versions of a prompt, against plain forward passes of transformers with hooks by hand."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import ModelError, OptionError, PromptError
from mechattn.model.checkpoint import load_tokenizer, toy_folder
from mechattn.patching.answer_metrics import chosen_metric
from tests.conftest import loaded_once
from tests.model.unusual import unusual_model
from tests.tiny_families import tiny_model

LONGER = [
    ma.Prompt(tokens=(1, 20, 30, 31, 32, 40, 41, 9 + i), answer_tokens=(60,), counterpart=(1, 20, 35, 40, 41, 9 + i),
              other_answer=(61,), id=str(i))
    for i in range(3)
]  # fmt: skip


@pytest.fixture(scope="module")
def wide():
    native = AutoModelForCausalLM.from_pretrained(toy_folder("toy:llama"), dtype=torch.float64)
    return loaded_once("toy:llama", dtype=torch.float64), native.eval()


def difference(native, tokens, at, wrong, modules=(), put=None):
    """logit[answer] − logit[wrong] before position ``at``; outputs of modules, some rows exchanged."""
    seen, handles = {}, []

    def see(name):
        def hook(module, args, out):
            value = (out[0] if isinstance(out, tuple) else out).clone()
            if put and name in put:
                for place, row in put[name].items():
                    value[0, place] = row(value[0, place])
            seen[name] = value[0]
            return (value, *out[1:]) if isinstance(out, tuple) else value

        return hook

    for name in modules:
        handles.append(native.get_submodule(name).register_forward_hook(see(name)))
    with torch.no_grad():
        logits = native(torch.tensor([tokens]), use_cache=False).logits[0, at - 1]
    for handle in handles:
        handle.remove()
    return float(logits[tokens[at]] - logits[wrong]), seen


PARTS = {"attn_out": "model.layers.1.self_attn", "mlp_out": "model.layers.1.mlp", "resid_post": "model.layers.1",
         "q": "model.layers.1.self_attn.q_proj", "k": "model.layers.1.self_attn.k_proj"}  # fmt: skip
PARTNERS = [(0, 0), (1, 1), (5, 3), (6, 4), (7, 5), (8, 6)]  # in LONGER: prompt, counterpart


@pytest.mark.parametrize(
    ("part", "direction"),
    [
        ("attn_out", "denoising"),
        ("mlp_out", "noising"),
        ("resid_post", "denoising"),
        ("resid_post", "noising"),
        ("q", "noising"),
        ("k", "denoising"),
    ],
)
def test_parts_of_versions_of_other_lengths_against_hooks_by_hand(wide, part, direction):
    model, native = wide
    of_head = part in ("q", "k")
    head = 2
    columns = slice(None)
    if of_head:
        columns = slice(head * model.cfg.d_head, (head + 1) * model.cfg.d_head)
    sites = ma.Sites(part, [(1, head)] if of_head else [1])
    patched = ma.patch(
        model, LONGER, Counterpart(), at=sites, metric="logit_diff", direction=direction
    ).effects
    module = PARTS[part]
    misaligned = []
    for index, prompt in enumerate(LONGER):
        base, source = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        partners = PARTNERS
        if direction == "denoising":
            base, source = source, base
            partners = [(theirs, mine) for mine, theirs in PARTNERS]
        before, _ = difference(native, base, len(base) - 1, 61)
        after, values = difference(native, source, len(source) - 1, 61, [module])

        def exchanged(place, values=values):
            """Puts the source's value at a place into a row."""

            def change(row):
                row = row.clone()
                row[columns] = values[module][place][columns]
                return row

            return change

        def effect(shift, base=base, partners=partners, before=before, exchanged=exchanged):
            rows = {to: exchanged(at - shift * (at > 1)) for to, at in partners}
            return difference(native, base, len(base) - 1, 61, [module], {module: rows})[0] - before

        measured = float(patched.effect[index].squeeze())
        assert measured == pytest.approx(effect(shift=0), abs=2e-5)
        assert float(patched.whole[index]) == pytest.approx(after - before, abs=2e-5)
        misaligned.append(abs(effect(shift=1) - measured))
    assert max(misaligned) > 1e-4, "the oracle would notice tokens that are misaligned by one"


def test_positions_and_segments_add_up_where_they_should(wide):
    """The stream after the last layer: only the last token before the answer has an effect, and it has all of it."""
    model, _ = wide
    made = ma.patch(
        model,
        LONGER,
        Counterpart(),
        at=ma.Sites("resid_post", by="position"),
        metric="logit_diff",
        direction="denoising",
    )
    last = made.effects.effect.sel(layer=3)
    np.testing.assert_allclose(last.sel(position=7), made.effects.whole, atol=2e-5)
    positions = made.effects.position.values
    assert positions.tolist() == [2, 3, 4, 5, 6, 7, 8], "before, both runs are the same"
    without_partner = made.effects.effect.isel(prompt=0, layer=0).isnull().values
    assert positions[without_partner].tolist() == [2, 3, 4]
    assert set(made.table().position) == {5, 6, 7, 8}
    assert float(abs(last.sel(position=[5, 6, 8])).max()) < 2e-5
    assert "pairs of layer and position" in str(made)
    table = made.table()
    share = table.share[(table.layer == 3) & (table.position == 7)].item()
    assert share == pytest.approx(1, abs=1e-4), (
        "normalised: the corrupted version is 0, the clean one 1"
    )
    figure = ma.render.patching_map(made)
    assert list(figure.data[0].x) == [5, 6, 7, 8]


def test_heads_by_position_are_attributed_and_sum_to_the_head(wide):
    model, _ = wide
    pairs = ma.pairs(model, "ioi", 2, same_length=True)
    whole = ma.patch(model, pairs, Counterpart(), controls=()).effects.effect
    by_position = ma.Sites(by="position")
    parts = ma.patch(model, pairs, Counterpart(), at=by_position, controls=()).effects.effect
    np.testing.assert_allclose(parts.sum("position"), whole, rtol=1e-5, atol=1e-9)


def test_bad_answers_and_positions_are_refused_in_words(wide):
    model, _ = wide
    same = [ma.Prompt(tokens=p.tokens, counterpart=p.counterpart, answer_tokens=(60,), other_answer=(60,), id=p.id)
            for p in LONGER]  # fmt: skip
    with pytest.raises(PromptError, match=r"both answers of prompt 0 .* are the same tokens"):
        ma.patch(model, same, Counterpart(), metric="logit_diff", direction="denoising")
    with pytest.raises(PromptError, match=r'has no other answer, which metric="logit_diff" needs'):
        ma.patch(
            model,
            ma.load_prompts("word-problems", limit=2, with_answer=True),
            ma.MeaninglessTokens("/", 3),
            metric="logit_diff",
            direction="denoising",
        )
    mixed = [
        *LONGER,
        ma.Prompt(tokens=(1, 20, 30), counterpart=(1, 20, 31), answer_tokens=(60,), id="x"),
    ]
    with pytest.raises(
        OptionError, match=r"prompts have 4 to 9 tokens .* position means another token in each"
    ):
        ma.patch(
            model,
            mixed,
            Counterpart(),
            at=ma.Sites("resid_post", by="position"),
            direction="denoising",
        )


def test_the_metric_is_the_logit_difference_where_every_prompt_has_another_answer():
    with_both = ma.Prompt(tokens=(1, 2), answer_tokens=(3,), other_answer=(4,))
    with_one = ma.Prompt(tokens=(1, 2), answer_tokens=(3,))
    assert chosen_metric(None, [with_both, with_both]) == "logit_diff"
    assert chosen_metric(None, [with_both, with_one]) == "logprob"
    assert chosen_metric("kl", [with_both]) == "kl"


@pytest.mark.parametrize("part", ["attn_out", "mlp_out"])
def test_blocks_whose_outputs_are_multiplied(part):
    """Granite's blocks fire TransformerLens's hooks of their outputs for its own functions alone."""
    tokenizer = load_tokenizer("toy:llama")
    plain, same = (
        tiny_model("Granite", len(tokenizer), residual_multiplier=0.22).double() for _ in range(2)
    )
    model = ma.load_model(same, tokenizer=tokenizer)
    effects = ma.patch(
        model, LONGER, Counterpart(), at=ma.Sites(part, [1]), metric="logit_diff", controls=()
    ).effects.effect
    module = PARTS[part]
    for index, prompt in enumerate(LONGER):
        clean, corrupted = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        _, values = difference(plain, corrupted, len(corrupted) - 1, 61, [module])
        rows = {to: lambda _, value=values[module][at]: value for to, at in PARTNERS}
        before, _ = difference(plain, clean, len(clean) - 1, 61)
        after, _ = difference(plain, clean, len(clean) - 1, 61, [module], {module: rows})
        assert abs(after - before) > 1e-3
        assert float(effects[index].squeeze()) == pytest.approx(after - before, abs=2e-5)


def test_a_part_that_a_layer_lacks_is_refused(tokenizer):
    """No single module of a Granite with experts gives what the MLP adds."""
    model = ma.load_model(unusual_model("Granite hybrid NoPE", len(tokenizer)), tokenizer=tokenizer)
    with pytest.raises(ModelError, match=r"layer 1 of .* has no hook of mlp_out"):
        ma.patch(model, LONGER, Counterpart(), at="mlp_out")
