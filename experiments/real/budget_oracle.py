"""The attention budget again, from plain transformers: whole rows, in float64, one query at a time.

    python experiments/real/budget_oracle.py FOLDER [--prompts gsm8k] [--questions 2]

FOLDER holds checkpoint folders. Queries and keys are taken before they are rotated, and transformers' own function
rotates them, at the positions of the baseline or of the longer sequence. The command prints the largest difference from
``ma.analyses.AttentionBudget`` over layers, heads, segments and causes, and the same for an oracle whose queries are one
position wrong, which must be large. Beside it stands what plain transformers differ by when they compute in float32, as the
hooked model does: 1e-5 in Qwen, which has large biases.
``tests/analysis/test_attention_budget_parity.py`` does this with the toys.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.axes import SEGMENTS

INSERTED = SEGMENTS.index("inserted")
SYSTEM = r"Please reason step by step and put your final answer within \boxed{}."


@dataclass
class Layer:
    """One layer of one pass: queries and keys before rotation [head, pos, d_head], and how scores are made of them."""

    q: torch.Tensor
    k: torch.Tensor
    rotate: object  # (q, k, query positions, key positions) -> rotated q and k
    scale: float
    window: int | None
    alibi: object  # (number of keys) -> [head, key]; None without ALiBi


def masks_of(plain, sequence):
    """The mask of a pass: of padding, of which there is none; or of each edge, where a condition cuts some."""
    length = len(sequence)
    if sequence.cut_edges is None:
        return torch.ones(1, length, dtype=torch.long)
    places = torch.arange(length)
    cut = sequence.cut_edges.queries[:, None] & sequence.cut_edges.keys & ~torch.eye(length).bool()
    distance = places[:, None] - places
    masks = {}
    for kind, window in (
        ("full_attention", length),
        ("sliding_attention", getattr(plain.config, "sliding_window", None) or length),
    ):
        hidden = cut | (distance < 0) | (distance >= window)
        lowest = torch.finfo(torch.float64).min
        masks[kind] = torch.zeros(length, length).double().masked_fill(hidden, lowest)[None, None]
    return masks if plain.config.model_type == "gemma3_text" else masks["full_attention"]


def read(plain, sequence):
    """Every layer of a pass of plain transformers over one sequence."""
    blocks = max((m for m in plain.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    projected = {}
    handles = []

    def keep(key):
        def take(module, inputs, output):
            projected[key] = output.detach()[0]

        return take

    for number, block in enumerate(blocks):
        for name, module in block.named_modules():
            last = name.rpartition(".")[2]
            if last in ("q_proj", "k_proj", "q_norm", "k_norm", "query_key_value", "c_attn"):
                handles.append(module.register_forward_hook(keep((number, last))))
    options = {}
    if plain.config.model_type != "falcon":
        options["position_ids"] = sequence.position_ids[None]
    with torch.no_grad():
        plain(sequence.tokens[None], attention_mask=masks_of(plain, sequence), **options)
    for handle in handles:
        handle.remove()
    return [layer_of(plain, block, number, projected) for number, block in enumerate(blocks)]


def layer_of(plain, block, number, projected):
    config = plain.config
    heads = config.num_attention_heads
    by_head = {}
    if (number, "query_key_value") in projected:  # Falcon: q, k and v of each head together
        together = projected[number, "query_key_value"]
        together = together.view(len(together), heads, 3, -1).permute(2, 1, 0, 3)
        by_head = {"q": together[0], "k": together[1]}
    elif (number, "c_attn") in projected:  # GPT-2: q of all heads, then k, then v
        together = projected[number, "c_attn"]
        together = together.view(len(together), 3, heads, -1).permute(1, 2, 0, 3)
        by_head = {"q": together[0], "k": together[1]}
    else:
        width = block.self_attn.head_dim
        for part in "qk":
            if (number, f"{part}_norm") in projected:  # Gemma 3: [head, pos, d_head] already
                by_head[part] = projected[number, f"{part}_norm"]
            else:
                flat = projected[number, f"{part}_proj"]
                by_head[part] = flat.view(len(flat), -1, width).transpose(0, 1)
    q = by_head["q"]
    k = by_head["k"].repeat_interleave(heads // len(by_head["k"]), 0)

    window = None
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[number] == "sliding_attention":
        window = config.sliding_window
    scale = q.shape[-1] ** -0.5
    rotate = None
    alibi = None
    if config.model_type == "falcon":
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        def alibi(keys):
            bias = build_alibi_tensor(torch.ones(1, keys), heads, torch.float64)
            return bias[:, 0] * scale

    elif config.model_type != "gpt2":
        scale = block.self_attn.scaling
        functions = sys.modules[type(block.self_attn).__module__]
        kind = (kinds[number],) if config.model_type == "gemma3_text" else ()

        def rotate(x, positions):
            cos, sin = plain.model.rotary_emb(x, positions[None], *kind)
            return functions.apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]

    return Layer(q, k, rotate, scale, window, alibi)


def masses_of_query(scores, place, places, layer, unseen, segment, counted):
    """Softmax of one query's scores over the counted keys that it sees, summed by segment [head, segment]."""
    sees = (places <= place) & counted & ~unseen
    if layer.window is not None:
        sees &= place - places < layer.window
    weights = np.exp(scores - scores[:, sees].max(1, keepdims=True)) * sees
    weights /= weights.sum(1, keepdims=True)
    return np.stack([weights[:, segment == code].sum(1) for code in range(len(SEGMENTS))], 1)


def budget_of_layer(short, long, baseline, longer, off=0):
    """The quantities of one layer, for a baseline and a longer sequence; queries are moved ``off`` positions too far."""
    length = len(longer)
    origin = longer.origin.numpy()
    segment = longer.segment.numpy()
    original = origin >= 0
    everywhere = np.ones(length, dtype=bool)
    places = np.arange(length)
    old_places = np.arange(len(baseline))
    old_segment = baseline.segment.numpy()

    # The baseline's queries and keys in the order of the longer sequence; inserted keys are its own.
    index = torch.tensor(np.clip(origin, 0, None))
    mixed_q = short.q[:, index]
    mixed_k = torch.where(torch.tensor(original)[None, :, None], short.k[:, index], long.k)
    if short.rotate is None:
        pairs = [(short.q, short.k), (long.q, long.k), (mixed_q, mixed_k)]
    else:
        old, new = baseline.position_ids, longer.position_ids
        pairs = [
            (short.rotate(short.q, old), short.rotate(short.k, old)),
            (long.rotate(long.q, new), long.rotate(long.k, new)),
            (long.rotate(mixed_q, new + off), long.rotate(mixed_k, new)),
        ]
    biases = [0 if long.alibi is None else long.alibi(len(p[1][0]))[:, None] for p in pairs]
    short_scores, long_scores, mixed_scores = (
        (q @ k.transpose(1, 2) * short.scale + bias).numpy()
        for (q, k), bias in zip(pairs, biases, strict=True)
    )

    by_query = []
    for place in np.flatnonzero(segment == SEGMENTS.index("question")):
        query = origin[place]
        unseen = np.zeros(length, dtype=bool)
        if longer.cut_edges is not None and longer.cut_edges.queries[place]:
            unseen = longer.cut_edges.keys.numpy() & (places != place)
        nothing = np.zeros(len(baseline), dtype=bool)
        before = masses_of_query(
            short_scores[:, query], query, old_places, short, nothing, old_segment, ~nothing
        )
        rows = (long_scores[:, place], mixed_scores[:, place])
        after = masses_of_query(rows[0], place, places, long, unseen, segment, everywhere)
        moved = masses_of_query(rows[1], place, places, long, unseen, segment, everywhere)
        moved_only = masses_of_query(rows[1], place, places, long, unseen, segment, original)
        dilution = -after[:, INSERTED, None] * before
        causes = np.stack([moved_only - before, moved - moved_only, after - moved], -1)
        by_query.append((after, after - before, dilution, after - before - dilution, causes))
    names = ("attention", "change", "dilution", "rerouting", "by_cause")
    return {n: np.mean(values, 0) for n, values in zip(names, zip(*by_query), strict=True)}


def oracle(plain, baseline, longer, off=0):
    """The quantities of every layer."""
    short = read(plain, baseline)
    long = read(plain, longer)
    layers = zip(short, long, strict=True)
    budgets = [budget_of_layer(*layer, baseline, longer, off) for layer in layers]
    return {name: np.stack([budget[name] for budget in budgets]) for name in budgets[0]}


def largest_differences(measured, expected):
    """By quantity, the largest difference over what is measured (a segment without tokens is not)."""
    return {
        name: float(np.nanmax(abs(measured[name] - values))) for name, values in expected.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", default="gsm8k")
    parser.add_argument("--questions", type=int, default=2)
    options = parser.parse_args()

    slash = ma.MeaninglessTokens("/", count=55)
    conditions = {"slash": slash, "masked": slash.masked(), "unshifted": slash.unshifted()}
    for folder in sorted(path.parent for path in options.folder.glob("*/config.json")):
        model = ma.load_model(folder)
        template = "chat" if getattr(model.tokenizer, "chat_template", None) else "plain"
        prompts = ma.load_prompts(
            options.prompts, limit=options.questions, system=SYSTEM, template=template
        )
        result = ma.run(model, prompts, conditions, ma.analyses.AttentionBudget())
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        single = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, condition in conditions.items():
            for number, prompt in enumerate(prompts):
                baseline = ma.Baseline().apply(prompt, model)
                longer = condition.apply(prompt, model)
                measured = result["attention_budget"].sel(condition=name).isel(prompt=number)
                expected = oracle(plain, baseline, longer)
                rounded = oracle(single, baseline, longer)
                for words, values in (
                    ("measured", {key: measured[key].values for key in expected}),
                    ("plain transformers in float32", rounded),
                ):
                    largest = largest_differences(values, expected)
                    numbers = ", ".join(f"{key} {value:.1e}" for key, value in largest.items())
                    print(
                        f"{folder.name}, {name}, prompt {prompt.id}, {words}: {numbers}", flush=True
                    )
        moved = oracle(plain, baseline, longer, off=1)
        wrong = largest_differences({key: measured[key].values for key in moved}, moved)
        print(f"{folder.name}, one position wrong: by_cause {wrong['by_cause']:.1e}", flush=True)


if __name__ == "__main__":
    main()
