"""Sequences: every token in its segment, BOS once, filler inserted on token ids at the right place."""

import copy
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.prompts.conditions import Variant
from mechattn.prompts.token_sequences import insert
from mechattn.prompts.tokenization import tokenize

PROMPT = ma.Prompt(
    "Tom has 3 apples. How many are left?", system="Solve it.", answer="3. Answer: 3", id="a"
)


def runs(sequence):
    """The segments in their order, each run once."""
    names = [SEGMENTS[code] for code in sequence.segment.tolist()]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def text_of(model, sequence, segment):
    return model.tokenizer.decode(sequence.tokens[sequence.of_segment(segment)])


def chatting(toy, template):
    """The toy with a chat template."""
    tokenizer = copy.deepcopy(toy.tokenizer)
    tokenizer.chat_template = template
    return SimpleNamespace(tokenizer=tokenizer, cfg=toy.cfg)


def test_plain_segments(toy):
    sequence = tokenize(PROMPT, toy)
    assert runs(sequence) == ["first", "system", "template", "question", "template", "answer"]
    assert text_of(toy, sequence, "question") == PROMPT.question
    assert text_of(toy, sequence, "system") == PROMPT.system
    assert text_of(toy, sequence, "answer") == PROMPT.answer
    assert sequence.origin.tolist() == list(range(len(sequence)))
    text = f"{PROMPT.system}\n{PROMPT.question}\n{PROMPT.answer}"
    assert sequence.tokens.tolist() == toy.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("opening", ["", "<bos>"])
def test_chat_template_with_and_without_bos_gives_it_once(toy, opening):
    model = chatting(
        toy,
        opening + "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ",
    )
    prompt = ma.Prompt(PROMPT.question, system=PROMPT.system, template="chat")
    sequence = tokenize(prompt, model)
    bos = toy.tokenizer.bos_token_id
    assert sequence.tokens.tolist().count(bos) == 1
    assert sequence.tokens[0] == bos
    assert runs(sequence) == ["first", "template", "system", "template", "question", "template"]
    assert text_of(model, sequence, "question").strip() == PROMPT.question


def test_a_chat_template_without_system_role_opens_the_users_turn(toy):
    model = chatting(
        toy,
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<u>{{ m.content }}</u>{% endfor %}",
    )
    sequence = tokenize(ma.Prompt(PROMPT.question, system=PROMPT.system, template="chat"), model)
    assert text_of(model, sequence, "system") == PROMPT.system
    assert text_of(model, sequence, "question").strip() == PROMPT.question


def test_template_words_are_not_the_question(toy):
    model = chatting(toy, "Tom is here.\n{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}")
    sequence = tokenize(ma.Prompt("Tom", template="chat"), model)
    first = int(sequence.of_segment("question").nonzero()[0])
    assert model.tokenizer.decode(sequence.tokens[:first]).endswith("<u>")


def test_a_model_without_bos_gets_none(toy):
    model = SimpleNamespace(tokenizer=toy.tokenizer, cfg=SimpleNamespace(default_prepend_bos=False))
    sequence = tokenize(PROMPT, model)
    assert runs(sequence)[:2] == ["first", "system"]
    assert sequence.first_part == "system"


@pytest.mark.parametrize("place", ["before_question", "start"])
def test_filler_before_a_question_that_comes_first(toy, place):
    model = SimpleNamespace(
        tokenizer=toy.tokenizer, cfg=SimpleNamespace(default_prepend_bos=False, d_vocab=784)
    )
    made = ma.MeaninglessTokens("/", count=4, place=place).apply(
        ma.Prompt("Tom has 3 apples."), model
    )
    assert runs(made)[:3] == ["inserted", "first", "question"]
    assert made.of_part("question").sum() == made.of_segment("question").sum() + 1


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("start", "first inserted system template question template answer"),
        ("before_question", "first system template inserted question template answer"),
        ("after_question", "first system template question inserted template answer"),
        ("before_answer", "first system template question template inserted answer"),
        ("random", "first system template question inserted question template answer"),
    ],
)
def test_places(toy, place, expected):
    sequence = ma.MeaninglessTokens("/", count=7, place=place).apply(PROMPT, toy)
    baseline = tokenize(PROMPT, toy)
    assert runs(sequence) == expected.split()
    assert int(sequence.inserted.sum()) == 7
    filler = toy.tokenizer.convert_ids_to_tokens(sequence.tokens[sequence.inserted])
    assert set(filler) == {"/", "Ġ/"}
    assert sequence.tokens[~sequence.inserted].tolist() == baseline.tokens.tolist()
    assert sequence.origin[~sequence.inserted].tolist() == list(range(len(baseline)))


def test_random_places_follow_the_seed_and_the_prompt(toy):
    condition = ma.MeaninglessTokens(place="random")

    def place(seed, id):
        prompt = ma.Prompt("one two three four five six seven eight nine ten " * 8, id=id)
        return int(condition.apply(prompt, toy, seed).inserted.nonzero()[0, 0])

    assert place(0, "a") == place(0, "a")
    assert len({place(0, id) for id in "abcdefgh"}) > 3
    assert len({place(seed, "a") for seed in range(8)}) > 3


CONTROLS = [
    ma.MeaninglessTokens("/", 21),
    ma.MeaninglessTokens("?", 20, separator=""),
    ma.conditions.RepeatedWord("apples", 20),
    ma.conditions.RandomTokens(20),
    ma.RandomSentence(20),
    ma.conditions.ShuffledSentence(20),
    ma.conditions.Counting(20),
]


def controls_with(option):
    """The controls that have this option."""
    return [condition for condition in CONTROLS if option in condition.__dataclass_fields__]


@pytest.mark.parametrize("condition", CONTROLS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("place", ["before_question", "after_question", "random"])
def test_every_condition_inserts_exactly_count_tokens(toy, condition, place):
    condition = dataclasses.replace(condition, place=place)
    baseline, made = tokenize(PROMPT, toy), condition.apply(PROMPT, toy, seed=1)
    assert int(made.inserted.sum()) == condition.count
    assert made.tokens[~made.inserted].tolist() == baseline.tokens.tolist()
    assert condition.apply(PROMPT, toy, seed=1).tokens.tolist() == made.tokens.tolist()
    where = made.inserted.nonzero().flatten()
    assert int(where[-1] - where[0]) == condition.count - 1, "one run"


@pytest.mark.parametrize("condition", controls_with("draw"), ids=lambda c: type(c).__name__)
def test_controls_are_drawn_for_each_prompt_and_seed(toy, condition):
    other_prompt = dataclasses.replace(PROMPT, id="b")
    other_draw = dataclasses.replace(condition, draw=1)
    drawn = {
        tuple(_filler(kind.apply(prompt, toy, seed)))
        for kind in (condition, other_draw)
        for prompt in (PROMPT, other_prompt)
        for seed in (0, 1)
    }
    assert len(drawn) == 8


def test_a_shuffled_sentence_has_the_tokens_of_the_sentence(toy):
    sentence, shuffled = ma.RandomSentence(30), ma.conditions.ShuffledSentence(30)
    one, other = (c.apply(PROMPT, toy, 3) for c in (sentence, shuffled))
    assert sorted(one.tokens.tolist()) == sorted(other.tokens.tolist())
    assert one.tokens.tolist() != other.tokens.tolist()


def test_random_tokens_are_ordinary(toy):
    drawn = set()
    for seed in range(20):
        drawn.update(_filler(ma.conditions.RandomTokens(50).apply(PROMPT, toy, seed)))
    assert not drawn & set(toy.tokenizer.all_special_ids)
    assert all(toy.tokenizer.decode([token]).strip() for token in drawn)
    assert len(drawn) > 300


def _filler(sequence):
    return sequence.tokens[sequence.inserted].tolist()


def test_position_ids_of_the_variants(toy):
    slash = ma.MeaninglessTokens("/", 20)
    baseline, made = tokenize(PROMPT, toy), slash.unshifted().apply(PROMPT, toy)
    kept = made.position_ids
    assert kept[~made.inserted].tolist() == list(range(len(baseline)))
    first = int(made.inserted.nonzero()[0])
    assert kept[made.inserted].tolist() == list(range(first - 20, first))
    assert slash.apply(PROMPT, toy).position_ids.tolist() == list(range(len(made)))
    assert slash.masked().apply(PROMPT, toy).cut_edges
    both = slash.masked().unshifted().apply(PROMPT, toy)
    assert both.cut_edges
    assert both.keeps_positions
    at_the_end = ma.MeaninglessTokens("/", 3, place="before_answer").unshifted()
    no_answer = ma.Prompt("Tom has 3 apples.", id="c")
    n = len(tokenize(no_answer, toy))
    last = at_the_end.apply(no_answer, toy).position_ids[-4:].tolist()
    assert last == [n - 1, n - 3, n - 2, n - 1]


def test_a_sweep_names_its_conditions():
    made = ma.sweep(ma.MeaninglessTokens("/"), count=[0, 10, 25], place=["start", "random"])
    assert list(made) == [
        "count=10, place=start", "count=10, place=random", "count=25, place=start", "count=25, place=random",
    ]  # fmt: skip
    assert made["count=25, place=start"] == ma.MeaninglessTokens("/", 25, "start")
    masked = ma.sweep(ma.RandomSentence().masked(), count=[5])
    assert masked == {"count=5": ma.RandomSentence(5).masked()}


@pytest.mark.parametrize("place", ["before_question", "start", "middle", "before_answer", "random"])
def test_a_given_text_is_inserted_once_unchanged(toy, place):
    text = " Take your time, please."
    sequence = ma.conditions.Text(text, place=place).apply(PROMPT, toy)
    assert _filler(sequence) == toy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert torch.equal(sequence.tokens[~sequence.inserted], tokenize(PROMPT, toy).tokens)
    if place == "middle":
        question = sequence.of_segment("question").nonzero().flatten()
        first = int(sequence.inserted.nonzero()[0])
        before, after = int((question < first).sum()), int((question > first).sum())
        assert 0 <= after - before <= 1


def test_a_text_behind_a_marker(toy):
    sequence = ma.conditions.Text(" Well.", after="How many").apply(PROMPT, toy)
    first = int(sequence.inserted.nonzero()[0])
    before = toy.tokenizer.decode(sequence.tokens[:first])
    assert before.endswith("How many")
    for shorter in range(1, first):  # by hand: no earlier place has it
        assert "How many" not in toy.tokenizer.decode(sequence.tokens[:shorter])
    with pytest.raises(ma.MechattnError, match=r"prompt a .* does not contain after=.Why"):
        ma.conditions.Text(" Well.", after="Why").apply(PROMPT, toy)


def test_the_nearest_count_that_a_tokenizer_can_reach(toy):
    """One that cuts each repetition into two tokens reaches even numbers alone."""

    class InTwos:
        def __call__(self, text, add_special_tokens=False):
            return {"input_ids": [1, 2] * len(text.split())}

        def decode(self, tokens):
            return "/"

    model = SimpleNamespace(tokenizer=InTwos(), cfg=toy.cfg)
    assert ma.MeaninglessTokens("/", 55).fitted(model).count == 56
    assert len(ma.MeaninglessTokens("/", 55).fitted(model).filler(PROMPT, model)) == 56
    assert ma.MeaninglessTokens("/", 1).fitted(model).count == 2
    assert ma.MeaninglessTokens("/", 55).fitted(toy) == ma.MeaninglessTokens("/", 55)
    long = ma.MeaninglessTokens(" ".join("abcdefghijklmnopqrstuvwxyzabcdefg"), 7)

    with pytest.raises(ma.MechattnError, match=r"no whole number of .* about 7 tokens"):
        long.fitted(model)


def test_a_variant_keeps_what_the_condition_marks(toy):
    @dataclasses.dataclass(frozen=True)
    class Unmoved(ma.MeaninglessTokens):
        def apply(self, prompt, model, seed=0):
            sequence = super().apply(prompt, model, seed)
            return dataclasses.replace(sequence, keeps_positions=True)

    slash = ma.MeaninglessTokens("/", 3)
    assert Unmoved("/", 3).masked().apply(PROMPT, toy).keeps_positions
    assert not slash.masked().apply(PROMPT, toy).keeps_positions

    with pytest.raises(ma.MechattnError, match="Variant has cut edges of its own"):
        Variant(slash.masked()).masked().apply(PROMPT, toy)


def test_a_kind_of_ones_own_and_tokens_at_several_places(toy):
    """An Insertion takes what ours take; inserting twice keeps origin and segments of both."""

    @dataclasses.dataclass(frozen=True)
    class Dots(ma.conditions.Insertion):
        count: int = 3
        place: str = "before_question"

        def filler(self, prompt, model, seed=0):
            return [7] * 3

    once = Dots().apply(PROMPT, toy)
    assert _filler(once) == [7, 7, 7]
    masked = Dots(place="middle").masked().unshifted().apply(PROMPT, toy)
    longer = insert(masked, [8, 8], len(masked))
    assert longer.keeps_positions
    assert longer.cut_edges.keys.tolist() == [*masked.cut_edges.keys.tolist(), False, False]

    with pytest.raises(ma.MechattnError, match="count=0: give a whole number"):
        Dots(count=0)
    message = "Dots: filler gives 3 tokens for prompt a, but count=20"
    with pytest.raises(ma.MechattnError, match=message):
        Dots(count=20).apply(PROMPT, toy)

    twice = insert(once, [8, 8], len(once))
    assert _filler(twice) == [7, 7, 7, 8, 8]
    assert torch.equal(twice.tokens[~twice.inserted], tokenize(PROMPT, toy).tokens)
    assert twice.origin[~twice.inserted].tolist() == list(range(len(once) - 3))


class InDigits:
    """Cuts a text into characters, as tokenizers cut numbers, and a number's digits with it."""

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("place", ["before_question", "after_question", "middle", "before_answer"])
@pytest.mark.parametrize("count", [5, 25, 26])
def test_counting_ends_in_a_whole_number(toy, count, place):
    model = SimpleNamespace(tokenizer=InDigits(), cfg=toy.cfg)
    filler = ma.conditions.Counting(count, place).filler(PROMPT, model)
    text = model.tokenizer.decode(filler)
    numbers = text.split()
    assert len(filler) == count
    assert numbers == [str(n + 1) for n in range(len(numbers))]
    following = f" {len(numbers) + 1}"
    assert text.count("\n") <= len(following) + 1, "no further number would have fitted"
    assert text.startswith("\n")
    assert text.endswith("\n") == (place != "after_question"), "there the template follows"


@pytest.mark.parametrize("times", [1, 3])
def test_the_question_is_repeated_token_by_token(toy, times):
    sequence = ma.conditions.RepeatQuestion(times).apply(PROMPT, toy)
    question = sequence.tokens[sequence.of_segment("question")].tolist()
    line = toy.tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert _filler(sequence) == (line + question) * times
    assert sequence.tokens[~sequence.inserted].equal(tokenize(PROMPT, toy).tokens)
    ids = ma.Prompt(tokens=tuple(tokenize(PROMPT, toy).tokens.tolist()))
    repeated = ma.conditions.RepeatQuestion(times).apply(ids, toy)
    assert _filler(repeated) == [*ids.tokens[1:]] * times, "token ids have no lines"


@pytest.mark.parametrize(
    "condition",
    [ma.conditions.Counting(count=11), ma.conditions.RepeatQuestion()],
    ids=lambda c: type(c).__name__,
)
def test_chats_have_them_in_the_users_turn(toy, condition):
    model = chatting(
        toy, "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}[assistant] "
    )
    sequence = condition.apply(ma.Prompt(PROMPT.question, template="chat"), model)
    first, *_, last = sequence.inserted.nonzero().flatten().tolist()
    before = model.tokenizer.decode(sequence.tokens[:first])
    filler = model.tokenizer.decode(sequence.tokens[first : last + 1])
    after = model.tokenizer.decode(sequence.tokens[last + 1 :])
    assert before.endswith(PROMPT.question)
    assert filler.startswith("\n")
    assert not filler.endswith("\n")
    assert after.replace(" ", "") == "</s>[assistant]"


LINES = [dataclasses.replace(condition, own_line=True) for condition in controls_with("own_line")]


@pytest.mark.parametrize("condition", LINES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("place", ["before_question", "after_question"])
def test_the_own_line_is_an_inserted_token(toy, condition, place):
    condition = dataclasses.replace(condition, place=place)
    made = condition.apply(PROMPT, toy, seed=1)
    text = toy.tokenizer.decode(made.tokens[made.inserted])
    assert int(made.inserted.sum()) == condition.count
    assert text.count("\n") == 1
    assert text.startswith("\n") == (place == "after_question")
    assert text.endswith("\n") == (place != "after_question")


class MergesFullStops(InDigits):
    """Characters, but a full stop with the line break after it is a single token, as in Qwen."""

    def __call__(self, text, add_special_tokens=False):
        merged = text.replace(".\n", "\ue000").replace("/\n", "\ue001")
        return {"input_ids": [ord(c) for c in merged]}

    def decode(self, tokens, **options):
        text = "".join(map(chr, tokens))
        return text.replace("\ue000", ".\n").replace("\ue001", "/\n")


@pytest.mark.parametrize(
    "condition",
    [
        ma.MeaninglessTokens("/", 55, separator="", own_line=True),
        ma.MeaninglessTokens("ab.", 54, separator="", own_line=True),
        ma.RandomSentence(120, own_line=True, cut=False),
        ma.RandomSentence(120, own_line=True),
    ],
    ids=str,
)
def test_a_line_break_is_tokenized_with_the_mark_before_it(toy, condition):
    """Else a server that takes texts would read other tokens than a model here."""
    tokenizer = MergesFullStops()
    model = SimpleNamespace(tokenizer=tokenizer, cfg=toy.cfg)
    filler = condition._filler_with_line(PROMPT, model, 0)
    text = tokenizer.decode(filler)
    assert len(filler) == condition.count
    assert text.endswith("\n")
    assert tokenizer(text)["input_ids"] == filler


@pytest.mark.parametrize(("count", "own_line"), [(20, True), (33, False)])
def test_whole_sentences_have_exactly_the_count(toy, count, own_line):
    condition = ma.RandomSentence(count, own_line=own_line, cut=False)
    fillers = {
        seed: toy.tokenizer.decode(_filler(condition.apply(PROMPT, toy, seed))).strip()
        for seed in range(5)
    }
    assert all(re.fullmatch(r"([A-Z][^.]+\.\s?)+", text) for text in fillers.values())
    assert len(set(fillers.values())) == 5
    cut = toy.tokenizer.decode(_filler(ma.RandomSentence(20).apply(PROMPT, toy)))
    assert not cut.endswith("."), "the check would see a cut sentence"


def test_sentences_that_cannot_be_whole_are_told(toy):
    with pytest.raises(ma.MechattnError, match="no whole sentences of 3 tokens"):
        ma.RandomSentence(3, cut=False).apply(PROMPT, toy)
    with pytest.raises(OptionError, match="a line of its own takes at least two tokens"):
        ma.MeaninglessTokens("/", 1, own_line=True)
