"""A process that is killed while answers come, and the same call again: nothing is lost or counted twice."""

import json
import os
import signal
import time
from dataclasses import replace
from multiprocessing import get_context

import pytest

import mechattn as ma
from mechattn.evaluation import server_probe
from mechattn.evaluation.generate import Generation
from tests.served.stand_in import StandIn, running

LIMIT = 16


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with everything imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["transformer_lens.model_bridge", "mechattn.evaluation.evaluate"]
    )
    return context


def run(path, model="toy:llama", server=None, stuck=None):
    """Some answers; after so many it waits in the middle of a batch until it is killed."""
    ended = []
    advance = Generation.advance

    def until_stuck(generation):
        if stuck is not None and len(ended) >= stuck:
            time.sleep(900)
        answers = advance(generation)
        ended.extend(answers)
        return answers

    prompts = ma.load_prompts("word-problems", limit=3)
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    options = {"samples": 2, "new_tokens": LIMIT, "batch": 3, "out": path, "server": server}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "advance", until_stuck)
        patch.setattr(server_probe, "TOKENS", 8)  # in the process that is killed, too
        return ma.evaluate(model, prompts, conditions, **options)


def by_question(path):
    return {(a.prompt, a.condition, a.sample): a for a in ma.load_evaluation(path).answers}


def continued(path, started, again):
    """What is there after the kill, and after the same call again."""
    assert started.exitcode == -signal.SIGKILL, "it ended before it could be killed"
    assert 1 < len(path.read_bytes().splitlines()) < 13
    again()
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len({(r["prompt"], r["condition"], r["sample"]) for r in rows}) == len(rows) == 12
    return by_question(path)


@pytest.mark.slow
def test_killed_and_continued(processes, toy, tmp_path):
    """When some answers were written; at each file operation it is tested in tests/results/test_kills.py."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run(whole, toy)
    started = processes.Process(target=run, args=(part,), kwargs={"stuck": 5})
    started.start()
    until = time.monotonic() + 900  # of a machine that does much else
    while started.is_alive() and time.monotonic() < until:
        if part.exists() and part.read_bytes().count(b"\n") >= 6:
            break
        time.sleep(0.01)
    started.kill()
    started.join(60)
    got, expected = continued(part, started, lambda: run(part, toy)), by_question(whole)
    for key, answer in got.items():
        assert replace(answer, logprob=0.0) == replace(expected[key], logprob=0.0)
        assert answer.logprob == pytest.approx(expected[key].logprob, abs=1e-5)
    assert part.read_text().splitlines()[0] == whole.read_text().splitlines()[0]


@pytest.mark.slow
def test_the_client_of_a_server_is_killed_and_continued(processes, engine, tmp_path):
    """When the server has been asked for some more answers than have been written."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    with running(StandIn(engine)) as server:
        run(whole, server=server.address)
        server.bodies.clear()
        started = processes.Process(target=run, args=(part,), kwargs={"server": server.address})

        def fault(handler, body):
            if len(server.answers_asked(LIMIT)) > 6:
                os.kill(started.pid, signal.SIGKILL)

        server.fault = fault
        started.start()
        started.join(900)
        server.fault = lambda handler, body: False
        got = continued(part, started, lambda: run(part, server=server.address))
    assert got == by_question(whole)
