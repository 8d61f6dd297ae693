"""What a machine with a card is needed for, in one command: tests, times, memory, patching, generation, several cards.

Nothing is downloaded. Each part runs in a process of its own with a time limit, and writes its table after each cell: a
part that fails or is cut short leaves a line that says so, and the same command goes on with what is missing.

    make gpu                                                   # at most 9 minutes; out/gpu/report.md
    python experiments/benchmarks/gpu.py --parts received-1B   # one part
    python experiments/benchmarks/gpu.py --device cpu --small  # toys on the CPU, to test the command itself
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
from datetime import date
from functools import cache
from pathlib import Path

import torch
from bench import machine, versions
from measured_cells import Cells
from parts import PARTS

ROOT = Path(__file__).parents[2]
GRACE = 25  # seconds beyond a part's own deadline, for its imports, until it is stopped
RUNNING = "running"


def best_device() -> str:
    """The card, if torch sees one."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def _code() -> str:
    """The commit, where there is one."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return f"mechattn {git.stdout.strip()}, " if git.returncode == 0 else ""


def where(args: argparse.Namespace) -> str:
    """The machine and the code: tables of others are not gone on with."""
    return f"{args.device}{', small' * args.small}: {machine(args.device)}, {_code()}{versions()}"


def why_no_card() -> str:
    """What to do where torch sees no card."""
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return f"there is an nvidia-smi here, but torch {torch.__version__} was built without CUDA: install another build"
    return f"torch {torch.__version__} sees no card here"


def run_parts(args: argparse.Namespace, names: list[str]) -> None:
    """Run parts in a process of their own, with a time limit; each leaves a line about how it ended."""
    seconds = sum(PARTS[name].seconds for name in names)
    command = [
        sys.executable,
        __file__,
        "--measure",
        *names,
        "--device",
        args.device,
        "--out",
        str(args.out),
    ]
    command += ["--small"] if args.small else []
    quiet = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    log = args.out / f"{names[0]}.log"
    with open(log, "w", encoding="utf-8") as written:
        try:
            code = subprocess.run(
                command,
                env=quiet,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=seconds + GRACE,
            ).returncode
            how = f"failed: its process ended with exit status {code}, see {log.name}"
        except subprocess.TimeoutExpired:
            how = f"stopped after {seconds + GRACE:.0f} s: the same command goes on with what is missing"
    for cells in (Cells(args.out / f"{name}.json", where(args)) for name in names):
        if cells.ended == RUNNING:
            cells.end_with(how)


def measure(args: argparse.Namespace, name: str) -> None:
    """Measure one part, in this process."""
    cells = Cells(args.out / f"{name}.json", where(args), PARTS[name].seconds)
    began = time.monotonic()
    cells.end_with(RUNNING)
    try:
        PARTS[name].measure(cells, args.device, args.small)
    except Exception as error:
        traceback.print_exc()
        cells.end_with(
            f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :300
            ]
        )
    else:
        how = (
            "cells are missing: the same command goes on with them"
            if cells.lacking()
            else "complete"
        )
        cells.end_with(f"{how}, {time.monotonic() - began:.0f} s")


def report(args: argparse.Namespace) -> str:
    """Every part's table, with the machine, the date and how each part ended."""
    lines = ["# mechattn on a device", "", f"{where(args)}, {date.today()}."]
    if args.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        lines.append(
            f"{torch.cuda.device_count()} of them, {memory:.0f} GiB each. CUDA {torch.version.cuda}."
        )
    if args.small:
        lines.append(
            "`--small`: toys and short texts, which show that the command works and nothing about speed."
        )
    for name, part in PARTS.items():
        cells = Cells(args.out / f"{name}.json", where(args))
        goal = [f"Goal: {part.goal}", ""] if part.goal else []
        lines += [
            "",
            f"## {name}",
            "",
            part.about,
            "",
            *goal,
            f"*{cells.ended}*",
            "",
            cells.markdown(),
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "mps", "cpu"],
        help="the card if there is one, otherwise the CPU",
    )
    parser.add_argument(
        "--small", action="store_true", help="toys and short texts; always on a CPU"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--again", action="store_true", help="measure what an earlier call has measured too"
    )
    parser.add_argument("--out", type=Path, help="out/gpu; with --small out/gpu-small")
    parser.add_argument("--measure", nargs="+", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = args.device or best_device()
    args.small = args.small or args.device == "cpu"
    args.out = args.out or ROOT / "out" / ("gpu-small" if args.small else "gpu")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measure:
        for name in args.measure:
            measure(args, name)
        return
    if args.device == "cpu":
        print(
            f"{why_no_card()}. What follows runs on the CPU with toys, and measures no card.",
            flush=True,
        )
    if args.again:
        for name in args.parts:
            (args.out / f"{name}.json").unlink(missing_ok=True)
    left = [
        name for name in args.parts if not Cells(args.out / f"{name}.json", where(args)).complete
    ]
    # With a card each part has a process of its own, as one that fails may leave the card unusable to its process.
    for names in [left] if args.small and left else [[name] for name in left]:
        run_parts(args, names)
        (args.out / "report.md").write_text(report(args), encoding="utf-8")
    ended = {name: Cells(args.out / f"{name}.json", where(args)).ended for name in args.parts}
    print(
        "\n".join(f"{name}: {how}" for name, how in ended.items()), args.out / "report.md", sep="\n"
    )
    sys.exit(any(how.startswith(("failed", "stopped")) for how in ended.values()))


if __name__ == "__main__":
    main()
