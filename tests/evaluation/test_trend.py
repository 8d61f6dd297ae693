"""A trend over a sweep, of attention beyond its null and of accuracy."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.graded_answers import GradedAnswer
from mechattn.stats.trend import trend as trend_of

SWEEP = ma.sweep(ma.MeaninglessTokens("/"), count=[3, 9, 25])


@pytest.fixture(scope="module")
def result():
    return ma.run("toy:llama", ma.load_prompts("word-problems", limit=6), SWEEP)


def test_attention_less_its_null(result):
    found = ma.trend(result, list(SWEEP), layer=2)
    data = result["received_attention"].sel(layer=2, segment="question")
    received, null = data.received_by_segment, data.received_by_segment_dilution
    each = []
    for name in SWEEP:
        measured = np.log(received.sel(condition=name) / received.sel(condition="baseline"))
        expected = np.log(null.sel(condition=name) / null.sel(condition="baseline"))
        each.append((measured - expected).mean("head").values)
    expected = trend_of(np.array(each).T)
    assert (found.rho, found.p, found.n) == (
        pytest.approx(expected.rho),
        pytest.approx(expected.p),
        6,
    )
    assert ma.trend(result, list(SWEEP)[::-1], layer=2).rho == pytest.approx(-found.rho)


def test_accuracy():
    right = {"a": [0, 0, 0, 0], "b": [0, 1, 0, 0], "c": [1, 1, 0, 1]}
    answers = tuple(
        GradedAnswer(str(p), name, 0, "", (1,), "1", "1", bool(value), True, -1.0)
        for name, values in right.items()
        for p, value in enumerate(values)
    )
    evaluation = Evaluation(answers, {"conditions": {}})
    found = ma.trend(evaluation, ["a", "b", "c"])
    assert found.rho == pytest.approx(trend_of(np.array(list(right.values())).T).rho)
    assert found.rho > 0.5


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        (["count=3", "count=9"], "at least three names"),
        (["count=3", "count=9", "count=9"], "each once"),
        (["count=3", "count=9", "count=7"], "no condition 'count=7'"),
        (["baseline", "count=3", "count=9"], "has no change from itself"),
        ("count=3", "at least three names"),
    ],
)
def test_what_is_no_sweep(result, conditions, said):
    with pytest.raises(OptionError, match=said):
        ma.trend(result, conditions)
