"""CPU-seconds and peak memory of patching heads, beside TransformerLens's ``patching``.

    python experiments/benchmarks/patching.py out/real/smollm2 out/real/qwen2.5 --pairs 8 --heads 12

The same heads' z, pairs and metric, exactly and in float32: IOI pairs of equal length, whose clean
run is patched with the corrupted one's outputs. Calls are interleaved in one process for seconds;
each runs once more in a process of its own for the peak of resident memory above what was resident
before the call. The largest difference between both libraries' effects is printed beside.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformer_lens.patching import generic_activation_patch, layer_head_vector_patch_setter

import mechattn as ma
from mechattn.conditions import Counterpart

CALLS = ("TransformerLens", "mechattn, controls=()", "mechattn, both controls")


class Task:
    """A model, its pairs, and the heads to patch."""

    def __init__(self, path: Path, pairs: int, heads: int) -> None:
        self.model = ma.load_model(str(path))
        self.pairs = ma.pairs(self.model, "ioi", limit=pairs, same_length=True)
        cfg = self.model.cfg
        layers = np.linspace(0, cfg.n_layers - 1, heads).round().astype(int)
        self.heads = [(int(layer), index % cfg.n_heads) for index, layer in enumerate(layers)]

    def call(self, name: str) -> np.ndarray:
        """Effects [pair head]."""
        if name == "TransformerLens":
            return self.transformer_lens()
        controls = () if "()" in name else ("other_prompt", "random")
        patched = ma.patch(
            self.model,
            self.pairs,
            Counterpart(),
            at=self.heads,
            direction="noising",
            controls=controls,
        )
        effect = patched.effects.effect
        columns = [effect.sel(layer=layer, head=head).values for layer, head in self.heads]
        return np.stack(columns, axis=1)

    def transformer_lens(self) -> np.ndarray:
        """The heads one by one, all pairs in a batch."""
        model = self.model
        clean, corrupted, right, wrong = [], [], [], []
        for prompt in self.pairs:
            sequences = {}
            for text in (prompt.question, prompt.counterpart):
                given = ma.Prompt(text, answer=prompt.answer, template="joined")
                sequences[text] = ma.Baseline().apply(given, model)
            sequence = sequences[prompt.question]
            answer = sequence.of_segment("answer").nonzero()[0].item()
            other = ma.Prompt(prompt.question, answer=prompt.other_answer, template="joined")
            clean.append(sequence.tokens[:answer])
            corrupted.append(sequences[prompt.counterpart].tokens[:answer])
            right.append(sequence.tokens[answer])
            wrong.append(ma.Baseline().apply(other, model).tokens[answer])
        rows = torch.arange(len(clean))
        right, wrong = torch.stack(right), torch.stack(wrong)

        def metric(logits: torch.Tensor) -> torch.Tensor:
            return logits[rows, -1, right] - logits[rows, -1, wrong]

        names = {f"blocks.{layer}.attn.hook_z" for layer, _ in self.heads}
        with torch.no_grad():
            _, cache = model.run_with_cache(torch.stack(corrupted), names_filter=names.__contains__)
            before = metric(model(torch.stack(clean)))
            result = generic_activation_patch(
                model,
                torch.stack(clean),
                cache,
                metric,
                layer_head_vector_patch_setter,
                "z",
                index_df=pd.DataFrame(self.heads, columns=["layer", "head"]),
                reduce="none",
            )
        values = result.values
        return (values - before).T.numpy()


def peak_mib(task: Task, name: str) -> float:
    """The peak of resident memory during a call, above what is resident before it (Linux)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what loading has freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mib("VmRSS")
    task.call(name)
    return resident_mib("VmHWM") - before


def resident_mib(field: str) -> float:
    """A number of this process's status, such as VmHWM, the peak of resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-of", help="one call alone, whose peak memory is printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for path in options.models:
        task = Task(path, options.pairs, options.heads)
        if options.peak_of:
            print(peak_mib(task, options.peak_of))
            return
        compare(task, path, options)


def compare(task: Task, path: Path, options: argparse.Namespace) -> None:
    """Print a model's table."""
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    effects = {}
    for _ in range(options.rounds):
        for name in CALLS:
            start = time.process_time()
            effects[name] = task.call(name)
            seconds[name].append(time.process_time() - start)
    difference = abs(effects[CALLS[0]] - effects[CALLS[1]]).max()
    del task
    print(f"\n{path.name}: {options.pairs} pairs, {options.heads} heads, float32, one thread; ")
    print(f"effects differ by at most {difference:.1e}\n")
    print("| call | CPU-seconds, median | of TransformerLens | peak MiB above what was loaded |")
    print("|---|---|---|---|")
    reference = float(np.median(seconds[CALLS[0]]))
    for name in CALLS:
        command = [sys.executable, __file__, str(path), "--peak-of", name]
        command += ["--pairs", str(options.pairs), "--heads", str(options.heads)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        median = float(np.median(seconds[name]))
        peak = float(output.split()[-1])
        print(f"| {name} | {median:.1f} | {median / reference:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
