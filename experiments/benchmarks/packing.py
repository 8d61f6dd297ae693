"""What zstd would save of a result, and what storing one takes.

    python experiments/benchmarks/packing.py

On toys, and on a chunk of the synthetic result of ``large.py``: the share of the bytes that zstd at level 1 leaves of
the pieces, how long Zarr takes with and without it, and the bytes and files of two small results.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zarr
from large import base, block
from zarr.codecs import Crc32cCodec, ZstdCodec

import mechattn as ma
from mechattn.store.pieces import FILL, in_regions, region_of

CHUNK = 128


def main() -> None:
    """Both tables."""
    warnings.simplefilter("ignore")
    print("| result | codec | share | written | read | (processor time)\n|---|---|---|---|---|---|")
    for name in ("toy:llama", "toy:qwen2", "toy:falcon"):
        packed(name, toy(name, "moments"))
    packed("toy:llama, positions", toy("toy:llama", "prompts"))
    packed("synthetic", block(base(), range(CHUNK)))
    print(
        "\n| toy:llama | form | bytes | files | written | loaded and hashed |\n|---|---|---|---|---|---|"
    )
    for positions in ("moments", "prompts"):
        result = toy("toy:llama", positions)
        form(positions, "stored", result, result.save)


def toy(name: str, positions: Any) -> ma.Result:
    """64 word problems with 55 slashes, four analyses."""
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.MlpActivations(),
        ma.analyses.AttentionFocus(),
    ]
    conditions = {"slash": ma.MeaninglessTokens("/").fitted(ma.load_model(name))}
    prompts = ma.load_prompts("word-problems", limit=64)
    return ma.run(name, prompts, conditions, analyses, positions=positions)


def packed(name: str, result: ma.Result) -> None:
    """The pieces of a result with and without zstd."""
    variables = [v for d in result.datasets.values() for v in d.variables.values() if in_regions(v)]
    whole = sum(variable.nbytes for variable in variables)
    for label, codecs in (
        ("none", [Crc32cCodec()]),
        ("zstd 1", [ZstdCodec(level=1), Crc32cCodec()]),
    ):
        with TemporaryDirectory() as folder:
            begun = time.process_time()
            for number, variable in enumerate(variables):
                of = region_of(variable, min(64, len(variable)))
                array = zarr.create_array(
                    folder, name=str(number), shape=of.shape, chunks=of.piece, dtype=of.dtype,
                    fill_value=FILL[np.dtype(of.dtype).kind], compressors=codecs, filters=None,
                    config={"write_empty_chunks": True},
                )  # fmt: skip
                array[...] = variable.values
            written, stored = time.process_time(), bytes_in(Path(folder))[0]
            for number in range(len(variables)):
                zarr.open_array(folder, path=str(number), mode="r")[...]
            seconds = f"{written - begun:.2f} s | {time.process_time() - written:.2f} s"
            print(
                f"| {name} | {label} | {stored / whole:.2f} of {whole / 1e6:,.1f} MB | {seconds} | |",
                flush=True,
            )


def form(positions: str, label: str, result: ma.Result, write: Callable[[Path], object]) -> None:
    """One way of storing a result."""
    with TemporaryDirectory() as folder:
        place, begun = Path(folder) / "r.zarr", time.monotonic()
        write(place)
        written = time.monotonic()
        ma.load_result(place).digest()
        seconds = f"{written - begun:.2f} s | {time.monotonic() - written:.2f} s"
        print(
            f"| {positions} | {label} | {bytes_in(place)[0]:,} | {bytes_in(place)[1]} | {seconds} |",
            flush=True,
        )


def bytes_in(folder: Path) -> tuple[int, int]:
    """Of all files in a folder, and how many there are."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


if __name__ == "__main__":
    main()
