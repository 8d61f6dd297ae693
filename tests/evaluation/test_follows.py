"""Whose answer it is after a transplant: a toy that reads its answers off filler, beside one that reads past it."""

import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from tests.evaluation import by_hand


def filler(count):
    return ma.MeaninglessTokens("/", count=count, place="before_answer")


def evaluated(model, prompts, condition, new_tokens, own=False):
    recorded = ma.record_keys_values(model, prompts, condition)
    others = recorded.from_other_prompts()
    conditions = {
        "filler": condition,
        "another's": condition.under(ma.interventions.KVPatch("inserted", others)),
    }
    if own:
        conditions["own"] = condition.under(ma.interventions.KVPatch("inserted", recorded))
    return ma.evaluate(model, prompts, conditions, new_tokens=new_tokens), others.sources


def test_the_toy_that_computes_over_filler_follows_it():
    relay, questions = ma.load_model("toy:relay"), ma.load_prompts("recall", limit=12)
    evaluation, sources = evaluated(relay, questions, filler(12), 6, own=True)
    assert evaluation.right("filler").mean() > 0.9
    shares = evaluation.follows("another's", sources, "filler")
    assert shares["followed"] >= 0.8, shares
    assert shares["n"] + shares["alike"] == 12
    assert shares["by_chance"] < 0.3
    assert evaluation.follows("own", sources, "filler")["followed"] == 0


def test_the_toy_that_reads_past_filler_does_not(toy):
    """Inside the question, where keys and values differ from prompt to prompt, and 95 % of answers are right."""
    problems = ma.load_prompts("word-problems", limit=6)
    inside = ma.MeaninglessTokens("/", count=12, place="middle")
    evaluation, sources = evaluated(toy, problems, inside, 60)
    shares = evaluation.follows("another's", sources, "filler")
    assert shares["followed"] < 0.05, shares
    assert shares["kept"] > 0.5


def finals(filler, other, samples=1):
    """An evaluation by the final answers under two conditions."""
    answers = [
        by_hand.answer(number, condition, answer=final, sample=sample)
        for condition, given in (("filler", filler), ("other", other))
        for number, final in enumerate(given)
        for sample in range(samples)
    ]
    return Evaluation(tuple(answers), {})


def test_shares_are_counted():
    sources = dict(zip("012345", "123450", strict=True))
    evaluation = finals(["1", "2", "3", "1", None, "5"], ["2", "3", "7", "2", "9", "5"])
    shares = evaluation.follows("other", sources, "filler")
    assert shares["n"] == 4
    assert shares["alike"] == 2  # of 3 the source's answer was not read, of 4 its own
    assert shares["followed"] == pytest.approx(2 / 4)  # 0 said 2, 1 said 3
    assert shares["kept"] == pytest.approx(1 / 4)  # 5 still says 5
    assert shares["by_chance"] == 0
    assert shares["low"] < 0.5 < shares["high"]


def test_what_cannot_be_told():
    swapped = {"0": "1", "1": "0"}
    alike, distinct = ["1", "1"], ["1", "2"]
    for evaluation, arguments, message in (
        (finals(alike, alike), ("other", swapped), "no prompt's answer differs from its source's"),
        (finals(distinct, distinct, 2), ("other", swapped), "2 answers per problem"),
        (finals(distinct, distinct), ("other", {"0": "7"}), "the source of prompt 0 is not among"),
        (finals(distinct, distinct), ("slash", swapped), "condition='slash': choose one of"),
    ):
        with pytest.raises(OptionError, match=message):
            evaluation.follows(*arguments, "filler")


def test_all_shares_are_over_the_same_units():
    """13 problems of one group keep their answers, 3 alone follow: shares of the four units."""
    filler = [str(n) for n in range(16)]
    sources = {filler[n]: filler[n - 1] for n in range(16)}
    other = [*filler[:13], *filler[12:15]]
    groups = {str(n): "one" if n < 13 else str(n) for n in range(16)}
    evaluation = Evaluation(finals(filler, other).answers, {"groups": groups})
    shares = evaluation.follows("other", sources, "filler")
    assert (shares["n"], shares["followed"], shares["kept"]) == (4, 0.75, 0.25)
    alone = evaluation.follows("other", sources, "filler", unit="prompt")
    assert (alone["n"], alone["followed"], alone["kept"]) == (16, 3 / 16, 13 / 16)


def test_an_evaluation_with_missing_answers_is_printed():
    answers = finals(["1", "2", "3"], ["1", "2", "3"]).answers
    unfinished = Evaluation(answers[:-1], {})
    assert "answers are missing (1 of 3 under 'other')" in repr(unfinished)
    unbegun = Evaluation(answers, {"conditions": ["slash"]})
    assert "answers are missing (3 of 3 under 'slash')" in repr(unbegun)
    empty = Evaluation((), {})
    assert empty.samples == 0
    for call in (empty.accuracy, lambda: empty.pass_at_k(1)):
        with pytest.raises(OptionError, match="the evaluation has no answers"):
            call()
    with pytest.raises(OptionError, match="condition='slsh': choose one of"):
        unfinished.answered([], "slsh")
    with pytest.raises(OptionError, match="sample=5: the evaluation has 1 answers"):
        unfinished.answered([], "other", sample=5)
    with pytest.raises(OptionError, match=r"level=95\.0: give a probability"):
        Evaluation(answers, {}).accuracy(95.0)
    with pytest.raises(OptionError, match="at least one number of answers"):
        Evaluation(answers, {}).pass_at_k([])
