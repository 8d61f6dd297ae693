"""What the tests of servers share."""

import copy
from functools import cache
from pathlib import Path

import openai
import pytest
import torch

import mechattn as ma
from mechattn.evaluation import server_probe
from tests.served.stand_in import Engine, StandIn, running


@pytest.fixture(scope="session")
def engine(toy):
    """Plain generation by toy:llama, remembered."""
    return Engine(toy._mechattn.native, toy.tokenizer)


@pytest.fixture(scope="session")
def prompts():
    return ma.load_prompts("word-problems", limit=3)


@pytest.fixture
def server(engine):
    with running(StandIn(engine)) as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def certificate():
    """What a server of the tests shows over TLS."""
    return Path(__file__).with_name("certificate.pem")


@pytest.fixture(autouse=True)
def short_probe(monkeypatch):
    """A probe's answers have eight tokens, fewer than most tests' own (`StandIn.answers_asked` tells them by that)."""
    monkeypatch.setattr(server_probe, "MOST_ANSWER_TOKENS", 8)


@pytest.fixture
def no_waiting(monkeypatch):
    """A request is repeated at once."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.01)


@pytest.fixture(autouse=True)
def few_certificates(certificate, monkeypatch):
    """Each client reads the certificates that are trusted: here one, and not the hundred of the system."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


def rounded(bits):
    """Rounds weights to so many bits, with one scale a row."""

    def change(weights):
        scale = weights.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weights / scale).round() * scale

    return change


def with_noise(share):
    """Adds noise of a share of the weights' spread."""
    return lambda weights: weights + share * weights.std() * torch.randn_like(weights)


CHANGES = {
    "8 bits": rounded(8),
    "4 bits": rounded(4),
    "2 bits": rounded(2),
    "30 % noise": with_noise(0.3),  # three in four answers are still those of the model
}


@pytest.fixture(scope="session")
def changed_engine(engine):
    """The engine with other weights, by the name of the change."""

    @cache
    def changed(name):
        model = copy.deepcopy(engine.model)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(CHANGES[name](parameter))
        return Engine(model, engine.tokenizer)

    return changed
