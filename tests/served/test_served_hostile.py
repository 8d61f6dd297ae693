"""A server that is not to be trusted: what it gets, what it sends, and how much of it is read."""

import gzip
import logging

import pytest

from mechattn.errors import ServerError
from tests.served.stand_in import StandIn, running, served

pytestmark = pytest.mark.usefixtures("no_waiting")
KEY = "sk-4f1d-never-to-be-seen"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_server_gets_only_the_key(prompts, engine, monkeypatch):
    """Headers that the environment gives for OpenAI, one of which would replace the key."""
    monkeypatch.setenv("LAB_KEY", KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer of-other\nX-Lab: of-other")
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-other")
    with running(StandIn(engine, key=KEY)) as server:
        served(server, prompts[:1], key="LAB_KEY")
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    values = [value for headers in server.headers for value in headers.values()]
    assert not any("of-other" in value for value in values)
    assert not any(name.startswith("x-") for headers in server.headers for name in headers)


@pytest.mark.parametrize("place", ["a text", "an error"])
def test_the_key_is_shown_nowhere(prompts, engine, place, tmp_path, monkeypatch, caplog, capsys):
    """In no file, log, error or provenance, though the server repeats it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LAB_KEY", KEY)
    path = tmp_path / "answers.jsonl"

    def change(reply):
        if place == "a text":
            (choice,) = reply["choices"]
            reply["choices"] = [choice | {"text": f"so {KEY}", "token_ids": None}]
        return reply

    def fault(handler, body):
        return place == "an error" and handler.send(404, {"error": f"no {KEY}"})

    with running(StandIn(engine, key=KEY, change=change, fault=fault)) as server:
        if place != "an error":
            evaluation = served(server, prompts[:1], key="LAB_KEY", out=path)
            shown = [repr(evaluation.provenance), repr(evaluation.answers)]
        else:
            with pytest.raises(ServerError) as error:
                served(server, prompts[:1], key="LAB_KEY", out=path)
            shown = [error.exconly(), repr(error.value.__cause__)]
    shown += [path.read_text(), caplog.text, *capsys.readouterr()]
    assert not any(KEY in text for text in shown)


def test_a_key_that_is_refused(prompts, engine, monkeypatch):
    monkeypatch.setenv("LAB_KEY", KEY + "x")
    with running(StandIn(engine, key=KEY)) as server:
        with pytest.raises(ServerError, match=r"answers 401: .*who is Bearer ….*key="):
            served(server, prompts, key="LAB_KEY")
        with pytest.raises(ServerError, match=r"answers 401: .*who is Bearer none"):
            served(server, prompts)


@pytest.mark.parametrize("asks_for_models", [True, False])
def test_a_redirect_is_not_followed(prompts, engine, asks_for_models):
    def away(handler, body):
        is_elsewhere = asks_for_models or body is not None
        return is_elsewhere and handler.send(307, {}, Location=f"{other.address}/completions")

    with running(StandIn(engine)) as other, running(StandIn(engine, fault=away)) as server:
        with pytest.raises(ServerError, match="answers 307: "):
            served(server, prompts)
        assert not other.headers


def without_end(handler, body):
    """Text that goes on until nobody reads it."""
    if body is None:
        return False
    handler.send(200, b'{"text": "', length=2**40)
    try:
        while True:
            handler.wfile.write(b"a" * 2**16)
    except OSError:
        return True


def zipped(handler, body):
    """A reply of a few hundred bytes that would be 16 MiB."""
    content = gzip.compress(gzip.compress(b"a" * 2**24))
    return body is not None and handler.send(200, content, Content_Encoding="gzip, gzip")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_end, r"its reply has more than [12]\d\d,\d{3} bytes"),
        (zipped, "gives no finished completion"),
    ],
)
def test_an_endless_reply_is_not_read(prompts, engine, fault, message):
    with (
        running(StandIn(engine, fault=fault)) as server,
        pytest.raises(ServerError, match=message),
    ):
        served(server, prompts)


ODD_CHOICES = {
    "nested": {"logprobs": b"[" * 60_000},
    "a lone surrogate": {"text": "\ud800", "token_ids": None},
    "token ids of text": {"token_ids": ["5"]},
    "a list as a reason": {"finish_reason": ["stop"]},
    "a log-probability of 400 digits": {"logprobs": {"token_logprobs": [10**400]}},
    "log-probabilities of the prompt as numbers": {"prompt_logprobs": [1] * 300},
}


@pytest.mark.parametrize("kind", [*ODD_CHOICES])
def test_an_odd_reply_is_refused(prompts, server, kind):
    """Never another error than ours."""

    def fault(handler, body):
        if body is None:
            return False
        reply = handler.stand_in.reply(body)
        if kind == "nested":
            return handler.send(200, b'{"choices": ' + b"[" * 60_000)
        reply["choices"][0] |= ODD_CHOICES[kind]
        return handler.send(200, reply)

    server.fault = fault
    with pytest.raises(ServerError, match="gives no finished completion but"):
        served(server, prompts)


def test_a_server_without_a_count_of_what_it_read(prompts, server):
    server.change = lambda reply: reply | {"usage": None}
    with pytest.raises(ServerError, match="does not say how many tokens it has read"):
        served(server, prompts)
    evaluation = served(server, prompts, verify=False)
    assert not evaluation.provenance["probe"]["counted"]


def test_a_proxy_of_the_environment_gets_nothing_for_this_machine(prompts, engine, monkeypatch):
    with running(StandIn(engine)) as proxy, running(StandIn(engine)) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.address.removesuffix("/v1"))
        monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")  # for which a package is missing
        served(server, prompts)
        assert server.headers
        assert not proxy.headers
        monkeypatch.delenv("ALL_PROXY")
        server.address = "http://models.example/v1"
        served(server, prompts)
        assert {headers["host"] for headers in proxy.headers} == {"models.example"}
