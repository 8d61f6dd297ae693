"""The cost of received attention of every layer and head: this library's engines, their limit, and their peers.

One process, interleaved runs after a warm-up, medians of ratios with intervals; the peak memory of each in a process of
its own. The limit is a plain forward pass of transformers with SDPA, without cache and with the logits of one position.

    python experiments/benchmarks/bench.py --out experiments/benchmarks/2026-11-22-cpu.md
    python experiments/benchmarks/bench.py --lengths 256 1024 --kv-heads 12 --engines "pass alone" hooks
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binom

import mechattn as ma
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.engine.batch_values import measure_batch
from mechattn.engine.forward import forward_fused, forward_in_blocks, forward_through_hooks
from mechattn.functional import focus, received
from mechattn.functional.attention import Rows
from mechattn.model import hooks
from mechattn.model.checkpoint import load_tokenizer, toy_folder, toy_names
from mechattn.prompts.sequences import Batch

LIMIT = "SDPA forward (the limit)"
SHAPES = {  # layers, query heads, d_model, d_mlp
    "small": (12, 12, 768, 3072),
    "1B": (16, 32, 2048, 8192),
    "7B": (28, 28, 3584, 18944),
}


class Nowhere:
    """Takes values as a collector would, and counts them."""

    def add(self, layer: int, batch: Batch, values: dict) -> None:
        assert all(len(value) == len(batch.tokens) for value in values.values())


def size_of(shape: str) -> tuple[int, int, int]:
    """Layers, query heads and d_model."""
    if shape in SHAPES:
        return SHAPES[shape][:3]
    config = json.loads((toy_folder(shape) / "config.json").read_text())
    return config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]


def new_model(shape: str, kv_heads: int, longest: int, device: str, dtype: torch.dtype, family: str = "llama") -> Any:
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
        "gemma3_text": {"num_key_value_heads": kv_heads, "head_dim": width // heads, "sliding_window": 512},
    }[family]
    if family == "gpt_neo":
        usual = {name: usual[name] for name in usual if not name.startswith("num_")}
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **usual, **own)).to(dtype).eval()


def batch_of(length: int, device: str) -> Batch:
    """One sequence of random tokens: a system prompt, inserted tokens, a question."""
    tokens = torch.randint(5, 700, (1, length), generator=torch.Generator().manual_seed(0))
    segment = torch.full((1, length), 4)
    segment[:, : length // 4] = 2
    segment[:, length // 4 : length // 2] = 3
    origin = torch.arange(length)[None].clone()
    origin[segment == 3] = -1
    return Batch(tokens, origin, segment, torch.tensor([length]), ((0, "baseline"),)).to(device)


def runners(
    shape: str, kv_heads: int, longest: int, device: str, dtype: torch.dtype, family: str = "llama"
) -> dict[str, Callable]:
    """Each way to compute it, as a function of a batch; the hooked and the plain model share their parameters."""
    if shape in toy_names():
        bridge = ma.load_model(shape, device=device, dtype=dtype)
    else:
        made = new_model(shape, kv_heads, longest, device, dtype, family)
        bridge = ma.load_model(made, tokenizer=load_tokenizer("toy:llama"))
    plain = bridge._mechattn.native
    windows = {layer: hooks.attention_window(bridge, layer) for layer in hooks.attention_layers(bridge)}

    def sdpa(batch: Batch) -> None:
        plain(batch.tokens, use_cache=False, logits_to_keep=1)

    def whole(batch: Batch) -> None:
        """What users call: token ids in, a result out, with nulls, moments, provenance and the model's own check."""
        tokens = batch.tokens.clone()
        tokens[:, 0] = bridge.tokenizer.bos_token_id
        ma.run(bridge, tokens)

    def ours(forward: Callable) -> Callable[[Batch], None]:
        def run(batch: Batch) -> None:
            measure_batch(bridge, batch, forward, windows, [ReceivedAttention()], [Nowhere()])

        return run

    def everything(batch: Batch) -> None:
        """Column sums, segment mass and shift, top two and argmax, self and first-token mass, entropy, distance."""
        member, real = batch.segment == 3, batch.real
        span = slice(batch.tokens.shape[1] // 4, batch.tokens.shape[1] // 2)
        sums: dict[int, torch.Tensor] = {}

        def see(layer: int, rows: Rows) -> None:
            columns = received.column_sums(rows.pattern, real[:, rows.queries])
            sums.setdefault(layer, columns.new_zeros(*columns.shape[:-1], batch.tokens.shape[1]))[..., rows.keys] += (
                columns
            )
            received.self_attention(rows.pattern, rows.queries.start, rows.keys.start)
            rows.pattern[..., 0].sum(-1)
            focus.top_two(rows.pattern)
            focus.entropy(rows.pattern)
            focus.mean_distance(rows.pattern, rows.queries.start, rows.keys.start)
            first, stop = rows.keys.start, min(span.stop, rows.keys.stop)
            keys = slice(min(max(span.start, first), stop), stop)
            if keys.start < keys.stop:
                part = rows.pattern[..., keys.start - first : keys.stop - first]
                focus.shift(part, rows.attention.v[:, :, keys], member[:, keys]).norm(dim=-1)

        forward_in_blocks(bridge, batch, windows, see, max(windows))
        assert len([s @ batch.members().to(s).mT for s in sums.values()]) == len(windows)

    def one_layer(batch: Batch) -> None:
        measure_batch(bridge, batch, forward_in_blocks, {0: windows[0]}, [ReceivedAttention()], [Nowhere()])

    def output_attentions(batch: Batch) -> None:
        plain.set_attn_implementation("eager")
        made = plain(batch.tokens, use_cache=False, output_attentions=True, logits_to_keep=1).attentions
        plain.set_attn_implementation("sdpa")
        assert len([a.float().mean(-2) for a in made]) == len(windows)

    def run_with_cache(batch: Batch) -> None:
        _, cache = bridge.run_with_cache(batch.tokens, names_filter=lambda name: name.endswith("hook_pattern"))
        assert len([cache["pattern", layer].float().mean(-2) for layer in windows]) == len(windows)

    def reducing_hook(batch: Batch) -> None:
        got: dict[str, torch.Tensor] = {}
        named = [(hooks.pattern_hook(n), lambda a, hook: got.update({hook.name: a.float().mean(-2)})) for n in windows]
        bridge.run_with_hooks(batch.tokens, fwd_hooks=named, return_type=None)
        assert len(got) == len(windows)

    ways = {
        LIMIT: sdpa,
        "mechattn, ma.run": whole,
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
    return ways if shape in toy_names() or family != "llama" else ways | _nnsight(plain, len(windows))


def _updates_and_focus(bridge: Any, windows: dict[int, int | None]) -> dict[str, Callable]:
    """Magnitude and orientation of every head's update, here and with hook_result; focus and sinks together."""

    def measuring(*analyses: Any) -> Callable[[Batch], None]:
        ready = [a.calibrated(bridge, list(windows), []) if hasattr(a, "calibrated") else a for a in analyses]

        def run(batch: Batch) -> None:
            measure_batch(bridge, batch, forward_in_blocks, windows, ready, [Nowhere()] * len(ready))

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
        "mechattn, focus and sinks": measuring(ma.analyses.AttentionFocus(), ma.analyses.AttentionSinks()),
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
        plain.set_attn_implementation("eager")
        with torch.no_grad(), wrapped.trace(batch.tokens, use_cache=False, logits_to_keep=1):
            saved = nnsight.save([])
            for n in range(layers):
                saved.append(wrapped.model.layers[n].self_attn.output[1].float().mean(-2))
        plain.set_attn_implementation("sdpa")
        assert len(saved) == layers

    return {"nnsight, a trace that reduces": trace}


def seconds(run: Callable, batch: Batch) -> float:
    """The time of one run."""
    began = time.perf_counter()
    with torch.no_grad():
        run(batch)
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def needs(name: str, length: int, shape: str) -> float:
    """Bytes of [query, key] matrices that are held at once, so that a way is left out where they do not fit."""
    layers, heads = size_of(shape)[:2]
    held = {"output_attentions": layers + 3, "run_with_cache": layers + 3, "nnsight": 3, "hook": 4}
    held["use_attn_result"] = 4
    return next((n for part, n in held.items() if part in name), 0) * 4.0 * heads * length**2


Ratio = tuple[float, float, float]  # the median and its interval


def ratio_to(limit: list[float], taken: list[float]) -> Ratio:
    """Median of the ratios within each round, and its 95 % interval by order statistics; all of them below 6 rounds."""
    ratios = sorted(way / best for way, best in zip(taken, limit, strict=False))
    low = max(int(binom.ppf(0.025, len(ratios), 0.5)), 1) - 1
    return statistics.median(ratios), ratios[low], ratios[len(ratios) - 1 - low]


def settled(found: Ratio) -> bool:
    """Whether the interval is narrow: ± 0.02, or a quarter of what the way costs beyond the limit.

    The rounds that are left go to the ways that are near the limit, where a small difference matters.
    """
    middle, low, high = found
    return high - low <= 2 * max(0.02, 0.25 * (middle - 1))


def times(args: argparse.Namespace, ways: dict[str, Callable], length: int) -> tuple[dict[str, Ratio], float, int]:
    """Each way's ratio to the limit, the seconds of the limit, and the rounds.

    In each round the limit and every way run once, in turn in this order and in the other, so that what else the
    machine does weighs on all; a way whose interval is narrow sits out.
    """
    batch = batch_of(length, args.device)
    fit = {name: run for name, run in ways.items() if needs(name, length, args.shape) < args.memory * 2**30}
    for run in fit.values():
        seconds(run, batch)
    taken: dict[str, list[float]] = {name: [] for name in fit}
    found: dict[str, Ratio] = {}
    began = 0.0
    while (rounds := len(taken[LIMIT])) <= args.runs or time.perf_counter() - began < args.most:
        if rounds == args.runs:
            began = time.perf_counter()
        wide = [name for name in fit if name != LIMIT and (rounds < args.runs or not settled(found[name]))]
        if not wide:
            break
        for name in [LIMIT, *wide][:: -1 if rounds % 2 else 1]:
            taken[name].append(seconds(fit[name], batch))
        found |= {name: ratio_to(taken[LIMIT], taken[name]) for name in wide}
    for name, (middle, low, high) in found.items():
        print(f"{length:6} {name:60} {middle:.3f} [{low:.3f}, {high:.3f}], {len(taken[name])} runs", flush=True)
    return found, statistics.median(taken[LIMIT]), len(taken[LIMIT])


def peak(args: argparse.Namespace, name: str, length: int) -> tuple[float, float] | None:
    """Peak memory in MiB, and seconds, of one run of one way in a fresh process; None where it fails."""
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--lengths",
        str(length),
        "--shape",
        args.shape,
        "--family",
        args.family,
    ]
    command += ["--kv-heads", str(args.kv_heads), "--device", args.device, "--dtype", args.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    mebibytes, taken = done.stdout.split()[-2:]
    return float(mebibytes), float(taken)


def one(args: argparse.Namespace) -> None:
    """Run one way once and print the peak of this process and the seconds of the run."""
    ways = runners(args.shape, args.kv_heads, max(args.lengths), args.device, getattr(torch, args.dtype), args.family)
    taken = seconds(ways[args.one], batch_of(args.lengths[0], args.device))
    if args.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20, taken)
    else:
        print(_peak_of_this_process(), taken)


def _peak_of_this_process() -> float:
    """In MiB. Linux says it of this program; getrusage counts what the process that started it held at that time."""
    status = Path("/proc/self/status")
    if status.exists():
        found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(found.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def table(args: argparse.Namespace, names: list[str], found: dict, limits: dict, peaks: dict) -> str:
    """The results as Markdown."""

    def ratio(name: str, length: int) -> str:
        if name not in found[length]:
            return f"over {args.memory:.0f} GiB"
        middle, low, high = found[length][name]
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    def more(name: str, length: int) -> str:
        if (name, length) not in peaks:
            return f"over {args.memory:.0f} GiB"
        if peaks[name, length] is None:
            return "fails"
        (size, taken), limit = peaks[name, length], peaks[LIMIT, length][0]
        return f"{size:,.0f} MiB ({size / limit:.2f}), {taken:.1f} s"

    layers, heads, width = size_of(args.shape)
    head = "| " + " | ".join(["", *(f"{n:,}" for n in found)]) + " |"
    rule = "|---" * (len(found) + 1) + "|"
    lines = [
        f"{args.family}, {args.shape}: {layers} layers, {heads} query heads, "
        + ("" if args.shape in toy_names() else f"{args.kv_heads} key-value heads, ")
        + f"d_model {width}, {args.dtype}, "
        f"{args.device}. Received attention and segment mass of every layer and head, one sequence. {_machine()}, "
        f"{torch.get_num_threads()} threads, {date.today()}. {_versions()}.",
        "",
        "Time as a ratio to the SDPA forward of the same model in the same round, one process: median over rounds "
        f"({', '.join(str(rounds) for _, rounds in limits.values())}, after a warm-up) and its 95 % interval. A way "
        "whose interval is narrow sits the later rounds out.",
        "",
        head,
        rule,
        *("| " + " | ".join([name, *(ratio(name, n) for n in found)]) + " |" for name in names if name != LIMIT),
        "| " + " | ".join([f"{LIMIT}, seconds", *(f"{limits[n][0]:.3g}" for n in found)]) + " |",
    ]
    if peaks:
        head = "| " + " | ".join(["", *(f"{n:,}" for n in args.peaks)]) + " |"
        about = "Peak memory of a fresh process and its ratio to that of the SDPA forward; seconds of its only run."
        lines += ["", about, "", head, "|---" * (len(args.peaks) + 1) + "|"]
        lines += ["| " + " | ".join([name, *(more(name, n) for n in args.peaks)]) + " |" for name in names]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{len(found)} cores of {found[0]}" if found else platform.processor()


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _versions() -> str:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    return ", ".join(f"{name} {of(name)}" for name in ("torch", "transformers", "transformer-lens", "nnsight"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *toy_names()], default="small")
    parser.add_argument("--family", choices=["llama", "gpt_neox", "gpt_neo", "gemma3_text"], default="llama")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192])
    parser.add_argument("--engines", nargs="*", help="parts of the names of the ways to run; all without")
    parser.add_argument("--runs", type=int, default=5, help="rounds a length at least")
    parser.add_argument("--most", type=float, default=300, help="seconds a length for further rounds")
    parser.add_argument("--memory", type=float, default=12, help="GiB that [query, key] matrices may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--peaks", type=int, nargs="*", default=[], help="lengths to measure peak memory at")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        one(args)
        return
    ways = runners(args.shape, args.kv_heads, max(args.lengths), args.device, getattr(torch, args.dtype), args.family)
    names = [n for n in ways if not args.engines or any(part in n for part in [*args.engines, LIMIT])]
    found: dict[int, dict[str, Ratio]] = {}
    limits: dict[int, tuple[float, int]] = {}
    peaks: dict[tuple[str, int], tuple[float, float] | None] = {}

    def write() -> None:
        if args.out:  # after each length, so that a killed benchmark leaves what it has measured
            args.out.write_text(table(args, names, found, limits, peaks))

    for length in args.lengths:
        found[length], *limit = times(args, {name: ways[name] for name in names}, length)
        limits[length] = tuple(limit)
        write()
    for length in args.peaks:
        for name in names:
            if needs(name, length, args.shape) < args.memory * 2**30:
                peaks[name, length] = peak(args, name, length)
    write()
    print(table(args, names, found, limits, peaks))


if __name__ == "__main__":
    main()
