"""A server that is slow, busy, broken, cut off, or another: nothing is lost, nothing counted twice."""

import json
import signal
import threading

import pytest

import mechattn as ma
from mechattn.errors import Interrupted, ServerError
from tests.served.stand_in import StandIn, running, served

pytestmark = pytest.mark.usefixtures("no_waiting")
SLASH = {"slash": ma.MeaninglessTokens("/", 20)}


@pytest.fixture(scope="module")
def local(toy, prompts):
    return ma.evaluate(toy, prompts, SLASH, new_tokens=12)


def read(answers):
    return [(answer.prompt, answer.condition, answer.tokens) for answer in answers]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def busy(handler, body):
    return handler.send(429, {"error": "busy"}, retry_after="0.001")


def broken(handler, body):
    return handler.send(500, {"error": "broken"})


def cut(handler, body):
    """The connection ends in the middle of a reply."""
    handler.send(200, b'{"choices": ', length=500)
    handler.close_connection = True
    return True


def slow(handler, body):
    """Nothing comes until it is asked again."""
    threading.Event().wait(1)
    return True


def half(handler, body):
    """A proxy ends a reply, and says that it is whole."""
    return handler.send(200, b'{"choices": [')


@pytest.mark.parametrize(("fault", "timeout"), [(busy, 60), (cut, 60), (slow, 0.5)])
def test_a_fault_now_and_then_changes_nothing(prompts, server, local, fault, timeout, tmp_path):
    """In the probe and among the answers: what was asked for again is there once."""
    path = tmp_path / "answers.jsonl"
    fault_count = 0

    def now_and_then(handler, body):
        nonlocal fault_count
        if body is None or len(server.bodies) % 7 != 5:
            return False
        fault_count += 1
        return fault(handler, body)

    server.fault = now_and_then
    evaluation = served(server, prompts, SLASH, out=path, timeout=timeout, batch=4)
    assert fault_count > 2
    assert read(evaluation.answers) == read(local.answers)
    written = [(row["prompt"], row["condition"]) for row in rows(path)]
    assert len(set(written)) == len(written) == 6


def test_a_fault_that_stays_loses_nothing(prompts, server, local, tmp_path):
    """It ends the run, what came before is kept, and the same call goes on."""
    path = tmp_path / "answers.jsonl"
    server.fault = lambda handler, body: (
        len(server.answers_asked(12)) > 3 and broken(handler, body) if body else False
    )
    with pytest.raises(ServerError, match=r"answers 500: .*broken"):
        served(server, prompts, SLASH, out=path, batch=1)
    assert len(rows(path)) == 3
    server.fault = lambda handler, body: False
    server.bodies.clear()
    evaluation = served(server, prompts, SLASH, out=path)
    assert len(server.answers_asked(12)) == 6 - 3
    assert read(evaluation.answers) == read(local.answers)


def test_answers_under_way_beside_a_failure_are_kept(prompts, server, tmp_path):
    """Four at once, the first of which fails when the others have begun: these are written."""
    path = tmp_path / "answers.jsonl"
    all_begun = threading.Barrier(4)

    def fault(handler, body):
        if body is None or body["max_tokens"] != 12 or len(server.answers_asked(12)) > 4:
            return False
        return all_begun.wait(30) == 0 and half(handler, body)

    server.fault = fault
    with pytest.raises(ServerError, match=r"gives no finished completion but \{\"choices\": \["):
        served(server, prompts, SLASH, out=path, batch=4)
    assert len(rows(path)) >= 3


def test_no_more_at_once_than_asked_for(prompts, server):
    """A third would be seen: each request waits for it a moment."""
    running_count = 0
    most = 0
    third = threading.Event()
    lock = threading.Lock()

    def count(handler, body):
        nonlocal running_count, most
        with lock:
            running_count += 1
            most = max(most, running_count)
        if running_count > 2:
            third.set()
        third.wait(0.05)
        with lock:
            running_count -= 1
        return False

    server.fault = count
    served(server, prompts[:2], batch=2, verify=False)
    assert most == 2


@pytest.fixture
def stuck(server):
    """The server, which does not reply to the third answer and later ones before it is released."""
    released = threading.Event()

    def wait(handler, body):
        if body is not None and len(server.answers_asked(12)) > 2:
            server.on_third_answer()
            assert released.wait(60), "somebody waited for this answer"
            return True  # nobody is there to read it
        return False

    server.on_third_answer = lambda: None
    server.fault = wait
    yield server
    released.set()


@pytest.mark.usefixtures("interruptible")
def test_after_ctrl_c_nobody_waits_for_the_server(prompts, stuck, tmp_path):
    main_thread = threading.main_thread().ident
    left = threading.Event()

    def interrupt():
        """Once; and again, like an impatient user, if that came where Python drops it."""
        signal.pthread_kill(main_thread, signal.SIGINT)
        while not left.wait(5):
            signal.pthread_kill(main_thread, signal.SIGINT)

    stuck.on_third_answer = interrupt
    try:
        with pytest.raises(Interrupted, match=r"stopped; [12] of 6 answers are kept in .*answers"):
            served(stuck, prompts, SLASH, out=tmp_path / "answers.jsonl", batch=1)
    finally:
        left.set()


def test_nobody_is_there(prompts):
    with pytest.raises(
        ServerError, match=r"the server at http://127\.0\.0\.1:9/v1 cannot be reached"
    ):
        ma.evaluate("toy:llama", prompts, server="http://127.0.0.1:9/v1")


def test_another_name(prompts, server):
    with pytest.raises(ServerError, match=r"answers 404: .*does not exist"):
        served(server, prompts, served_model="qwen")


def test_an_address_without_v1_is_told_at_once(prompts, server):
    """As llama.cpp answers there: in a form of its own."""
    server.change = lambda reply: {"content": reply["choices"][0]["text"], "stop": True}
    with pytest.raises(ServerError, match=r"is the address right, such as .*/v1"):
        served(server, prompts)
    assert len(server.bodies) <= 3


def test_a_bad_request_is_no_text_server(prompts, server):
    server.fault = lambda handler, body: (
        body is not None and handler.send(400, {"error": "max_tokens must be even"})
    )
    with pytest.raises(ServerError, match=r"answers 400: .*max_tokens must be even"):
        served(server, prompts)


def test_certificates_are_checked(prompts, engine, certificate, monkeypatch):
    """Nothing is asked of a server whose certificate nobody has signed, unless the user trusts it by a file."""
    monkeypatch.delenv("SSL_CERT_FILE")
    with running(StandIn(engine), certificate) as server:
        with pytest.raises(ServerError, match=r"cannot be reached, .*CERTIFICATE_VERIFY_FAILED"):
            served(server, prompts[:2])
        assert not server.headers
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        served(server, prompts[:2])
        assert server.headers


def test_the_models_that_a_server_lists_are_named(engine, prompts):
    for listed, message in (([], "lists no models: give"), (["a", "b"], "lists 'a', 'b': give")):
        reply = {"data": [{"id": name} for name in listed]}
        stand_in = StandIn(engine, fault=lambda handler, _, reply=reply: handler.send(200, reply))
        with running(stand_in), pytest.raises(ServerError, match=message):
            served(stand_in, prompts)
