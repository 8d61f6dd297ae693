"""Random tokens that are repeated: drawn from the model's own vocabulary, the same for the same seed."""

from types import SimpleNamespace

import pytest

import mechattn as ma
from mechattn.errors import OptionError

MODEL = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(d_vocab=12, default_prepend_bos=False))


def test_a_span_is_read_twice(toy):
    prompts = ma.repeated_random(toy, 20)
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
    assert ma.repeated_random(toy, 3) == ma.repeated_random(toy, 5)[:3]
    assert ma.repeated_random(toy, 3) != ma.repeated_random(toy, 3, seed=1)


def test_three_times_and_without_a_tokenizer():
    (prompt,) = ma.repeated_random(MODEL, 1, span=(4, 4), times=3)
    assert prompt.tokens == prompt.tokens[:4] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": (5, 3)}, "give a shortest and a longest span"),
        ({"span": 5}, "span=5: give a shortest and a longest span"),
        ({"times": 1}, "times=1: give a whole number, at least 2"),
        ({"span": (13, 13)}, "a span of 13 different tokens needs a larger vocabulary than 12"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(OptionError, match=message):
        ma.repeated_random(MODEL, **({"limit": 1} | options))


def test_a_pair_takes_a_span_with_another_successor():
    with pytest.raises(OptionError, match="of at least 3"):
        ma.pairs(MODEL, "repeated-random", 1, span=(2, 4))
    (prompt,) = ma.pairs(MODEL, "repeated-random", 1, span=(3, 3))
    assert sorted(prompt.counterpart[:3]) == sorted(prompt.tokens[:3])
