"""A process that is killed at any moment, and the same call again."""

import signal
import subprocess
import sys
import time

import pytest

import mechattn as ma

RUN = """
import sys
import mechattn as ma

def run(path):
    return ma.evaluate(
        "toy:llama", ma.load_prompts("word-problems", limit=12), {"slash": ma.MeaninglessTokens("/", 20)},
        new_tokens=40, batch=2, samples=2, out=path,
    )

if __name__ == "__main__":
    run(sys.argv[1])
"""


def start(path):
    return subprocess.Popen([sys.executable, "-c", RUN, str(path)])


def by_question(path):
    return {(a.prompt, a.condition, a.sample): a for a in ma.load_evaluation(path).answers}


@pytest.mark.slow
def test_killed_and_continued(tmp_path):
    """When some answers were written; at each file operation it is tested in tests/results/test_kills.py."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    here: dict = {}
    exec(RUN, here)
    here["run"](whole)
    run = start(part)
    until = time.monotonic() + 900  # of a machine that does much else
    while run.poll() is None and time.monotonic() < until:
        if part.exists() and part.read_bytes().count(b"\n") >= 6:
            run.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert run.wait(60) == -signal.SIGKILL, "it ended before it could be killed"
    assert part.read_bytes().count(b"\n") > 1
    assert start(part).wait(900) == 0
    expected, got = by_question(whole), by_question(part)
    assert got.keys() == expected.keys()
    for key, answer in got.items():
        assert answer.tokens == expected[key].tokens
        assert answer.logprob == pytest.approx(expected[key].logprob, abs=1e-5)
    assert part.read_text().splitlines()[0] == whole.read_text().splitlines()[0]
