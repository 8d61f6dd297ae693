"""Attributed edges and patched paths of a real model against plain transformers, in float64.

    python experiments/real/circuits/oracle_edges.py out/real/smollm2 --head 23.3 --late 24.4

Nothing of mechattn is used for the reference. A zero is added to what a single reader reads (a norm
before an MLP or before the logits, or one head's part of a projection), so that its gradient is that
of this reader alone; an edge's effect is the writer's difference between both runs times that
gradient. Paths are patched in two plain passes. Prints the largest difference of each kind, and that
from a reference whose writer is one head too high, which must be large.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import contextmanager
from pathlib import Path

import torch
from oracle import Head, Plain, pairs_of
from torch import Tensor
from transformers import AutoTokenizer

import mechattn as ma


class PlainParts(Plain):
    """The same model, whose parts are hooked by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blocks = self.model.model.layers
        self.has_norm_after = hasattr(self.blocks[0], "pre_feedforward_layernorm")

    def norm_before_mlp(self, layer: int) -> torch.nn.Module:
        block = self.blocks[layer]
        if self.has_norm_after:
            return block.pre_feedforward_layernorm
        return block.post_attention_layernorm

    def last_logits(self, tokens: tuple[int, ...]) -> Tensor:
        """The logits after the last token."""
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]

    def writes(self, tokens: tuple[int, ...], heads: list[Head], mlps: list[int]) -> dict:
        """What the embedding, heads and MLPs add to the residual stream [pos d_model]."""
        written: dict[str, Tensor] = {}
        stack = Hooks()

        def keep(name: str):
            return lambda module, inputs, output: written.update({name: output[0].detach()})

        def keep_input(name: str):
            return lambda module, inputs: written.update({name: inputs[0][0].detach()})

        stack.before(self.blocks[0].input_layernorm, keep_input("embedding"))
        for layer in mlps:
            block = self.blocks[layer]
            last = block.post_feedforward_layernorm if self.has_norm_after else block.mlp
            stack.after(last, keep(f"L{layer}MLP"))
        for layer, _ in heads:
            stack.before(self.blocks[layer].self_attn.o_proj, keep_input(f"z{layer}"))
            if self.has_norm_after:
                norm = self.blocks[layer].post_attention_layernorm
                stack.before(norm, keep_input(f"sum{layer}"))
        with stack.hooked(), torch.no_grad():
            self.last_logits(tokens)
        for layer, head in heads:
            columns = self.columns(head)
            weight = self.blocks[layer].self_attn.o_proj.weight[:, columns]
            write = written[f"z{layer}"][:, columns] @ weight.mT
            if self.has_norm_after:
                norm = self.blocks[layer].post_attention_layernorm
                total = written[f"sum{layer}"]
                scale = (total.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
                write = write * scale * (1 + norm.weight)
            written[f"L{layer}H{head}"] = write
        return written

    def gradient(self, tokens: tuple[int, ...], reader: str, answers: tuple[int, int]) -> Tensor:
        """Of the logit difference, for what one reader reads [pos d_model]."""
        zero = torch.zeros(
            1, len(tokens), self.model.config.hidden_size, dtype=torch.float64, requires_grad=True
        )
        stack = Hooks()
        if reader == "logits":
            stack.before(self.model.model.norm, lambda module, inputs: (inputs[0] + zero,))
        elif reader.endswith("MLP"):
            norm = self.norm_before_mlp(int(reader[1:-3]))
            stack.before(norm, lambda module, inputs: (inputs[0] + zero,))
        else:
            self._add_to_projection(stack, reader, zero)
        with stack.hooked():
            logits = self.last_logits(tokens)
        (gradient,) = torch.autograd.grad(logits[answers[0]] - logits[answers[1]], zero)
        return gradient[0]

    def _add_to_projection(self, stack: Hooks, reader: str, zero: Tensor) -> None:
        where, part = reader.split(".")
        layer, head = map(int, where[1:].split("H"))
        block = self.blocks[layer]
        projection = getattr(block.self_attn, f"{part}_proj")
        columns = self.columns(head)
        read: dict[str, Tensor] = {}

        def keep(module, inputs):
            read["stream"] = inputs[0].detach()

        def add(module, inputs, output):
            seen = block.input_layernorm.forward(read["stream"] + zero)
            own = seen @ projection.weight[columns].mT
            output = output.clone()
            output[..., columns] += own - own.detach()
            return output

        stack.before(block.input_layernorm, keep)
        stack.after(projection, add)

    def path_effect(
        self, base: tuple[int, ...], source: tuple[int, ...], sender: Head, reader: str, answers
    ) -> float:
        """Of a path: other heads held, MLPs computed again; then the reader's part replaced."""
        of_base = self.heads_outputs(base)
        of_source = self.heads_outputs(source)
        layer, head = sender
        held = {n: z.clone() for n, z in of_base.items()}
        held[layer][..., self.columns(head)] = of_source[layer][..., self.columns(head)]
        stack = Hooks()
        for n, block in enumerate(self.blocks):
            stack.before(block.self_attn.o_proj, lambda module, inputs, n=n: (held[n],))
        read: dict[str, Tensor] = {}
        projection = None
        if reader != "logits":
            where, part = reader.split(".")
            read_layer, read_head = map(int, where[1:].split("H"))
            projection = getattr(self.blocks[read_layer].self_attn, f"{part}_proj")
            stack.after(projection, lambda module, inputs, output: read.update(r=output.detach()))
        with torch.no_grad():
            before = self.last_logits(base)
            with stack.hooked():
                after = self.last_logits(base)
            if projection is not None:
                columns = self.columns(read_head)

                def replace(module, inputs, output):
                    output = output.clone()
                    output[..., columns] = read["r"][..., columns]
                    return output

                second = Hooks()
                second.after(projection, replace)
                with second.hooked():
                    after = self.last_logits(base)
        right, wrong = answers
        return float((after[right] - after[wrong]) - (before[right] - before[wrong]))

    def part_effect(
        self, base: tuple[int, ...], source: tuple[int, ...], part: str, where: Head, answers
    ) -> float:
        """Of a layer's stream or MLP, or of one key-value head's keys, at every token."""
        layer, head = where
        block = self.blocks[layer]
        module = block
        if part == "mlp_out":
            module = block.post_feedforward_layernorm if self.has_norm_after else block.mlp
        if part == "k":
            module = block.self_attn.k_proj
        columns = self.columns(head) if part == "k" else slice(None)
        kept: dict[str, Tensor] = {}
        keeping, replacing = Hooks(), Hooks()
        keeping.after(module, lambda module, inputs, output: kept.update(source=first_of(output)))

        def replace(module, inputs, output):
            values = first_of(output).clone()
            values[..., columns] = kept["source"][..., columns]
            return (values, *output[1:]) if isinstance(output, tuple) else values

        replacing.after(module, replace)
        with torch.no_grad():
            before = self.last_logits(base)
            with keeping.hooked():
                self.last_logits(source)
            with replacing.hooked():
                after = self.last_logits(base)
        right, wrong = answers
        return float((after[right] - after[wrong]) - (before[right] - before[wrong]))

    def heads_outputs(self, tokens: tuple[int, ...]) -> dict[int, Tensor]:
        outputs: dict[int, Tensor] = {}
        stack = Hooks()
        for n, block in enumerate(self.blocks):
            stack.before(
                block.self_attn.o_proj,
                lambda module, inputs, n=n: outputs.update({n: inputs[0].detach()}),
            )
        with stack.hooked(), torch.no_grad():
            self.last_logits(tokens)
        return outputs


def first_of(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class Hooks:
    """Hooks that are there inside a ``with`` block."""

    def __init__(self) -> None:
        self.wanted: list[tuple[str, torch.nn.Module, object]] = []

    def before(self, module: torch.nn.Module, hook: object) -> None:
        self.wanted.append(("register_forward_pre_hook", module, hook))

    def after(self, module: torch.nn.Module, hook: object) -> None:
        self.wanted.append(("register_forward_hook", module, hook))

    @contextmanager
    def hooked(self):
        handles = [getattr(module, kind)(hook) for kind, module, hook in self.wanted]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def named(text: str) -> Head:
    layer, head = text.split(".")
    return int(layer), int(head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--head", type=named, default=(2, 1), help="a writer, and a sender")
    parser.add_argument("--late", type=named, default=(5, 2), help="a reader in a later layer")
    options = parser.parse_args()
    head, late = options.head, options.late
    sender, receiver = f"L{head[0]}H{head[1]}", f"L{late[0]}H{late[1]}"
    prompts = pairs_of(AutoTokenizer.from_pretrained(options.model))

    # Qwen's eager attention takes its softmax in float32, so in float64 it is refused as not its own.
    is_qwen = "qwen" in options.model.name
    model = ma.load_model(str(options.model), dtype=torch.float64, verify=not is_qwen)
    value_reader = f"L{late[0]}H0.v"
    edges = [
        (sender, "logits"), (sender, f"{receiver}.q"), (sender, f"L{late[0]}MLP"),
        ("embedding", "L0MLP"), ("L0MLP", value_reader), (f"L{head[0]}MLP", "logits"),
    ]  # fmt: skip
    between = [(sender, "logits"), (sender, f"{receiver}.q"), (sender, value_reader)]
    parts = [("resid_post", head), ("mlp_out", (0, 0)), ("mlp_out", head), ("k", (late[0], 0))]
    counterpart = ma.conditions.Counterpart()
    ours = {}
    for direction in ("noising", "denoising"):
        edge_effects = ma.edges(model, prompts, counterpart, direction=direction).effects.effect
        for writer, reader in edges:
            for index, value in enumerate(edge_effects.sel(writer=writer, reader=reader).values):
                ours["edges", direction, index, writer, reader] = float(value)
        patched = ma.paths(model, prompts, counterpart, between, direction=direction)
        for place, (writer, reader) in enumerate(between):
            for index, value in enumerate(patched.effects.effect.isel(path=place).values):
                ours["paths", direction, index, writer, reader] = float(value)
        for part, where in parts:
            sites = ma.Sites(part, [where if part == "k" else where[0]])
            effects = ma.patch(
                model, prompts, counterpart, at=sites, direction=direction, controls=()
            )
            for index, value in enumerate(effects.effects.effect.values.reshape(len(prompts))):
                ours["parts", direction, index, part, where] = float(value)
    heads_of_layer = int(model.cfg.n_heads)
    del model
    gc.collect()

    plain = PlainParts(options.model)
    wrong = f"L{head[0]}H{(head[1] + 1) % heads_of_layer}"
    heads = [head, named(wrong[1:].replace("H", "."))]
    reference = {}
    of_wrong_head = {}
    for index, prompt in enumerate(prompts):
        answers = (prompt.answer_tokens[0], prompt.other_answer[0])
        versions = {"noising": (prompt.tokens, prompt.counterpart)}
        versions["denoising"] = versions["noising"][::-1]
        for direction, (base, source) in versions.items():
            of_base = plain.writes(base, heads, [0, head[0]])
            of_source = plain.writes(source, heads, [0, head[0]])
            for writer, reader in edges:
                gradient = plain.gradient(base, reader, answers)
                step = of_source[writer] - of_base[writer]
                key = ("edges", direction, index, writer, reader)
                reference[key] = float((step * gradient).sum())
                if writer == sender:
                    step = of_source[wrong] - of_base[wrong]
                    of_wrong_head[key] = float((step * gradient).sum())
            for writer, reader in between:
                key = ("paths", direction, index, writer, reader)
                reference[key] = plain.path_effect(base, source, head, reader, answers)
                of_wrong_head[key] = plain.path_effect(base, source, heads[1], reader, answers)
            for part, where in parts:
                key = ("parts", direction, index, part, where)
                reference[key] = plain.part_effect(base, source, part, where, answers)
                if part != "k":
                    where = (where[0] + 1, 0)
                    of_wrong_head[key] = plain.part_effect(base, source, part, where, answers)
    for kind in ("edges", "paths", "parts"):
        keys = [key for key in reference if key[0] == kind]
        largest = max(abs(reference[key]) for key in keys)
        apart = max(abs(ours[key] - reference[key]) for key in keys)
        moved = max(abs(ours[k] - value) for k, value in of_wrong_head.items() if k[0] == kind)
        print(f"{options.model.name} {kind}: {len(keys)} numbers up to {largest:.3g}, difference at "
              f"most {apart:.1e}; with {wrong} for {sender} {moved:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
