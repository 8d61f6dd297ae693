"""Path patching: what one head passes to another head's q, k or v, or to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_layers
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.controls import aligned_output, random_step
from mechattn.patching.effects import Patching
from mechattn.patching.pairs import (
    Direction,
    Pair,
    PatchingRequest,
    PromptEffects,
    UnpatchedLogits,
    request_of,
)
from mechattn.patching.patched_runs import (
    HeadChange,
    HeadOutput,
    LayerHead,
    RecordedRun,
    changing,
    logits_of,
    patched_logits,
    possible_starts,
    recorded_runs,
)
from mechattn.patching.plan import patched_row_bytes, rows_within
from mechattn.patching.sites import check_head
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY, head_name, head_named


class Receiver(NamedTuple):
    """The queries, keys or values of a head."""

    part: Literal["q", "k", "v"]
    where: LayerHead


@dataclass(frozen=True)
class HeadPath:
    """A path from a head to a part of another head, or to the logits.

    Args:
        sender: The head that writes.
        receiver: The part of a head that reads, with key-value heads for k and v; None for the
            logits.
    """

    sender: LayerHead
    receiver: Receiver | None

    @property
    def name(self) -> str:
        """The name, such as "L0H1 → L1H0.k"."""
        end = "logits"
        if self.receiver is not None:
            part, where = self.receiver
            end = f"{head_name(*where)}.{part}"
        return f"{head_name(*self.sender)} → {end}"


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
    """Patch paths exactly, from a head to another head's queries, keys or values or directly to
    the logits.

    Each path takes two passes.

    1. The sender's output is that of the other run, and the outputs of all other heads are held at
       their values in the unpatched run. MLPs are computed again. This gives what the receiver
       would get: ``r' = r(z_sender := z'_sender, z_h := z_h for all other heads h)``. For "logits",
       this pass already gives the effect.
    2. Only r is replaced by r', and everything after it is computed again:
       ``effect = metric(run with r') − metric(run)``.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        between: Paths as pairs such as ``("L0H1", "L1H0.k")`` or ``("L1H0", "logits")``. For k and
            v, the number of the receiving head is that of a key-value head.
        metric: As for ``patch``.
        direction: As for ``edges``.
        memory: The memory that a prompt's passes may take. As many paths share a pass as fit.
        seed: The seed of random directions and of the condition's draws.

    Returns:
        Effects by path. The control "random" replaces the sender's output by a random step of equal
        norm from its own.

    Raises:
        MechattnError: A name is not that of a path, a head doesn't exist, or a receiver is not in a
            later layer than its sender; or as for ``patch``.

    Source:
        Path patching: arXiv:2211.00593, appendix B.
    """
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    chosen_paths = _paths_in(request.model, between)
    receivers = [path.receiver for path in chosen_paths if path.receiver is not None]
    receiving_layers = [layer for _, (layer, _) in receivers]
    starts = possible_starts(request.model, request.shortest, receiving_layers)

    batches = (
        {pair.id: _pair_effects(request, chosen_paths, starts, pair)} for pair in request.pairs
    )
    axes = {"path": [path.name for path in chosen_paths]}
    return request.run_patching(batches, axes, method="exact")


def _paths_in(model: HookedModel, between: Any) -> list[HeadPath]:
    """The named paths, each checked and listed once.

    Raises:
        OptionError: A name is not that of a path, a head doesn't exist, or a receiver is not in a
            later layer than its sender.
    """
    if not isinstance(between, (list, tuple)) or not between:
        raise OptionError(
            f'between={between!r}: give paths such as [("L0H1", "L1H0.k"), ("L1H0", "logits")]'
        )
    chosen_paths = []
    for ends in between:
        path = _path_of(ends)
        check_head(model, path.sender, "z")
        if path.receiver is not None:
            part, where = path.receiver
            check_head(model, where, part)
            layer, _ = where
            sender_layer, _ = path.sender
            if layer <= sender_layer:
                raise OptionError(
                    f"{ends!r}: nothing passes from layer {sender_layer} to layer {layer}; name a"
                    " later layer"
                )
        chosen_paths.append(path)
    # The tests would count a repeated path as two.
    return list(dict.fromkeys(chosen_paths))


def _path_of(ends: Any) -> HeadPath:
    """The path between two names, such as "L0H1" and "L1H0.k"."""
    match ends:
        case (str(start), str(end)):
            sender = head_named(start)
            receiving_head, _, part = end.partition(".")
            where = head_named(receiving_head)
            if sender is not None and end == "logits":
                return HeadPath(sender, None)
            if sender is not None and where is not None and part in ("q", "k", "v"):
                return HeadPath(sender, Receiver(part, where))  # type: ignore[arg-type]
    raise OptionError(
        f'{ends!r} is not a path: give a pair such as ("L0H1", "L1H0.k"), which ends in q, k or v'
        ' of a head or in "logits"'
    )


def _pair_effects(
    request: PatchingRequest, chosen_paths: Sequence[HeadPath], starts: Sequence[int], pair: Pair
) -> PromptEffects:
    """The effect of each path in a pair, the effect of a random step of its sender, and the whole
    effect.
    """
    model = request.model
    layers = attention_layers(model)
    [base_run] = recorded_runs(model, [(pair.base, pair.origins)], layers, "z", starts)
    [source_run] = recorded_runs(model, [(pair.source, pair.origins)], layers, "z")
    unpatched_logits = UnpatchedLogits(pair, base_run.logits, source_run.logits)

    # Random steps are drawn in the order in which paths first name their senders.
    generator = torch.Generator().manual_seed(pair.seed)
    source_outputs = {}
    random_outputs = {}
    for where in dict.fromkeys(path.sender for path in chosen_paths):
        z = base_run.output_of(where, base_run.positions)
        source_z = aligned_output(base_run, source_run, where)
        source_outputs[where] = source_z
        random_outputs[where] = z + random_step(generator, source_z - z)

    # Besides a pass, the queries, keys and values of all layers may be kept for the second pass.
    cfg = model.cfg
    received_values = 3 * cfg.n_layers * cfg.n_heads * cfg.d_head
    most_rows = rows_within(request.memory, patched_row_bytes(model, pair, received_values))
    rows = []
    for outputs in (source_outputs, random_outputs):
        rows += [(path, outputs[path.sender]) for path in chosen_paths]
    batch_effects = []
    for start in range(0, len(rows), most_rows):
        batch = rows[start : start + most_rows]
        batch_effects.append(_path_effects(model, batch, base_run, unpatched_logits))
    effects = np.concatenate(batch_effects)
    effect, random_effect = np.split(effects, 2)  # in the order of ``rows``
    return {"whole": unpatched_logits.whole, "effect": effect, "random": random_effect}


def _path_effects(
    model: HookedModel,
    rows: Sequence[tuple[HeadPath, HeadOutput]],
    base_run: RecordedRun,
    unpatched_logits: UnpatchedLogits,
) -> Float[np.ndarray, " row"]:
    """The effect of each row of the passes, in which one path is patched.

    Args:
        model: The hooked model.
        rows: The path of each row, and the value that replaces its sender's output.
        base_run: The run that is patched, with the output of every head.
        unpatched_logits: The logits of both unpatched runs.
    """
    received: dict[int, Tensor] = {}  # by row [pos d_head]

    def hold(layer: int, z: Tensor) -> Tensor:
        """Hold each head's output at that of the base run, except for the sender of each row."""
        held_z = base_run.activations[layer].expand_as(z).clone()
        positions = base_run.positions.to(z.device)
        for row, (path, output) in enumerate(rows):
            sender_layer, head = path.sender
            if sender_layer == layer:
                held_z[row, positions, head] = output.to(z)
        return held_z

    def record(row: int, head: int, x: Tensor) -> Tensor:
        received[row] = x[row, :, head].detach()
        return x

    # The first pass gives the effect of paths to the logits, and what the other receivers get.
    receivers = {}  # by row
    for row, (path, _) in enumerate(rows):
        if path.receiver is not None:
            receivers[row] = path.receiver
    with ExitStack() as stack:
        holds = {layer: partial(hold, layer) for layer in base_run.activations}
        stack.enter_context(changing(model, "z", holds))
        for row, (part, (layer, head)) in receivers.items():
            record_row = partial(record, row, head)
            stack.enter_context(changing(model, part, {layer: record_row}))
        logits = logits_of(model, [base_run.sequence] * len(rows))
    effects = unpatched_logits.effects(logits)

    # The second pass changes only these receivers.
    if receivers:
        all_positions = torch.arange(len(base_run.sequence))
        changes = []
        for row, (part, where) in receivers.items():
            changes.append([HeadChange(part, where, all_positions, received[row])])
        receiver_logits = patched_logits(model, [base_run] * len(changes), changes)
        effects[list(receivers)] = unpatched_logits.effects(receiver_logits)
    return effects
