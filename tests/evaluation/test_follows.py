"""Whose answer it is after a transplant: a toy that reads its answers off filler, beside one that reads past it."""

import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.graded_answers import GradedAnswer


def filler(count):
    return ma.MeaninglessTokens("/", count=count, place="before_answer")


def evaluated(model, prompts, condition, new_tokens):
    recorded = ma.record_keys_values(model, prompts, condition)
    others = recorded.from_other_prompts()
    conditions = {
        "filler": condition,
        "own": condition.under(ma.interventions.KVPatch("inserted", recorded)),
        "another's": condition.under(ma.interventions.KVPatch("inserted", others)),
    }
    return ma.evaluate(model, prompts, conditions, new_tokens=new_tokens), others.sources


def test_the_toy_that_computes_over_filler_follows_it():
    relay, questions = ma.load_model("toy:relay"), ma.load_prompts("recall", limit=20)
    evaluation, sources = evaluated(relay, questions, filler(12), 6)
    assert evaluation.right("filler").mean() > 0.9
    found = evaluation.follows("another's", sources, "filler")
    assert found["followed"] >= 0.8, found
    assert found["n"] + found["alike"] == 20
    assert found["by_chance"] < 0.3
    assert evaluation.follows("own", sources, "filler")["followed"] == 0


def test_the_toy_that_reads_past_filler_does_not(toy):
    """Inside the question, where keys and values differ from prompt to prompt, and 95 % of answers are right."""
    problems = ma.load_prompts("word-problems", limit=20)
    evaluation, sources = evaluated(
        toy, problems, ma.MeaninglessTokens("/", count=12, place="middle"), 60
    )
    found = evaluation.follows("another's", sources, "filler")
    assert found["followed"] < 0.05, found
    assert found["kept"] > 0.5


def test_shares_are_counted():
    own, put = ["1", "2", "3", "1", None, "5"], ["2", "3", "7", "2", "9", "5"]
    sources = dict(
        zip("012345", "123450", strict=True)
    )  # 3 and its source: unread; 5 gets what 0 said
    answers = [
        GradedAnswer(str(i), name, 0, "", (), answer, "1", False, True)
        for name, given in (("filler", own), ("other", put))
        for i, answer in enumerate(given)
    ]
    found = Evaluation(tuple(answers), {}).follows("other", sources, "filler")
    assert (found["n"], found["alike"]) == (
        4,
        2,
    )  # 3 and 4 are left out: their source's, or their own, was not read
    assert found["followed"] == pytest.approx(2 / 4)  # 0 said 2, 1 said 3
    assert found["kept"] == pytest.approx(1 / 4)  # 5 still says 5
    assert found["by_chance"] == pytest.approx((0 + 0 + 0 + 0) / 4)
    assert found["low"] < 0.5 < found["high"]


def test_what_cannot_be_told():
    def made(answers, samples=1):
        return Evaluation(
            tuple(
                GradedAnswer(str(i), name, s, "", (), a, "1", False, True)
                for name in ("filler", "other")
                for s in range(samples)
                for i, a in enumerate(answers)
            ),
            {},
        )

    swapped = {"0": "1", "1": "0"}
    with pytest.raises(OptionError, match="no prompt's answer differs from its source's"):
        made(["1", "1"]).follows("other", swapped, "filler")
    with pytest.raises(OptionError, match="2 answers per problem"):
        made(["1", "2"], samples=2).follows("other", swapped, "filler")
    with pytest.raises(
        OptionError, match="the source of prompt 0 is not among the answered problems"
    ):
        made(["1", "2"]).follows("other", {"0": "7"}, "filler")
    with pytest.raises(OptionError, match="no condition 'slash'"):
        made(["1", "2"]).follows("other", swapped, "slash")
