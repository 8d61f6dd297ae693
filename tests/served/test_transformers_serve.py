"""``transformers serve`` with a toy, on the loopback address: the server that others wrote."""

import os
import time
from dataclasses import replace

import pytest
from transformers.cli.serve import Serve

import mechattn as ma
from mechattn.errors import ServerError
from mechattn.model.checkpoint import toy_folder

pytestmark = pytest.mark.slow
CONDITIONS = {
    "slash": ma.MeaninglessTokens("/", 55),
    "start": ma.MeaninglessTokens("/", 20, place="start"),
    "middle": ma.MeaninglessTokens("/", 20, place="middle"),
    "random place": ma.MeaninglessTokens("/", 20, place="random"),
    "before the answer": ma.MeaninglessTokens("/", 20, place="before_answer"),
    "word": ma.conditions.RepeatedWord(count=20),
    "counting": ma.conditions.Counting(20),
    "repeated": ma.conditions.RepeatQuestion(),
    "text": ma.conditions.Text(" Take your time."),
}


@pytest.fixture(scope="module")
def server():
    """Its address; it serves from a thread of this process, which has torch imported already."""
    folder = str(toy_folder("toy:llama"))
    serve = Serve(
        folder, host="127.0.0.1", port=0, device="cpu", dtype="float32", non_blocking=True
    )
    while not serve.server.started:
        assert serve._thread.is_alive()
        time.sleep(0.01)
    (listening,) = serve.server.servers[0].sockets
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    serve.kill_server()


def test_answers_are_those_of_the_loop_here(toy, server):
    """MECHATTN_SERVED=100 asks for as many problems; rounding differs with CPU and batch, and may turn a tie."""
    prompts = ma.load_prompts("word-problems", limit=int(os.environ.get("MECHATTN_SERVED", "1")))
    local = ma.evaluate(toy, prompts, CONDITIONS, new_tokens=10)
    pinned = ma.Server(server, str(toy_folder("toy:llama")))
    remote = ma.evaluate(toy, prompts, CONDITIONS, new_tokens=10, batch=8, server=pinned)
    assert remote.provenance["probe"]["sent"] == "text"
    assert remote.provenance["probe"]["rounds"][0]["alike"] == 1.0
    assert remote.provenance["served_model"] == "llama"
    pairs = zip(local.answers, remote.answers, strict=True)
    same = [replace(ours, logprob=0.0) == replace(theirs, logprob=0.0) for ours, theirs in pairs]
    assert len(same) == 10 * len(prompts)
    assert same.count(False) <= 0.002 * len(same)


def test_another_model_is_refused(server):
    prompts = ma.load_prompts("word-problems", limit=3)
    asked = {"server": ma.Server(server, str(toy_folder("toy:llama"))), "new_tokens": 10}
    with pytest.raises(ServerError, match=r"answers 400: .*Server is pinned to"):
        ma.evaluate("toy:llama", prompts, **(asked | {"server": ma.Server(server, "another")}))
    with pytest.raises(ServerError, match=r"has read \d+ tokens of a prompt that has"):
        ma.evaluate("toy:falcon", prompts, **asked)
