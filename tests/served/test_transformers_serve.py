"""``transformers serve`` with a toy, on the loopback address: the server that others wrote."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.errors import PromptError, ServerError
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


@contextmanager
def serving(folder, log):
    """The server, for the length of a ``with``; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"serve {folder} --host 127.0.0.1 --port {port} --device cpu --dtype float32"
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, *words.split()]
    with open(log, "w") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        until = time.monotonic() + 120
        while not _healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def _healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(toy_folder("toy:llama"), tmp_path_factory.mktemp("serve") / "log") as address:
        yield address


def test_answers_are_those_of_the_loop_here(toy, server):
    """MECHATTN_SERVED=100 asks for as many problems; rounding differs with CPU and batch, and may turn a tie."""
    prompts = ma.load_prompts("word-problems", limit=int(os.environ.get("MECHATTN_SERVED", "1")))
    local = ma.evaluate(toy, prompts, CONDITIONS, new_tokens=60)
    pinned = ma.Server(server, str(toy_folder("toy:llama")))
    remote = ma.evaluate(toy, prompts, CONDITIONS, new_tokens=60, batch=8, server=pinned)
    assert remote.provenance["probe"]["sent"] == "text"
    assert remote.provenance["probe"]["rounds"][0]["alike"] == 1.0
    assert remote.provenance["served_model"] == "llama"
    pairs = zip(local.answers, remote.answers, strict=True)
    same = [replace(ours, logprob=0.0) == replace(theirs, logprob=0.0) for ours, theirs in pairs]
    assert len(same) == 10 * len(prompts)
    assert same.count(False) <= 0.002 * len(same)


def test_it_takes_no_other_text_and_does_not_sample(server):
    prompts = ma.load_prompts("word-problems", limit=3)
    asked = {"server": ma.Server(server, str(toy_folder("toy:llama"))), "new_tokens": 10}
    with pytest.raises(
        PromptError, match=r"takes only text, and the text of .* would be read as other tokens"
    ):
        ma.evaluate("toy:llama", prompts, {"shuffled": ma.conditions.ShuffledSentence(20)}, **asked)
    with pytest.raises(ServerError, match="does not sample"):
        ma.evaluate("toy:llama", prompts, samples=2, **asked)
    with pytest.raises(ServerError, match=r"answers 400: .*Server is pinned to"):
        ma.evaluate("toy:llama", prompts, **(asked | {"server": ma.Server(server, "another")}))
    with pytest.raises(ServerError, match=r"has read \d+ tokens of a prompt that has"):
        ma.evaluate("toy:falcon", prompts, **asked)
