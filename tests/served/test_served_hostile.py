"""A server that is not to be trusted: what it gets, what it sends, and how much of it is read."""

import gzip
import logging
import threading

import pytest

import mechattn as ma
from mechattn.errors import OptionError, ServerError
from mechattn.evaluation import server_completions, server_probe
from tests.served.stand_in import StandIn, asked_of, running

KEY = "sk-4f1d-never-to-be-seen"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(server_completions, "_FIRST_GARBLED_WAIT", 0.001)
    monkeypatch.setattr(server_probe, "TOKENS", 8)
    for name in (*PROXIES, *map(str.lower, PROXIES)):
        monkeypatch.delenv(name, raising=False)


def there(prompts, server, **options):
    given = asked_of(server, {"new_tokens": 12} | options)
    return ma.evaluate("toy:llama", prompts, **given)


def test_nothing_of_the_environment_is_sent(some, engine, monkeypatch):
    """Headers that the environment gives for OpenAI, one of which would replace the key."""
    monkeypatch.setenv("LAB_KEY", KEY)
    monkeypatch.setenv(
        "OPENAI_CUSTOM_HEADERS", "Authorization: Bearer sk-of-another\nX-Lab: of-another"
    )
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-another")
    with running(StandIn(engine, key=KEY)) as server:
        there(some, server, key="LAB_KEY")
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert not any(
        "of-another" in value for headers in server.headers for value in headers.values()
    )


@pytest.mark.parametrize("of", ["the list of models", "the answers"])
def test_a_redirect_is_not_followed(some, engine, of):
    def away(handler):
        if of == "the answers" and handler.command == "GET":
            return False
        handler.send(307, {}, Location=f"{other.address}{handler.path.removeprefix('/v1')}")
        return True

    with running(StandIn(engine)) as other, running(StandIn(engine, raw=away)) as server:
        with pytest.raises(
            ServerError, match=rf"answers 307: go to {other.address}.* give the other one"
        ):
            there(some, server)
        assert not other.headers


def without_end(handler):
    """Text that goes on until nobody reads it."""
    handler.send(200, b'{"text": "', length=2**40)
    try:
        while True:
            handler.wfile.write(b"a" * 2**16)
    except OSError:
        return True


def zipped_twice(handler):
    """A reply of a few hundred bytes that would be 64 MiB."""
    handler.send(200, gzip.compress(gzip.compress(b"a" * 2**26)), Content_Encoding="gzip, gzip")
    return True


@pytest.mark.parametrize("reply", [without_end, zipped_twice])
def test_a_reply_is_not_read_beyond_what_an_answer_can_be(some, engine, reply):
    def raw(handler):
        return handler.command == "POST" and reply(handler)

    with (
        running(StandIn(engine, raw=raw)) as server,
        pytest.raises(
            ServerError, match=r"replies with more than 1\d\d,\d{3} bytes|compresses its replies"
        ),
    ):
        there(some, server)


def test_compression_is_not_asked_for(some, engine):
    with running(StandIn(engine)) as server:
        there(some, server)
    assert {headers["accept-encoding"] for headers in server.headers} == {"identity"}


@pytest.mark.parametrize("tells", ["ids", "a count", "text"])
def test_an_answer_is_not_longer_than_allowed(some, engine, tells):
    """A server that ignores max_tokens, whatever it says of that."""

    def change(made):
        (choice,) = made["choices"]
        if server.asked[-1]["max_tokens"] != 12:  # of a probe
            return made
        if tells == "ids":
            choice["token_ids"] = [5] * 5003
        elif tells == "a count":
            made["usage"]["completion_tokens"] = 5003
        else:
            choice.pop("token_ids", None)
            choice["text"] = "12 " * 5003
        return made

    ids = tells != "text"
    with (
        running(StandIn(engine, change=change, takes_ids=ids)) as server,
        pytest.raises(ServerError, match=r"has generated [\d,]+ tokens where 12 were allowed"),
    ):
        there(some, server, batch=1)


@pytest.mark.parametrize(
    "where", ["model", "finish_reason", "text", "ids", "list", "error", "redirect"]
)
def test_a_key_that_is_repeated_is_shown_nowhere(
    some, engine, where, tmp_path, monkeypatch, caplog, capsys
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LAB_KEY", KEY)

    def change(made):
        if where == "model":
            return made | {"model": KEY}
        (choice,) = made["choices"]
        if where == "ids":
            ids = engine.tokenizer(KEY, add_special_tokens=False)["input_ids"]
            assert engine.tokenizer.decode(ids) == KEY
            return made | {"choices": [choice | {"token_ids": ids}]}
        return made | {"choices": [choice | {where: f"so {KEY}"}]} if where in choice else made

    def raw(handler):
        if where == "list" and handler.command == "GET":
            handler.send(200, {"data": [{"id": KEY}]})
        elif where == "error":
            handler.send(404, {"error": f"no {KEY}"})
        elif where == "redirect":
            handler.send(302, {}, Location=f"http://host/{KEY}")
        else:
            return False
        return True

    path = tmp_path / "answers.jsonl"
    with (
        running(StandIn(engine, change=change, raw=raw)) as server,
        pytest.raises(ServerError) as refused,
    ):
        there(some, server, key="LAB_KEY", out=path, new_tokens=40)
    told = [
        path.read_text(),
        caplog.text,
        *capsys.readouterr(),
        str(refused.value),
        refused.exconly(),
    ]
    assert KEY not in "".join(told)
    assert "repeats the key" in str(refused.value) or where in ("error", "redirect")


@pytest.mark.parametrize("key", ["sk-é-1234567", "sk-1234567\nX-Other: 1", "sk 1234567"])
def test_a_key_that_no_header_can_carry(some, key, monkeypatch):
    monkeypatch.setenv("LAB_KEY", key)
    with pytest.raises(
        OptionError, match="holds a space, a line break or a character outside ASCII"
    ) as refused:
        ma.evaluate("toy:llama", some, server=ma.Server("http://127.0.0.1:9/v1", key="LAB_KEY"))
    assert "1234567" not in str(refused.value)


@pytest.mark.parametrize("of", ["head", "content"])
def test_an_answer_that_never_ends_is_given_up(some, engine, of, monkeypatch):
    """One byte after the other, each within the time that is allowed for the whole."""
    monkeypatch.setattr(server_completions, "_RETRIES", 0)

    def drip(handler):
        if handler.command == "GET":
            return False
        if of == "content":
            handler.send(200, b"{", length=2**20)
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        try:
            while not gone.wait(0.05):
                handler.wfile.write(b" " if of == "content" else b"X: 1\r\n")
        except OSError:
            pass
        return True

    gone = threading.Event()
    try:
        with (
            running(StandIn(engine, raw=drip)) as server,
            pytest.raises(ServerError, match=r"gives no answer within 0\.4 s \(timeout\)"),
        ):
            there(some, server, timeout=0.4)
    finally:
        gone.set()


DEEP = b'{"choices": ' + b"[" * 60_000 + b"]" * 60_000 + b"}"
ODD = {
    "nested": (DEEP, "no readable answer"),
    "a lone surrogate": ({"text": "\ud800"}, "no readable answer"),
    "token id -1": ({"token_ids": [5, -1]}, "its token ids are not whole numbers below"),
    "token id 10^30": ({"token_ids": [5, 10**30]}, "its token ids are not whole numbers below"),
    "token ids of text": ({"token_ids": ["5"]}, "its token ids are not whole numbers below"),
    "no text": ({"text": None}, "was not finished"),
    "a list as a reason": ({"finish_reason": ["stop"]}, "was not finished"),
    "a log-probability of 400 digits": ({"logprobs": {"token_logprobs": [-(10**400)]}}, None),
    "a log-probability of text": ({"logprobs": {"token_logprobs": ["-1"]}}, None),
    "log-probabilities of the prompt as numbers": ({"prompt_logprobs": [1] * 300}, None),
}


@pytest.mark.parametrize("given", [*ODD])
def test_an_odd_reply_is_an_error_or_nothing(toy, some, engine, given):
    """Never another error than ours: it is refused, or left out where an answer can do without."""
    odd, message = ODD[given]

    def raw(handler):
        if handler.command == "GET" or odd is not DEEP:
            return False
        handler.send(200, DEEP)
        return True

    def change(made):
        return made | {"choices": [made["choices"][0] | odd]}

    with running(StandIn(engine, change=change, raw=raw)) as server:
        if message is None:
            assert len(ma.evaluate(toy, some, new_tokens=12, server=server.address).answers) == 2
        else:
            with pytest.raises(ServerError, match=message):
                ma.evaluate(toy, some, new_tokens=12, server=server.address)


@pytest.mark.parametrize("longest", ["4096", -1, 10.5, [], True])
def test_a_limit_that_is_no_number_is_none(some, engine, longest):
    with running(StandIn(engine, longest=longest)) as server:
        assert len(there(some, server).answers) == 2


@pytest.mark.parametrize("data", [[{"id": 5}], [{"id": []}], [5], {"toy": 1}, None])
def test_a_list_of_models_that_is_none(some, engine, data):
    def raw(handler):
        return handler.command == "GET" and (handler.send(200, {"data": data}) or True)

    with running(StandIn(engine, raw=raw)) as server:
        with pytest.raises(ServerError, match="it lists none: give model="):
            there(some, server)
        assert len(there(some, server, model="toy").answers) == 2


@pytest.mark.parametrize("tells", ["ids", "text"])
def test_a_server_without_a_count_of_what_it_read(some, engine, tells):
    """Where it tells the ids these are compared; otherwise nothing shows what it has read, which is not passed over."""

    def change(made):
        return {name: value for name, value in made.items() if name != "usage"}

    with running(StandIn(engine, change=change, takes_ids=tells == "ids")) as server:
        if tells == "ids":
            assert there(some, server).provenance["probe"]["counted"] is True
            server.change = lambda made: change(
                made | {"choices": [made["choices"][0] | {"prompt_token_ids": None}]}
            )
        with pytest.raises(
            ServerError, match=r"says neither how many tokens it has read \(usage\.prompt_tokens\)"
        ):
            there(some, server)
        assert there(some, server, verify=False).provenance["probe"]["counted"] is False


def test_a_proxy_of_the_environment_gets_nothing_for_this_machine(some, engine, monkeypatch):
    with running(StandIn(engine)) as proxy, running(StandIn(engine)) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.address.removesuffix("/v1"))
        there(some, server)
        assert server.headers
        assert not proxy.headers
        with pytest.warns(
            UserWarning, match=r"go through the environment's proxy .*can read prompts and key"
        ):
            ma.evaluate("toy:llama", some, new_tokens=12, server="http://models.example/v1")
        assert {headers["host"] for headers in proxy.headers} == {"models.example"}


@pytest.mark.parametrize(
    "proxy", ["socks5://user:hunter2@127.0.0.1:9", "gopher://hunter2", "http://[::1"]
)
def test_a_proxy_that_cannot_be_used(some, engine, proxy, monkeypatch):
    for name in ("ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    with running(StandIn(engine)) as server:
        there(some, server)  # on this machine
    with pytest.raises(
        ServerError, match=r"a proxy or certificates of the environment cannot be used"
    ) as refused:
        ma.evaluate("toy:llama", some, server="http://models.example/v1")
    assert "hunter2" not in str(refused.value)
