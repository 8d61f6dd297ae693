"""The cost of received attention of every layer and head: this library's engines, their limit, and their peers.

One process, interleaved runs after a warm-up, medians of ratios with intervals; the peak memory of each in a process of
its own. The limit is a plain forward pass of transformers with SDPA, without cache and with the logits of one position.

    python experiments/benchmarks/bench.py --out experiments/benchmarks/2026-11-22-cpu.md
    python experiments/benchmarks/bench.py --lengths 256 1024 --kv-heads 12 --engines "pass alone" hooks
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from scipy.stats import binom
from ways import LIMIT, SHAPES, batch_of, hooked, runners, seconds, size_of

from mechattn.model.checkpoint import toy_names


def ways_of(args: argparse.Namespace) -> dict[str, Callable]:
    """The ways to run the model that the arguments describe."""
    dtype = getattr(torch, args.dtype)
    bridge = hooked(args.shape, args.kv_heads, max(args.lengths), args.device, dtype, args.family)
    return runners(bridge, nnsight=args.shape not in toy_names() and args.family == "llama")


def needs(name: str, length: int, shape: str) -> float:
    """Bytes of [query, key] matrices that are held at once, so that a way is left out where they do not fit."""
    layers, heads = size_of(shape)[:2]
    held = {"output_attentions": layers + 3, "run_with_cache": layers + 3, "nnsight": 3, "hook": 4}
    held["use_attn_result"] = 4
    return next((n for part, n in held.items() if part in name), 0) * 4.0 * heads * length**2


Ratio = tuple[float, float, float]  # the median and its interval


def ratio_to(limit: list[float], taken: list[float]) -> Ratio:
    """Median of the ratios within each round, and its 95 % interval by order statistics; all of them below 6 rounds."""
    ratios = sorted(way / best for way, best in zip(taken, limit, strict=False))
    low = max(int(binom.ppf(0.025, len(ratios), 0.5)), 1) - 1
    return statistics.median(ratios), ratios[low], ratios[len(ratios) - 1 - low]


def settled(found: Ratio) -> bool:
    """Whether the interval is narrow: ± 0.02, or a quarter of what the way costs beyond the limit.

    The rounds that are left go to the ways that are near the limit, where a small difference matters.
    """
    middle, low, high = found
    return high - low <= 2 * max(0.02, 0.25 * (middle - 1))


def times(
    args: argparse.Namespace, ways: dict[str, Callable], length: int
) -> tuple[dict[str, Ratio], float, int]:
    """Each way's ratio to the limit, the seconds of the limit, and the rounds.

    In each round the limit and every way run once, in turn in this order and in the other, so that what else the
    machine does weighs on all; a way whose interval is narrow sits out.
    """
    batch = batch_of(length, args.device)
    fit = {
        name: run
        for name, run in ways.items()
        if needs(name, length, args.shape) < args.memory * 2**30
    }
    for run in fit.values():
        seconds(run, batch)
    taken: dict[str, list[float]] = {name: [] for name in fit}
    found: dict[str, Ratio] = {}
    began = 0.0
    while (rounds := len(taken[LIMIT])) <= args.runs or time.perf_counter() - began < args.most:
        if rounds == args.runs:
            began = time.perf_counter()
        wide = [
            name
            for name in fit
            if name != LIMIT and (rounds < args.runs or not settled(found[name]))
        ]
        if not wide:
            break
        for name in [LIMIT, *wide][:: -1 if rounds % 2 else 1]:
            taken[name].append(seconds(fit[name], batch))
        found |= {name: ratio_to(taken[LIMIT], taken[name]) for name in wide}
    for name, (middle, low, high) in found.items():
        print(
            f"{length:6} {name:60} {middle:.3f} [{low:.3f}, {high:.3f}], {len(taken[name])} runs",
            flush=True,
        )
    return found, statistics.median(taken[LIMIT]), len(taken[LIMIT])


def peak(args: argparse.Namespace, name: str, length: int) -> tuple[float, float] | None:
    """Peak memory in MiB, and seconds, of one run of one way in a fresh process; None where it fails."""
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--lengths",
        str(length),
        "--shape",
        args.shape,
        "--family",
        args.family,
    ]
    command += ["--kv-heads", str(args.kv_heads), "--device", args.device, "--dtype", args.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    mebibytes, taken = done.stdout.split()[-2:]
    return float(mebibytes), float(taken)


def one(args: argparse.Namespace) -> None:
    """Run one way once and print the peak of this process and the seconds of the run."""
    ways = ways_of(args)
    taken = seconds(ways[args.one], batch_of(args.lengths[0], args.device))
    if args.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20, taken)
    else:
        print(_peak_of_this_process(), taken)


def _peak_of_this_process() -> float:
    """In MiB. Linux says it of this program; getrusage counts what the process that started it held at that time."""
    status = Path("/proc/self/status")
    if status.exists():
        found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(found.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def table(
    args: argparse.Namespace, names: list[str], found: dict, limits: dict, peaks: dict
) -> str:
    """The results as Markdown."""

    def ratio(name: str, length: int) -> str:
        if name not in found[length]:
            return f"over {args.memory:.0f} GiB"
        middle, low, high = found[length][name]
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    def more(name: str, length: int) -> str:
        if (name, length) not in peaks:
            return f"over {args.memory:.0f} GiB"
        if peaks[name, length] is None:
            return "fails"
        (size, taken), limit = peaks[name, length], peaks[LIMIT, length][0]
        return f"{size:,.0f} MiB ({size / limit:.2f}), {taken:.1f} s"

    layers, heads, width = size_of(args.shape)
    head = "| " + " | ".join(["", *(f"{n:,}" for n in found)]) + " |"
    rule = "|---" * (len(found) + 1) + "|"
    lines = [
        f"{args.family}, {args.shape}: {layers} layers, {heads} query heads, "
        + ("" if args.shape in toy_names() else f"{args.kv_heads} key-value heads, ")
        + f"d_model {width}, {args.dtype}, "
        f"{args.device}. Received attention and segment mass of every layer and head, one sequence. "
        f"{machine(args.device)}, {torch.get_num_threads()} threads, {date.today()}. {versions()}.",
        "",
        "Time as a ratio to the SDPA forward of the same model in the same round, one process: median over rounds "
        f"({', '.join(str(rounds) for _, rounds in limits.values())}, after a warm-up) and its 95 % interval. A way "
        "whose interval is narrow sits the later rounds out.",
        "",
        head,
        rule,
        *(
            "| " + " | ".join([name, *(ratio(name, n) for n in found)]) + " |"
            for name in names
            if name != LIMIT
        ),
        "| " + " | ".join([f"{LIMIT}, seconds", *(f"{limits[n][0]:.3g}" for n in found)]) + " |",
    ]
    if peaks:
        head = "| " + " | ".join(["", *(f"{n:,}" for n in args.peaks)]) + " |"
        about = "Peak memory of a fresh process and its ratio to that of the SDPA forward; seconds of its only run."
        lines += ["", about, "", head, "|---" * (len(args.peaks) + 1) + "|"]
        lines += [
            "| " + " | ".join([name, *(more(name, n) for n in args.peaks)]) + " |" for name in names
        ]
    return "\n".join(lines) + "\n"


def machine(device: str = "cuda") -> str:
    """The name of the card, or of the CPU."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{len(found)} cores of {found[0]}" if found else platform.processor()


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def versions() -> str:
    """Of the packages that the times depend on."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    return ", ".join(
        f"{name} {of(name)}" for name in ("torch", "transformers", "transformer-lens", "nnsight")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, *toy_names()], default="small")
    parser.add_argument(
        "--family", choices=["llama", "gpt_neox", "gpt_neo", "gemma3_text"], default="llama"
    )
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192])
    parser.add_argument(
        "--engines", nargs="*", help="parts of the names of the ways to run; all without"
    )
    parser.add_argument("--runs", type=int, default=5, help="rounds a length at least")
    parser.add_argument(
        "--most", type=float, default=300, help="seconds a length for further rounds"
    )
    parser.add_argument(
        "--memory", type=float, default=12, help="GiB that [query, key] matrices may take"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument(
        "--peaks", type=int, nargs="*", default=[], help="lengths to measure peak memory at"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        one(args)
        return
    ways = ways_of(args)
    names = [
        n for n in ways if not args.engines or any(part in n for part in [*args.engines, LIMIT])
    ]
    found: dict[int, dict[str, Ratio]] = {}
    limits: dict[int, tuple[float, int]] = {}
    peaks: dict[tuple[str, int], tuple[float, float] | None] = {}

    def write() -> None:
        if args.out:  # after each length, so that a killed benchmark leaves what it has measured
            args.out.write_text(table(args, names, found, limits, peaks))

    for length in args.lengths:
        found[length], *limit = times(args, {name: ways[name] for name in names}, length)
        limits[length] = tuple(limit)
        write()
    for length in args.peaks:
        for name in names:
            if needs(name, length, args.shape) < args.memory * 2**30:
                peaks[name, length] = peak(args, name, length)
    write()
    print(table(args, names, found, limits, peaks))


if __name__ == "__main__":
    main()
