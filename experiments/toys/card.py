"""Write a toy's card from what measure.py saved for its training seeds, and copy the weights of one.

Of several seeds the median ships if it stays within 15 points of its clean accuracy with 55 held-out “/”; if it does
not, the best one ships, and the card says so. A card of a single training says that seeds differ.

python experiments/toys/measure.py out/toys/llama-* --save
python experiments/toys/card.py llama out/toys/llama-*
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from measure import measure, table_lines
from safetensors.torch import load_file

HARDEST, LARGEST_LOSS = "5 steps", 0.15
TOYS = Path(__file__).parents[2] / "mechattn" / "toys"
WORDS = {
    "llama": "Llama (RoPE, grouped-query attention, gated MLP, RMSNorm)",
    "qwen2": "Qwen2 (as Llama, with biases on queries, keys and values; no BOS)",
    "gemma3": "Gemma 3 (QK norm, post-norms, two layers with a window of 64 to each full one, grouped queries)",
    "falcon": "Falcon-RW (ALiBi, LayerNorm, biases, a plain GELU MLP; no BOS)",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--problems", type=int, default=200, help="for a single training")
    parser.add_argument(
        "--options", default="", help="what train.py was called with besides, for the card"
    )
    args = parser.parse_args()
    if len(args.folders) == 1:  # nothing to choose
        measured = {
            args.folders[0]: {
                "problems": args.problems,
                "table": measure(args.folders[0] / "model", args.problems),
            }
        }
    else:
        measured = {
            folder: json.loads((folder / "measured.json").read_text()) for folder in args.folders
        }
    ranked = sorted(args.folders, key=lambda folder: measured[folder]["table"]["55 “/”"][HARDEST])
    median = ranked[(len(ranked) - 1) // 2]
    table = measured[median]["table"]
    holds = table["clean"][HARDEST] - table["55 “/”"][HARDEST] <= LARGEST_LOSS
    shipped = median if holds else ranked[-1]
    target = TOYS / args.family
    target.mkdir(exist_ok=True)
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copyfile(shipped / "model" / name, target / name)
    (target / "README.md").write_text(
        "\n".join(card_lines(args.family, measured, shipped, holds, args.options)) + "\n"
    )
    print(f"{shipped} ships as toy:{args.family}")


def card_lines(
    family: str, measured: dict, folder: Path, is_median: bool, options: str
) -> list[str]:
    """The card in Markdown."""
    command = "python experiments/toys/train.py"
    weights = load_file(folder / "model" / "model.safetensors")
    size, stored = sum(w.numel() for w in weights.values()), str(next(iter(weights.values())).dtype)
    config = json.loads((folder / "model" / "config.json").read_text())
    seed, problems = folder.name.split("-")[-1], measured[folder]["problems"]
    table = measured[folder]["table"] if len(measured) == 1 else measure(folder / "model", problems)
    count = len(measured)
    which = (
        f"the median of {count}"
        if is_median
        else f"**the best of {count}, as the median loses more than 15 points**"
    )
    which = (
        "the only one of this family (seeds differ, above all in how well “/” is ignored)"
        if count == 1
        else which
    )
    lines = [
        f"# toy:{family}",
        "",
        f"A toy, {size / 1e6:.2f} M parameters: the architecture of {WORDS.get(family, family)}, "
        f"{config['num_hidden_layers']} layers, {config['num_attention_heads']} heads, 1,024 positions, its own BPE "
        f"tokenizer of {config['vocab_size']} tokens. Stored as {stored.removeprefix('torch.')}, loaded as float32.",
        "",
        "It solves generated word problems of one to five steps (`experiments/toys/generated_problems.py`); it is for "
        "trying out measurements, and says nothing about real models. In training, filler stood between the system "
        "prompt and the "
        "question in part of the examples, never `/`, `?` or `he`.",
        "",
        f"Training seed {seed}, {which}; ranked by exact match on five-step problems with 55 “/”. Trained on the CPU by"
        if count > 1
        else f"Training seed {seed}, {which}. Trained on the CPU by",
        "",
        f"    {command} --family {family} --seed {seed} --out out/toys/{folder.name} {options}".rstrip(),
        "",
        f"## Held-out exact match, greedy, weights as stored ({problems} problems a row)",
        "",
        *table_lines(table, problems),
        "",
        "Measured by `make cards`, which prints this table again"
        + (", on other problems than those that chose the seed." if count > 1 else "."),
    ]
    if count == 1:
        return lines
    lines += [
        "",
        f"## The training seeds, on the {problems} problems that chose among them",
        "",
        "| seed | "
        + " | ".join(f"{name}, {kind}" for name, rows in table.items() for kind in rows)
        + " |",
        "|---" * (1 + sum(len(rows) for rows in table.values())) + "|",
    ]
    for training, some in measured.items():
        shares = [
            f"{100 * value:.1f} %" for rows in some["table"].values() for value in rows.values()
        ]
        lines.append(f"| {training.name.split('-')[-1]} | " + " | ".join(shares) + " |")
    return lines


if __name__ == "__main__":
    main()
