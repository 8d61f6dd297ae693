"""A run that is killed with SIGKILL at random moments, and the same command again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "experiments" / "faults.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_numbers():
    """``python experiments/faults.py`` makes twenty."""
    trials = 2
    command = [sys.executable, str(FAULTS), "--trials", str(trials), "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == f"{trials} of {trials}"
    assert (
        sum("ended before" not in line.split(" and ")[0] for line in lines[1 : trials + 1])
        == trials
    ), "each was killed at least once"
