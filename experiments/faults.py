"""Kill ``mechattn run`` at random moments, give the same command again, and compare what comes out to the bit.

    python experiments/faults.py --trials 20

Each trial: the command in a process of its own, killed with SIGKILL at a moment drawn from its whole length (loading,
measuring, keeping a chunk, merging, writing the result); again, killed at another moment if it takes as long; then once
more to its end. The digest of all arrays has
to be that of an undisturbed run. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
model = "toy:llama"
threads = 1
chunk = 2
verify = false
[prompts]
source = "word-problems"
limit = 32
[conditions.slash]
count = 20
[[analyses]]
kind = "ReceivedAttention"
[[analyses]]
kind = "AttentionFocus"
[output]
result = "result.zarr"
"""


def started(folder: Path) -> int:
    """The command in a child of this process, which has imported everything and computed nothing."""
    child = os.fork()
    if child:
        return child
    try:
        from mechattn.commands.main import main

        os.chdir(folder)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        sys.argv = ["mechattn", "run", str(folder.parent / "config.toml")]
        main()
        os._exit(0)
    except SystemExit as done:
        os._exit(int(done.code or 0))
    except BaseException:
        os._exit(99)


def finished(folder: Path) -> tuple[str, float]:
    """Run to the end: the digest of the result, and the seconds it took."""
    from mechattn.results.arrays import datasets_digest
    from mechattn.store.reading import load_result

    begun = time.monotonic()
    _, status = os.waitpid(started(folder), 0)
    if status:
        raise SystemExit(f"the command ended with {os.waitstatus_to_exitcode(status)}")
    return datasets_digest(load_result(folder / "result.zarr").datasets), time.monotonic() - begun


def interrupted(folder: Path, after: float) -> str:
    """Start, and kill after some seconds; says what was there at that moment."""
    child = started(folder)
    time.sleep(after)
    ended, _ = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    parts = len(list(folder.glob("result.zarr.parts/[0-9]*.zarr")))
    found = f"{parts} of 16 chunks" + (
        ", writing the result" if list(folder.glob(".result.zarr.*")) else ""
    )
    if (folder / "result.zarr").exists():
        found = "ended before" if ended else "result written"
    return f"{after:.2f} s ({found})"


def main() -> None:
    """All trials, a line each."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--trials", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    import torch
    import transformer_lens.model_bridge  # noqa: F401  (before the forks, so that a start is cheap)

    import mechattn.commands.run_config  # noqa: F401

    torch.set_num_threads(1)
    draw, same = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as where:
        root = Path(where)
        (root / "config.toml").write_text(CONFIG)
        (root / "undisturbed").mkdir()
        expected, seconds = finished(root / "undisturbed")
        print(f"undisturbed: {seconds:.1f} s, digest {expected}", flush=True)
        for trial in range(given.trials):
            folder = root / str(trial)
            folder.mkdir()
            found = [interrupted(folder, draw.uniform(0, seconds))]
            while (
                "ended before" in found[-1]
            ):  # it was faster than the first time: this was no trial
                shutil.rmtree(folder / "result.zarr")
                found = [interrupted(folder, draw.uniform(0, seconds))]
            found.append(interrupted(folder, draw.uniform(0, seconds)))
            digest, _ = finished(folder)
            left = sorted(path.name for path in folder.iterdir())
            good = digest == expected and left == ["result.zarr"]
            same += good
            print(
                f"{trial + 1}: killed after {' and '.join(found)}: {'same' if good else f'DIFFERS {left}'}",
                flush=True,
            )
    print(f"{same} of {given.trials}")
    sys.exit(same != given.trials)


if __name__ == "__main__":
    main()
