"""Any split of the prompts, merged in any order and any tree, is one pass over all of them."""

import random
import warnings

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.results.provenance import set_hash
from tests.conftest import run_part

CONDITIONS = ["baseline", "slash"]


def synthetic(world, chosen):
    """A result of some prompts of a small world, by numpy's own mean and variance over prompts."""
    chosen = sorted(chosen)
    width = max(world["lengths"][i] for i in chosen)
    per_key = np.full((len(chosen), 2, 3, width), np.nan)
    for row, i in enumerate(chosen):
        per_key[row, ..., : world["lengths"][i]] = world["per_key"][i][..., : world["lengths"][i]]
    tokens = np.where(np.isnan(per_key[:, :, 0]), -2, per_key[:, :, 0] * 100).astype(np.int32)
    n = (~np.isnan(per_key)).sum(0).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mean of nothing
        mean = np.nanmean(per_key, 0)
        variance = np.nanvar(per_key, 0, ddof=1)
    dims = ("condition", "layer", "key")
    received = {
        "mass": (
            ("prompt", "condition", "layer"),
            world["scalars"][chosen],
            {"units": "probability"},
        ),
        "histogram": (
            ("prompt", "condition", "bin"),
            world["histograms"][chosen],
            {"units": "share"},
        ),
        "received": (dims, mean, {"units": "probability"}),
        "received_variance": (dims, variance),
        "received_n": (dims, n),
        "received_per_prompt": (("prompt", *dims), per_key),
    }
    texts = np.full((2, width), "", dtype=object)
    texts[:, : world["lengths"][chosen[0]]] = f"t{chosen[0]}"
    sequences = {
        "tokens": (("prompt", "condition", "pos"), tokens),
        "place": (("prompt",), np.array(chosen)),
        "first_prompt_text": (("condition", "pos"), texts.astype(np.dtypes.StringDType())),
    }
    ids = [f"p{i}" for i in chosen]
    if chosen[0] % 2:  # stored results have their variables in another order
        received = dict(sorted(received.items(), reverse=True))
    coords = {"prompt": ids, "condition": CONDITIONS}
    labels = {"layer": [0, 2, 5], "bin": [-np.inf, 0.0], "key": np.arange(width)}
    return ma.Result(
        {
            "received": xr.Dataset(received, coords | labels),
            "sequences": xr.Dataset(sequences, coords),
        },
        {
            "model": {
                "name": "m",
                "device": f"cuda:{chosen[0] % 2}",
                "verified": True,
                "not_verified": [],
            },
            "prompts": {"count": len(chosen), "hash": set_hash(ids), "template": "plain"},
            "seed": 0,
            "seconds": len(chosen),
        },
    )


def a_world(lengths, seed):
    rng = np.random.default_rng(seed)
    n = len(lengths)
    return {
        "lengths": lengths,
        "per_key": 1e6
        + rng.normal(size=(n, 2, 3, max(lengths))),  # a spread that a sum of squares would lose
        "scalars": rng.normal(size=(n, 2, 3)).astype(np.float32),
        "histograms": rng.random((n, 2, 2)).astype(np.float32),
    }


def in_some_tree(parts, seed):
    """Two random results at a time, or three, until one is left."""
    rng = random.Random(seed)
    parts = list(parts)
    while len(parts) > 1:
        count = min(len(parts), rng.choice([2, 2, 3]))
        chosen = [parts.pop(rng.randrange(len(parts))) for _ in range(count)]
        parts.append(ma.merge_results(chosen))
    return parts[0]


def assert_one_pass(merged, whole):
    assert merged.datasets.keys() == whole.datasets.keys()
    for name, expected in whole.datasets.items():
        got = merged[name]
        assert set(got.variables) == set(expected.variables)
        assert got.sizes == expected.sizes
        for variable in expected.variables:
            ours = got[variable].values
            theirs = expected[variable].values
            assert got[variable].dims == expected[variable].dims
            assert got[variable].attrs == expected[variable].attrs
            if theirs.dtype.kind in "TOU":
                ours = ours.astype(object)
                theirs = theirs.astype(object)
            if (
                "prompt" in expected[variable].dims
                or theirs.dtype.kind not in "f"
                or variable == "bin"
            ):
                assert_array_equal(ours, theirs, err_msg=f"{name}.{variable}")
            else:
                # A mean of 1e6 is rounded by 1e-10, and a variance takes that times a deviation, once a merge.
                most = 4e-9 if variable.endswith("_variance") else 1e-10
                assert_allclose(ours, theirs, rtol=1e-10, atol=most, err_msg=f"{name}.{variable}")


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    owners=st.lists(st.integers(0, 4), min_size=9, max_size=9),
    seed=st.integers(0, 2**16),
)
def test_any_split_order_and_tree_is_one_pass(lengths, owners, seed):
    world = a_world(lengths, seed)
    groups = {}
    for prompt in range(len(lengths)):
        groups.setdefault(owners[prompt], []).append(prompt)
    parts = [synthetic(world, group) for group in groups.values()]
    whole = synthetic(world, range(len(lengths)))
    merged = in_some_tree(parts, seed)
    assert_one_pass(merged, whole)
    for name in ("prompts", "seed", "seconds"):
        assert merged.provenance[name] == whole.provenance[name]


@pytest.mark.parametrize("spoil", ["scalars", "per_key", "lengths"])
def test_the_law_would_notice_another_value(spoil):  # negative control
    world = a_world([3, 5, 2, 4], 1)
    other = {**world, spoil: [2, 5, 2, 4] if spoil == "lengths" else world[spoil] + np.float32(1)}
    merged = ma.merge_results([synthetic(other, [0, 3]), synthetic(world, [1, 2])])
    with pytest.raises(AssertionError):
        assert_one_pass(merged, synthetic(world, range(4)))


def test_a_real_run_in_parts_is_the_whole_run(toy, short_prompts, tmp_path):
    """A prompt a batch, so that how they are split changes no batch."""
    conditions = {"slash": ma.MeaninglessTokens(count=7)}
    analyses = [ma.ReceivedAttention(), ma.analyses.MlpActivations("absolute", 0.01)]
    options = {"layers": [0], "memory": "1KiB", "seed": 4}

    def run(places):
        chosen = [short_prompts[place] for place in places]
        return run_part(toy, chosen, conditions, analyses, places=places, **options)

    whole = run(range(4))
    expected = whole.compare("slash", resamples=99, columns="all").difference.values
    parts = [run(places) for places in ([2], [0, 3], [1])]
    parts[1].save(tmp_path / "part.zarr")
    parts[1] = ma.load_result(tmp_path / "part.zarr")  # as it comes back from a disk
    merged = in_some_tree(parts, seed=0)
    assert_one_pass(merged, whole)
    assert merged.provenance["prompts"] == whole.provenance["prompts"]
    assert merged["sequences"].place.values.tolist() == [0, 1, 2, 3]
    difference = merged.compare("slash", resamples=99, columns="all").difference
    assert_array_equal(difference, expected)


def test_moments_of_many_merges_keep_their_digits():
    """Twenty prompts, merged one by one: the error does not grow."""
    world = a_world([2] * 20, 9)
    merged = synthetic(world, [0])
    for prompt in range(1, 20):
        merged = ma.merge_results([merged, synthetic(world, [prompt])])
    assert_one_pass(merged, synthetic(world, range(20)))


def test_the_hash_of_the_prompts_is_of_the_set(prompts):
    assert set_hash(prompts) == set_hash(reversed(prompts))
    assert set_hash(prompts) != set_hash(prompts[1:])
    assert set_hash([*prompts, prompts[0]]) != set_hash(prompts)


def test_a_prompt_that_is_in_two_results_is_named():
    world = a_world([3] * 6, 2)
    with pytest.raises(OptionError, match="prompt p3 is in two of the results"):
        ma.merge_results([synthetic(world, [1, 3]), synthetic(world, [3, 5])])
