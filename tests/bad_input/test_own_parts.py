"""Conditions and analyses of a user's own that are not quite right: what is wrong is said in his words, before the work."""

import dataclasses
import warnings
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis.analysis import Quantity
from mechattn.engine.pending_sums import PendingSums
from mechattn.errors import ConditionError, MechattnError, OptionError, PromptError
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
        (lambda p, m: [1, 2, 3], r"'own' gives a list for prompt 0"),
        (
            lambda p, m: tokenize(ma.Prompt(p.question.upper()), m),
            "'own' changes the tokens of original tokens of prompt 0",
        ),
        (
            lambda p, m: shuffled(p, m, "origin"),
            "'own' changes the origin of original tokens of prompt 0",
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
            "'own' inserts other tokens into prompt 0 each time, so no run can be repeated",
        ),
        (lambda p, m: insert(tokenize(p, m), [5], 999), r"at=999: give a position from 0 to \d+"),
        (lambda p, m: insert(tokenize(p, m), "hello", 1), r"filler='hello': give token ids"),
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


def test_tokens_before_an_answer_are_read(toy):  # negative control
    some = [ma.Prompt(text, answer="3", id=str(i)) for i, text in enumerate(PROMPTS)]
    result = ma.run(toy, some, {"own": ma.MeaninglessTokens("/", 3, place="before_answer")})
    assert result.verdict("own").change.estimate != 0


class Rows:
    name = "rows"
    options = {}
    quantities = {"paid": Quantity(("head",), "probability", "attention")}

    def problem(self, sequence):
        return None

    def start(self, batch, heads):
        return {"paid": torch.zeros(len(batch.rows), heads)}

    def add(self, sums, rows):
        sums["paid"] += rows.pattern.sum((-1, -2))

    def values(self, sums, batch, window):
        return sums


def changed(**parts):
    return type("Changed", (Rows,), parts)()


def without(*names):
    return type(
        "Less", (), {name: part for name, part in vars(Rows).items() if name not in names}
    )()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: without("values"), r"which is not an analysis \(it lacks values\)"),
        (lambda: without("start", "name"), r"\(it lacks name, start\)"),
        (lambda: without("add"), r"the analysis rows receives no data: define add\(sums, rows\)"),
        (lambda: changed(name="my analysis/1"), "'my analysis/1': use letters, digits and _"),
    ],
)
def test_an_analysis_of_ones_own(toy, make, message, no_forward):
    with pytest.raises(OptionError, match=message):
        run(toy, None, [make()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: ma.run(m, "my.jsonl"),
            r"'my.jsonl', the name of a file: load_prompts\('my.jsonl'\) reads",
        ),
        (lambda m: ma.run(m, "Why is it?", seed="a"), "seed='a': give a whole number"),
        (
            lambda m: ma.conditions.Text(" Hmm.", after=" is", place="start"),
            "place='start' and after=' is': give only one of the two",
        ),
        (lambda m: ma.interventions.AttentionKnockout(3, "inserted"), "queries=3: choose among"),
    ],
)
def test_values_of_another_kind(toy, call, message, no_forward):
    with pytest.raises(MechattnError, match=message):
        call(toy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: ma.render.received_attention(r, 0, None), "heads=None, top=None: give one"),
        (
            lambda r: r.compare("slash", quantity=["received"]),
            r"quantity=\['received'\]: give one name",
        ),
        (lambda r: r.compare("slash", level="a"), "level='a': give a probability"),
        (lambda r: r.page(None), "None is not a path"),
    ],
)
def test_what_is_asked_of_a_result(slash_result, call, message):
    with pytest.raises(MechattnError, match=message):
        call(slash_result)


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
    result = ma.run(toy, prompts, {"nothing": slash})
    verdict = result.verdict("nothing")
    assert not (verdict.beyond | verdict.above).any()
    table = result.compare("nothing", resamples=99, columns="all")
    assert (table.q_beyond == 1).all()
    assert np.abs(table.beyond).max() == 0


def test_a_kind_of_inserted_tokens_without_a_filler(toy):
    @dataclasses.dataclass(frozen=True)
    class Empty(ma.conditions.Insertion):
        count: int = 3
        place: str = "start"

    with pytest.raises(TypeError, match=r"Empty .*abstract method '?filler"):
        ma.run(toy, "Tom has 3 apples.", {"empty": Empty()})


class PairsAndCaptures(ma.analyses.AffineShift):
    captures = ("attn.hook_z",)

    def start(self, batch, heads):
        return {}

    def add_captures(self, sums, captures):
        pass


def test_captures_wait_for_pairs_too():
    """As in a bridge whose hook_pattern fires after hook_z."""
    batch = SimpleNamespace(batches={0: None}, heads=1)
    pending = PendingSums(batch, [PairsAndCaptures()], None, None)
    assert pending.parts == [{"pairs", "hooks"}]
    arrived = []
    pending.after_rows(0, 0, lambda: arrived.append("captures"))
    assert arrived == []
    pending.complete(0, 0, "pairs")
    assert arrived == ["captures"]
