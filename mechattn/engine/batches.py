"""Batches: planned to fit into memory, measured in one forward pass each, and halved where they
don't fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from mechattn.analysis.analysis import Analysis
from mechattn.engine.engines import Forward
from mechattn.engine.nulls import Nulls
from mechattn.engine.pending_sums import AllArrived, LayerValues, PendingSums
from mechattn.engine.placed_batch import PlacedBatch, Windows
from mechattn.engine.receivers import RowReceiver, receiving_activations, receiving_captures
from mechattn.errors import ModelError, RowError, memory_bytes, reason
from mechattn.functional.attention import BLOCK
from mechattn.interventions.intervention import Target, any_reads_first
from mechattn.model.hooked import HookedModel
from mechattn.model.scores import BlindScores
from mechattn.prompts.token_sequences import Batch

# Scores, masked scores, pattern and the working copies of a reduction are in memory at the same
# time, in float32: so many [query, key] matrices of a layer, or of each of its blocks of rows.
_SQUARES = 6
_BLOCKS = 2
_FLOAT32 = 4  # bytes
_LARGEST_BATCH = 64  # rows
_LEAST_FILL = 0.75  # the shortest prompt of a batch, as a share of its longest
# What torch's allocators, cuBLAS and the kernel say in a RuntimeError; only that of CUDA's allocator
# has a type of its own.
_MEMORY_WORDS = (
    "not enough memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
)
Measured = TypeVar("Measured")


def row_bytes(cfg: Any, length: int, holds_pattern: bool) -> int:
    """The memory of a row of a batch, in bytes; it depends only on the row's length, so a plan is
    reproducible.

    Args:
        cfg: The configuration of a hooked model.
        length: The number of positions.
        holds_pattern: Whether a layer's whole pattern is in memory (hooks), or blocks of rows
            (streaming).
    """
    # Numbers in memory at the same time for each position: residual stream, projections and MLP.
    width = 8 * int(cfg.d_model) + 3 * int(cfg.d_mlp or 4 * cfg.d_model)
    query_rows = _BLOCKS * BLOCK
    if holds_pattern:
        query_rows = _SQUARES * length
    return _FLOAT32 * length * (cfg.n_heads * query_rows + width)


def batch_plan(
    lengths: Sequence[int],
    conditions: int,
    bytes_of_row: Callable[[int], int],
    memory: str,
    sides: Sequence[str],
) -> list[list[int]]:
    """Group prompts of similar length so that one layer of a batch fits the budget.

    Args:
        lengths: The most tokens of each prompt under any condition.
        conditions: How many conditions there are, and so rows of each prompt.
        bytes_of_row: The memory of a row by its length, see :func:`row_bytes`.
        memory: The budget, such as "2GiB".
        sides: The side of the model's boundary on which each prompt lies, which a batch cannot mix;
            empty for a model without a boundary.

    Returns:
        The indices of the prompts of each batch.
    """
    budget = memory_bytes(memory)
    if not sides:
        sides = [""] * len(lengths)

    def fits(batch: Sequence[int], index: int) -> bool:
        """Whether a prompt at least as long as those of the batch can join it."""
        shortest = batch[0]
        rows = (len(batch) + 1) * conditions
        return (
            sides[shortest] == sides[index]
            and lengths[shortest] >= _LEAST_FILL * lengths[index]
            and rows <= _LARGEST_BATCH
            and rows * bytes_of_row(lengths[index]) <= budget
        )

    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (sides[index], lengths[index])):
        if batches and fits(batches[-1], index):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def in_halves(
    indices: Sequence[int], measure: Callable[[Sequence[int]], Measured]
) -> tuple[list[Measured], list[list[int]]]:
    """Measure some prompts together; if they don't fit in memory, each half of them, and so on.

    Returns:
        What was measured, in the order of the prompts, and the prompts that did not fit together.
    """
    measured = []
    too_large = []
    waiting = [list(indices)]
    while waiting:
        batch = waiting.pop(0)
        try:
            measured.append(measure(batch))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = reason(error)

        # Outside the except block, where the error no longer keeps the tensors of the pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        if len(batch) == 1:
            raise ModelError(
                f"a batch of prompt number {batch[0]} alone with all its conditions does not fit in"
                f" memory ({cause}); use fewer conditions per run, a shorter prompt, or a machine"
                " with more memory"
            )

        too_large.append(batch)
        middle = len(batch) // 2
        waiting[:0] = [batch[:middle], batch[middle:]]
    return measured, too_large


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the machine had no memory left."""
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _MEMORY_WORDS)


def measure_batch(
    model: HookedModel,
    batch: Batch,
    forward: Forward,
    windows: Windows,
    analyses: Sequence[Analysis],
    prompt_ids: Sequence[str],
    blind: BlindScores = BlindScores(),
) -> list[LayerValues]:
    """Run the model on a batch and return the values of each analysis in each layer, on the CPU.

    Args:
        model: The model.
        batch: Sequences, padded on the right.
        forward: The engine, see :func:`mechattn.engine.engines.chosen_engine`.
        windows: The layers to measure, each with the number of keys that its queries see.
        analyses: The analyses, which share the pass.
        prompt_ids: The id of each prompt of the run, for interventions and messages.
        blind: What the model adds to its scores regardless of content; only nulls need it.

    Returns:
        For each analysis its values by layer and quantity, each [row of the batch, …].

    Raises:
        ModelError: The attention is invalid, gives NaN, or lacks what an analysis needs.
    """
    placed_batch = PlacedBatch.of(model, batch, windows, prompt_ids)
    placed = placed_batch.placed
    nulls = Nulls(analyses, placed, blind)
    pending = PendingSums(placed_batch, analyses, nulls)
    receiver = RowReceiver(pending)

    try:
        with ExitStack() as stack:
            # Made before interventions on the nonlinearities, but entered after them: it sees their
            # results.
            watching_mlps = receiving_activations(pending)
            interventions = placed_batch.interventions()
            for intervention, target in interventions:
                stack.enter_context(intervention.acting(model, partial(_same_target, target)))

            if any_reads_first(intervention for intervention, _ in interventions):
                # Without windows no layer is measured: interventions read this pass.
                forward(model, placed, {}, receiver, pending.last_layer)

            stack.enter_context(watching_mlps)
            stack.enter_context(receiving_captures(pending))
            windows_to_see: Windows = {}
            if receiver.is_needed:
                windows_to_see = windows
            with suppress(AllArrived):
                forward(model, placed, windows_to_see, receiver, pending.last_layer)
    except RowError as error:
        raise ModelError(f"{placed_batch.name_of_row(error.row)}: {error}") from error
    except Exception:
        pending.refuse_nan()  # the cause, if there is one
        raise
    return pending.checked_values()


def _same_target(target: Target) -> Target:
    """The target of every forward pass of this batch; an intervention asks for it in each."""
    return target
