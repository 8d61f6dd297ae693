"""Two workers on two cores against one, a thread each: chunks a minute after start-up, on the local Ray cluster.

    python experiments/benchmarks/workers.py

On a machine without anything else to do. Start-up (Ray, imports, the model, checking the prompts) is left out: the
clock runs from the moment when every worker has given its first chunk to the last chunk, at least 60 seconds for two.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice

import mechattn as ma
from experiments.toys.generated_problems import word_problems
from mechattn.jobs.executors import Ray


def seconds_a_chunk(workers: int, job: ma.Job, chunks: int) -> tuple[float, float]:
    """Seconds a chunk, and of how many seconds of work."""
    came = []
    for _ in Ray(workers=workers).parts(job, range(chunks)):
        came.append(time.monotonic())
    span = came[-1] - came[workers - 1]
    return span / (chunks - workers), span


def main() -> None:
    """One line for each number of workers, and the ratio."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--chunks", type=int, default=90)
    options.add_argument("--size", type=int, default=64, help="prompts a chunk")
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    problems = islice(word_problems("test"), given.chunks * given.size)
    prompts = [
        ma.Prompt(problem.question, id=str(index), group=problem.template)
        for index, problem in enumerate(problems)
    ]
    conditions = {"slash": ma.MeaninglessTokens(count=55)}
    job = ma.Job("toy:llama", prompts, conditions, chunk=given.size, threads=1, verify=False)
    each = {}
    for workers in (2, 1):
        each[workers], span = seconds_a_chunk(workers, job, given.chunks)
        print(
            f"{workers} workers: {each[workers]:.2f} s a chunk of {given.size} prompts, {span:.0f} s of work",
            flush=True,
        )
    print(f"two are {each[1] / each[2]:.2f} times as fast as one")


if __name__ == "__main__":
    main()
