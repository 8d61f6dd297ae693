"""Random weights as a null: hardly a head of a random model is found, most of a trained one; and what is refused."""

import weakref
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import mechattn as ma
from mechattn.errors import OptionError
from tests.stats.test_random_draws import by_loops

CONDITIONS = {"slash": ma.MeaninglessTokens("/", 20), "sentence": ma.RandomSentence(20)}
MODELS = 4


@pytest.fixture(scope="module")
def trained(toy, prompts):
    return ma.run(toy, prompts[:6], CONDITIONS)


@pytest.fixture(scope="module")
def random(toy, prompts):
    """Results of random models with the seeds 0 to 3."""
    return ma.run_random(toy, prompts[:6], CONDITIONS, draws=MODELS)


def changes(result, condition="slash"):
    """Mean log-ratio [layer, head] of the question."""
    received = result["received_attention"].received_by_segment.sel(segment="question")
    logs = np.log(received.astype(float)).mean("prompt").transpose("condition", "layer", "head")
    return (logs.sel(condition=condition) - logs.sel(condition="baseline")).values


def test_the_columns_are_those_of_loops(trained, random):
    table = trained.compare("slash", random=random[:3], columns="all")
    mean, low, high, p = by_loops(changes(trained), [changes(draw) for draw in random[:3]])
    for column, expected in (
        ("null_random", mean),
        ("random_low", low),
        ("random_high", high),
        ("p_random", p),
    ):
        np.testing.assert_allclose(table[column], expected, atol=1e-9, err_msg=column)
    assert table.attrs["null_random"] == "random weights (initialised): 3 draws, 96 heads compared"
    assert table.attrs["smallest_p_random"] == 1 / 97
    plain = trained.compare("slash", columns="all")
    assert plain.equals(table[plain.columns]), "the other columns stay"
    wrong = by_loops(changes(trained), [changes(draw, "sentence") for draw in random[:3]])
    assert abs(wrong[0] - mean).max() > 1e-5, "draws of another condition would be noticed"


def test_some_layers_at_a_time_give_the_same(trained, random, monkeypatch):
    from mechattn.contrast import differences

    seen = []
    blocks = differences.layer_blocks
    monkeypatch.setattr(
        differences, "layer_blocks", lambda *given: seen.append(blocks(*given)) or seen[-1]
    )
    options = dict(random=random[:3], resamples=99, columns="all")
    expected = trained.compare("slash", **options)
    assert all(len(layers) == 1 for layers in seen)
    got = replace(trained, memory="30KiB").compare("slash", **options)
    assert any(len(layers) > 1 for layers in seen)
    pd.testing.assert_frame_equal(got, expected, rtol=1e-12)
    assert got.attrs == expected.attrs


def test_most_heads_of_a_trained_toy_are_found(trained, random):
    table = trained.compare("slash", null="uniform", random=random[:3], columns="all")
    assert (table.q_random < 0.05).mean() > 0.5
    both = stats.false_discovery_control(np.maximum(table.p_beyond, table.p_random))
    np.testing.assert_allclose(table.q_random, both)
    assert trained.resolution("slash", draws=3).random == table.attrs["resolution_random"]
    said = "over 32 tests, adjusts the larger of this p and the p against random weights"
    assert f"; q_random, {said} (initialised): 3 draws" in trained.methods(table)
    fall_less = (table.difference > table.null_random)[table.q_random < 0.05]
    assert fall_less.mean() > 0.9


def test_a_head_missing_in_random_models_is_not_tested(trained, random):
    table = trained.compare("slash", random=random[:3], columns="all")
    table.loc["L1H2", ["p_random", "q_random"]] = np.nan
    table.attrs["tests_random"] = 31
    q = ma.adjust([table]).q_random.dropna()
    both = np.maximum(table.p_beyond, table.p_random).dropna()
    np.testing.assert_allclose(q, stats.false_discovery_control(both))


def test_too_few_draws_are_refused_before_a_model_is_loaded():
    with pytest.raises(OptionError, match=r"draws=2.*at least 3"):
        ma.run_random("no/such-model", "Tom has 3 apples.", draws=2)


def test_one_random_model_is_held_at_a_time(toy, monkeypatch):
    models = weakref.WeakSet()

    def drawn(*options):
        assert not models
        models.add(model := ma.random_weights(*options))
        return model

    monkeypatch.setattr("mechattn.engine.run.random_weights", drawn)
    ma.run_random(toy, "Tom has 3 apples.", draws=3)


def test_what_is_no_list_of_random_models_is_refused(trained, random):
    with pytest.raises(OptionError, match=r"give a list of results, as ma\.run_random"):
        trained.compare("slash", random=random[0], columns="all")
    with pytest.raises(OptionError, match=r"holds 2 results; give at least 3"):
        trained.compare("slash", random=random[:2], columns="all")
    with pytest.raises(
        OptionError, match=r"random\[2\] comes from toy:llama, whose weights are not random"
    ):
        trained.compare("slash", random=[*random[:2], trained], columns="all")
    with pytest.raises(OptionError, match="the same weights twice"):
        trained.compare("slash", random=[*random[:2], random[0]], columns="all")


def test_random_models_of_another_run_are_refused(trained, random, toy, prompts):
    drawn = ma.random_weights(toy, seed=99)

    def run(some, conditions, seed=0):
        return ma.run(drawn, some, conditions, seed=seed)

    for other, why in (
        (run(prompts[6:9], {"slash": CONDITIONS["slash"]}), "has different prompts"),
        (
            run(prompts[:6], {"slash": CONDITIONS["sentence"]}),
            "has a different condition named 'slash'",
        ),
    ):
        with pytest.raises(OptionError, match=rf"random\[2\] {why}.*run ma.run_random with"):
            trained.compare("slash", random=[*random[:2], other], columns="all")
    other = run(prompts[:6], CONDITIONS, seed=1)
    with pytest.raises(OptionError, match=r"read different tokens with 'sentence', so its seed"):
        trained.compare("sentence", random=[*random[:2], other], columns="all")
    assert len(trained.compare("slash", random=[*random[:2], other], columns="all")) == 32, (
        "slashes are the same with any seed"
    )
