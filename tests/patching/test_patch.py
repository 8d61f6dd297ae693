"""Patching across runs of other lengths, against plain forward passes of transformers with hooks written by hand."""

import itertools
import re
import warnings
from dataclasses import replace
from functools import partial
from html import unescape
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.conditions import Counterpart
from mechattn.errors import OptionError, PromptError, PromptTooLong
from mechattn.model.hooks import attention_window
from mechattn.patching import controls, pairs, plan
from mechattn.patching import patch as patching
from mechattn.patching.answer_metrics import (
    METRIC_WORDS,
    answer_logprob,
    answer_margin,
    divergence,
)
from mechattn.patching.pairs import warn_of_junctions
from mechattn.patching.patched_runs import recorded_runs
from mechattn.render import words
from mechattn.stats.paired import paired
from mechattn.stats.units import Units, halves_of
from tests.conftest import loaded_once, short_problems
from tests.patching.plain_runs import plain_logits, plain_toy
from tests.patching.test_pairs import LONGER

SLASH = ma.MeaninglessTokens("/", count=9)
HEADS = [(0, 1), (2, 0), (3, 3), (0, 2)]


@pytest.fixture(scope="module")
def patched_heads(toy):
    """Four heads, in eight prompts."""
    return ma.patch(toy, short_problems(8), SLASH, at=HEADS, direction="denoising")


@pytest.fixture(scope="module")
def wide(request):
    """A toy in float64, hooked, and as transformers has it."""
    return loaded_once(request.param, dtype=torch.float64), plain_toy(request.param, "sdpa")


def of_toys(*toys):
    """The toys whose ``wide`` a test takes."""
    return pytest.mark.parametrize("wide", toys, indirect=True, scope="module")


# Where it matters how a family names or gives what is exchanged; what is exchanged for what is one line for all.
EVERY = pytest.mark.parametrize(
    ("wide", "direction"),
    [("toy:gemma3", "denoising"), ("toy:falcon", "denoising"), ("toy:llama", "noising")],
    indirect=["wide"],
    scope="module",
)


def by_hand(native, sequence, puts=None):
    """Log-probability of the answer, and what each W_O is given; with inputs of heads exchanged at some
    tokens: ``puts[layer, head][place]``."""
    given = []
    heads = native.config.num_attention_heads

    def exchange(layer, z):
        by_head = z.clone().view(len(sequence), heads, -1)
        for (put_layer, head), values in (puts or {}).items():
            if put_layer == layer:
                for place, value in values.items():
                    by_head[place, head] = value
        given.append(by_head)
        return by_head.flatten(1)

    names = [name for name, _ in native.named_modules()]
    outputs = [name for name in names if name.endswith(("attn.o_proj", "attention.dense"))]
    reading = {name: partial(exchange, layer) for layer, name in enumerate(outputs)}
    with torch.no_grad():
        log_probs = plain_logits(native, sequence.tokens, reading).double().log_softmax(-1)
    places = sequence.of_segment("answer").nonzero()[:, 0]
    return float(log_probs[places - 1, sequence.tokens[places]].sum()), given


class HandPatched:
    """Both runs of a prompt in plain transformers, and what patching some heads does there."""

    def __init__(self, model, native, prompt, direction):
        base = SLASH.apply(prompt, model, 0)
        source = ma.Baseline().apply(prompt, model, 0)
        if direction == "noising":
            base, source = source, base
        self.native, self.base, self.source = native, base, source
        self.before, _ = by_hand(native, base)
        self.after, self.values = by_hand(native, source)

    def effect(self, heads, segment=None, shift=0):
        """With the source's values of these heads at the tokens that both have, ``shift`` places too late."""
        place_of = {int(origin): place for place, origin in enumerate(self.base.origin)}
        puts = {}
        for layer, head in heads:
            values = {}
            for place, origin in enumerate(self.source.origin):
                in_segment = segment in (None, SEGMENTS[self.source.segment[place]])
                if origin >= 0 and in_segment and place_of[int(origin)] + shift < len(self.base):
                    values[place_of[int(origin)] + shift] = self.values[layer][place, head]
            puts[layer, head] = values
        return by_hand(self.native, self.base, puts)[0] - self.before


@EVERY
def test_patched_heads_against_hooks_written_by_hand(wide, direction):
    model, native = wide
    some = short_problems(2)
    patched = ma.patch(model, some, SLASH, direction=direction).effects
    misaligned = []
    for prompt in some:
        hand = HandPatched(model, native, prompt, direction)
        whole = float(patched.whole.sel(prompt=prompt.id))
        assert whole == pytest.approx(hand.after - hand.before, abs=2e-5)
        for layer, head in HEADS:
            effect = float(patched.effect.sel(prompt=prompt.id, layer=layer, head=head))
            assert effect == pytest.approx(hand.effect([(layer, head)]), abs=2e-5)
            if prompt is some[0]:
                misaligned.append(abs(hand.effect([(layer, head)], shift=1) - effect))
    assert max(misaligned) > 2e-3, "the oracle would notice tokens that are misaligned by one"


@of_toys("toy:llama")
def test_heads_patched_together_against_hooks_written_by_hand(wide):
    """Two heads of one layer and two of others in a single pass, and not the sum of each alone."""
    model, native = wide
    some = short_problems(3)
    together = ma.patch(model, some, SLASH, at=HEADS, together=True, direction="denoising")
    apart = ma.patch(model, some, SLASH, at=HEADS, direction="denoising")
    effects = together.effects.effect.squeeze()
    for prompt in some:
        hand = HandPatched(model, native, prompt, "denoising")
        effect = float(effects.sel(prompt=prompt.id))
        assert effect == pytest.approx(hand.effect(HEADS), abs=2e-5)
    summed = apart.effects.effect.sum(("layer", "head"))
    assert float(abs(summed - effects).max()) > 5e-5, "effects of heads do not add up"
    assert together.table().set[0] == "L0H1 + L2H0 + L3H3 + L0H2"
    assert "over 1 set patched" in str(together)


@of_toys("toy:falcon")
def test_heads_by_segment_against_hooks_written_by_hand(wide):
    """Only the tokens of one segment are exchanged, and the segments are those that every prompt has."""
    model, native = wide
    some = short_problems(2)
    sites = ma.Sites("z", ["L0H1", "L2H0"], by="segment")
    effects = ma.patch(model, some, SLASH, at=sites, direction="denoising").effects.effect
    between_segments = []
    for prompt in some:
        hand = HandPatched(model, native, prompt, "denoising")
        for layer, head in [(0, 1), (2, 0)]:
            by_segment = effects.sel(prompt=prompt.id, layer=layer, head=head)
            for segment in ("question", "answer"):
                effect = float(by_segment.sel(segment=segment))
                assert effect == pytest.approx(hand.effect([(layer, head)], segment), abs=2e-5)
            question, answer = by_segment.sel(segment=["question", "answer"]).values
            between_segments.append(abs(question - answer))
    assert max(between_segments) > 1e-4, "exchanging the segments would be noticed"

    in_every_prompt = {"first", "template", "system", "question", "answer"}
    assert set(effects.segment.values) == in_every_prompt


def test_the_table_by_segment_and_the_residual_stream(toy):
    some = short_problems(3)
    made = ma.patch(
        toy, some, SLASH, at=ma.Sites("resid_post", [0, 3], by="segment"), direction="denoising"
    )
    table = made.table()
    assert list(table.columns[:2]) == ["layer", "segment"]
    assert len(table) == 2 * made.effects.sizes["segment"]
    assert f"over {len(table)} pairs of layer and segment patched" in str(made)
    heat = ma.render.patching_map(made).data[0]
    assert list(heat.x) == made.effects.segment.values.tolist()
    assert_allclose(np.array(heat.z, dtype=float), made.effects.effect.mean("prompt"))
    together = ma.patch(
        toy, some, SLASH, at=ma.Sites("resid_post", [0, 3]), together=True, direction="denoising"
    )
    assert together.table().set.tolist() == ["L0 + L3"]
    assert_allclose(together.effects.effect.squeeze(), together.effects.whole, atol=2e-4)
    with pytest.raises(OptionError, match="a map needs effects by layer"):
        ma.render.patching_map(together)


def test_attribution_by_segment_adds_up(toy):
    """First-order effects are sums over tokens, so the segments' add up to the head's."""
    some = short_problems(1)
    options = {"method": "attribution", "direction": "denoising"}
    whole = ma.patch(toy, some, SLASH, **options)
    parts = ma.patch(toy, some, SLASH, at=ma.Sites(by="segment"), **options)
    assert_allclose(parts.effects.effect.sum("segment"), whole.effects.effect, rtol=1e-5, atol=1e-7)
    assert [*parts.checked] == ["prompt", "layer", "head", "segment", "exact", "attributed"]


def test_patterns_against_attention_written_by_hand(monkeypatch):
    """toy:llama with other attention: the pattern is what multiplies the values."""
    layer, head = 1, 1
    site = ma.Sites("pattern", [(layer, head)])
    model = loaded_once("toy:llama", dtype=torch.float64)
    patched = ma.patch(model, short_problems(2), SLASH, at=site, direction="denoising").effects
    seen = []
    exchanged = {}  # by what the rows of a run are replaced

    def attention(module, q, k, v, mask, scaling, **options):
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * scaling
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        if module.layer_idx == layer:
            seen.append(weights[0, head].clone())
            for original, pattern in exchanged.items():
                weights[0, head, original] = 0
                weights[0, head, original[:, None], original] = pattern
        return (weights @ v.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(
        ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attention, raising=False
    )
    native = plain_toy()
    for prompt in short_problems(2):
        base = SLASH.apply(prompt, model, 0)
        seen.clear()
        by_hand(native, ma.Baseline().apply(prompt, model, 0))
        [pattern] = seen
        before, _ = by_hand(native, base)
        exchanged[(base.origin >= 0).nonzero()[:, 0]] = pattern
        after, _ = by_hand(native, base)
        exchanged.clear()
        effect = float(patched.effect.sel(prompt=prompt.id).squeeze())
        assert effect == pytest.approx(after - before, abs=2e-5)
        assert abs(effect) > 1e-4


@of_toys("toy:falcon")
def test_attribution_is_the_derivative(wide, monkeypatch):
    """A hundredth of the step, patched exactly, has a hundredth of the attributed effect."""
    model, _ = wide
    some = short_problems(2)
    options = {"method": "attribution", "direction": "denoising"}
    attributed = ma.patch(model, some, SLASH, **options).effects.effect
    named = ma.patch(model, some, SLASH, at=[(2, 0), (2, 3)], **options).effects.effect
    assert_array_equal(named.sel(layer=2, head=[0, 3]), attributed.sel(layer=2, head=[0, 3]))
    aligned_output = patching.aligned_output

    def small_step(base, source, where):
        layer, head = where
        own = base.activations[layer][base.positions, head]
        return own + 1e-2 * (aligned_output(base, source, where) - own)

    monkeypatch.setattr(patching, "aligned_output", small_step)
    exact = ma.patch(model, some, SLASH, at=HEADS, direction="denoising").effects.effect
    for layer, head in HEADS:
        expected = exact.sel(layer=layer, head=head).values
        estimate = 1e-2 * attributed.sel(layer=layer, head=head).values
        assert_allclose(estimate, expected, rtol=0.1, atol=1e-6)


def test_attribution_costs_a_few_passes_and_one_backward_a_prompt(monkeypatch):
    """However many heads there are, and besides what it is compared with: both runs, the one for gradients,
    and another prompt's, which the longest prompt lacks."""
    # Not verified, as a new hook leads to another verification, whose passes would count.
    model = loaded_once("toy:llama", verify=False)
    passes = []
    backwards = []
    before_check = []
    handle = model.original_model.register_forward_hook(lambda *_: passes.append(1))
    plain_grad = torch.autograd.grad
    plain_sample = patching.checked_sample

    def counted_grad(*arguments):
        backwards.append(1)
        return plain_grad(*arguments)

    def counted_sample(*arguments):
        before_check.append(len(passes))
        return plain_sample(*arguments)

    monkeypatch.setattr(torch.autograd, "grad", counted_grad)
    monkeypatch.setattr(patching, "checked_sample", counted_sample)
    ma.patch(model, short_problems(3), SLASH, method="attribution", direction="denoising")
    handle.remove()
    assert before_check == [4 * 3 - 1]
    assert len(backwards) == 3


@of_toys("toy:llama")
def test_attribution_stands_beside_what_it_was_compared_with(wide):
    """Also where heads are not named in the order of the table, and positions lack a partner."""
    model, _ = wide
    sites = ma.Sites("z", [(3, 0), (0, 1), (2, 2)], by="position")
    made = ma.patch(model, LONGER, Counterpart(), at=sites, method="attribution")
    checked = made.checked
    assert len(checked) == 3 * 8
    exact = ma.patch(model, LONGER, Counterpart(), at=sites, controls=())
    for row in checked.itertuples():
        at = {"prompt": row.prompt, "layer": row.layer, "head": row.head, "position": row.position}
        assert row.exact == pytest.approx(float(exact.effects.effect.sel(at)), abs=1e-9)
        assert row.attributed == pytest.approx(float(made.effects.effect.sel(at)))
    labels = ["layer", "head", "position"]
    means = made.effects.effect.mean("prompt", skipna=False).stack(cell=labels)
    assert abs(means).idxmax().item() in {*zip(*(checked[label] for label in labels))}
    correlation, _ = made.agreement
    assert correlation == pytest.approx(np.corrcoef(checked.exact, checked.attributed)[0, 1])
    assert f"correlation {correlation:.3f}" in str(made)


def test_where_an_inserted_token_predicts_the_answer_that_is_said(toy):
    """It has no counterpart, so not even the stream after the last layer restores the answer."""
    condition = ma.MeaninglessTokens("/", count=9, place="before_answer")
    last = ma.Sites("resid_post", [3])
    message = r"in 3 of 3 prompts the token right before the answer is an inserted one"
    with pytest.warns(UserWarning, match=message):
        effects = ma.patch(
            toy, short_problems(3), condition, at=last, direction="denoising"
        ).effects
    assert float(abs(effects.effect.sel(layer=3) - effects.whole).max()) > 0.1


def runs_of(model, prompt, part):
    """A prompt with and without inserted tokens, read in layers 0 and 1."""
    origins = ma.Baseline().apply(prompt, model, 0).origin
    sequences = [
        (condition.apply(prompt, model, 0), origins) for condition in (SLASH, ma.Baseline())
    ]
    return recorded_runs(model, sequences, [0, 1], part)


def test_the_random_control_is_a_step_of_equal_norm(toy):
    base, source = runs_of(toy, short_problems(1)[0], "z")
    where = (1, 2)
    value = controls.aligned_output(base, source, where)
    own = base.activations[1][base.positions, 2]

    def drawn_for(name):
        return controls.after_random_steps(7, name, base, {where: value})[where]

    step = drawn_for("a") - own
    lengths = (value - own).norm(dim=-1)
    torch.testing.assert_close(step.norm(dim=-1), lengths, atol=1e-5, rtol=1e-4)
    assert not torch.equal(drawn_for("a"), drawn_for("b"))
    cosine = torch.nn.functional.cosine_similarity(step, value - own, dim=-1)
    assert cosine.abs().mean() < 0.5


def test_the_random_pattern_stays_inside_the_window():
    """And keeps each token's probabilities."""
    model = loaded_once("toy:gemma3", dtype=torch.float64)
    [longer] = ma.load_prompts("word-problems", limit=1, with_answer=True)
    base, source = runs_of(model, longer, "pattern")
    window = attention_window(model, 0)
    assert window < len(base.positions)
    value = controls.aligned_pattern(base, source, (0, 1))
    drawn = controls.shuffled_patterns(model, 7, "a", base, {(0, 1): value})[0, 1]
    distance = base.positions[:, None] - torch.arange(len(base.sequence))
    assert (drawn[(distance < 0) | (distance >= window)] == 0).all()
    torch.testing.assert_close(drawn.sort(-1).values, value.sort(-1).values, rtol=0, atol=0)
    assert not torch.equal(drawn, value)


def stand_in(name, length, answer):
    """What the choice of another prompt asks of a pair."""
    return SimpleNamespace(id=name, origins=range(length), answer=torch.tensor([answer]))


def partner_ids(pairs, seed):
    return {name: pair.id for name, pair in controls.partners_of(pairs, seed).items()}


def test_the_other_prompt_has_another_answer_where_there_is_one():
    alternating = [stand_in(str(index), 5, index % 2) for index in range(12)]
    for seed in range(20):
        partners = partner_ids(alternating, seed)
        assert len(partners) == 12
        assert all((int(own) + int(other)) % 2 for own, other in partners.items())


def test_the_other_prompt_fits_whatever_the_order():
    lengths = {"a": 5, "b": 9, "c": 7, "d": 6, "e": 8}
    pairs = [stand_in(name, length, index) for index, (name, length) in enumerate(lengths.items())]
    partners = partner_ids(pairs, 7)
    assert partners == partner_ids(pairs[::-1], 7)
    assert partners != partner_ids(pairs, 8)
    assert sorted(partners) == ["a", "c", "d", "e"], "the longest has none"
    for own, other in partners.items():
        assert own != other
        assert lengths[other] >= lengths[own]


def test_another_prompt_is_aligned_from_both_ends(toy):
    first, *_, last = short_problems(6)
    short, long = (ma.Baseline().apply(prompt, toy, 0) for prompt in (first, last))
    shared = int((short.tokens != long.tokens[: len(short)]).nonzero()[0])
    assert 0 < shared < len(short) < len(long)
    base = SLASH.apply(first, toy, 0)
    [base_run, long_run] = recorded_runs(toy, [(base, short.origin), (long, long.origin)], [1], "z")
    value = controls.aligned_output(base_run, long_run, (1, 2))
    from_the_end = len(long) - (len(short) - shared)
    assert torch.equal(value[:shared], long_run.activations[1][:shared, 2])
    assert torch.equal(value[shared:], long_run.activations[1][from_the_end:, 2])

    unpatched = [(sequence, sequence.origin) for sequence in (short, long)]
    patterns = recorded_runs(toy, unpatched, [1], "pattern")
    rows = controls.aligned_pattern(*patterns, (1, 2))
    assert rows[-1, -1] == patterns[1].activations[1][-1, 2, -1]


def test_metrics_against_loops():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    baseline = torch.randn(1, 3, 7, generator=generator, dtype=torch.float64)
    answer = torch.tensor([4, 0, 6])
    margins = answer_margin(logits, answer)
    divergences = divergence(logits, baseline)
    log_probs = answer_logprob(logits, answer)
    expected = baseline[0].softmax(-1)
    for row in range(2):
        margin, kl, log_prob = 0.0, 0.0, 0.0
        for place, token in enumerate(answer.tolist()):
            scores = logits[row, place]
            best, second = scores.topk(2).values
            margin += float(scores[token] - (second if scores[token] == best else best)) / 3
            p = scores.softmax(-1)
            kl += float((expected[place] * (expected[place] / p).log()).sum()) / 3
            log_prob += float(p[token].log())
        measured = [float(values[row]) for values in (margins, divergences, log_probs)]
        assert measured == pytest.approx([margin, kl, log_prob], abs=1e-12)
    wrong = answer_margin(logits, answer.flip(0))
    assert abs(wrong - margins).max() > 0.1, "another answer would be noticed"


def test_a_metric_of_ones_own(toy):
    def first_token(logits, answer):
        return logits[:, 0, answer[0]]

    made = ma.patch(toy, short_problems(2), SLASH, at=HEADS, metric=first_token)
    assert made.about["metric"] == "first_token"
    assert made.effects.whole.notnull().all()


def test_the_table(patched_heads):
    effects = patched_heads.effects
    table = patched_heads.table()
    assert [*zip(table.layer, table["head"])] == sorted(HEADS)
    for row in table.itertuples():
        cell = effects.sel(layer=row.layer, head=row.head)
        assert row.effect == pytest.approx(float(cell.effect.mean()))
        has_no_other = cell.other_prompt.isnull().values.tolist()
        assert has_no_other == [False] * 7 + [True], "the longest"
        assert row.other_prompt == pytest.approx(float(cell.other_prompt.mean()))
    assert (abs(patched_heads.table(top=4).effect).diff().dropna() <= 0).all()

    halves = patched_heads.table(select="half", top=1)
    ranking, _ = halves_of(8)
    largest = abs(effects.effect[ranking].mean("prompt").stack(cell=["layer", "head"])).idxmax()
    assert (halves.layer.item(), halves["head"].item()) == largest.item()
    assert halves.n.item() == 4


def drawn(heads, rng, whole=1.0, n=24, metric="logprob", direction="denoising"):
    """Patching in which no head has an effect."""
    dims, size = ("prompt", "layer", "head"), (n, heads // 8, 8)
    effects = {name: (dims, rng.normal(size=size)) for name in ("effect", "other_prompt", "random")}
    made = xr.Dataset(effects | {"whole": ("prompt", rng.normal(whole, 0.3, n))}).assign_coords(
        {"prompt": [str(i) for i in range(n)], "layer": range(size[1]), "head": range(8)}
    )
    about = {
        "model": "toy",
        "metric": METRIC_WORDS[metric],
        "metric_name": metric,
        "direction": direction,
        "method": "attribution",
    }
    return ma.Patching(made, Units(n), about)


def test_among_heads_without_effect_the_largest_are_seldom_findings():
    """q is over all heads, and not over those that are printed, as the negative control has it."""
    rng = np.random.default_rng(0)
    tables, over_all, over_shown, halves = 8, 0, 0, 0
    for each in range(tables):
        made = drawn(144, rng)
        made = replace(made, effects=made.effects[["effect", "whole"]])
        table = made.table(top=8)
        assert len(table) == 8
        assert each or table.q_effect.tolist() == made.table(top=144).q_effect[:8].tolist()
        over_all += bool((table.q_effect < 0.05).any())
        halves += bool((made.table(top=8, select="half").q_effect < 0.05).any())
        shown = made.effects.effect.values[:, table.layer, table["head"]]
        over_shown += bool((paired(shown, None).q < 0.05).any())
    assert over_all <= 2
    assert halves <= 2
    assert over_shown >= 5
    assert "q of effect, over 144 heads attributed (first order); 8 of 144 shown" in str(made)


def test_no_share_of_a_whole_effect_that_may_be_nothing():
    rng = np.random.default_rng(1)
    made = drawn(32, rng)
    table = made.table()
    assert_allclose(table.share, table.effect / float(made.effects.whole.mean()))
    unsure = drawn(32, rng, whole=0.0)
    assert unsure.table().share.isnull().all()
    for patched, is_told in ((made, True), (unsure, False)):
        sentence = words.sentence_of(ma.render.patching_map(patched))
        assert ("of the whole effect" in sentence) == is_told


@pytest.mark.parametrize(("direction", "right"), [("noising", -1.0), ("denoising", 1.0)])
def test_versions_the_wrong_way_round_and_no_effect_are_said(direction, right):
    rng = np.random.default_rng(2)
    said = {
        whole: str(drawn(8, rng, whole, metric="logit_diff", direction=direction))
        for whole in (right, -right, 0.0)
    }
    assert "Careful" not in said[right]
    assert "are the two the wrong way round?" in said[-right]
    assert "the whole effect may be 0" in said[0.0]
    # Inserted tokens may raise the log-probability of an answer.
    assert "Careful" not in str(drawn(8, rng, -right, direction=direction))


def test_a_divergence_that_cannot_fall_is_tested_against_the_control():
    """Patching away from the baseline: every effect is above 0, whatever is put in."""
    made = drawn(32, np.random.default_rng(2), metric="kl", direction="noising")
    made = replace(made, effects=abs(made.effects))
    table = made.table()
    assert (table.effect_low > 0).all()
    assert (paired(made.effects.effect.values, None).q < 0.05).all()
    assert (table.q_beyond_random > 0.05).all()
    assert table.q_effect.isna().all()
    assert "q of beyond_random, over 32 heads" in str(made)


@pytest.mark.parametrize("measured", [(), ("other_prompt",)])
def test_controls_are_optional_and_memory_groups_rows(toy, patched_heads, measured):
    """Neither changes a number."""
    options = {"at": HEADS, "direction": "denoising", "memory": "1KiB"}
    patched = ma.patch(toy, short_problems(8), SLASH, controls=measured, **options)
    assert patched.controls == list(measured)
    for name in ("effect", *measured):
        assert_allclose(patched.effects[name], patched_heads.effects[name], rtol=1e-3, atol=1e-5)
    table = patched.table()
    for control in {"random", "other_prompt"} - {*measured}:
        assert not [column for column in table if control in column]
    assert len(ma.render.patching_effects(patched).data) == 2 + len(measured)


def test_effects_beyond_another_prompts_output_are_tested():
    patched = drawn(16, np.random.default_rng(5))
    patched.effects.other_prompt[3] = np.nan  # longer than all others
    patched.effects.other_prompt[:, 0, 1] = patched.effects.effect[:, 0, 1]
    patched.effects.effect[:, 1, 2] += 3
    known = np.arange(len(patched.effects.prompt)) != 3
    beyond = (patched.effects.effect - patched.effects.other_prompt).values[known]
    expected = paired(beyond.reshape(len(beyond), -1), None)
    table = patched.table()
    assert_allclose(table.q_beyond_other_prompt, expected.q)
    assert_allclose(table.beyond_other_prompt, beyond.mean(0).ravel())
    assert_allclose(table.beyond_other_prompt_low, expected.low)
    assert table.q_beyond_other_prompt["L1H2"] < 0.05


def test_long_runs_are_foretold_after_the_first_prompt(toy, monkeypatch):
    monkeypatch.setattr(pairs, "perf_counter", itertools.count(0, 100).__next__)
    with pytest.warns(UserWarning, match=r"about 5 min for 3 prompts; .*controls=\(\)"):
        ma.patch(toy, short_problems(3), SLASH, at=HEADS)


def checked_patching(exact, attributed):
    rows = []
    for prompt in "ab":
        for head, (measured, estimated) in enumerate(zip(exact, attributed)):
            rows.append((prompt, 0, head, measured, estimated))
    columns = ["prompt", "layer", "head", "exact", "attributed"]
    return replace(drawn(16, np.random.default_rng(6)), checked=pd.DataFrame(rows, columns=columns))


def test_ranking_is_warned_of_by_ranks_alone():
    """Estimates twice too large order heads as well; those in another order do not."""
    exact = np.array([1.0, 0.5, 0.3, 0.1, -0.2, -0.6])
    scaled = checked_patching(exact, exact**3 * 20)
    assert scaled.rank_agreement == pytest.approx(1)
    assert "do not rank heads" not in str(scaled)
    assert "their sizes are wrong" in str(scaled)
    turned = checked_patching(exact, exact[::-1])
    assert turned.rank_agreement == pytest.approx(-1)
    assert "do not rank heads by these" in str(turned)


@pytest.mark.parametrize(
    ("template", "answer", "other", "said"),
    [
        ("joined", "Mary", "", "a drink toMary"),
        ("plain", "Mary", "Tom", r"a drink to\\nMary"),
        ("plain", "Mary", "", None),  # perhaps a question
    ],
)
def test_an_answer_that_does_not_follow_is_warned_of(template, answer, other, said, toy):
    question = "Tom gave a drink to"
    prompt = ma.Prompt(question, answer=answer, template=template, other_answer=other)
    sequence = ma.Baseline().apply(prompt, toy)
    place = int(sequence.of_segment("answer").nonzero()[0])
    with torch.no_grad():
        likeliest = int(toy(sequence.tokens[None], return_type="logits")[0, place - 1].argmax())
    written = repr(toy.tokenizer.decode([likeliest]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_junctions(toy, [prompt], [sequence])
    assert all(f"where the model would write {written};" in str(w.message) for w in heard)
    assert [bool(re.search(said or "", str(w.message))) for w in heard] == [True] * bool(said)


def test_too_few_groups_get_advice_that_patching_has():
    made = drawn(32, np.random.default_rng(3))
    few = replace(made, units=Units.grouped(["a", "b"] * 12))
    with pytest.raises(OptionError, match=r"24 prompts; give prompts of at least 3 groups$"):
        few.table()


def test_where_groups_are_too_few_their_means_are_printed():
    made = drawn(8, np.random.default_rng(3), n=4)
    uneven = replace(made, units=Units.grouped(["a", "a", "a", "b"]))
    effects = made.effects.effect.values.reshape(4, 8)
    means = (effects[:3].mean(0) + effects[3]) / 2
    _, why, header, first_row = str(uneven).splitlines()[:4]
    assert "no interval from fewer than 3" in why
    assert header.split() == ["layer", "head", "effect"]
    assert float(first_row.split()[-1]) == pytest.approx(means[abs(means).argmax()], rel=1e-2)
    assert abs(means).max() != pytest.approx(abs(effects.mean(0)).max(), rel=1e-2)


def test_the_map_shows_the_means_and_leaves_the_others_empty(patched_heads):
    heat, marks, faded, _ = ma.render.patching_map(patched_heads).data
    expected = patched_heads.effects.effect.mean("prompt").values
    assert_allclose(np.array(heat.z, dtype=float), expected)
    assert np.isnan(expected).sum() == expected.size - len(HEADS)
    q = patched_heads.table().q_effect
    assert len(marks.x) == int((q < 0.05).sum())
    assert np.isfinite(np.array(faded.z, dtype=float)).sum() == int((q >= 0.05).sum())


def test_the_figure_of_effects_shows_the_table():
    made = drawn(16, np.random.default_rng(4))
    made.effects.other_prompt[:, 1, 2] = -50.0
    made.effects.effect[:, 1, 2] += 20.0
    table = made.table(top=5).iloc[::-1]
    figure = ma.render.patching_effects(made, top=5)
    sure, unsure, random, other = figure.data
    tests = table[["q_effect", "q_beyond_random", "q_beyond_other_prompt"]]
    is_sure = (tests < 0.05).all(axis=1) & (table.effect_low * table.effect_high > 0)
    for drawn_effects, rows in ((sure, is_sure), (unsure, ~is_sure)):
        assert_allclose(drawn_effects.x, table.effect[rows])
        low = drawn_effects.x - drawn_effects.error_x.arrayminus
        assert_allclose(low, table.effect_low[rows])
        assert_array_equal(drawn_effects.y, np.flatnonzero(rows))
    assert "differs from 0 and from each control (q < 0.05)" in unescape(sure.name)
    assert len(sure.x) > 0
    assert_allclose(random.x, table.random)
    assert figure.layout.yaxis.ticktext.index("L1H2") == 4, "the largest is above the others"
    assert other.text.tolist() == ["", "", "", "", "−50"]
    assert other.x[4] > -50, "at the edge, with its number"
    assert other.x[:4].tolist() == table.other_prompt[:4].tolist()
    in_file = ma.render.figure_table(figure).set_index(["series", "y"]).x
    assert in_file["from another prompt", "L1H2"] == -50, "a file has the number, not the edge"


NO_ANSWER = {"prompts": ma.load_prompts("word-problems", limit=2)}


def of_tokens(*tokens):
    """Options for a prompt with another version."""
    prompt = ma.Prompt(tokens=tokens, counterpart=(1, 20, 31), answer_tokens=(60,))
    return {"prompts": [prompt], "condition": Counterpart()}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (NO_ANSWER, PromptError, "no reference answer for the model to read"),
        (of_tokens(1, 20, 9999), PromptError, "a token id outside the vocabulary"),
        (of_tokens(*[1] * 1030), PromptTooLong, r'1,031 tokens with the condition "baseline"'),
        ({"condition": SLASH.masked()}, OptionError, "hides tokens or acts inside the model"),
        ({"condition": ma.Baseline()}, OptionError, "inserts nothing into prompt 0"),
        ({"at": ["L0H2", "L9H0"]}, OptionError, "no head 0 in layer 9"),
        ({"at": []}, OptionError, "give heads such as"),
        ({"at": "all"}, OptionError, "for all heads or layers one of 'z', 'q', 'k', 'v'"),
        ({"at": ma.Sites("resid_post", 9)}, OptionError, "layer 9 is out of range"),
        ({"at": ma.Sites("mlp")}, OptionError, "part='mlp'"),
        ({"together": [(0, 1)]}, OptionError, "name the set in at="),
        ({"metric": "accuracy"}, OptionError, "choose one of 'logprob', 'logit_diff'"),
        ({"method": "attribution", "metric": "kl"}, OptionError, "every gradient is 0"),
        ({"method": "attribution", "at": "v"}, OptionError, "names 'v' with together=False"),
        ({"method": "attribution", "together": True}, OptionError, "'z' with together=True"),
        ({"method": "fast"}, OptionError, "choose one of 'exact', 'attribution'"),
        ({"metric": "kl", "controls": ()}, OptionError, "tested against the random control"),
        ({"controls": "random"}, OptionError, r"give .*or \(\) for none"),
        ({"seed": -1}, OptionError, "seed=-1: give a whole number, at least 0"),
    ],
)
def test_what_cannot_be_patched_is_refused_before_a_pass(toy, monkeypatch, wrong, error, message):
    monkeypatch.setattr(plan, "recorded_runs", lambda *_: pytest.fail("a pass was made"))
    options = {"model": toy, "prompts": short_problems(3), "condition": SLASH} | wrong
    with pytest.raises(error, match=message):
        ma.patch(**options)


@pytest.mark.parametrize(
    ("metric", "method", "message"),
    [
        (lambda logits, answer: logits.sum(), "exact", r"gives \[\] for 1 rows; give one number"),
        (lambda logits, answer: logits[:, 0, 0] * torch.nan, "exact", "gives NaN or infinity"),
        (lambda logits, answer: logits[:, 0].argmax(-1).float(), "attribution", "has no gradient"),
    ],
)
def test_a_metric_that_is_none(metric, method, message, toy):
    with pytest.raises(OptionError, match=message):
        ma.patch(toy, short_problems(2), SLASH, method=method, metric=metric)
