"""The first screen: each mark at its number, and a sentence that says no more than the intervals do."""

import numpy as np
import pytest

from mechattn.pages.first_screen import Change, changes, picture, sentence
from mechattn.stats.comparison import Verdict
from mechattn.stats.intervals import Interval


def change(model, condition, measured, null):
    estimate, low, high = (np.float64(value) for value in measured)
    none = np.zeros((1, 1), dtype=bool)
    of_null = Interval(*(np.float64(null),) * 3)
    return Change(model, condition, Verdict(Interval(estimate, low, high), of_null, none, none, 9))


LESS = (-0.2, -0.22, -0.18)


def test_the_rows_are_those_of_the_verdict(slash_result):
    (row,) = changes([slash_result])
    verdict = slash_result.verdict("slash")
    assert row.condition == "slash"
    assert row.verdict.change == verdict.change
    assert row.verdict.null == verdict.null


def test_marks_stand_at_their_numbers():
    made = picture(
        [change("a", "x", LESS, -0.5), change("a", "y", (0.1, 0.05, 0.15), 0.0), change("b", "x", LESS, -0.5)]
    )
    assert [mark.model for mark in made.rows] == ["a", "", "b"]
    ends = [(at, float(words.replace("−", "-").replace("\u00a0%", ""))) for at, words in made.ticks]
    (left, low), (right, high) = ends[0], ends[-1]

    def place(value):
        return left + (right - left) * (100 * value - low) / (high - low)

    first, second, _ = made.rows
    assert first.point == pytest.approx(place(-0.2), abs=0.01)
    assert first.null == pytest.approx(place(-0.5), abs=0.01)
    assert (first.low, first.low + first.length) == pytest.approx((place(-0.22), place(-0.18)), abs=0.01)
    assert second.point == pytest.approx(place(0.1), abs=0.01)
    assert made.zero == pytest.approx(place(0), abs=0.01)
    assert "b, x: −20.0\u00a0% [−22.0\u00a0%, −18.0\u00a0%], uniform attention −50.0\u00a0%" in made.says


@pytest.mark.parametrize(
    ("null", "words"),
    [
        (-0.5, "50.0\u00a0% less; it loses less."),
        (-0.1, "10.0\u00a0% less; it loses more."),
        (-0.2, "20.0\u00a0% less; the two cannot be distinguished."),
    ],
)
def test_the_sentence_says_on_which_side_of_the_null(null, words):
    said = sentence([change("a", "slash", LESS, null)])
    start = "With “slash”, each token of the question receives 20.0\u00a0% less attention than without it. "
    assert said == f"{start}If heads attended uniformly, it would be {words}"


def test_a_sentence_of_several_models_says_where_they_differ():
    rows = [change("a", "x", LESS, -0.5), change("b", "x", (-0.4, -0.5, -0.3), -0.1), change("c", "x", LESS, -0.2)]
    said = sentence(rows)
    assert "receives 20.0 to 40.0\u00a0% less attention than without it, in 3 models." in said
    assert said.endswith("of 3 models 1 loses less, 1 loses more, 1 cannot be distinguished from it.")
    assert sentence([*rows[:1], change("b", "x", LESS, -0.4)]).endswith("; all 2 models lose less.")
    both = sentence([change("a", "x", LESS, 0.1), change("b", "x", (0.3, 0.2, 0.4), 0.1)])
    assert (
        "the attention that each token of the question receives changes by −20.0 to +30.0\u00a0%, in 2 models." in both
    )
    assert both.endswith("of 2 models 1 gains more, 1 gains less.")


def test_a_control_stands_beside_the_first_condition():
    said = sentence([change("a", "slash", LESS, -0.5), change("a", "sentence", (-0.3, -0.4, -0.2), -0.5)])
    assert said.endswith(" With “sentence”: 30.0\u00a0% less.")


def test_what_has_no_verdict_says_why():
    row = Change("a", "slash", None, "no verdict, since there are 2 prompts")
    assert sentence([row]) == "a: no verdict, since there are 2 prompts."
    assert picture([row]) is None
    assert sentence([]) == ""
    marks = picture([row, change("b", "slash", LESS, -0.5)]).rows
    assert marks[0].problem.startswith("no verdict")
