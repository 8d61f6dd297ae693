"""What is said before accuracies are read: answers cut off, answers unread, ceilings and floors."""

import pytest

from mechattn.commands.evaluate import accuracy_table
from mechattn.evaluation.evaluation import Evaluation
from tests.evaluation import by_hand


def evaluation(**answers_by_condition):
    """An evaluation of answers that are "right", "wrong", "unread" or "cut off"."""
    answers = []
    for condition, kinds in answers_by_condition.items():
        for number, kind in enumerate(kinds):
            answers.append(
                by_hand.answer(
                    number,
                    condition,
                    right=kind == "right",
                    answer=None if kind in ("unread", "cut off") else "7",
                    finished=kind != "cut off",
                )
            )
    return Evaluation(tuple(answers), {})


USUAL = ["right"] * 10 + ["wrong"] * 10


def test_nothing_is_said_where_nothing_is_the_matter():
    usual = evaluation(baseline=USUAL, slash=["cut off", "unread", *USUAL[2:]])
    assert usual.cautions == []
    table = accuracy_table(usual)
    assert table.startswith("| condition")
    # Ten of 20 are right; of these, the first two are cut off and unread under the condition.
    assert "| 0.25 | 0, 2 |" in table
    assert table.endswith("The baseline can fall by 50.0 points.")
    assert "n = 20; Wilson's and Newcombe's intervals, McNemar's test (mid-p)" in table


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("cut off", "many answers were cut off and count as wrong (3 of 20 under 'slash')"),
        ("unread", "many answers end without a final answer (3 of 20 under 'slash')"),
    ],
)
def test_more_than_a_tenth_is_said_before_the_table(kind, sentence):
    careful = evaluation(baseline=USUAL, slash=[kind] * 3 + USUAL[3:])
    (caution,) = careful.cautions
    assert sentence in caution
    assert accuracy_table(careful).splitlines()[0] == f"**{caution}**"
    assert repr(careful).splitlines()[1] == caution
    assert careful.accuracy().attrs["cautions"] == [caution]


@pytest.mark.parametrize(("kind", "word"), [("right", "fall"), ("wrong", "rise")])
def test_a_ceiling_and_a_floor_are_said(kind, word):
    (caution,) = evaluation(baseline=[kind] * 20, slash=USUAL).cautions
    assert caution.endswith(f"so accuracy can only {word}.")
