"""Results that don't belong together are refused, naming the field; what may differ is listed."""

from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.errors import OptionError
from tests.conftest import run_part


@pytest.fixture(scope="module")
def half(toy, prompts):
    """Runs one prompt, at its place in a run of two."""

    def run(place, name="slash", count=5, layers=(0,), **options):
        conditions = {name: ma.MeaninglessTokens(count=count)}
        options |= {"layers": list(layers), "places": [place]}
        return run_part(toy, [prompts[place]], conditions, **options)

    return run


@pytest.fixture(scope="module")
def halves(half):
    """Two results of one run."""
    return half(0), half(1)


def test_another_condition_option_seed_or_layer_is_refused(half, halves):
    first, _ = halves
    queries_all = [ma.ReceivedAttention(queries="all")]
    for other, field in (
        (half(1, count=6), r"conditions\.slash\.options\.count is 5 in one and 6 in another"),
        (half(1, name="dash"), r"conditions\.slash is .* and None in another"),
        (half(1, seed=1), "seed is 0 in one and 1 in another"),
        (half(1, memory="1GiB"), "memory is '2GiB' in one and '1GiB'"),
        (half(1, keep="prompts"), "keep is 'moments'"),
        (half(1, analyses=queries_all), r"analyses\.received_attention\.queries is"),
        (half(1, layers=(1,)), "layers is"),
    ):
        with pytest.raises(OptionError, match=f"don't belong together: .*{field}"):
            ma.merge_results([first, other])


def test_datasets_of_another_meaning_are_refused(halves):
    first, second = halves
    renamed = second["received_attention"].assign_attrs(unit="points")
    other = replace(second, datasets={**second.datasets, "received_attention": renamed})
    with pytest.raises(OptionError, match=r"dataset received_attention\.attributes\.unit is None"):
        ma.merge_results([first, other])


def test_truth_values_of_each_prompt_are_refused(halves):
    def with_flags(result):
        flags = result["sequences"].tokens > 5
        datasets = {**result.datasets, "sequences": result["sequences"].assign(flags=flags)}
        return replace(result, datasets=datasets)

    with pytest.raises(OptionError, match="values of type bool cannot be merged"):
        ma.merge_results([with_flags(result) for result in halves])


def test_devices_and_times_are_listed(halves):
    first, second = halves
    about = {**second.provenance, "time": "2001-01-01T00:00:00+00:00", "threads": 99}
    about["model"] = {**about["model"], "device": "cuda:7", "verified": False}
    merged = ma.merge_results([first, replace(second, provenance=about)])
    assert merged.provenance["time"][0].startswith("2001")
    assert 99 in merged.provenance["threads"]
    assert merged.provenance["model"]["device"] == ["cpu", "cuda:7"]
    assert merged.provenance["model"]["verified"] is False
    assert merged.provenance["seconds"] == pytest.approx(
        sum(r.provenance["seconds"] for r in (first, second))
    )


def test_nothing_to_merge_and_one_alone(halves):
    with pytest.raises(OptionError, match="no results to merge"):
        ma.merge_results([])
    first, _ = halves
    assert ma.merge_results([first]) is first
