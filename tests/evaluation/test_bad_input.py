"""What evaluate refuses, before the model runs."""

import importlib

import pytest

import mechattn as ma
from mechattn.errors import MechattnError, ModelError, OptionError, PromptTooLong
from mechattn.evaluation.generate import Generation

SLASH = ma.MeaninglessTokens("/", 55)


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"new_tokens": 0}, OptionError, "new_tokens=0"),
        ({"temperature": -1}, OptionError, "temperature=-1"),
        ({"new_tokens": 2000}, PromptTooLong, "its answer up to 2,000"),
        (
            {"conditions": {"x": SLASH.under(ma.interventions.AttentionKnockout(layers=1))}},
            OptionError,
            "in some layers only",
        ),
        (
            {"conditions": {"x": ma.Baseline(intervention=ma.interventions.ARM(layers=9))}},
            OptionError,
            "layer 9 is out of range",
        ),
        ({"conditions": {"baseline": SLASH}}, OptionError, "the baseline is the unchanged prompt"),
    ],
)
def test_bad_input(toy, some, options, error, message, monkeypatch):
    def reached(generation):
        raise AssertionError("the model ran before the input was checked")

    monkeypatch.setattr(Generation, "advance", reached)
    with pytest.raises(error, match=message):
        ma.evaluate(toy, some, **options)


ADDRESS = "http://127.0.0.1:9/v1"  # where nobody is


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "host:8000"}, r"address='host:8000': give an address such as"),
        ({"server": "http://host:99999/v1"}, r"give an address such as"),
        (
            {"server": ADDRESS, "new_tokens": 2000},
            r"its answer up to 2,000; toy:llama takes 1,024",
        ),
        (
            {
                "server": ADDRESS,
                "conditions": {"x": ma.Baseline(intervention=ma.interventions.ARM())},
            },
            "'x' acts inside the model",
        ),
        (
            {"server": ADDRESS, "conditions": {"x": SLASH.masked()}},
            "'x' acts inside the model",
        ),
    ],
)
def test_what_a_server_is_not_asked_for(some, options, message, monkeypatch):
    """Found before anybody is spoken to."""
    served = importlib.import_module("mechattn.evaluation.served_answers")
    monkeypatch.setattr(served, "connected", lambda *args: pytest.fail("the server was spoken to"))
    with pytest.raises(MechattnError, match=message):
        ma.evaluate("toy:llama", some, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": f" {ADDRESS} "}, "address=' http.*give an address such as"),
        ({"address": "http:h:8000/v1"}, "address='http:h:8000/v1': give an address"),
        ({"timeout": True}, "timeout=True: give a number of seconds"),
        ({"verify": "no"}, "verify='no': give True or False"),
        ({"model": 7}, "model=7: give the name of the model on the server"),
        ({"key": 5}, "key is not the name of an environment variable"),
    ],
)
def test_values_that_a_server_does_not_take(options, message):
    with pytest.raises(OptionError, match=message):
        ma.Server(**{"address": ADDRESS} | options)


@pytest.mark.parametrize(
    "options",
    [
        {"address": "http://user:hunter2@host:8000/v1"},
        {"address": ADDRESS, "key": "sk-hunter2"},  # no environment variable
        {"address": ADDRESS, "key": "hunter2hunter2hunter2hunter2"},
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated(options):
    with pytest.raises(OptionError, match="variable") as raised:
        ma.Server(**options)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("key", ["sk-é-1234567", "sk-1234567\nX-Other: 1"])
def test_a_key_that_no_header_can_carry(key, monkeypatch):
    monkeypatch.setenv("LAB_KEY", key)
    with pytest.raises(OptionError, match="printable ASCII without spaces") as raised:
        ma.Server(ADDRESS, key="LAB_KEY")
    assert "1234567" not in str(raised.value)


def test_the_package_that_asks_is_named(some, monkeypatch):
    server = importlib.import_module("mechattn.evaluation.server")
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r'pip install "mechattn\[server\]"'):
        ma.evaluate("toy:llama", some, server=ADDRESS)


def test_no_model_is_read_for_a_server(some, monkeypatch):
    load = importlib.import_module("mechattn.model.load")
    monkeypatch.setattr(
        load, "load_model", lambda *args, **options: pytest.fail("a model was loaded")
    )
    with pytest.raises(ModelError, match="there is no toy 'toy:lama'"):
        ma.evaluate("toy:lama", some, server=ADDRESS)
