"""The sentence under a figure holds the number that the result holds, with its interval."""

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.commands.run_config import DRAW_FUNCTIONS
from mechattn.contrast.contrast import Verdict
from mechattn.render.figure_declaration import FIGURES
from mechattn.render.words import change_words, heads_words, mean_words, percent, sentence_of
from mechattn.results.provenance import matched_control
from mechattn.stats.intervals import Interval
from mechattn.stats.units import halves_of
from tests.figures_config import needed_options
from tests.render.by_hand import percent_change, t_interval

OPTIONS = {
    "received_attention": {"layer": 0, "heads": [1, 2]},
    "agreement": {"condition": "slash"},
}


@pytest.mark.parametrize("name", sorted(DRAW_FUNCTIONS))
def test_every_figure_says_its_number_with_an_interval(measured, name):
    draw = DRAW_FUNCTIONS[name]
    words = sentence_of(draw(measured, **OPTIONS.get(name, needed_options(draw))))
    assert re.search(r"\d[^ ]* ?%? \[[+−-]?\d[^\]]*, [+−-]?\d[^\]]*\]", words), words
    assert "nan" not in words


def numbers(words):
    return [float(n.replace("−", "-")) for n in re.findall(r"[+−]\d+\.\d", words)]


def test_the_sentence_describes_drawn_heads_and_prompts(measured):
    at = measured["received_attention"].received_by_segment.sel(segment="question", layer=1)
    each = at.isel(head=[1, 5]).mean("head")
    ratios = each.sel(condition="slash") / each.sel(condition="baseline")
    expected = percent_change(ratios)
    shown = numbers(sentence_of(ma.render.received_attention(measured, 1, [1, 5], "slash")))
    assert_allclose(shown[:3], expected, atol=0.051)
    others = numbers(sentence_of(ma.render.received_attention(measured, 1, [0, 5], "slash")))
    assert np.abs(others[:3] - expected).max() > 0.1, "another head has another number"
    odd = slice(1, 8, 2)
    half = numbers(change_words(measured, "slash", layer=1, heads=[1, 5], prompts=np.r_[odd]))
    assert_allclose(half[:3], percent_change(ratios[odd]), atol=0.051)


def a_verdict(**options):
    """No head changes."""
    change = Interval(*map(np.float64, (-0.3, -0.4, -0.2)))
    masks = dict.fromkeys(["below", "above", "rises", "falls", "marked"], np.zeros(32, dtype=bool))
    return Verdict(change, change, **masks, margin=None, same=None, null_kind="uniform", **options)


def test_too_few_prompts_for_any_head_are_said(toy, prompts):
    conditions = {"slash": ma.MeaninglessTokens(count=20)}
    few, enough = (ma.render.verdict_words(ma.run(toy, prompts[:n], conditions)) for n in (3, 8))
    assert few.endswith("With 3 prompts no head could be shown to change (q < 0.05).")
    assert "the largest of 4, on the prompts that made it so" in few
    assert "no head could" not in enough
    in_groups = a_verdict(n=5, unit="groups (5 of 9 prompts)")
    assert heads_words(in_groups).startswith("With 5 groups (5 of 9 prompts) no head could")
    assert heads_words(replace(in_groups, n=6)).startswith("Of 32 heads, none changes")


@pytest.mark.parametrize("condition", ["slash", "masked"])
def test_heads_that_rise_and_fall_are_counted_from_the_table(measured, condition):
    """Masked tokens take nothing, so attention to the question can rise."""
    table = measured.compare(condition)
    large = (table.q_difference < 0.05) & (abs(table.change) > 0.05)
    falling = int((large & (table.change < 0)).sum())
    rising = int((large & (table.change > 0)).sum())
    words = ma.render.verdict_words(measured, condition)
    told = f"Of 32 heads, {falling} fall and {rising} rise by more than 5\u00a0% (q < 0.05)"
    assert (told if falling + rising else "Of 32 heads, none changes") in words, words


def test_the_sentence_has_layer_points_and_null(measured):
    """Each number by hand, the layer chosen on the other half of the prompts."""
    words = ma.render.verdict_words(measured, "slash")
    dataset = measured["received_attention"].sel(segment="question")
    slash, baseline = (dataset.sel(condition=name) for name in ("slash", "baseline"))
    received, before = (each.received_by_segment for each in (slash, baseline))
    by_layer = np.log(received.mean("head") / before.mean("head"))
    chosen, told = (by_layer.isel(prompt=half) for half in halves_of(8))
    layer = int(abs(chosen.mean("prompt")).values.argmax())
    expected = percent_change(np.exp(told.isel(layer=layer).values))
    shown = numbers(words.partition(f"most in layer {layer}: ")[2])
    assert_allclose(shown[:3], expected, atol=0.051)
    points = 100 * (slash.mass_by_segment - baseline.mass_by_segment).mean()
    told_points = numbers(words.partition("and all of it by ")[2])[0]
    assert told_points == pytest.approx(float(points), abs=0.051)
    both = ["layer", "head"]
    null = slash.received_by_segment_dilution.mean(both) / before.mean(both)
    assert f"would change it by {percent(np.expm1(np.log(null).mean()))}" in words


def test_a_mean_over_prompts(measured):
    values = measured["attention_focus"].self_share.sel(condition="slash", segment="question")
    expected = t_interval(values.mean(["layer", "head"]).values)
    shown = [float(n) for n in re.findall(r"\d\.\d+", mean_words(measured, values))]
    assert_allclose(shown, expected, rtol=6e-3)


def test_the_verdict_names_its_matched_control(measured):
    assert matched_control(measured, "slash") == "sentence"
    assert matched_control(measured, "sentence") is None, "a control has no control"
    words = ma.render.verdict_words(measured, "slash", to="sentence")
    control = ma.render.verdict_words(measured, "sentence").split(" over")[0].split("changes ")[1]
    received = measured["received_attention"].received_by_segment.sel(segment="question")
    means = received.mean(["layer", "head"]).astype(np.float64)
    ratios = means.sel(condition="slash") / means.sel(condition="sentence")
    apart = percent(percent_change(ratios)[0] / 100)
    assert (
        f"With “sentence” it changes {control} (“slash” relative to “sentence”: {apart} [" in words
    )


def test_a_page_names_the_null_that_is_drawn(measured):
    options = {"layer": None, "heads": ["L0H1"], "null": "uniform"}
    words = FIGURES["received_attention"].page_words(measured, options)
    assert "dotted line, what uniform attention would give" in words.note
    assert words.title_end.startswith(", any layer")
