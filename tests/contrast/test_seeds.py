"""Several training runs: stacked with their seed as a dimension, and an interval over seeds, not over prompts."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

import mechattn as ma

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def runs(toy, prompts):
    """Models with random weights stand in for training runs."""
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    return {
        seed: ma.run(ma.random_weights(toy, seed=seed, kind="shuffled"), prompts[:6], conditions)
        for seed in SEEDS
    }


def test_results_of_several_seeds_are_stacked_with_the_seed_as_a_dimension(runs):
    parts = [run["received_attention"] for run in runs.values()]
    made = xr.concat(parts, pd.Index(list(runs), name="seed"), join="exact")
    assert made.received_by_segment.sizes["seed"] == 3
    for seed, part in zip(SEEDS, parts, strict=True):
        xr.testing.assert_equal(
            made.sel(seed=seed).received_by_segment.drop_vars("seed"), part.received_by_segment
        )
    assert not made.sel(seed=0).received_by_segment.equals(made.sel(seed=1).received_by_segment), (
        "negative control"
    )


def test_tables_of_several_seeds_are_one_family(runs):
    tables = [run.compare("slash", columns="all") for run in runs.values()]
    made = ma.adjust(tables)
    np.testing.assert_allclose(
        made.q_beyond,
        stats.false_discovery_control(np.concatenate([table.p_beyond for table in tables])),
    )
    assert made.groupby("table").size().tolist() == [32, 32, 32]


def test_an_interval_over_prompts_says_nothing_about_another_seed(runs):
    """The heads of the last layer change in each seed by another amount; an interval over seeds is of n = 3."""
    tables = [
        run.compare("slash", columns="all").query("layer == 3").reset_index(drop=True)
        for run in runs.values()
    ]
    one, other = tables[:2]
    missed = (other.beyond < one.beyond_low) | (other.beyond > one.beyond_high)
    assert missed.mean() > 0.5
    itself = (one.beyond < one.beyond_low) | (one.beyond > one.beyond_high)
    assert not itself.any(), "negative control"
    changes = np.array([run.verdict("slash").change.estimate for run in runs.values()])
    low, high = stats.ttest_1samp(np.log1p(changes), 0).confidence_interval()
    half = stats.t.ppf(0.975, 2) * np.log1p(changes).std(ddof=1) / np.sqrt(3)
    assert (high - low) / 2 == pytest.approx(half)
