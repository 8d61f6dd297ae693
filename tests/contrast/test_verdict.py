"""The verdict: a known effect is found, a drop by definition is not, and its heads are those that the table marks."""

import numpy as np
import pytest
import xarray as xr

from mechattn.results.result import Result


def a_result(values, baseline, null, null_baseline):
    """Received attention of one segment [prompt, layer, head] in two conditions, and under uniform attention."""
    names = ["baseline", "other"]
    coords = {
        "condition": names,
        "segment": ["question"],
        "layer": range(values.shape[1]),
        "head": range(values.shape[2]),
    }
    dims = ("condition", "segment", "prompt", "layer", "head")
    data = xr.Dataset(
        {
            "received_by_segment": (dims, np.stack([baseline, values])[:, None]),
            "received_by_segment_uniform": (
                dims[:-1],
                np.stack([null_baseline, null])[:, None, ..., 0],
            ),
        },
        coords,
    )
    sequences = xr.Dataset(
        {"origin": (("prompt", "condition", "pos"), np.zeros((len(values), 2, 2)))},
        {"condition": names},
    )
    return Result(
        {"received_attention": data, "sequences": sequences},
        {"model": {"name": "m"}, "prompts": {"hash": "a"}},
    )


def simulated(shift: float, seed: int = 0):
    """64 prompts, 4 layers, 8 heads; half of the heads fall ``shift`` (in logs) below a null that varies by prompt."""
    rng = np.random.default_rng(seed)
    null_baseline = np.exp(rng.normal(-4, 0.2, (64, 4, 1)))
    null = null_baseline * np.exp(rng.normal(-0.5, 0.05, (64, 4, 1)))
    baseline = null_baseline * np.exp(rng.normal(0, 0.3, (64, 4, 8)))
    effect = np.where(np.arange(8) < 4, shift, 0.0)
    values = baseline * null / null_baseline * np.exp(rng.normal(effect, 0.1, (64, 4, 8)))
    return a_result(values, baseline, null, null_baseline)


def test_a_known_effect_is_found_and_nothing_else():
    result = simulated(-0.2)
    verdict = result.verdict("other")
    table = result.compare("other")
    assert verdict.below[:, :4].all()
    assert (verdict.below[:, 4:] | verdict.above[:, 4:]).sum() <= 2
    assert verdict.n == 64
    np.testing.assert_array_equal(
        (verdict.below | verdict.above).reshape(-1), table.q_beyond < 0.05
    )


def test_a_drop_by_definition_alone_is_not_beyond_the_null():
    """More than 3 of 10 would come once in 970 times at a rate of 5 %."""
    found = [simulated(0.0, seed).verdict("other") for seed in range(10)]
    assert sum((v.below | v.above).any() for v in found) <= 3
    assert all(v.change.high < 0 for v in found)


def test_heads_that_fall_as_the_null_are_within_a_margin():
    """Half of the heads fall further by 0.2 in logs, the others as uniform attention does, with an error of 0.0125."""
    result = simulated(-0.2)
    for margin, same in ((0.08, [False] * 4 + [True] * 4), (0.4, [True] * 8), (0.001, [False] * 8)):
        verdict = result.verdict("other", margin=margin)
        table = result.compare("other", margin=margin)
        assert (verdict.same == same).all()
        np.testing.assert_array_equal(verdict.same.reshape(-1), table.q_same < 0.05)
    assert result.verdict("other").same is None


@pytest.mark.filterwarnings("error")
def test_heads_with_no_difference_at_all_are_not_beyond():
    values = np.full((5, 1, 2), 0.1)
    verdict = a_result(values, values, values[..., :1], values[..., :1]).verdict("other")
    assert not verdict.below.any()
    assert not verdict.above.any()
