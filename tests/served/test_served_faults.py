"""A server that is slow, busy, broken, cut off, or another: nothing is lost, nothing counted twice, no key is told."""

import json
import logging
import time

import pytest

import mechattn as ma
from mechattn.errors import OutputError, ServerError
from mechattn.evaluation import served_answers, server, server_completions
from tests.served.stand_in import StandIn, asked_of, running

SLASH = ma.MeaninglessTokens("/", 20)
KEY = "sk-4f1d-never-to-be-seen"


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=3)


@pytest.fixture(scope="module")
def here(toy, some):
    return ma.evaluate(toy, some, {"slash": SLASH}, new_tokens=20)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(server_completions, "_FIRST_GARBLED_WAIT", 0.001)
    monkeypatch.setattr(server, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(server, "_LONGEST_WAIT", 0.01)


def there(prompts, server, **options):
    given = asked_of(server, {"new_tokens": 20, "batch": 4} | options)
    return ma.evaluate("toy:llama", prompts, {"slash": SLASH}, **given)


def of_answers(server, number):
    """How many answers were requested before this request, probes left out; None for a request of a probe."""
    before = [body["max_tokens"] == 20 for body in server.asked[: number + 1]]
    return sum(before) - 1 if before[-1] else None


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def as_told(answers):
    return [(a.prompt, a.condition, a.tokens, a.right) for a in answers]


@pytest.mark.parametrize(
    "fault",
    [429, 500, pytest.param("slow", marks=pytest.mark.slow), "cut", "half", "twice", "aborted"],
    ids=lambda fault: str(fault),
)
def test_a_fault_now_and_then_changes_nothing(some, engine, here, fault, tmp_path):
    """In the probe and among the answers: what was asked for again is there once."""
    often = 12 if fault == "slow" else 3
    path = tmp_path / "answers.jsonl"

    def now_and_then(
        number,
    ):  # three times at most for one request: a fault that stays is another test
        return (
            fault
            if number % often == 2 and server.asked[:number].count(server.asked[number]) < 3
            else None
        )

    with running(StandIn(engine, fault=now_and_then)) as server:
        made = there(some, server, out=path, timeout=1.0 if fault == "slow" else 60)
        assert len(server.asked) > 4 + 4 * 6 + 6, "nothing was asked for again"
    assert as_told(made.answers) == as_told(here.answers)
    written = rows(path)
    assert len({(r["prompt"], r["condition"], r["sample"]) for r in written}) == len(written) == 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (500, r"answers 500: .*busy"),
        (429, r"answers 429: .*busy"),
        ("half", r"gives no readable answer \(its JSON is incomplete"),
        ("twice", r"it has 2 choices, but one was requested"),
        ("aborted", r"was not finished: finish_reason is 'abort'"),
        ("another", r"answers as 'another', but 'toy' was asked for"),
    ],
    ids=str,
)
def test_a_fault_that_stays_loses_nothing(some, engine, here, fault, message, tmp_path):
    """It ends the run, what came before is kept, and the same call goes on."""
    path = tmp_path / "answers.jsonl"
    with running(
        StandIn(
            engine, fault=lambda number: fault if (of_answers(server, number) or 0) >= 3 else None
        )
    ) as server:
        with pytest.raises(ServerError, match=message):
            there(some, server, out=path, batch=1)
        assert len(rows(path)) == 3
        server.fault = None
        server.bodies.clear()
        made = there(some, server, out=path, batch=3)
        assert sum(body["max_tokens"] == 20 for body in server.asked) == 6 - 3
    assert as_told(made.answers) == as_told(here.answers)


def test_answers_that_are_under_way_beside_a_failure_are_kept(some, engine, tmp_path, monkeypatch):
    """Four at once, one of which fails for good: the three others are written before the error is raised."""
    path = tmp_path / "answers.jsonl"
    monkeypatch.setattr(served_answers, "stretches", lambda todo, seed: [todo])

    def fault(number):
        if of_answers(server, number) == 0:
            return "another"
        time.sleep(0.1)
        return None

    with (
        running(StandIn(engine, fault=fault)) as server,
        pytest.raises(ServerError, match="answers as 'another'"),
    ):
        there(some, server, out=path)
    assert len(rows(path)) == 3


def test_no_more_at_once_than_asked_for(some, engine):
    made = StandIn(engine)

    def until_three_wait(number):
        """Two are held up until there are three; if a fourth came then, it would be counted."""
        end = time.monotonic() + 20
        while made.busy > 1 and made.busiest < 3 and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.02)

    made.fault = until_three_wait
    with running(made) as server:
        there(some[:2], server, batch=3, verify=False)
        assert server.busiest == 3


def test_nothing_more_is_asked_for_where_nothing_can_be_written(
    some, engine, tmp_path, monkeypatch
):
    from mechattn.evaluation.answer_file import Kept

    def full(self, answer):
        raise OutputError("there is no room")

    monkeypatch.setattr(Kept, "add", full)
    with running(StandIn(engine)) as server:
        with pytest.raises(OutputError, match="no room"):
            there(some, server, batch=2)
        assert sum(body["max_tokens"] == 20 for body in server.asked) < 6


def test_nobody_is_there(some):
    began = time.monotonic()
    with pytest.raises(
        ServerError,
        match=r"the server at http://127\.0\.0\.1:9/v1 cannot be reached, or closed the connection",
    ):
        ma.evaluate("toy:llama", some, server="http://127.0.0.1:9/v1")
    assert time.monotonic() - began < 60  # and not after all the retries of an answer


def test_another_name(some, engine):
    with (
        running(StandIn(engine)) as server,
        pytest.raises(ServerError, match=r"answers 404: .*does not exist"),
    ):
        there(some, server, model="qwen")


def test_certificates_are_checked(some, engine, certificate, monkeypatch):
    """Nothing is asked of a server whose certificate nobody has signed, unless the user trusts it by a file."""
    monkeypatch.delenv("SSL_CERT_FILE")
    with running(StandIn(engine), certificate) as server:
        with pytest.raises(
            ServerError,
            match=r"cannot be reached, or closed the connection .*CERTIFICATE_VERIFY_FAILED",
        ):
            there(some[:2], server)
        assert not server.headers
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        there(some[:2], server)
        assert server.headers


def test_the_key_goes_to_the_server_alone(some, engine, tmp_path, monkeypatch, caplog, capsys):
    """In no file, log, error, provenance or repr, though the server repeats it; others of the environment stay here."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LAB_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-account")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-another-account")
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine, key=KEY)) as server:
        made = there(some[:2], server, key="LAB_KEY", out=path)
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        assert not any(
            "another-account" in value for headers in server.headers for value in headers.values()
        )
        monkeypatch.setenv("LAB_KEY", KEY + "x")  # it is refused, and repeated
        with pytest.raises(ServerError, match=r"answers 401: .*who is Bearer ….*key=") as refused:
            there(some[:2], server, key="LAB_KEY", out=tmp_path / "more.jsonl")
        with pytest.raises(ServerError, match=r"answers 401: .*who is Bearer none"):
            there(some[:2], server)
    given = ma.Server(server.address, key="LAB_KEY")
    causes = [refused.value, refused.value.__cause__]
    told = [
        path.read_text(),
        caplog.text,
        repr(made.provenance),
        repr(given),
        str(given),
        *map(str, causes),
    ]
    told += [*capsys.readouterr(), refused.exconly()]
    assert given.secret == KEY + "x"
    assert not any(KEY in text for text in told)
