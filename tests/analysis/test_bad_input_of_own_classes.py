"""Conditions and analyses of a user's own that are not quite right: what is wrong is said in his words, before the work."""

import dataclasses
import warnings
from itertools import count

import numpy as np
import pytest

import mechattn as ma
from mechattn.errors import ConditionError, PromptError
from mechattn.prompts.token_sequences import insert
from mechattn.prompts.tokenization import tokenize

PROMPTS = [
    "Tom has 3 apples. How many?",
    "Why is the old river quiet?",
    "Mia buys two boats and a clock.",
]
DRAWN = count(5)  # another token each time


def run(model, condition=None, analyses=None):
    conditions = None if condition is None else {"own": condition}
    return ma.run(model, PROMPTS, conditions, analyses)


class Own:
    def __init__(self, made):
        self.made = made

    def apply(self, prompt, model, seed=0):
        return self.made(prompt, model)


def shuffled(prompt, model, part):
    sequence = tokenize(prompt, model)
    return dataclasses.replace(sequence, **{part: getattr(sequence, part).flip(0)})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda p, m: None,
            r"'own' gives a NoneType for prompt 0: apply must return a TokenSequence",
        ),
        (
            lambda p, m: tokenize(ma.Prompt(p.question.upper()), m),
            "'own' changes the tokens of original tokens of prompt 0",
        ),
        (
            lambda p, m: shuffled(p, m, "segment"),
            "'own' changes the segment of original tokens of prompt 0",
        ),
        (
            lambda p, m: dataclasses.replace(
                made := insert(tokenize(p, m), [5], 1), segment=made.segment.clamp(max=1)
            ),
            "'own' puts tokens that it inserts into a segment of prompt 0: their segment must be \"inserted\"",
        ),
        (
            lambda p, m: insert(tokenize(p, m), [next(DRAWN)], 1),
            "'own' inserts different tokens into prompt 0 each time, so no run can be repeated",
        ),
        (lambda p, m: insert(tokenize(p, m), [5], 999), r"at=999: give a position from 0 to \d+"),
    ],
)
def test_a_condition_of_ones_own(toy, made, message, no_forward):
    with pytest.raises(ConditionError, match=message):
        run(toy, Own(made))


def test_a_condition_that_inserts_is_taken(toy):  # negative control
    assert run(toy, Own(lambda p, m: insert(tokenize(p, m), [5, 6], 1))).conditions == [
        "baseline",
        "own",
    ]


@pytest.mark.parametrize("template", ["plain", "chat"])
@pytest.mark.parametrize(
    "condition",
    [
        ma.MeaninglessTokens("/", 3, place="before_answer"),
        Own(lambda p, m: insert(tokenize(p, m), [5, 6], len(tokenize(p, m)))),
    ],
    ids=lambda c: type(c).__name__,
)
def test_tokens_that_nothing_reads(toy, condition, template, no_forward, monkeypatch):
    """+0.0 % [+0.0, +0.0] would be said of them."""
    chat = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    monkeypatch.setattr(toy.tokenizer, "chat_template", chat)
    some = [ma.Prompt(text, template=template, id=str(i)) for i, text in enumerate(PROMPTS)]
    if not isinstance(condition, Own):
        some[0] = dataclasses.replace(some[0], answer="3")
    with pytest.raises(
        ConditionError,
        match=r"prompt [01] .* ends with what 'own' inserts.*give prompts with an answer",
    ):
        ma.run(toy, some, {"own": condition})


@pytest.mark.parametrize(("answer", "warned"), [("", True), ("3 and 4", False)])
def test_tokens_that_only_a_newline_reads_are_warned_of(toy, answer, warned):
    some = [ma.Prompt(text, answer=answer, id=str(i)) for i, text in enumerate(PROMPTS)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ma.run(toy, some, {"own": ma.MeaninglessTokens("/", 3, place="after_question")})
    assert any("only the last token" in str(one.message) for one in caught) == warned


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "Why?"}\n')
    assert ma.load_prompts(str(tmp_path / "p.jsonl"))[0].question == "Why?"


def test_a_text_that_ends_like_a_file_is_a_text(toy):
    assert ma.run(toy, "Tom opens the file my.jsonl").conditions == ["baseline"]
    with pytest.raises(PromptError):
        ma.run(toy, "data/my.jsonl")


def test_rounding_is_no_finding(toy, prompts):
    """Tokens that take no attention and move nothing are the baseline, to the last digits."""
    slash = ma.MeaninglessTokens("/", 20).masked().unshifted()
    result = ma.run(toy, prompts[:6], {"nothing": slash})
    verdict = result.verdict("nothing")
    assert not (verdict.below | verdict.above).any()
    table = result.compare("nothing", resamples=99, columns="all")
    assert (table.q_beyond == 1).all()
    assert np.abs(table.beyond).max() == 0
