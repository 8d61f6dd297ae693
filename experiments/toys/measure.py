"""Measure a toy as it is stored: held-out exact match with greedy decoding, clean and with held-out filler.

    python experiments/toys/measure.py mechattn/toys/llama            # prints the card's table
    python experiments/toys/measure.py out/toys/llama-* --save        # beside each training's weights, for the card

Weights are loaded as float32 with native attention. Problems are of the test split, which no training sees.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from generated_problems import word_problems
from train import exact_match
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mechattn.stats.intervals import wilson_interval

FILLERS = {"clean": None, "55 “/”": "/", "55 “?”": "?", "55 “he”": "he"}
CHOOSING, REPORTING = (
    1,
    2,
)  # seeds of the problems on which a training is chosen, and of those that the card reports


def measure(folder: Path, problems: int, seed: int = REPORTING) -> dict[str, dict[str, float]]:
    """Exact match by filler and number of steps."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # Auto would take Qwen2's own rules
    table: dict[str, dict[str, float]] = {}
    for name, text in FILLERS.items():
        filler = (
            []
            if text is None
            else tokenizer(" ".join([text] * 55), add_special_tokens=False)["input_ids"]
        )
        assert len(filler) in (0, 55), f"{text!r} is no single token"
        rows = {"all": list(islice(word_problems("test", seed=seed), problems))}
        if text in (None, "/"):
            rows["5 steps"] = list(islice(word_problems("test", steps=(5,), seed=seed), problems))
        table[name] = {
            kind: exact_match(model, tokenizer, some, filler) for kind, some in rows.items()
        }
    return table


def table_lines(table: dict[str, dict[str, float]], problems: int) -> list[str]:
    """The table in Markdown, with 95 % Wilson intervals."""
    lines = ["| filler | problems | exact match | 95 % interval |", "|---|---|---|---|"]
    for name, rows in table.items():
        for kind, share in rows.items():
            low, high = wilson_interval(round(share * problems), problems)
            which = "1 to 5 steps" if kind == "all" else kind
            lines.append(
                f"| {name} | {which} | {100 * share:.1f} % | {100 * low:.1f} to {100 * high:.1f} % |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", help="a checkpoint folder, or a training's folder"
    )
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--save", action="store_true", help="write measured.json, to choose a training by"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for folder in args.folders:
        weights = folder / "model" if (folder / "model").is_dir() else folder
        table = measure(weights, args.problems, CHOOSING if args.save else REPORTING)
        print(
            f"{folder}: {args.problems} held-out problems each\n"
            + "\n".join(table_lines(table, args.problems)),
            flush=True,
        )
        if args.save:
            (folder / "measured.json").write_text(
                json.dumps({"problems": args.problems, "table": table})
            )


if __name__ == "__main__":
    main()
