"""The cost of measuring real models, each part beside plain passes of the same model over the same tokens.

A plain pass is a forward pass of transformers with SDPA, without a cache and with the logits of one position, of a model
that is loaded for this alone: the model inside a bridge runs eager attention, and a comparison with it would flatter.
Ways are interleaved; a ratio is the median over rounds of CPU time (``time.process_time``) over that of the plain pass
in the same round, so that other work on the machine changes it little. One thread. At each length there are as many
prompts in one batch as make about a thousand tokens, as what a run does once (looking at the model's state, describing the
result) would be much of a pass over a single short prompt.

    python experiments/benchmarks/real.py out/real
    python experiments/benchmarks/real.py out/real --models smollm2 --lengths 130 512 --runs 3 --out out/real.md
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import mechattn as ma

PLAIN = "plain SDPA pass (the limit)"
RECEIVED = "`ma.run`, received attention"
TOGETHER = "`ma.run`, five analyses together"
EAGER = "transformers, `output_attentions=True`"
CACHE = "TransformerLens, `run_with_cache` of patterns"
SLASHES = ma.MeaninglessTokens("/", count=55)
TOKENS_OF_A_BATCH = 1_040  # about
PEERS_UP_TO = 6 * 2**30  # bytes of patterns of all layers that a peer may hold at once


def five_analyses() -> list[Any]:
    """What people measure together."""
    of = ma.analyses
    return [
        ma.ReceivedAttention(),
        of.AttentionBudget(),
        of.AttentionFocus(),
        of.HeadUpdates(),
        of.AttentionSinks(),
    ]


@dataclass(frozen=True)
class Cost:
    """The cost of one way."""

    model: str
    tokens: int  # of one prompt
    prompts: int  # in one batch
    way: str
    seconds: float  # of CPU, median
    ratio: float  # to plain passes over the same tokens, median over rounds
    low: float  # the smallest and the largest ratio of a round
    high: float
    rounds: int


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU time of a call, of all threads of this process."""
    gc.collect()
    begun = time.process_time()
    call()
    return time.process_time() - begun


def plain_model(folder: Path, attention: str) -> Any:
    """A model of transformers as anybody would load it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    ).eval()


def ways_to_measure(folder: Path, bridge: Any, tokens: torch.Tensor) -> dict[str, Callable]:
    """The plain pass, ours and the peers', each over the same tokens."""
    plain = plain_model(folder, "sdpa")
    ways: dict[str, Callable] = {
        PLAIN: lambda: plain(tokens, use_cache=False, logits_to_keep=1),
        RECEIVED: lambda: ma.run(bridge, tokens),
        TOGETHER: lambda: ma.run(bridge, tokens, analyses=five_analyses()),
    }
    cfg = bridge.cfg
    prompts, length = tokens.shape
    if 4 * prompts * int(cfg.n_layers) * int(cfg.n_heads) * length**2 > PEERS_UP_TO:
        return ways
    eager = plain_model(folder, "eager")

    def patterns_of_cache() -> None:
        bridge.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_pattern"), return_type=None
        )

    ways[EAGER] = lambda: eager(tokens, use_cache=False, logits_to_keep=1, output_attentions=True)
    ways[CACHE] = patterns_of_cache
    return ways


def costs_of_passes(
    name: str, folder: Path, bridge: Any, tokens: torch.Tensor, runs: int
) -> list[Cost]:
    """Interleaved rounds after a warm-up: forwards and backwards in turn."""
    ways = ways_to_measure(folder, bridge, tokens)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with torch.no_grad():
        for call in ways.values():
            call()
        for number in range(runs):
            order = list(ways) if number % 2 == 0 else list(reversed(ways))
            for way in order:
                seconds[way].append(cpu_seconds(ways[way]))
    costs = []
    for way, taken in seconds.items():
        ratios = [own / limit for own, limit in zip(taken, seconds[PLAIN], strict=True)]
        middle = statistics.median(ratios)
        costs.append(
            Cost(
                model=name,
                tokens=tokens.shape[1],
                prompts=len(tokens),
                way=way,
                seconds=statistics.median(taken),
                ratio=middle,
                low=min(ratios),
                high=max(ratios),
                rounds=runs,
            )
        )
    return costs


def costs_around_a_run(name: str, folder: Path, questions: list[str]) -> tuple[Any, list[Cost]]:
    """Loading, verification, a run of two conditions, its comparison and its page, once each; and the bridge."""
    held: dict[str, Any] = {}

    def load() -> None:
        held["bridge"] = ma.load_model(folder, verify=False)

    def run() -> None:
        held["result"] = ma.run(
            held["bridge"], prompts, {"slash": SLASHES}, five_analyses(), keep="prompts"
        )

    seconds = {"loading": cpu_seconds(load)}
    bridge = held["bridge"]
    seconds["verification"] = cpu_seconds(lambda: ma.verify_model(bridge))
    template = "chat" if getattr(bridge.tokenizer, "chat_template", None) else "plain"
    prompts = [
        ma.Prompt(question, template=template, id=str(number))
        for number, question in enumerate(questions)
    ]
    seconds[f"`ma.run`, five analyses, {len(prompts)} prompts with and without 55 “/”"] = (
        cpu_seconds(run)
    )
    result = held["result"]
    seconds["statistics: `result.compare`"] = cpu_seconds(lambda: result.compare("slash"))
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        seconds["page: `result.page`"] = cpu_seconds(lambda: result.page(page))

    plain = plain_model(folder, "sdpa")
    sequences = [
        condition.apply(prompt, bridge).tokens[None]
        for prompt in prompts
        for condition in (ma.Baseline(), SLASHES)
    ]

    def plain_passes() -> None:
        with torch.no_grad():
            for tokens in sequences:
                plain(tokens, use_cache=False, logits_to_keep=1)

    plain_passes()
    limit = cpu_seconds(plain_passes)
    tokens = round(statistics.mean(part.shape[1] for part in sequences))
    seconds = {f"plain SDPA passes of these {len(sequences)} sequences": limit, **seconds}
    costs = [
        Cost(
            model=name,
            tokens=tokens,
            prompts=len(prompts),
            way=way,
            seconds=taken,
            ratio=taken / limit,
            low=taken / limit,
            high=taken / limit,
            rounds=1,
        )
        for way, taken in seconds.items()
    ]
    return bridge, costs


def markdown(costs: list[Cost], title: str, note: str) -> str:
    """The tables of all models; the JSON below them holds the same numbers."""
    lines = [f"# {title}", "", note, ""]
    for name in dict.fromkeys(cost.model for cost in costs):
        lines += [f"## {name}", ""]
        lines += ["| prompts × tokens | | CPU seconds | of plain passes | range | rounds |"]
        lines += ["|---|---|---|---|---|---|"]
        for cost in costs:
            if cost.model == name:
                spread = f"{cost.low:.2f} to {cost.high:.2f}" if cost.rounds > 1 else ""
                lines += [
                    f"| {cost.prompts} × {cost.tokens:,} | {cost.way} | {cost.seconds:.2f} | {cost.ratio:.2f} | "
                    f"{spread} | {cost.rounds} |"
                ]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder with one checkpoint folder a model")
    parser.add_argument("--models", nargs="*", help="folders in it; all by default")
    parser.add_argument("--lengths", nargs="*", type=int, default=[130, 512, 2048])
    parser.add_argument("--runs", type=int, default=5, help="rounds for each length")
    parser.add_argument("--prompts", type=int, default=8, help="questions of the run with a page")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the table")
    parser.add_argument("--out", type=Path, help="a Markdown file; its numbers beside it as JSON")
    args = parser.parse_args()
    if args.prompts < 3:
        parser.error("--prompts: a comparison needs at least 3 prompts")
    torch.set_num_threads(1)

    folders = [args.folder / name for name in args.models or []]
    if not folders:
        folders = sorted(path.parent for path in args.folder.glob("*/config.json"))
    out = args.out or Path(__file__).parent / f"{date.today()}-real-cpu.md"
    questions = [prompt.question for prompt in ma.load_prompts("word-problems", limit=128)]
    title = f"{date.today()}: real models on a CPU, one thread"
    note = (
        f"`experiments/benchmarks/real.py`; torch {torch.__version__}, transformers "
        f"{version('transformers')}, TransformerLens {version('transformer_lens')}. Ratios of CPU time to "
        f"plain SDPA passes over the same tokens, median over rounds. {args.note}"
    ).strip()
    costs: list[Cost] = []
    for folder in folders:
        bridge, around = costs_around_a_run(folder.name, folder, questions[: args.prompts])
        costs += around
        ids = bridge.tokenizer(" ".join(questions * 4))["input_ids"]
        for length in args.lengths:
            prompts = max(1, TOKENS_OF_A_BATCH // length)
            tokens = torch.tensor(ids[: prompts * length]).reshape(prompts, length)
            tokens[:, 0] = ids[0]  # BOS, where the tokenizer puts one before a text
            costs += costs_of_passes(folder.name, folder, bridge, tokens, args.runs)
            # After each length, so that a run that is cut off leaves its numbers.
            out.write_text(markdown(costs, title, note))
            out.with_suffix(".json").write_text(json.dumps(list(map(asdict, costs)), indent=1))
            print(markdown(costs, title, note), flush=True)


if __name__ == "__main__":
    main()
