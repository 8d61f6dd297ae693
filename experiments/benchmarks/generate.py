"""The throughput of generation under conditions: this library against plain ``generate`` of transformers.

Batch 32, 50 new tokens, interleaved runs after a warm-up, medians of tokens a second. Then batches whose rows are
exchanged as answers end, against batches that wait for their longest answer, where answers are as long as a real
model's to GSM8K.

    python experiments/benchmarks/generate.py --model toy:llama
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from ways import SHAPES, new_model

import mechattn as ma
from mechattn.evaluation.generate import Generation, Request, answers
from mechattn.functional.attention import EdgeMask
from mechattn.model.checkpoint import load_tokenizer, toy_names
from mechattn.prompts.token_sequences import TokenSequence

NEVER = frozenset([10**9])
# Lengths in tokens of Qwen2.5-Coder-0.5B-Instruct's answers to 64 problems of GSM8K.
ANSWERED = Path(__file__).parents[1] / "real" / "2026-11-26-accuracy.json"


class OfLengths(Generation):
    """Answers that end after a number of tokens each, which ``lengths`` gives."""

    lengths: list[int]

    def write(self, rows, logits) -> None:
        super().write(rows, logits)
        for row in rows:
            row.is_ended |= len(row.tokens) >= self.lengths[row.number]


def batching(
    native, requests: list[Request], lengths: list[int], batch: int
) -> dict[str, Callable]:
    """Both ways to batch answers of these lengths, as functions."""

    def continuous() -> None:
        generation = OfLengths(native, requests, batch, max(lengths), NEVER)
        generation.lengths = lengths
        made: dict = {}
        while generation.is_open:
            made |= generation.advance()
        assert [len(made[number].tokens) for number in range(len(lengths))] == lengths

    def static() -> None:
        for start in range(0, len(requests), batch):
            longest = max(lengths[start : start + batch])
            answers(native, requests[start : start + batch], longest, NEVER)

    return {"each batch waits for its longest answer": static, "rows are exchanged": continuous}


def spread_of_lengths(shorter: int) -> list[int]:
    """How long a real model's answers are, divided by a number."""
    tokens = json.loads(ANSWERED.read_text())["conditions"]["baseline"]["tokens"]
    return [max(1, length // shorter) for length in tokens]


def ways(model, sequences: list[TokenSequence], new_tokens: int) -> dict[str, Callable[[], None]]:
    """Each way to generate, as a function."""
    native = model._mechattn.native
    tokens = torch.stack([s.tokens for s in sequences]).to(next(native.parameters()).device)

    def plain() -> None:
        with torch.no_grad():
            out = native.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == tokens.shape[1] + new_tokens

    def ours(*interventions, masked: bool = False) -> Callable[[], None]:
        def run() -> None:
            own = [
                replace(s, interventions=interventions, edge_mask=_hidden(s) if masked else None)
                for s in sequences
            ]
            asked = [Request(str(i), each, 0) for i, each in enumerate(own)]
            made = answers(native, asked, new_tokens, NEVER)
            assert all(len(a.tokens) == new_tokens for a in made)

        return run

    released = ma.interventions.ARM(form="released_llama", p1=95.0)
    return {
        "transformers, generate": plain,
        "mechattn": ours(),
        "mechattn, a quarter of the keys hidden": ours(masked=True),
        "mechattn with ARM (layer 0)": ours(released),
        "mechattn with ARM, scope=tensor": ours(
            ma.interventions.ARM(form="released_llama", p1=95.0, scope="tensor")
        ),
    }


def _hidden(sequence: TokenSequence) -> EdgeMask:
    """The second quarter of the tokens, which no later token sees, as in a masked condition."""
    place, length = torch.arange(len(sequence)), len(sequence)
    return EdgeMask(place >= length // 2, (place >= length // 4) & (place < length // 2))


def drawn(count: int, length: int) -> list[TokenSequence]:
    """Sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(5, 700, (length,), generator=generator) for _ in range(count)]
    return [TokenSequence(each, torch.arange(length), torch.full((length,), 4)) for each in tokens]


def rates(ways: dict[str, Callable[[], None]], tokens: int, runs: int) -> dict[str, float]:
    """Tokens a second of each way, the median of interleaved runs after a warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs + 1):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - began)
    return {way: tokens / statistics.median(times[1:]) for way, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=[*SHAPES, *toy_names()], default=["toy:llama", "small"]
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shorter", type=int, default=4, help="divides the real lengths")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"Batch {args.batch}, prompts of {args.length} tokens, {args.new_tokens} new ones; tokens a second, ratio "
        "to plain generate; medians.",
        "",
        "|  | " + " | ".join(args.model) + " |",
        "|---" * (len(args.model) + 1) + "|",
    ]
    found: dict[str, list[str]] = {}
    spread: dict[str, list[str]] = {}
    for name in args.model:
        if name in toy_names():
            model = ma.load_model(name)
        else:
            made = new_model(name, 4, 1024, "cpu", torch.float32)
            model = ma.load_model(made, tokenizer=load_tokenizer("toy:llama"))
        some = ways(model, drawn(args.batch, args.length), args.new_tokens)
        rate = rates(some, args.batch * args.new_tokens, args.runs)
        for way, value in rate.items():
            found.setdefault(way, []).append(
                f"{value:,.0f} ({value / rate['transformers, generate']:.2f})"
            )
        lengths = spread_of_lengths(args.shorter)
        sequences = drawn(len(lengths), args.length)
        requests = [Request(str(number), s, 0) for number, s in enumerate(sequences)]
        both = batching(model._mechattn.native, requests, lengths, args.batch // 2)
        rate = rates(both, sum(lengths), args.runs)
        static = rate["each batch waits for its longest answer"]
        for way, value in rate.items():
            spread.setdefault(way, []).append(f"{value:,.0f} ({value / static:.2f})")
    lines += [f"| {way} | " + " | ".join(cells) + " |" for way, cells in found.items()]
    lines += [
        "",
        f"64 answers as long as a real model's to GSM8K, divided by {args.shorter}, {args.batch // 2} rows at a time.",
        "",
        *lines[2:4],
        *[f"| {way} | " + " | ".join(cells) + " |" for way, cells in spread.items()],
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
