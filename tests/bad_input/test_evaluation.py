"""What evaluate refuses, before the model runs."""

import importlib

import pytest

import mechattn as ma
from mechattn.errors import ModelError, OptionError, PromptTooLong

module = importlib.import_module("mechattn.evaluation.evaluate")
SLASH = ma.MeaninglessTokens("/", 55)


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"new_tokens": 0}, OptionError, "new_tokens=0"),
        ({"samples": 2, "temperature": 0.0}, OptionError, "the same answer 2 times"),
        ({"temperature": -1}, OptionError, "temperature=-1"),
        ({"grader": "exact"}, OptionError, "grader='exact'"),
        ({"new_tokens": 2000}, PromptTooLong, "2000 new ones are allowed"),
        ({"conditions": {"x": SLASH.under(ma.Knockout(layers=1))}}, OptionError, "in some layers only"),
        ({"conditions": {"x": ma.Baseline(intervention=ma.ARM(layers=9))}}, ModelError, "layer 9 is out of range"),
        ({"conditions": {"baseline": SLASH}}, OptionError, "changes the prompt"),
    ],
)
def test_bad_input(toy, some, options, error, message, monkeypatch):
    def reached(*args):
        raise AssertionError("the model ran before the input was checked")

    monkeypatch.setattr(module, "answers", reached)
    with pytest.raises(error, match=message):
        ma.evaluate(toy, some, progress=False, **options)
