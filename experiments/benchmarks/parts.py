"""What ``gpu.py`` measures, part by part."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import generate
import torch
from bench import ratio_to
from measured_cells import Cells, emptied
from ways import LIMIT, batch_of, hooked, runners, seconds

import mechattn as ma
from mechattn.prompts.token_sequences import Batch

ROOT = Path(__file__).parents[2]
GOAL = 1.15  # of the flash forward's time, at 2k and 8k tokens
GOAL_MEMORY = 1.1  # of its peak memory
OURS = "mechattn, ma.run, "
WAYS = (LIMIT, OURS + "streaming", OURS + "fused", "transformers, output_attentions", "TransformerLens, run_with_cache",
        "nnsight, a trace that reduces")  # fmt: skip
LENGTHS = [(2048, 1), (8192, 1), (2048, 8), (8192, 8), (32768, 1), (32768, 8)]  # tokens, sequences
SMALL = [(64, 1), (128, 4)]
ROUNDS, ENOUGH = 9, 6.0  # at most so many rounds, and seconds of them, for a column
FEW_ROUNDS = 2  # with --small


@dataclass(frozen=True)
class Part:
    """One part: what it measures, the function that fills its cells, the seconds that it may take, and the goal."""

    about: str
    measure: Callable[[Cells, str, bool], None]
    seconds: float
    goal: str = ""


def dtype_on(device: str) -> torch.dtype:
    """What weights are made in: bfloat16, on a CPU float32."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def peak(run: Callable[[], Any]) -> float:
    """The most memory of the card that a run takes, weights included, in MiB; NaN where torch does not count it."""
    if not torch.cuda.is_available():
        run()
        return float("nan")
    emptied()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def tests(cells: Cells, device: str, small: bool) -> None:
    """The tests marked ``gpu``, of this device; with ``small`` those that take seconds."""
    if small:
        chosen = f"test_column_sums and {device}"
    elif device == "cpu":
        chosen = "cpu"
    else:
        chosen = "not cpu-"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "gpu",
        "-k",
        chosen,
        "-vv",  # a line for each test, although the project's options ask for few
        "-p",
        "no:cacheprovider",
    ]
    counts: dict[str, dict[str, int]] = {}
    cells.table.clear()
    cells.notes.clear()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            if found := re.search(
                r"tests/gpu/test_(\w+)\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED)", line
            ):
                file, name, outcome = found.groups()
                of_file = counts.setdefault(file, dict.fromkeys(("passed", "failed", "skipped"), 0))
                of_file["failed" if outcome == "ERROR" else outcome.lower()] += 1
                for column, count in of_file.items():
                    cells.put(file, column, str(count))
                if outcome in ("FAILED", "ERROR"):
                    cells.note(f"- failed: {file}, {name}")
        if running.wait() not in (0, 1):
            raise RuntimeError(
                f"pytest ended with exit status {running.returncode}; tests.log says why"
            )
    if not counts:
        raise RuntimeError("pytest ran no test; tests.log says why")
    if failed := sum(of_file["failed"] for of_file in counts.values()):
        raise AssertionError(f"{failed} tests fail; their names are below the table")


def received(shape: str, kv_heads: int, cells: Cells, device: str, small: bool) -> None:
    """Time and peak memory of each way, as ratios to the flash forward, column by column."""
    columns = SMALL if small else LENGTHS
    most_rounds = FEW_ROUNDS if small else ROUNDS
    longest = max(length for length, _ in columns)
    bridge = hooked("toy:llama" if small else shape, kv_heads, longest, device, dtype_on(device))
    ways = runners(bridge, nnsight=not small)
    spent: dict[str, float] = {}  # seconds of a run for each token and key, at the last column
    for length, sequences in columns:
        _column(cells, ways, batch_of(length, device, sequences), spent, most_rounds)


def _column(
    cells: Cells,
    ways: dict[str, Callable],
    batch: Batch,
    spent: dict[str, float],
    most_rounds: int,
) -> None:
    """Each way once, with its peak memory; then all that fit in turn, as often as there is time."""
    (sequences, length), sizes, fit = batch.tokens.shape, {}, {}
    column, work = f"{length:,} × {sequences}", sequences * length * length
    if not any(cells.missing(name, column) for name in WAYS):
        return

    def first(name: str) -> str:
        began = time.perf_counter()
        sizes[name] = peak(partial(seconds, ways[name], batch))
        spent[name] = (time.perf_counter() - began) / work
        fit[name] = ways[name]
        return "not measured: it ran once"

    if not cells.missing(LIMIT, column):
        first(LIMIT)  # the others' ratios need it in the same rounds
    for name in WAYS:
        if name not in ways:
            cells.put(name, column, "absent")
        else:
            cells.tried(name, column, partial(first, name), 2 * spent.get(name, 0) * work)
    taken = _rounds(cells, fit, batch, most_rounds)
    for name in fit if taken.get(LIMIT) else ():
        cells.put(name, column, _cell(name, length, taken, sizes))


def _rounds(
    cells: Cells, fit: dict[str, Callable], batch: Batch, most_rounds: int
) -> dict[str, list[float]]:
    """Seconds of each way, in rounds that go forwards and backwards in turn."""
    taken: dict[str, list[float]] = {name: [] for name in fit}
    began, longest = time.perf_counter(), 0.0
    for number in range(most_rounds):
        round_began = time.perf_counter()
        if number and (round_began - began > ENOUGH or longest > cells.left()):
            break
        for name in list(fit)[:: -1 if number % 2 else 1]:
            taken[name].append(seconds(fit[name], batch))
        longest = max(longest, time.perf_counter() - round_began)
    return taken


def _cell(name: str, length: int, taken: dict[str, list[float]], sizes: dict[str, float]) -> str:
    """Seconds of the limit; of another way its ratio to that, its memory's, and whether they meet the goal."""
    size, of_limit = sizes[name], sizes[LIMIT]
    counted = size == size  # not NaN
    if name == LIMIT:
        return f"{statistics.median(taken[name]):.3g} s" + (f", {size:,.0f} MiB" if counted else "")
    middle, low, high = ratio_to(taken[LIMIT], taken[name])
    text = f"{middle:.2f} [{low:.2f}, {high:.2f}], {len(taken[name])} runs"
    text += f"; memory {size / of_limit:.2f}" if counted else ""
    if name.startswith(OURS) and length in (2048, 8192):
        met = middle <= GOAL and (not counted or size / of_limit <= GOAL_MEMORY)
        text += f" (goal {'met' if met else 'MISSED'})"
    return text


def patching(cells: Cells, device: str, small: bool) -> None:
    """Patching and edges of word problems with their answers, and a plain forward of as many tokens beside it."""
    bridge = hooked("toy:llama" if small else "1B", 8, 2048, device, dtype_on(device))
    prompts = ma.load_prompts("word-problems", limit=2 if small else 4, with_answer=True)
    slash = ma.MeaninglessTokens("/", 55)
    plain, tokens = bridge._mechattn.native, batch_of(160, device).tokens

    def forward() -> None:
        with torch.no_grad():
            plain(tokens, use_cache=False, logits_to_keep=1)
        float(tokens[0, 0])  # waits for the card

    some = [(0, 0), (0, 1), (1, 0), (1, 1)]
    ways: dict[str, Callable[[], object]] = {
        "attributed: all heads (z)": lambda: ma.patch(
            bridge, prompts, slash, method="attribution", direction="denoising"
        ),
        "patched: four heads (z)": lambda: ma.patch(
            bridge, prompts, slash, at=some, direction="denoising"
        ),
        "patched: all layers (resid_post)": lambda: ma.patch(
            bridge, prompts, slash, at="resid_post", direction="denoising"
        ),
        "attributed: all edges (EAP)": lambda: ma.edges(
            bridge, prompts, slash, metric="logprob", memory="64GiB"
        ),
    }
    forward()
    began = time.perf_counter()
    of_forward = peak(forward)
    alone = time.perf_counter() - began
    cells.put("a forward of 160 tokens", "seconds a prompt", f"{alone:.3g}")
    for name, way in ways.items():

        def measure(way: Callable[[], object] = way) -> str:
            began = time.perf_counter()
            size = peak(way)
            spent = (time.perf_counter() - began) / len(prompts)
            memory = f"; memory {size / of_forward:.2f}" if size == size else ""
            return f"{spent:.3g} ({spent / alone:.0f} forwards){memory}"

        cells.tried(name, "seconds a prompt", measure)


def generation(cells: Cells, device: str, small: bool) -> None:
    """Tokens a second with a cache, and their ratio to plain ``generate``."""
    bridge = hooked("toy:llama" if small else "1B", 8, 1024, device, dtype_on(device))
    batch, length, new = (4, 32, 8) if small else (32, 128, 50)
    ways = generate.ways(bridge, generate.drawn([length] * batch), new)
    taken: dict[str, list[float]] = {}

    def measure(name: str) -> str:
        for _ in range(4):
            began = time.perf_counter()
            ways[name]()  # its tokens are read at the end, which waits for the card
            taken.setdefault(name, []).append(time.perf_counter() - began)
        rate = batch * new / statistics.median(taken[name][1:])
        first = next(iter(taken))
        ratio = f" ({statistics.median(taken[first][1:]) / statistics.median(taken[name][1:]):.2f})"
        return f"{rate:,.0f}" + (ratio if first == next(iter(ways)) else "")

    for name in ways:
        cells.tried(name, "tokens a second", partial(measure, name))


PARTS = {
    "tests": Part(
        "The tests marked `gpu`: numbers against float64 on the CPU, kernels, halving of a batch that does not fit, "
        "waiting for the card inside a layer, patching, generation, several devices.",
        tests,
        150,
        "no test fails.",
    ),
    "received-1B": Part(
        "Received attention of every layer and head of a Llama of 1 B parameters (16 layers × 32 heads, 8 key-value "
        "heads, random weights): time and peak memory as ratios to the flash forward in the same rounds; tokens × "
        "sequences.",
        partial(received, "1B", 8),
        130,
        f"at 2,048 and 8,192 tokens at most {GOAL} × the forward's time and {GOAL_MEMORY} × its peak memory.",
    ),
    "received-7B": Part(
        "The same with a Llama of 7 B parameters (32 layers × 32 heads, as many key-value heads).",
        partial(received, "llama-7B", 32),
        120,
        f"as for 1 B: {GOAL} × and {GOAL_MEMORY} ×.",
    ),
    "patching": Part(
        "`ma.patch` and `ma.edges` at 1 B, on word problems of about 160 tokens with 55 inserted, with their controls.",
        patching,
        40,
    ),
    "generation": Part(
        "Generation at 1 B, batch 32, 50 new tokens: tokens a second, and the ratio to `generate` of transformers.",
        generation,
        45,
    ),
}
