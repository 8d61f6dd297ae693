"""Exact paths: what one head passes to another's q, k or v, or to the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import head_named
from mechattn.errors import OptionError
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_layers
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric, chosen_metric
from mechattn.patching.effects import Patching, effects_dataset
from mechattn.patching.memory import paths_row_bytes, rows_within
from mechattn.patching.pairs import Pair, PairRuns, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import (
    Where,
    changing,
    logits_of,
    patched_logits,
    possible_starts,
    read,
)
from mechattn.patching.refusals import Direction
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY, memory_bytes

Output = Float[Tensor, "shared d_head"]  # of a head, at the original tokens that both runs have


@dataclass(frozen=True)
class Path:
    """From a head to a part of another head, or to the logits (None)."""

    sender: Where
    receiver: Where | None
    part: Literal["q", "k", "v"] | None
    name: str


@alone
def paths(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    between: Sequence[tuple[str, str]],
    *,
    metric: Metric | None = None,
    direction: Direction = "noising",
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Patch paths exactly: from a head to another head's queries, keys or values, or directly to
    the logits.

    First the run is repeated with every head's output held at its own value, except the sender's,
    which is that of the other run, while MLPs are computed again; this gives what the receiver
    would get: ``r' = r(z_sender := z'_sender, z_h := z_h for all other heads h)``. Then the run is
    repeated with r' in that place alone, and all that comes after is computed:
    ``effect = metric(run with r') − metric(run)``. For "logits" the first repetition's are
    measured.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        between: Pairs such as ``("L0H1", "L1H0.k")`` or ``("L1H0", "logits")``; keys and values are
            counted by heads that have their own.
        metric: As for ``patch``.
        direction: As for ``edges``.
        memory: The memory that a prompt's passes may take; as many paths go together as fit.
        seed: The seed of random directions.

    Returns:
        Effects by path, with a random step of equal norm of the sender as control.

    Raises:
        OptionError: A head doesn't exist, or a receiver is not in a later layer than its sender.

    Source:
        Path patching: arXiv:2211.00593, appendix B.
    """
    budget = memory_bytes(memory)
    model = load_model(model)
    named = _paths_in(model, between)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    pairs, _ = pairs_of(model, prompts, condition, metric, direction, seed)
    effects = [
        _effects(model, pair, named, budget, seed + index)
        for index, pair in enumerate(tqdm(pairs, desc="paths", delay=2))
    ]
    dataset = effects_dataset(effects, prompts, {"path": [path.name for path in named]})
    about = about_of(model, prompts, condition, metric, direction, seed)
    about["method"] = "patched"
    return Patching(dataset, units_of(prompts), about)


def _paths_in(model: HookedModel, between: Any) -> list[Path]:
    """The named paths, each checked."""
    if not isinstance(between, (list, tuple)) or not between:
        raise OptionError(
            f'between={between!r}: give paths such as [("L0H1", "L1H0.k"), ("L1H0", "logits")]'
        )
    layers = attention_layers(model)
    key_heads = kv_heads_of(model)
    heads_of_part = {"q": int(model.cfg.n_heads), "k": key_heads, "v": key_heads}
    named = []
    for pair in between:
        sender = receiver = None
        part = end = ""
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            end = str(pair[1])
            head_of_end, _, part = end.partition(".")
            sender = head_named(pair[0])
            receiver = head_named(head_of_end)
        to_a_head = receiver is not None and part in heads_of_part
        if sender is None or not (to_a_head or end == "logits"):
            raise OptionError(
                f'{pair!r} is not a path: give such as ("L0H1", "L1H0.k"), with q, k, v, or '
                '"logits"'
            )
        ends = [(sender, heads_of_part["q"])]
        if receiver is not None:
            ends.append((receiver, heads_of_part[part]))
            if receiver[0] <= sender[0]:
                raise OptionError(
                    f"{pair!r}: nothing passes from layer {sender[0]} to layer {receiver[0]}; name "
                    "a later layer"
                )
        for (layer, head), count in ends:
            if layer not in layers or head >= count:
                raise OptionError(
                    f"{pair!r}: {model.cfg.model_name} has heads 0 to {count - 1} there, in layers "
                    f"{', '.join(map(str, layers))}"
                )
        named.append(Path(sender, receiver, part or None, f"{pair[0]} → {pair[1]}"))  # type: ignore[arg-type]
    return named


def _effects(
    model: HookedModel, pair: Pair, named: Sequence[Path], budget: int, seed: int
) -> dict[str, np.ndarray]:
    """The effect of each path, that of a random step of its sender, and the whole effect."""
    layers = attention_layers(model)
    starts = possible_starts(
        model, pair.base, [path.receiver[0] for path in named if path.receiver]
    )
    base_run, source_run = read(
        model, [(pair.base, pair.origins), (pair.source, pair.origins)], layers, "z", starts
    )
    runs = PairRuns(pair, base_run, source_run)

    generator = torch.Generator().manual_seed(seed)
    outputs_by_name: dict[str, dict[Where, Output]] = {"effect": {}, "random": {}}
    for layer, head in dict.fromkeys(path.sender for path in named):
        z = base_run.z[layer][base_run.places, head]
        source_z = source_run.z[layer][source_run.places, head]
        direction = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        length = (source_z - z).norm(dim=-1, keepdim=True)
        direction *= length / direction.norm(dim=-1, keepdim=True)
        outputs_by_name["effect"][layer, head] = source_z
        outputs_by_name["random"][layer, head] = z + direction

    rows = rows_within(budget, paths_row_bytes(model, pair))
    effects = {"whole": np.array(runs.effect(source_run.logits))}
    for name, outputs in outputs_by_name.items():
        metrics = []
        for start in range(0, len(named), rows):
            batch = named[start : start + rows]
            metrics.append(_patched(model, batch, runs, outputs))
        effects[name] = np.concatenate(metrics) - runs.before
    return effects


def _patched(
    model: HookedModel,
    named: Sequence[Path],
    runs: PairRuns,
    outputs: Mapping[Where, Output],
) -> np.ndarray:
    """The metric with each path patched: one row of two passes for each."""
    base_run = runs.base
    rows_by_part: dict[Any, dict[int, Where]] = {}  # the receiver in each row
    for row, path in enumerate(named):
        if path.receiver is not None:
            rows_by_part.setdefault(path.part, {})[row] = path.receiver

    # The first pass: all heads are held except each row's sender, and receivers' parts are
    # recorded.
    recorded: dict[tuple[str, int], Tensor] = {}

    def hold(layer: int, z: Tensor) -> Tensor:
        z = base_run.z[layer].expand_as(z).clone()
        places = base_run.places.to(z.device)
        for row, path in enumerate(named):
            sender_layer, head = path.sender
            if sender_layer == layer:
                z[row, places, head] = outputs[path.sender].to(z)
        return z

    def record(part: str, layer: int, x: Tensor) -> Tensor:
        recorded[part, layer] = x.detach()
        return x

    with ExitStack() as stack:
        holds = {layer: partial(hold, layer) for layer in base_run.z}
        stack.enter_context(changing(model, "z", holds))
        for part, receivers in rows_by_part.items():
            layers = {layer for layer, _ in receivers.values()}
            records = {layer: partial(record, part, layer) for layer in layers}
            stack.enter_context(changing(model, part, records))
        logits = logits_of(model, [base_run.sequence] * len(named))
    metrics = runs.measure(logits).double().cpu().numpy()

    # The second: only the receivers' parts are changed.
    all_places = torch.arange(len(base_run.sequence))
    for part, receivers in rows_by_part.items():
        changes = []
        for row, (layer, head) in receivers.items():
            value = recorded[part, layer][row, :, head]
            changes.append([((layer, head), all_places, value)])
        logits = patched_logits(model, [base_run] * len(changes), changes, part)
        metrics[list(receivers)] = runs.measure(logits).double().cpu().numpy()
    return metrics
