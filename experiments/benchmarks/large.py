"""Time and memory of a result that is larger than memory: written by some processes at once, compared, put on a page.

    python experiments/benchmarks/large.py --out out/large --gib 20 --processes 4
    python experiments/benchmarks/large.py --out out/large --read          # again, what was written before

The result is a toy's whose prompts, layers and heads are repeated, with noise of 5 % for each prompt, condition, layer
and head, up to 32 layers × 32 heads (Llama-3.1-8B's), six conditions and four analyses: what it says is nothing. Each
process writes its chunks as a run does, and the last step merges them, a chunk at a time. What
reads the result runs in a process of its own, whose peak memory is printed, and begins with nothing of it in the
system's cache (Linux).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from page import CONDITIONS, grown

import mechattn as ma
from mechattn.commands.stored_results import report
from mechattn.results.merge import merge_results
from mechattn.store.reading import open_result

LAYERS, HEADS, CHUNK = 32, 32, 128
STEPS = ("opened", "loaded", "compared", "heads", "verdict", "report")


def base() -> ma.Result:
    """A toy's result, with the layers and heads of a large model."""
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.MlpActivations(),
        ma.analyses.AttentionFocus(),
    ]
    prompts = ma.load_prompts("word-problems", limit=8)
    return grown(ma.run("toy:llama", prompts, CONDITIONS, analyses), LAYERS, HEADS)


def block(result: ma.Result, places: range) -> ma.Result:
    """The prompts of a chunk: those of the toy again, each with its own noise."""
    generator = np.random.default_rng(places.start)
    made = {}
    for name, dataset in result.datasets.items():
        if "prompt" in dataset.dims:
            of = np.asarray(places) % dataset.sizes["prompt"]
            dataset = dataset.isel(prompt=of).assign_coords(
                prompt=[f"{place:06d}" for place in places]
            )
            for label, variable in dataset.data_vars.items():
                if (
                    variable.dims[:1] == ("prompt",)
                    and variable.ndim > 1
                    and variable.dtype.kind == "f"
                ):
                    drawn = ("prompt", "condition", "layer", "head")
                    shape = [size if dim in drawn else 1 for dim, size in variable.sizes.items()]
                    noise = 1 + 0.05 * generator.standard_normal(shape, dtype=np.float32)
                    dataset[label] = variable * noise.astype(variable.dtype)
        made[name] = dataset
    made["sequences"] = made["sequences"].drop_vars("group", errors="ignore")
    made["sequences"]["place"] = xr.Variable(
        "prompt", np.asarray(places), made["sequences"]["place"].attrs
    )
    about: dict[str, Any] = json.loads(json.dumps(result.provenance))
    about |= {
        "chunk": CHUNK,
        "prompts": about["prompts"] | {"count": len(places), "hash": f"{places.start:016x}"},
    }
    return ma.Result(made, about)


def write_some(result: ma.Result, count: int, numbers: list[int], folder: Path) -> None:
    """What one of the processes does."""
    for number in numbers:
        places = range(number * CHUNK, min((number + 1) * CHUNK, count))
        block(result, places).save(folder / f"{number:05d}.zarr")


def write(out: Path, gib: float, processes: int) -> None:
    """Write the result, by some processes at once, and say how long it took."""
    result = base()
    each = sum(
        v.nbytes // v.sizes["prompt"]
        for d in result.datasets.values()
        for v in d.values()
        if v.ndim > 1 and v.dims[0] == "prompt"
    )
    count = int(gib * 2**30 / each)
    chunks = -(-count // CHUNK)
    store, folder = out / "large.zarr", out / "chunks"
    for place in (store, folder):
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    work = [
        multiprocessing.Process(
            target=write_some,
            args=(result, count, list(range(chunks))[i::processes], folder),
        )
        for i in range(processes)
    ]
    for process in work:
        process.start()
    for process in work:
        process.join()
        assert process.exitcode == 0
    written = time.monotonic()
    merge_results([open_result(path) for path in sorted(folder.iterdir())]).save(store)
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    say("prompts", f"{count:,} in {chunks} chunks of {CHUNK}, {each / 2**20:.1f} MiB each")
    say("stored", f"{size / 2**30:.1f} GiB")
    say(f"written by {processes} processes", f"{written - begun:.0f} s")
    say("merged", f"{time.monotonic() - written:.0f} s, peak {peak():.2f} GiB")
    shutil.rmtree(folder)


def read(out: Path, step: str, resamples: int) -> None:
    """One way of reading it, in this process."""
    begun = time.monotonic()
    result = ma.load_result(out / "large.zarr")
    if step == "loaded":  # every number of it, checked, and nothing done with it
        for dataset in result.datasets.values():
            for name in dataset.data_vars:
                dataset[name].values  # noqa: B018
    elif step == "compared":
        result.compare(
            "slash", unit="prompt", resamples=resamples
        )  # they repeat, and so do their groups
    elif step == "heads":
        result.heads("received", unit="prompt")
    elif step == "verdict":
        result.verdict("slash", unit="prompt")
    elif step == "report":
        report(
            [out / "large.zarr"], out / "large.html", force=True
        )  # the page with every figure there is
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    say(step, f"{time.monotonic() - begun:.1f} s ({cpu:.0f} s of CPU), peak {peak():.2f} GiB")


def read_once(out: Path) -> None:
    """The bytes of all files, as they are."""
    begun = time.monotonic()
    for path in (out / "large.zarr").rglob("*"):
        if path.is_file():
            with open(path, "rb") as stored:
                while stored.read(2**24):
                    pass
    say("all bytes read once", f"{time.monotonic() - begun:.0f} s")


def forget(out: Path) -> None:
    """Drop the files from the system's cache, so that the next step reads them from the disk."""
    os.sync()
    for path in (out / "large.zarr").rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def peak() -> float:
    """Of this process since it began, in GiB: what Linux calls VmHWM (ru_maxrss counts the parent before exec too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def say(what: str, value: str) -> None:
    """A line of the table."""
    print(f"| {what} | {value} |", flush=True)


def main() -> None:
    """All of it, or one step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/large"))
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--resamples", type=int, default=9999)
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=STEPS)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help="read what is there; write nothing")
    given = parser.parse_args()
    if given.step:
        return read(given.out, given.step, given.resamples)
    if not given.read:
        write(given.out, given.gib, given.processes)
    forget(given.out)
    read_once(given.out)
    load = os.getloadavg()[1]
    say("load of the machine", f"{load:.1f}, on {os.cpu_count()} cores")
    for step in given.steps:
        forget(given.out)
        again = [sys.executable, __file__, "--out", str(given.out), "--step", step]
        subprocess.run([*again, "--resamples", str(given.resamples)], check=True)
    return None


if __name__ == "__main__":
    main()
