"""Counterparts: alignment against a brute-force search, segments of both versions, generated pairs."""

import itertools
import json
import random
import re
from types import SimpleNamespace

import pytest

import mechattn as ma
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.conditions import Counterpart
from mechattn.engine.request_checks import condition_sequences, with_baseline
from mechattn.errors import ConditionError, OptionError, PromptError
from mechattn.prompts.counterparts import _partners
from mechattn.prompts.generated import SOURCES
from mechattn.prompts.tokenization import tokenize


@pytest.fixture(scope="module")
def model(toy):
    return toy


def both(model, prompt, condition):
    made = condition_sequences(with_baseline({"other": condition}), [prompt], model, 0)[0]
    return made[BASELINE], made["other"]


def names(sequence):
    return [SEGMENTS[code] for code in sequence.segment]


def test_equal_lengths_are_paired_token_by_token(model):
    prompt = ma.Prompt(
        tokens=(1, 20, 30, 40, 50), answer_tokens=(60,), counterpart=(1, 20, 31, 40, 51)
    )
    own, other = both(model, prompt, Counterpart())
    assert other.origin.tolist() == [0, 1, 2, 3, 4, 5]
    expected = ["first", "question", "changed", "question", "changed", "answer"]

    assert names(own) == names(other) == expected

    assert other.tokens.tolist() == [1, 20, 31, 40, 51, 60]
    assert "0 without a partner, 2 changed" in other._repr_html_()
    assert repr(other).startswith(
        "TokenSequence(6 tokens, 0 without a partner, 2 changed; first 1, question 2, answer 1, "
    )


def test_other_lengths_leave_out_what_has_no_partner(model):
    prompt = ma.Prompt(
        tokens=(1, 20, 30, 31, 32, 40), answer_tokens=(60,), counterpart=(1, 20, 35, 36, 40)
    )
    own, other = both(model, prompt, Counterpart())
    assert other.origin.tolist() == [0, 1, -1, -1, 5, 6]
    assert names(other) == ["first", "question", "inserted", "inserted", "question", "answer"]
    changed = ["changed"] * 3
    assert names(own) == ["first", "question", *changed, "question", "answer"]
    _, ended = both(model, prompt, Counterpart(from_the_end=True))
    assert ended.origin.tolist() == [0, 1, 3, 4, 5, 6]

    with pytest.raises(PromptError, match="3 tokens without a partner under 'other'"):
        ma.run(model, [prompt], {"other": Counterpart()})


def longest(own, other):
    """The length of the longest common subsequence, by dynamic programming."""
    table = [[0] * (len(other) + 1) for _ in range(len(own) + 1)]
    for i, a in enumerate(own):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


def test_pairs_differ_only_in_replaced_stretches():
    draw = random.Random(0)
    count_equal = 0
    most = 0

    for _ in range(300):
        own = draw.choices(range(6), k=draw.randrange(4, 14))
        other = draw.choices(range(6), k=draw.randrange(4, 14))
        pairs = list(_partners(own, other, False).items())
        for (place, partner), (next_place, next_partner) in itertools.pairwise(pairs):
            assert place < next_place
            assert partner < next_partner
        if len(own) != len(other):
            count_equal += sum(own[place] == other[partner] for place, partner in pairs)
            most += longest(own, other)

    assert 0.85 * most < count_equal <= most, "near the longest, which a loop finds"


def test_every_other_condition_has_the_same_segments(model):
    prompt = ma.Prompt(tokens=(1, 20, 30, 40, 50), counterpart=(1, 20, 31, 40, 50))
    slash = ma.MeaninglessTokens("/", count=4)
    conditions = with_baseline({"other": Counterpart(), "slash": slash})
    (sequences,) = condition_sequences(conditions, [prompt], model, 0)
    own_segments = sequences["slash"].segment[~sequences["slash"].inserted]
    assert own_segments.equal(sequences[BASELINE].segment)
    (alone,) = condition_sequences(with_baseline({"slash": slash}), [prompt], model, 0)
    assert not alone[BASELINE].of_segment("changed").any()


def test_a_run_over_pairs_measures_the_changed_tokens(model):
    some = ma.pairs(model, "ioi", 4)
    result = ma.run(model, some, {"other": Counterpart()})
    values = result["received_attention"].received_by_segment.sel(segment="changed")
    assert bool(values.notnull().all())
    assert float(abs(values.diff("condition")).max()) > 1e-4
    table = result.compare("other", segment="changed", columns="all")
    assert abs(table.null).max() < 1e-6, "uniform attention doesn't see which tokens they are"


def test_versions_come_from_a_file_a_list_or_a_mapping(model, tmp_path):
    place = tmp_path / "pairs.jsonl"
    texts = ["Tom has a old", "Tom has b old"]
    rows = []

    for text in texts:
        clean = text.replace("old", "red")
        rows.append({"clean": clean, "corrupted": text, "answer": " hats", "wrong": " eggs"})

    place.write_text("\n".join(map(json.dumps, rows)))
    fields = {"field": "clean", "counterpart": "corrupted", "other_answer": "wrong"}
    prompts = ma.load_prompts(str(place), template="joined", **fields)
    assert [prompt.counterpart for prompt in prompts] == texts
    assert {(prompt.other_answer, prompt.answer) for prompt in prompts} == {(" eggs", " hats")}
    expected = Counterpart().apply(prompts[1], model).tokens

    for versions in (texts, dict(zip("01", texts, strict=True))):
        assert Counterpart(versions).apply(prompts[1], model).tokens.equal(expected)


def test_bad_versions_are_refused_in_words(model):
    prompt = ma.Prompt(tokens=(1, 20, 30), answer_tokens=(60,), id="7")
    with pytest.raises(ConditionError, match=r"prompt 7 .* has no other version: load_prompts"):
        Counterpart().apply(prompt, model)
    with pytest.raises(ConditionError, match=r"has no other version"):
        Counterpart([(1, 20, 31)]).apply(prompt, model)
    with pytest.raises(ConditionError, match=r"both versions of prompt 7 .* have the same tokens"):
        Counterpart({"7": (1, 20, 30)}).apply(prompt, model)
    with pytest.raises(OptionError, match="is a text and the other one is not"):
        Counterpart({"7": "Tom"}).apply(prompt, model)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("toy:llama", "ioi"),
        ("toy:llama", "greater-than"),
        ("toy:llama", "capitals"),
        ("toy:gemma3", "repeated-random"),
    ],
)
def test_generated_pairs_have_as_many_tokens_and_other_answers(name, source, shared):
    model = shared(name)
    prompts = ma.pairs(model, source, 12, span=(6, 9))
    assert prompts == ma.pairs(model, source, 12, span=(6, 9))
    assert prompts != ma.pairs(model, source, 12, span=(6, 9), seed=1)
    for prompt in prompts:
        own, other = both(model, prompt, Counterpart())
        assert len(own) == len(other)
        assert other.of_segment("changed").any()
        assert (prompt.answer or prompt.answer_tokens) != prompt.other_answer


def test_the_answers_of_generated_pairs_follow_from_their_versions(model):
    for prompt in ma.pairs(model, "repeated-random", 20, span=(5, 9)):
        for version, answer in (
            (prompt.tokens, prompt.answer_tokens[0]),
            (prompt.counterpart, prompt.other_answer[0]),
        ):
            earlier = [i for i, token in enumerate(version[:-1]) if token == version[-1]]
            assert [version[i + 1] for i in earlier] == [answer]

    for prompt in ma.pairs(model, "ioi", 20):
        assert (
            prompt.question.count(prompt.answer.strip())
            == 1
            == prompt.counterpart.count(prompt.other_answer.strip())
        )

    for prompt in ma.pairs(model, "greater-than", 24):
        late, early = (
            int(re.search(r"\d\d(\d\d)", text)[1]) for text in (prompt.question, prompt.counterpart)
        )
        right, other = int(prompt.answer), int(prompt.other_answer)
        assert right > late > other > early, "the other answer is right in the other version alone"
        digits = {number // 10 for number in (right, late, other, early)}
        assert len(digits) == 4, "so that first digits decide"


@pytest.mark.parametrize("source", ["ioi", "greater-than", "capitals"])
def test_pairs_are_grouped_by_template(model, source):
    prompts = ma.pairs(model, source, 40)
    groups = [prompt.group for prompt in prompts]
    templates = len(set(groups))
    assert templates >= 12
    assert groups[templates:] == groups[: len(groups) - templates], "each once before any again"

    for prompt in prompts:
        beginning = prompt.group.partition("{")[0]
        assert prompt.question.startswith(beginning)
    assert len({len(tokenize(prompt, model)) for prompt in prompts}) > 1


@pytest.mark.parametrize("source", SOURCES)
def test_pairs_may_have_one_length(model, source):
    same_length = ma.pairs(model, source, 6, same_length=True)
    assert len({len(tokenize(prompt, model)) for prompt in same_length}) == 1


def test_numbers_of_unusual_length_are_refused():
    def tokenizer(text, **_):
        return {"input_ids": [8] if text[0] == "8" else [8, 8]}

    model = SimpleNamespace(tokenizer=tokenizer, cfg=None)
    with pytest.raises(PromptError, match="a number from 80 to 99"):
        ma.pairs(model, "greater-than", 20)
