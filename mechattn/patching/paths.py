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

from mechattn.errors import OptionError
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_layers
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.controls import as_long
from mechattn.patching.effects import Patching
from mechattn.patching.pairs import (
    Direction,
    Pair,
    PatchingRequest,
    PromptEffects,
    Unpatched,
    request_of,
)
from mechattn.patching.patched_runs import (
    RecordedRun,
    Where,
    changing,
    logits_of,
    patched_logits,
    possible_starts,
    recorded_runs,
)
from mechattn.patching.plan import paths_row_bytes, rows_within
from mechattn.patching.sites import check_head
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY, head_named

Output = Float[Tensor, "shared d_head"]  # of a head, at the original tokens that both runs have


@dataclass(frozen=True)
class Path:
    """From a head to a part of another head, or to the logits.

    Args:
        sender: The head that writes.
        receiver: The head that reads, by its own keys and values; None for the logits.
        part: What of the receiver reads; None for the logits.
        name: Such as "L0H1 → L1H0.k".
    """

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
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    named = _paths_in(request.model, between)
    axes = {"path": [path.name for path in named]}
    effects_of = partial(_effects, request, named)
    return request.patched(request.pairs, effects_of, axes, "patched")


def _paths_in(model: HookedModel, between: Any) -> list[Path]:
    """The named paths, each checked.

    Raises:
        OptionError: A head doesn't exist, or a receiver comes too early.
    """
    if not isinstance(between, (list, tuple)) or not between:
        raise OptionError(
            f'between={between!r}: give paths such as [("L0H1", "L1H0.k"), ("L1H0", "logits")]'
        )
    key_heads = kv_heads_of(model)
    counts = {"q": model.cfg.n_heads, "k": key_heads, "v": key_heads}

    named = []
    for ends in between:
        path = _path_of(ends)
        check_head(model, path.sender, counts["q"])
        if path.receiver is not None:
            check_head(model, path.receiver, counts[str(path.part)])
            if path.receiver[0] <= path.sender[0]:
                raise OptionError(
                    f"{ends!r}: nothing passes from layer {path.sender[0]} to layer "
                    f"{path.receiver[0]}; name a later layer"
                )
        named.append(path)
    return named


def _path_of(ends: Any) -> Path:
    """The path between two names, such as "L0H1" and "L1H0.k"."""
    match ends:
        case (str(start), str(end)) if sender := head_named(start):
            name = f"{start} → {end}"
            if end == "logits":
                return Path(sender, None, None, name)

            node, _, part = end.partition(".")
            receiver = head_named(node)
            if receiver is not None and part in ("q", "k", "v"):
                return Path(sender, receiver, part, name)  # type: ignore[arg-type]
    raise OptionError(
        f'{ends!r} is not a path: give such as ("L0H1", "L1H0.k"), with q, k, v, or "logits"'
    )


def _effects(request: PatchingRequest, named: Sequence[Path], pair: Pair) -> PromptEffects:
    """The effect of each path, that of a random step of its sender, and the whole effect."""
    model = request.model
    receiving_layers = [path.receiver[0] for path in named if path.receiver]
    starts = possible_starts(model, pair.base, receiving_layers)

    layers = attention_layers(model)
    [base_run] = recorded_runs(model, [(pair.base, pair.origins)], layers, "z", starts)
    [source_run] = recorded_runs(model, [(pair.source, pair.origins)], layers, "z")
    unpatched = Unpatched(pair, base_run.logits, source_run.logits)

    # What each sender puts out, in the order of the paths, as the random steps are drawn in it.
    generator = torch.Generator().manual_seed(pair.seed)
    outputs: dict[str, dict[Where, Output]] = {"effect": {}, "random": {}}
    senders = dict.fromkeys(path.sender for path in named)
    for layer, head in senders:
        z = base_run.activations[layer][base_run.places, head]
        source_z = source_run.activations[layer][source_run.places, head]
        direction = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        outputs["effect"][layer, head] = source_z
        outputs["random"][layer, head] = z + as_long(direction, source_z - z)

    rows = rows_within(request.memory, paths_row_bytes(model, pair))
    effects: PromptEffects = {"whole": unpatched.whole}
    for name, outputs_of_senders in outputs.items():
        batches = []
        for start in range(0, len(named), rows):
            batch = named[start : start + rows]
            patched = _patched(model, batch, base_run, unpatched, outputs_of_senders)
            batches.append(patched)
        effects[name] = np.concatenate(batches)
    return effects


def _patched(
    model: HookedModel,
    named: Sequence[Path],
    base_run: RecordedRun,
    unpatched: Unpatched,
    outputs: Mapping[Where, Output],
) -> np.ndarray:
    """The effect of each path: one row of two passes for each.

    Args:
        model: The hooked model.
        named: The paths.
        base_run: The run that is patched, with every head's output.
        unpatched: What effects are counted from.
        outputs: What replaces each sender's output.
    """
    receivers_by_part: dict[Any, dict[int, Where]] = {}  # the receiver in each row
    for row, path in enumerate(named):
        if path.receiver is not None:
            receivers = receivers_by_part.setdefault(path.part, {})
            receivers[row] = path.receiver

    # The first pass: all heads are held except each row's sender, and receivers' parts are
    # recorded.
    recorded: dict[tuple[str, int], Tensor] = {}

    def hold(layer: int, z: Tensor) -> Tensor:
        z = base_run.activations[layer].expand_as(z).clone()
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
        holds = {layer: partial(hold, layer) for layer in base_run.activations}
        stack.enter_context(changing(model, "z", holds))
        for part, receivers in receivers_by_part.items():
            layers = {layer for layer, _ in receivers.values()}
            records = {layer: partial(record, part, layer) for layer in layers}
            stack.enter_context(changing(model, part, records))
        logits = logits_of(model, [base_run.sequence] * len(named))

    # Of paths to the logits, this is the effect; of the others it is replaced below.
    effects = unpatched.effects(logits)

    # The second: only the receivers' parts are changed.
    all_places = torch.arange(len(base_run.sequence))
    for part, receivers in receivers_by_part.items():
        changes = []
        for row, (layer, head) in receivers.items():
            value = recorded[part, layer][row, :, head]
            changes.append([((layer, head), all_places, value)])

        logits = patched_logits(model, [base_run] * len(changes), changes, part)
        rows = list(receivers)
        effects[rows] = unpatched.effects(logits)
    return effects
