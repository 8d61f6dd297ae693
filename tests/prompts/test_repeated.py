"""Random tokens that are repeated: drawn from the model's own vocabulary, the same for the same seed."""

from types import SimpleNamespace

import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.prompts.repeated import repeated_random


def test_a_span_is_read_twice(toy):
    prompts = ma.load_prompts("repeated-random", limit=20, model=toy)
    assert len({prompt.tokens for prompt in prompts}) == 20
    lengths = set()
    for prompt in prompts:
        tokens = prompt.tokens[1:] if toy.cfg.default_prepend_bos else prompt.tokens
        half = len(tokens) // 2
        assert tokens[:half] == tokens[half:]
        assert len(set(tokens)) == half, "no token comes twice within a span"
        assert not set(tokens) & set(toy.tokenizer.all_special_ids)
        lengths.add(half)
    assert min(lengths) >= 25
    assert max(lengths) <= 50
    assert len(lengths) > 5


def test_the_seed_decides(toy):
    assert repeated_random(toy, 3) == repeated_random(toy, 5)[:3]
    assert repeated_random(toy, 3) != repeated_random(toy, 3, seed=1)


def test_three_times_and_without_a_tokenizer():
    model = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(d_vocab=12, default_prepend_bos=False))
    (prompt,) = repeated_random(model, 1, span=(4, 4), times=3)
    assert prompt.tokens == prompt.tokens[:4] * 3


def test_it_can_be_run(toy):
    result = ma.run(
        toy, ma.load_prompts("repeated-random", limit=3, model=toy), {}, [ma.analyses.AttentionFocus()], progress=False
    )
    masses = result["attention_focus"].induction_mass.sel(segment="question")
    assert (masses > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": (0, 3)}, "at least two repetitions"),
        ({"span": (5, 3)}, "at least two repetitions"),
        ({"times": 1}, "at least two repetitions"),
        ({"span": (13, 13)}, "a span of 13 different tokens needs a larger vocabulary than 12"),
    ],
)
def test_bad_input(options, message):
    model = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(d_vocab=12, default_prepend_bos=False))
    with pytest.raises(OptionError, match=message):
        repeated_random(model, 1, **options)


def test_without_a_model():
    with pytest.raises(OptionError, match=r'load_prompts\("repeated-random", model=model\)'):
        ma.load_prompts("repeated-random")


@pytest.mark.parametrize(
    "option",
    [
        {"field": "text"}, {"answer_field": "reply"}, {"group_field": "kind"}, {"system": ""}, {"template": "chat"},
        {"with_answer": True}, {"split": "train"}, {"subset": "main"},
    ],
)  # fmt: skip
def test_an_option_that_random_tokens_ignore_is_refused(toy, option):
    ((name, value),) = option.items()
    with pytest.raises(OptionError, match=rf'^{name}={value!r}: "repeated-random" draws token ids.* omit it'):
        ma.load_prompts("repeated-random", limit=2, model=toy, **option)


def test_two_ignored_options_are_named_together(toy):
    with pytest.raises(OptionError, match=r"^system='Be brief\.', with_answer=True: .* omit them"):
        ma.load_prompts("repeated-random", model=toy, system="Be brief.", with_answer=True)


def test_options_at_their_defaults_are_taken(toy):
    """A config hands over all options, most of them at their defaults."""
    given = {"field": "question", "answer_field": "answer", "group_field": None, "system": None, "template": "plain"}
    given |= {"with_answer": False, "split": "test", "subset": None}
    plain = ma.load_prompts("repeated-random", limit=2, seed=3, model=toy)
    assert ma.load_prompts("repeated-random", limit=2, seed=3, model=toy, **given) == plain
