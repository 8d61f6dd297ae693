"""The ways to compute received attention of every layer and head, and models with random weights to time them on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import mechattn as ma
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.engine.batches import measure_batch
from mechattn.engine.engines import forward_fused, forward_in_blocks, forward_through_hooks
from mechattn.functional import focus, received
from mechattn.functional.attention import Rows, mix
from mechattn.model import hooks
from mechattn.model.checkpoint import toy_folder, toy_names, toy_tokenizer
from mechattn.prompts.token_sequences import Batch

LIMIT = "SDPA forward (the limit)"
SHAPES = {  # layers, query heads, d_model, d_mlp
    "small": (12, 12, 768, 3072),
    "1B": (16, 32, 2048, 8192),
    "7B": (28, 28, 3584, 18944),
    "llama-7B": (32, 32, 4096, 11008),
}
IDS = [str(number) for number in range(64)]  # of prompts, for messages


def size_of(shape: str) -> tuple[int, int, int]:
    """Layers, query heads and d_model."""
    if shape in SHAPES:
        return SHAPES[shape][:3]
    config = json.loads((toy_folder(shape) / "config.json").read_text())
    return config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]


def new_model(
    shape: str, kv_heads: int, longest: int, device: str, dtype: torch.dtype, family: str = "llama"
) -> Any:
    """A model of a family with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers, heads, width, mlp = SHAPES[shape]
    usual = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": longest,
        "vocab_size": 32_000,
    }
    own = {
        "llama": {"num_key_value_heads": kv_heads},
        "gpt_neox": {},
        "gpt_neo": {
            "num_layers": layers,
            "num_heads": heads,
            "attention_types": [[["global", "local"], layers // 2]],
        },
        "gemma3_text": {
            "num_key_value_heads": kv_heads,
            "head_dim": width // heads,
            "sliding_window": 512,
        },
    }[family]
    if family == "gpt_neo":
        usual = {name: usual[name] for name in usual if not name.startswith("num_")}
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **usual, **own), dtype=dtype
        ).eval()


def batch_of(length: int, device: str, sequences: int = 1) -> Batch:
    """Sequences of random tokens: a system prompt, inserted tokens, a question."""
    tokens = torch.randint(5, 700, (sequences, length), generator=torch.Generator().manual_seed(0))
    segment = torch.full((sequences, length), 4)
    segment[:, : length // 4] = 2
    segment[:, length // 4 : length // 2] = 3
    inserted = segment == 3
    origin = torch.where(inserted, -1, (~inserted).cumsum(1) - 1)
    rows = tuple((n, "baseline") for n in range(sequences))
    return Batch(tokens, origin, segment, torch.tensor([length] * sequences), rows).to(device)


def hooked(
    shape: str, kv_heads: int, longest: int, device: str, dtype: torch.dtype, family: str = "llama"
) -> Any:
    """A toy, or a model with random weights, hooked and verified."""
    if shape in toy_names():
        return ma.load_model(shape, device=device, dtype=dtype)
    made = new_model(shape, kv_heads, longest, device, dtype, family)
    return ma.load_model(made, tokenizer=toy_tokenizer("toy:llama"))


def runners(bridge: Any, nnsight: bool = False) -> dict[str, Callable]:
    """Each way to compute it, as a function of a batch; the hooked and the plain model share their parameters."""
    plain = bridge._mechattn.native
    windows = {
        layer: hooks.attention_window(bridge, layer) for layer in hooks.attention_layers(bridge)
    }

    def sdpa(batch: Batch) -> None:
        plain(batch.tokens, use_cache=False, logits_to_keep=1)

    def whole(batch: Batch, engine: str = "auto") -> None:
        """What users call: token ids in, a result out, with nulls, moments, provenance and the model's own check."""
        tokens = batch.tokens.clone()
        tokens[:, 0] = bridge.tokenizer.bos_token_id
        made = ma.run(bridge, tokens, engine=engine)
        assert engine in ("auto", made.provenance["engine"])

    def ours(forward: Callable) -> Callable[[Batch], None]:
        def run(batch: Batch) -> None:
            measure_batch(bridge, batch, forward, windows, [ReceivedAttention()], IDS)

        return run

    def everything(batch: Batch) -> None:
        """Column sums, segment mass and shift, top two and argmax, self and first-token mass, entropy, distance."""
        member, real = batch.segment == 3, batch.real
        span = slice(batch.tokens.shape[1] // 4, batch.tokens.shape[1] // 2)
        sums: dict[int, torch.Tensor] = {}

        def see(layer: int, rows: Rows) -> None:
            columns = received.column_sums(rows.pattern, real[:, rows.queries])
            sums.setdefault(layer, columns.new_zeros(*columns.shape[:-1], batch.tokens.shape[1]))[
                ..., rows.keys
            ] += columns
            received.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
            rows.pattern[..., 0].sum(-1)
            focus.top_two(rows.pattern)
            focus.entropy(rows.pattern)
            focus.mean_distance(rows.pattern, rows.queries.start, rows.keys.start)
            first, stop = rows.keys.start, min(span.stop, rows.keys.stop)
            keys = slice(min(max(span.start, first), stop), stop)
            if keys.start < keys.stop:
                part = rows.pattern[..., keys.start - first : keys.stop - first]
                mix(part, rows.attention.v[:, :, keys] * member[:, None, keys, None]).norm(dim=-1)

        forward_in_blocks(bridge, batch, windows, see, max(windows))
        assert len([s @ batch.members().to(s).mT for s in sums.values()]) == len(windows)

    def one_layer(batch: Batch) -> None:
        measure_batch(bridge, batch, forward_in_blocks, {0: windows[0]}, [ReceivedAttention()], IDS)

    def output_attentions(batch: Batch) -> None:
        with eager(plain):
            attentions = plain(
                batch.tokens, use_cache=False, output_attentions=True, logits_to_keep=1
            ).attentions
        assert len([pattern.float().mean(-2) for pattern in attentions]) == len(windows)

    def run_with_cache(batch: Batch) -> None:
        _, cache = bridge.run_with_cache(
            batch.tokens, names_filter=lambda name: name.endswith("hook_pattern")
        )
        assert len([cache["pattern", layer].float().mean(-2) for layer in windows]) == len(windows)

    def reducing_hook(batch: Batch) -> None:
        got: dict[str, torch.Tensor] = {}
        named = [
            (hooks.pattern_hook(n), lambda a, hook: got.update({hook.name: a.float().mean(-2)}))
            for n in windows
        ]
        bridge.run_with_hooks(batch.tokens, fwd_hooks=named, return_type=None)
        assert len(got) == len(windows)

    ways = {
        LIMIT: sdpa,
        "mechattn, ma.run": whole,
        "mechattn, ma.run, streaming": partial(whole, engine="streaming"),
        "mechattn, ma.run, fused": partial(whole, engine="fused"),
        "mechattn, the pass alone": ours(forward_in_blocks),
        "mechattn, a fused kernel": ours(forward_fused),
        "mechattn, streaming, layers=[0]": one_layer,
        "mechattn, streaming, every statistic": everything,
        "mechattn, hooks": ours(forward_through_hooks),
        "transformers, output_attentions": output_attentions,
        "TransformerLens, run_with_cache": run_with_cache,
        "TransformerLens, a hook that reduces": reducing_hook,
    }
    ways |= _updates_and_focus(bridge, windows)
    return ways | _nnsight(plain, len(windows)) if nnsight else ways


@contextmanager
def eager(plain: Any) -> Iterator[None]:
    """Attention with whole patterns inside a ``with`` block; also if they do not fit."""
    plain.set_attn_implementation("eager")
    try:
        yield
    finally:
        plain.set_attn_implementation("sdpa")


def _updates_and_focus(bridge: Any, windows: dict[int, int | None]) -> dict[str, Callable]:
    """Magnitude and orientation of every head's update, here and with hook_result; focus and sinks together."""

    def measuring(*analyses: Any) -> Callable[[Batch], None]:
        ready = [
            a.calibrated(bridge, list(windows), []) if hasattr(a, "calibrated") else a
            for a in analyses
        ]

        def run(batch: Batch) -> None:
            measure_batch(bridge, batch, forward_in_blocks, windows, ready, IDS)

        return run

    def hook_result(batch: Batch) -> None:
        got: list[torch.Tensor] = []
        streams: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Callable:
            return lambda stream, hook: streams.update({layer: stream})

        def reduce(layer: int) -> Callable:
            def see(result: torch.Tensor, hook: Any) -> None:
                stream = streams.pop(layer)[:, :, None]
                got.append(result.norm(dim=-1) / stream.norm(dim=-1))
                got.append(torch.nn.functional.cosine_similarity(result, stream, dim=-1))

            return see

        named = [(f"blocks.{n}.hook_resid_pre", keep(n)) for n in windows]
        named += [(f"blocks.{n}.attn.hook_result", reduce(n)) for n in windows]
        bridge.set_use_attn_result(True)
        bridge.run_with_hooks(batch.tokens, fwd_hooks=named, return_type=None)
        bridge.set_use_attn_result(False)
        assert len(got) == 2 * len(windows)

    return {
        "mechattn, head updates": measuring(ma.analyses.HeadUpdates()),
        "mechattn, focus and sinks": measuring(
            ma.analyses.AttentionFocus(), ma.analyses.AttentionSinks()
        ),
        "TransformerLens, use_attn_result": hook_result,
    }


def _nnsight(plain: Any, layers: int) -> dict[str, Callable]:
    """nnsight tracing the eager attention of the plain model, where it is installed."""
    try:
        import nnsight
    except ImportError:
        return {}
    wrapped = nnsight.NNsight(plain)

    def trace(batch: Batch) -> None:
        with (
            eager(plain),
            torch.no_grad(),
            wrapped.trace(batch.tokens, use_cache=False, logits_to_keep=1),
        ):
            saved = nnsight.save([])
            for n in range(layers):
                saved.append(wrapped.model.layers[n].self_attn.output[1].float().mean(-2))
        assert len(saved) == layers

    return {"nnsight, a trace that reduces": trace}


def seconds(run: Callable, batch: Batch) -> float:
    """The time of one run."""
    began = time.perf_counter()
    with torch.no_grad():
        run(batch)
    if batch.tokens.device.type != "cpu":
        getattr(torch, batch.tokens.device.type).synchronize()
    return time.perf_counter() - began
