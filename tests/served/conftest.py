"""What the tests of servers share."""

from pathlib import Path

import pytest

from mechattn.evaluation import server_probe
from tests.served.stand_in import Engine


@pytest.fixture(scope="session")
def engine(toy):
    """Plain generation by toy:llama, remembered."""
    return Engine(toy._mechattn.native, toy.tokenizer)


@pytest.fixture(scope="session")
def certificate():
    """What a server of the tests shows over TLS."""
    return Path(__file__).with_name("certificate.pem")


@pytest.fixture(autouse=True)
def whole_probe(monkeypatch):
    """The runs of these tests are so short that a tenth of their tokens would probe next to nothing."""
    monkeypatch.setattr(server_probe, "SHARE", 1000)


@pytest.fixture(autouse=True)
def few_certificates(certificate, monkeypatch):
    """Each client reads the certificates that are trusted: here one, and not the hundred of the system."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
