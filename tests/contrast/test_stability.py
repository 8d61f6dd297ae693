"""Selections on random halves against loops with sets; noise shares what chance gives, an effect far more."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

import mechattn as ma
from mechattn.contrast.stability import jaccard_by_chance
from mechattn.errors import OptionError
from mechattn.stats.paired import paired
from tests.contrast.test_compare import made_up

HEADS = 60


def drawn(effects, n=24, seed=0):
    """A result whose conditions move its sixty heads by these effects [condition, head]."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(n, 1 + len(effects), 1, HEADS))
    for i, effect in enumerate(effects):
        values[:, 1 + i, 0] += effect
    result = made_up(values, ("baseline", *[f"c{i}" for i in range(len(effects))]))
    origin = result["sequences"].assign_coords(prompt=[str(i) for i in range(n)])
    return ma.Result(
        dict(result.datasets) | {"sequences": origin}, result.provenance | {"conditions": {}}
    )


def ask(result, *args, **options):
    return result.stability(*args, quantity="quantity", **options)


@pytest.fixture(autouse=True)
def known_conditions(monkeypatch):
    monkeypatch.setattr("mechattn.contrast.differences._inserts_alike", lambda *of: True)


def changes(result, condition):
    """Of each prompt and head."""
    values = result["analysis"].quantity
    change = values.sel(condition=condition) - values.sel(condition="baseline")
    return change.values[:, 0]


def loop(one, other, select, splits, seed):
    """The same by sets, from two arrays [prompt, head]."""
    generator = np.random.default_rng(seed)
    overlaps = []
    for _ in range(splits):
        order = generator.permutation(len(one))
        half = len(order) // 2
        first = select(one[order[:half]])
        second = select(other[order[half : 2 * half]])
        union = first | second
        overlaps.append(len(first & second) / len(union) if union else np.nan)
    return np.array(overlaps)


def top(count):
    return lambda d: set(np.argsort(-abs(d.mean(0)))[:count])


def sure(d):
    return set(np.flatnonzero(paired(d, resamples=999).q < 0.05))


@pytest.mark.parametrize(
    ("size", "other_size", "cells"), [(2, 2, 5), (4, 3, 7), (2, 0, 4), (5, 5, 5)]
)
def test_chance_is_the_mean_over_all_pairs_of_sets(size, other_size, cells):
    overlaps = []
    for first in combinations(range(cells), size):
        for second in combinations(range(cells), other_size):
            shared = set(first) & set(second)
            overlaps.append(len(shared) / len(set(first) | set(second)))
    assert jaccard_by_chance(size, other_size, cells) == pytest.approx(np.mean(overlaps))


@pytest.mark.parametrize("choose", [5, None])
def test_the_index_is_that_of_a_loop_over_sets(choose):
    effect = np.zeros(HEADS)
    effect[:8] = np.linspace(0.5, 3, 8)
    result = drawn([effect], n=25)
    table = ask(result, "c0", top=choose, splits=12, seed=3)
    change = changes(result, "c0")
    found = loop(change, change, sure if choose is None else top(5), 12, 3)
    row = table.iloc[0]
    assert row.jaccard == pytest.approx(np.nanmean(found))
    assert [row.low, row.high] == pytest.approx(np.nanquantile(found, [0.025, 0.975]).tolist())
    assert row.none_selected == np.isnan(found).mean()
    if choose:
        assert row.by_chance == pytest.approx(jaccard_by_chance(5, 5, HEADS))
        assert row.selected == 5
    assert table.attrs["of"] == HEADS


def test_noise_shares_what_chance_gives_and_an_effect_far_more():
    noise = pd.concat(
        [ask(drawn([np.zeros(HEADS)], seed=seed), top=10, splits=20) for seed in range(25)]
    )
    assert noise.jaccard.mean() == pytest.approx(noise.by_chance.mean(), abs=0.015)
    effect = np.where(np.arange(HEADS) < 10, 3.0, 0.0)
    real = ask(drawn([effect]), top=10, splits=20).iloc[0]
    assert real.jaccard > 0.9 > 5 * real.by_chance


def test_several_fillers():
    one = np.where(np.arange(HEADS) < 10, 3.0, 0.0)
    other = np.where(np.arange(HEADS) >= 50, 3.0, 0.0)
    result = drawn([one, one, other])
    table = ask(result, top=10, conditions=["c0", "c1", "c2"], splits=15, seed=1)
    table.index = table.condition + table.other
    assert list(table.index) == ["c0c0", "c1c1", "c2c2", "c0c1", "c0c2", "c1c2"]
    jaccard = table.jaccard
    assert jaccard["c0c1"] > 0.9
    assert jaccard["c0c2"] < 0.1
    of_loop = loop(changes(result, "c0"), changes(result, "c1"), top(10), 15, 1)
    assert jaccard["c0c1"] == pytest.approx(of_loop.mean())
    assert table.on_all["c0c1"] > 0.8
    assert table.on_all["c0c2"] == 0
    assert np.isnan(table.on_all["c0c0"])


def test_groups_are_halved_as_a_whole():
    """Six prompts a group, copies of each other: with groups ignored the halves share what they should not."""
    result = drawn([np.zeros(HEADS)], n=48)
    values = result["analysis"].quantity.values
    values[:] = np.repeat(values[::6], 6, axis=0)
    names = np.repeat(list("abcdefgh"), 6).astype(object)
    groups = result["sequences"].assign(group=("prompt", names))
    grouped = ma.Result(dict(result.datasets) | {"sequences": groups}, result.provenance)
    respected, ignored = (
        ask(grouped, top=10, splits=60, unit=unit).iloc[0] for unit in ("auto", "prompt")
    )
    assert respected.jaccard == pytest.approx(respected.by_chance, abs=0.06)
    assert ignored.jaccard > respected.jaccard + 0.08, "negative control"


def test_what_it_refuses():
    result = drawn([np.zeros(HEADS)] * 2, n=10)
    for options, message in (
        (dict(top=HEADS), f"top=60: give a number of heads below {HEADS}"),
        (dict(top=None), "10 prompts; give at least 12"),
        (dict(condition="c0", conditions=["c0", "c1"]), "condition=… or conditions="),
        (dict(top=None, by="beyond"), "by='beyond' ranks heads: give top="),
    ):
        with pytest.raises(OptionError, match=message):
            ask(result, **options)
    with pytest.raises(OptionError, match="5 prompts; give at least 6"):
        ask(drawn([np.zeros(HEADS)], n=5))


def overlap_of_halves(differences):
    """The mean overlap of the three heads that differ most, on 200 random halves."""
    by_prompt = differences.transpose("prompt", "head").values
    return loop(by_prompt, by_prompt, top(3), 200, 0).mean()


def test_within_a_layer_and_in_a_note(slash_result):
    from mechattn.render.words import choice_words

    table = slash_result.stability("slash", top=3, layer=1)
    assert (table.attrs["of"], table.by_chance[0]) == (8, pytest.approx(jaccard_by_chance(3, 3, 8)))
    assert table.attrs["selection"] == "the 3 that change most"
    names = ["received_by_segment", "received_by_segment_dilution"]
    dataset = slash_result["received_attention"][names].sel(segment="question", layer=1)
    dataset = dataset.astype(float)
    ratios = np.log(dataset.sel(condition="slash") / dataset.sel(condition="baseline"))
    log_ratio, log_ratio_dilution = (ratios[name] for name in names)
    overlap = overlap_of_halves(log_ratio)
    assert table.jaccard[0] == pytest.approx(overlap)
    beyond = slash_result.stability("slash", top=3, layer=1, by="beyond")
    assert beyond.attrs["selection"] == "the 3 furthest from the null"
    assert beyond.jaccard[0] == pytest.approx(overlap_of_halves(log_ratio - log_ratio_dilution))
    assert beyond.jaccard[0] != pytest.approx(overlap), "negative control"
    words = choice_words(slash_result, "slash", 1, 3)
    in_common = f"both choose {100 * overlap:.0f}\u00a0%"
    assert f"{in_common} ({100 * table.by_chance[0]:.0f}\u00a0% by chance)" in words
    in_common = f"both choose {100 * beyond.jaccard[0]:.0f}\u00a0%"
    assert in_common in choice_words(slash_result, "slash", 1, 3, "beyond")
    assert choice_words(slash_result, "slash", 1, 8) == "", "a choice of all heads is none"
    with pytest.raises(OptionError, match="layer True was not measured"):
        slash_result.stability("slash", top=3, layer=True)
