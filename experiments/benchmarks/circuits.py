"""Time of all edges by EAP, beside TransformerLens's attribution_patch on the same pairs and metric, interleaved.

python experiments/benchmarks/circuits.py --pairs 64 --tokens 32 --out out/bench-circuits.md     (make bench)

GPT-2's shape with random weights, 12 layers × 12 heads. ``ma.edges`` also patches eight edges exactly on four pairs and
draws random steps. Exact patching: all heads of a pair against as many plain passes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch
from transformers import GPT2Config, GPT2LMHeadModel

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.model.checkpoint import lettered_tokenizer

VOCABULARY = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/bench-circuits.md"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    model = ma.load_model(GPT2LMHeadModel(config).eval(), tokenizer=lettered_tokenizer(VOCABULARY))
    pairs = made_pairs(given.pairs, given.tokens)
    own, other = (
        torch.tensor([[*v, 0] for v in vs])
        for vs in zip(*((p.tokens, p.counterpart) for p in pairs), strict=True)
    )
    heads = [(layer, head) for layer in range(12) for head in range(12)]
    calls: dict[str, Callable[[], object]] = {
        "mechattn, ma.edges": lambda: ma.edges(model, pairs, Counterpart(), memory="8GiB"),
        "TransformerLens, attribution_patch": lambda: attribution_patch(
            model,
            other,
            own,
            lambda logits: logits[0, -2, 0] - logits[0, -2, 1],
            EdgeAttributionConfig("edge"),
        ),
        "ma.patch, all heads exactly, two pairs": lambda: ma.patch(
            model, pairs[:2], Counterpart(), at=heads, metric="logit_diff", direction="denoising"
        ),
        "as many plain passes (3 × heads × pairs)": lambda: plain(
            model, own[:1], 3 * len(heads) * 2
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(given.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
            print(f"{name}: {times[name][-1]:.1f} s", flush=True)
    size = f"{given.pairs} pairs of {given.tokens + 1} tokens, 12 layers × 12 heads"
    lines = [f"{size}, float32, {torch.get_num_threads()} threads", ""]
    lines += ["| call | median s | all |", "|---|---|---|"]
    for name, each in times.items():
        lines.append(
            f"| {name} | {sorted(each)[len(each) // 2]:.1f} | {', '.join(f'{one:.1f}' for one in each)} |"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def made_pairs(count: int, tokens: int) -> list[ma.Prompt]:
    """Random tokens, half of them exchanged in the other version."""
    made = []
    for index in range(count):
        drawn = torch.randint(
            2, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(index)
        )
        drawn[1, tokens // 2 :] = drawn[0, tokens // 2 :]
        own, other = (tuple(row) for row in drawn.tolist())
        made.append(
            ma.Prompt(
                tokens=own, counterpart=other, answer_tokens=(0,), other_answer=(1,), id=str(index)
            )
        )
    return made


def plain(model: object, tokens: torch.Tensor, passes: int, rows: int = 32) -> None:
    """Plain passes, in batches as large as those of ``ma.patch``."""
    with torch.no_grad():
        for _ in range(passes // rows):
            model(tokens.expand(rows, -1))  # type: ignore[operator]


if __name__ == "__main__":
    main()
