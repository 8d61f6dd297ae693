"""The throughput of a server beside the loop here: word problems with and without 20 slashes, greedy.

``transformers serve`` (one prompt at a time, or with ``--continuous-batching``) on the loopback address, with as many
threads as the loop. Interleaved after a warm-up, medians of tokens a second. It measures what the way over a server
costs, and not an engine that is made for throughput.

    python experiments/benchmarks/served.py --model toy:llama
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import mechattn as ma
from mechattn.model.checkpoint import model_place

_MAIN = "from transformers.cli.transformers import main; main()"


@contextmanager
def serving(folder: str, *options: str) -> Iterator[str]:
    """The address of ``transformers serve``, for the length of a ``with``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [
        "serve",
        folder,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        *options,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def timed(evaluate: Callable[[], ma.Evaluation]) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    made = evaluate()
    return sum(len(answer.tokens) for answer in made.answers) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy:llama")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, folder = ma.load_model(args.model), model_place(args.model)
    prompts = ma.load_prompts("word-problems", limit=args.limit)
    conditions = {"slash": ma.MeaninglessTokens("/", 20).fitted(model)}
    options = {"new_tokens": args.new_tokens}

    def here(batch: int) -> Callable[[], ma.Evaluation]:
        return lambda: ma.evaluate(model, prompts, conditions, batch=batch, **options)

    def there(address: str) -> Callable[[], ma.Evaluation]:
        served = {"server": ma.Server(address, folder), "batch": args.batch}
        return lambda: ma.evaluate(args.model, prompts, conditions, **served, **options)

    with ExitStack() as stack:
        ways = {
            f"here, batch {args.batch}": here(args.batch),
            "here, batch 1": here(1),
            "transformers serve": there(stack.enter_context(serving(folder))),
            "transformers serve --continuous-batching": there(
                stack.enter_context(serving(folder, "--continuous-batching"))
            ),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.runs + 1):
            for way, run in ways.items():
                try:
                    rates[way].append(timed(run))
                except ma.MechattnError as error:
                    rates[way].append(float("nan"))
                    print(f"{way}: {error}", file=sys.stderr)
    lines = [
        f"{args.model}, {args.limit} word problems × 2 conditions, {args.new_tokens} new tokens, {args.batch} requests "
        f"at once, {torch.get_num_threads()} threads each; median of {args.runs} runs, tokens a second.",
        "",
        "| way | tokens a second | of the loop here |",
        "|---|---|---|",
    ]
    first = statistics.median(rates[next(iter(rates))][1:])
    for way, some in rates.items():
        middle = statistics.median(some[1:])
        lines.append(f"| {way} | {middle:,.0f} | {middle / first:.2f} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
