"""The throughput of generation under conditions: this library against plain ``generate`` of transformers.

Batch 32, 50 new tokens, interleaved runs after a warm-up, medians of tokens a CPU second. Then batches whose rows are
exchanged as answers end, against batches that wait for their longest answer, where answers are as long as a real
model's to GSM8K, or shorter in proportion, prompts too.

    python experiments/benchmarks/generate.py --model toy:llama
    python experiments/benchmarks/generate.py --only lengths --model out/real/smollm2 --shorter 8 --runs 2
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
from mechattn.evaluation.generate import Answer, Generation, answers, until_end
from mechattn.evaluation.generating_rows import Request
from mechattn.model.checkpoint import toy_tokenizer
from mechattn.prompts.token_sequences import CutEdges, TokenSequence

CHARACTERS_A_TOKEN = 4
TOKENS_OF_THE_CHAT = 40  # its template, and a system prompt that asks for a box
NEVER = frozenset([10**9])
# Lengths in tokens of Qwen2.5-Coder-0.5B-Instruct's answers to the first 64 problems of GSM8K.
ANSWERED = Path(__file__).parents[1] / "real" / "2026-11-26-accuracy.json"


class OfLengths(Generation):
    """Answers that end after a number of tokens each, which ``lengths`` gives."""

    lengths: list[int]

    def write(self, rows, logits) -> dict[int, Answer]:
        ended = super().write(rows, logits)
        for row in rows:
            if not row.is_ended and len(row.tokens) >= self.lengths[row.number]:
                row.is_ended = True
                ended[row.number] = until_end(row.tokens, row.logprobs, NEVER)
        return ended


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


def answered_prompts(shorter: int) -> list[tuple[int, int]]:
    """The lengths in tokens of GSM8K's first questions in a chat, and of a real model's answers.

    They are divided by a number, and sorted by the first, as ``evaluate`` sorts them.
    """
    answers = json.loads(ANSWERED.read_text())["conditions"]["baseline"]["tokens"][:64]
    prompts = ma.load_prompts("gsm8k", limit=len(answers))
    pairs = []
    for prompt, answer_length in zip(prompts, answers, strict=True):
        prompt_length = len(prompt.question) // CHARACTERS_A_TOKEN + TOKENS_OF_THE_CHAT
        pairs.append((prompt_length // shorter, max(1, answer_length // shorter)))
    return sorted(pairs, key=lambda pair: pair[0])


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
                replace(s, interventions=interventions, cut_edges=_hidden(s) if masked else None)
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


def _hidden(sequence: TokenSequence) -> CutEdges:
    """The second quarter of the tokens, which no later token sees, as in a masked condition."""
    place, length = torch.arange(len(sequence)), len(sequence)
    return CutEdges(place >= length // 2, (place >= length // 4) & (place < length // 2))


def drawn(lengths: list[int]) -> list[TokenSequence]:
    """Sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in lengths:
        tokens = torch.randint(5, 700, (length,), generator=generator)
        sequences.append(TokenSequence(tokens, torch.arange(length), torch.full((length,), 4)))
    return sequences


def rates(ways: dict[str, Callable[[], None]], tokens: int, runs: int) -> dict[str, float]:
    """Tokens a CPU second of each way, the median of interleaved runs after a warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs + 1):
        for way, run in ways.items():
            start = time.process_time()
            run()
            seconds[way].append(time.process_time() - start)
    return {way: tokens / statistics.median(times[1:]) for way, times in seconds.items()}


def beside_generate(model, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a CPU second of answers of equal lengths."""
    named = ways(model, drawn([args.length] * args.batch), args.new_tokens)
    return rates(named, args.batch * args.new_tokens, args.runs)


def of_real_lengths(model, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a CPU second of answers as long as a real model's."""
    prompt_lengths, answer_lengths = zip(*answered_prompts(args.shorter), strict=True)
    lengths = list(answer_lengths)
    sequences = drawn(list(prompt_lengths))
    requests = [Request(str(number), s, 0) for number, s in enumerate(sequences)]
    named = batching(model._mechattn.native, requests, lengths, args.batch // 2)
    return rates(named, sum(lengths), args.runs)


def loaded(name: str):
    """A toy, a checkpoint, or a model of a shape with random weights."""
    if name not in SHAPES:
        return ma.load_model(name)
    random_model = new_model(name, 4, 1024, "cpu", torch.float32)
    return ma.load_model(random_model, tokenizer=toy_tokenizer("toy:llama"))


def table(rates_by_model: dict[str, dict[str, float]]) -> list[str]:
    """Rates in Markdown, with the ratio of each to the first."""
    lines = [
        "|  | " + " | ".join(rates_by_model) + " |",
        "|---" * (len(rates_by_model) + 1) + "|",
    ]
    for way in next(iter(rates_by_model.values())):
        cells = []
        for rate in rates_by_model.values():
            first = next(iter(rate.values()))
            cells.append(f"{rate[way]:,.0f} ({rate[way] / first:.2f})")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=["toy:llama", "small"],
        help=f"{', '.join(SHAPES)}, a toy or a checkpoint",
    )
    parser.add_argument("--only", choices=["generate", "lengths"], help="one of both comparisons")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shorter", type=int, default=4, help="divides the real lengths")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    models = {name: loaded(name) for name in args.model}
    lines = []
    if args.only != "lengths":
        lines += [
            f"Batch {args.batch}, prompts of {args.length} tokens, {args.new_tokens} new ones; tokens a CPU second, "
            "ratio to plain generate; medians.",
            "",
            *table({name: beside_generate(model, args) for name, model in models.items()}),
            "",
        ]
    if args.only != "generate":
        shorter = ""
        if args.shorter > 1:
            shorter = f", divided by {args.shorter}"
        lines += [
            f"{len(answered_prompts(1))} prompts and answers as long as a real model's of GSM8K{shorter}, "
            f"{args.batch // 2} rows at a time; tokens a CPU second.",
            "",
            *table({name: of_real_lengths(model, args) for name, model in models.items()}),
        ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
