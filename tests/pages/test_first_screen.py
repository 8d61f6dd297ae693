"""The first screen: each mark at its number, and a sentence that says no more than the intervals do."""

import re

import numpy as np
import pytest

import mechattn as ma
from mechattn.contrast.contrast import Verdict
from mechattn.pages.first_screen import (
    MOST_TICKS,
    PictureRow,
    ShownModel,
    answer_sentences,
    change_sentence,
    control_sentence,
    own_attention_sentence,
    picture,
    verdict_sentences,
)
from mechattn.pages.page import subtitle
from mechattn.pages.page_data import head_patterns
from mechattn.render.words import percent, percent_words
from mechattn.stats.intervals import Interval
from tests.render.by_hand import percent_change, t_interval


def change(model, condition, measured, null):
    estimate, low, high = (np.float64(value) for value in measured)
    none = np.zeros((1, 1), dtype=bool)
    of_null = Interval(*(np.float64(null),) * 3)
    masks = dict.fromkeys(["below", "above", "rises", "falls", "marked"], none)
    verdict = Verdict(
        Interval(estimate, low, high),
        of_null,
        **masks,
        n=9,
        unit="prompts",
        margin=None,
        same=None,
        null_kind="uniform",
    )
    return PictureRow(model, condition, verdict)


LESS = (-0.2, -0.22, -0.18)


def test_a_budget_opens_the_page_with_self_attention(toy):
    conditions = {"slash": ma.MeaninglessTokens("/", 5), "sentence": ma.RandomSentence(5)}
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionBudget(), ma.analyses.SegmentFlow()]
    questions = ["What is 3 + 4?", "Add 2 and 9, please.", "Tom has 5 apples. How many?"]
    result = ma.run(toy, questions, conditions, analyses)
    opening = own_attention_sentence(result, "slash")
    assert answer_sentences([ShownModel(result)])[0] == opening

    own = result["segment_flow"].flow.sel(segment="question", to_segment="question")
    points = 100 * own.astype(np.float64)
    for condition in conditions:
        change = points.sel(condition=condition) - points.sel(condition="baseline")
        middle, low, high = t_interval(change.mean(("layer", "head")))
        words = f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")
        amount = "about as much to itself as"
        if low > 0:
            amount = "more to itself than"
        elif high < 0:
            amount = "less to itself than"
        assert f"{amount} without insertion: {words} of 100 points over all layers" in opening
        by_layer = change.mean(("head", "prompt")).values
        layer = int(np.abs(by_layer).argmax())
        largest = f"{by_layer[layer]:+.1f}".replace("-", "−")
        in_layer = rf"and {re.escape(largest)} \[.*?\] in layer {layer}, the largest"
        assert re.search(in_layer, opening)

    assert opening not in answer_sentences([ShownModel(result)] * 2)


UNSURE = (0.003, -0.01, 0.016)
BY = "the attention that a token of the question receives from all tokens after it changes on average by"


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (LESS, f"{BY} −20.0\u00a0% [−22.0\u00a0%, −18.0\u00a0%]"),
        (
            UNSURE,
            f"{BY} +0.3\u00a0% [−1.0\u00a0%, +1.6\u00a0%], which cannot be distinguished from 0",
        ),
    ],
)
def test_the_sentence_is_true_of_each_change(measured, words):
    """The first sentence of the page says neither "less" of what gains, nor "more" of what cannot be told."""
    assert change_sentence([change("a", "slash", measured, -0.5)]) == f"With “slash”, {words}."


def test_a_sentence_of_several_models_says_where_they_differ():
    rows = [
        change("a", "x", LESS, -0.5),
        change("b", "x", (-0.4, -0.5, -0.3), -0.1),
    ]
    said = change_sentence(rows)
    assert (
        "receives on average 20.0 to 40.0\u00a0% less attention than without it, in 2 models."
        in said
    )
    both = change_sentence([change("a", "x", LESS, 0.1), change("b", "x", UNSURE, 0.1)])
    by = "changes by −20.0 to +0.3\u00a0%, in 2 models, which cannot be distinguished from 0 in 1 of them."
    assert f"the attention that each token of the question receives on average {by}" in both


def by_prompt(result, condition, to):
    """The ratio of each prompt's mean over layers and heads, and its t interval, in float64."""
    received = result["received_attention"].received_by_segment.sel(segment="question")
    means = received.astype(np.float64).mean(("layer", "head"))
    return percent_change(means.sel(condition=condition) / means.sel(condition=to)) / 100


@pytest.fixture(scope="module")
def controlled(toy, prompts):
    conditions = {"slash": ma.MeaninglessTokens("/", 10), "sentence": ma.RandomSentence(10)}
    return ma.run(toy, prompts[:7], conditions)


def test_the_first_condition_stands_against_its_control(controlled):
    model = ShownModel(controlled)
    control = model.control_of("slash")
    found = control.difference
    assert control.name == "sentence"
    np.testing.assert_allclose(list(found), by_prompt(controlled, "slash", "sentence"), rtol=1e-5)
    wrong = by_prompt(controlled, "slash", "baseline")
    assert abs(wrong[0] - float(found.estimate)) > 1e-3, "another condition would be noticed"
    words = (
        "Comparing “slash” with “sentence”, which is as long, instead of with no insertion:"
        f" {percent_words(found)}"
    )
    assert control_sentence([model]) == f"{words}."
    twice = f"{percent(found.estimate)} to {percent(found.estimate)}"
    assert twice in control_sentence([model, model])


def test_a_sentence_on_one_of_several_models_names_it(slash_result, monkeypatch):
    monkeypatch.setattr("mechattn.pages.first_screen.first_token_words", lambda *_: "It moves.")
    assert "It moves." not in answer_sentences([ShownModel(slash_result)] * 2)


def test_conditions_in_any_order_keep_their_verdicts_and_patterns(toy, short_prompts):
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionMap()]
    result = ma.run(toy, short_prompts[:3], {"slash": ma.MeaninglessTokens("/", 5)}, analyses)
    reordered = result.sel(condition=["slash", "baseline"])
    first, second = verdict_sentences([ShownModel(reordered), ShownModel(result)])
    assert first == second.replace("result 2", "result 1")
    assert head_patterns(reordered) == head_patterns(result)
    with pytest.raises(ma.MechattnError, match="lacks: select it too"):
        ma.browse(result.sel(condition=["slash"]))


def test_what_has_no_verdict_says_why():
    row = PictureRow("a", "slash", None, "no verdict, since there are 2 prompts")
    assert change_sentence([row]) == "a: no verdict, since there are 2 prompts."
    assert picture([row]) is None
    assert change_sentence([]) == ""
    both = picture([row, change("b", "slash", (-0.3, -0.45, 0.15), -0.5)])
    assert both.description.startswith("b, slash")
    assert len(both.ticks) <= MOST_TICKS


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (ma.MeaninglessTokens("\n", 1), "1 token of “⏎” before the question"),
        (ma.RandomSentence(5, place="start"), "5 tokens of random sentences at the start"),
    ],
)
def test_a_page_says_what_is_inserted(toy, prompts, condition, words):
    result = ma.run(toy, prompts[:1], {"shown": condition}, layers=[0])
    assert (
        subtitle([result, result])
        == f"Attention with and without inserted tokens, 1 prompt. “shown” is {words}."
    )
