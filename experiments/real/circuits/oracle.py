"""Patching and induction heads of a real model against plain transformers, in float64.

    python experiments/real/circuits/oracle.py out/real/smollm2 --heads 16.0 23.3 0.1

Nothing of mechattn is used for the reference: a hook before each output projection keeps what it
reads and replaces one head's part of it. Prints the largest difference of each kind of number, and
the same from a reference whose heads are one too high, which must be large.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import mechattn as ma

QUESTIONS = [
    ("When Mary and John went to the store, {} gave a drink to", "John", "Mary"),
    ("After Tom and Anna left the park, {} handed a letter to", "Tom", "Anna"),
]
SPAN = 8
MEAN_OVER = 32
Head = tuple[int, int]


class Plain:
    """A model of transformers, run with one head's output replaced."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        for weight in self.model.parameters():
            weight.requires_grad_(False)
        self.width = getattr(self.model.config, "head_dim", None) or (
            self.model.config.hidden_size // self.model.config.num_attention_heads
        )
        self.outputs: dict[int, Tensor] = {}

    def columns(self, head: int) -> slice:
        return slice(head * self.width, (head + 1) * self.width)

    def logits(self, tokens: list[int], head: Head | None = None, value: Tensor | None = None):
        """Logits [pos d_vocab]; what each output projection reads is kept in ``outputs``."""
        handles = []
        for layer, block in enumerate(self.model.model.layers):

            def replace(module, inputs, layer=layer):
                z = inputs[0]
                if not z.requires_grad and torch.is_grad_enabled():
                    z = z.detach().requires_grad_()
                if head is not None and head[0] == layer:
                    z = z.clone()
                    z[0, :, self.columns(head[1])] = value
                self.outputs[layer] = z
                return (z,)

            handles.append(block.self_attn.o_proj.register_forward_pre_hook(replace))
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        return logits


def second_copy_loss(logits: Tensor, tokens: list[int]) -> Tensor:
    log_probs = logits.log_softmax(-1)
    places = range(len(tokens) - SPAN + 1, len(tokens))
    return -torch.stack([log_probs[place - 1, tokens[place]] for place in places]).mean()


def plain_patches(plain: Plain, prompts: list[ma.Prompt], heads: list[Head]) -> dict:
    """The effect of each head by direction, prompt and head."""
    effects = {}
    for prompt in prompts:
        versions = {"noising": prompt.tokens, "denoising": prompt.counterpart}
        right, wrong = prompt.answer_tokens[0], prompt.other_answer[0]
        outputs = {}
        before = {}
        with torch.no_grad():
            for direction, tokens in versions.items():
                last = plain.logits(list(tokens))[-1]
                before[direction] = last[right] - last[wrong]
                outputs[direction] = dict(plain.outputs)
            for direction, tokens in versions.items():
                other = outputs["denoising" if direction == "noising" else "noising"]
                for layer, head in heads:
                    value = other[layer][0, :, plain.columns(head)]
                    last = plain.logits(list(tokens), (layer, head), value)[-1]
                    effect = last[right] - last[wrong] - before[direction]
                    effects[direction, prompt.id, layer, head] = float(effect)
    return effects


def plain_induction(plain: Plain, spans: list[list[int]], others, heads: list[Head]) -> dict:
    """Score, effect of mean ablation and its first-order estimate, by prompt and head."""
    means: dict[int, Tensor] = {}
    for tokens in others:
        with torch.no_grad():
            plain.logits(tokens)
        for layer, z in plain.outputs.items():
            means[layer] = means.get(layer, 0) + z[0].detach() / len(others)
    numbers = {}
    for index, tokens in enumerate(spans):
        start = len(tokens) - SPAN
        with torch.no_grad():
            output = plain.model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
        loss = second_copy_loss(plain.logits(tokens), tokens)
        traced = dict(plain.outputs)
        for layer, head in heads:
            columns = plain.columns(head)
            pattern = output.attentions[layer][0, head]
            attended = [pattern[place, place - SPAN + 1] for place in range(start, len(tokens))]
            numbers["score", index, layer, head] = float(torch.stack(attended).mean())
            (gradient,) = torch.autograd.grad(loss, traced[layer], retain_graph=True)
            step = means[layer][:, columns] - traced[layer][0, :, columns].detach()
            numbers["attributed", index, layer, head] = float(
                (gradient[0, :, columns] * step).sum()
            )
            with torch.no_grad():
                ablated = plain.logits(tokens, (layer, head), means[layer][:, columns])
            effect = second_copy_loss(ablated, tokens) - loss.detach()
            numbers["effect", index, layer, head] = float(effect)
    return numbers


def pairs_of(tokenizer) -> list[ma.Prompt]:
    prompts = []
    for index, (text, giver, receiver) in enumerate(QUESTIONS):
        ids = [tokenizer(text.format(name))["input_ids"] for name in (giver, receiver)]
        answers = [
            tokenizer(f" {name}", add_special_tokens=False)["input_ids"][0]
            for name in (receiver, giver)
        ]
        assert len(ids[0]) == len(ids[1])
        prompts.append(
            ma.Prompt(
                tokens=tuple(ids[0]), counterpart=tuple(ids[1]), answer_tokens=(answers[0],),
                other_answer=(answers[1],), id=str(index),
            )
        )  # fmt: skip
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--heads", nargs="+", default=["0.1", "5.2"])
    parser.add_argument(
        "--induction", action="store_true", help="induction heads too; every head is ablated"
    )
    options = parser.parse_args()
    heads = [tuple(map(int, name.split("."))) for name in options.heads]
    pairs = pairs_of(AutoTokenizer.from_pretrained(options.model))

    # Qwen's eager attention takes its softmax in float32, so in float64 it is refused as not its own.
    is_qwen = "qwen" in options.model.name
    model = ma.load_model(str(options.model), dtype=torch.float64, verify=not is_qwen)
    heads_of_layer = model.cfg.n_heads
    spans = [list(p.tokens) for p in ma.repeated_random(model, 2, span=(SPAN, SPAN), seed=0)]
    others = [
        list(p.tokens) for p in ma.repeated_random(model, MEAN_OVER, span=(SPAN, SPAN), seed=1)
    ]
    other = ma.conditions.Counterpart()
    ours = {}
    for direction in ("noising", "denoising"):
        patched = ma.patch(model, pairs, other, at=heads, direction=direction, controls=())
        for layer, head in heads:
            values = patched.effects.effect.sel(layer=layer, head=head).values
            for index, value in enumerate(values):
                ours[direction, str(index), layer, head] = float(value)
    if options.induction:
        found = ma.induction_heads(model, 2, span=SPAN)
        kinds = {
            "score": found.scores,
            "effect": found.needed.effects.effect,
            "attributed": found.attributed,
        }
        for kind, values in kinds.items():
            for layer, head in heads:
                for index, value in enumerate(values.sel(layer=layer, head=head).values):
                    ours[kind, index, layer, head] = float(value)
    del model
    gc.collect()

    plain = Plain(options.model)
    reference = plain_patches(plain, pairs, heads)
    if options.induction:
        reference |= plain_induction(plain, spans, others, heads)
    for kind in dict.fromkeys(key[0] for key in reference):
        keys = [key for key in reference if key[0] == kind]
        difference = max(abs(ours[key] - reference[key]) for key in keys)
        largest = max(abs(reference[key]) for key in keys)
        print(f"{options.model.name} {kind}: {len(keys)} numbers up to {largest:.3g}, "
              f"difference at most {difference:.1e}", flush=True)  # fmt: skip

    shifted = [(layer, (head + 1) % int(heads_of_layer)) for layer, head in heads]
    wrong = plain_patches(plain, pairs, shifted)
    moved = dict(zip(shifted, heads, strict=True))
    difference = max(
        abs(ours[(direction, index, *moved[layer, head])] - value)
        for (direction, index, layer, head), value in wrong.items()
    )
    print(f"{options.model.name} wrong heads: difference {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
