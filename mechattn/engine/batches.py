"""Plans batches that fit into memory, measures each in one forward pass, and halves those that do
not fit."""

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

# The number of [query, key] matrices that are in memory at the same time with hooks: scores, masked
# scores, pattern, and the working copies of a reduction.
_MATRICES_WITH_HOOKS = 6
# The same for streamed blocks of rows, which are masked and normalised in place.
_BLOCKS_WHILE_STREAMING = 2
_FLOAT32_BYTES = 4
# Rows. Without it, a large budget would put all short prompts into a single batch.
_LARGEST_BATCH = 64
# The length of a batch's shortest prompt, as a fraction of its longest: a quarter is padding at
# most.
_LEAST_FILL = 0.75
# What torch's allocators, cuBLAS and the operating system say in a RuntimeError. Only the error of
# CUDA's allocator has a type of its own.
_MEMORY_WORDS = (
    "not enough memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
)
Measured = TypeVar("Measured")


def row_bytes(cfg: Any, length: int, holds_pattern: bool) -> int:
    """Estimate the memory that a row of a batch needs, in bytes.

    The estimate ignores the machine, so the same prompts always form the same batches.

    Args:
        cfg: The configuration of a hooked model.
        length: The number of positions.
        holds_pattern: Whether a layer's whole pattern is in memory (hooks) or only blocks of its
            rows (streaming).
    """
    # The numbers in memory at each position: about 8 vectors of the residual stream and of
    # projections, and 3 of the MLP.
    width = 8 * int(cfg.d_model) + 3 * int(cfg.d_mlp or 4 * cfg.d_model)
    query_rows = _BLOCKS_WHILE_STREAMING * BLOCK
    if holds_pattern:
        query_rows = _MATRICES_WITH_HOOKS * length
    return _FLOAT32_BYTES * length * (cfg.n_heads * query_rows + width)


def batch_plan(
    lengths: Sequence[int],
    condition_count: int,
    bytes_of_row: Callable[[int], int],
    memory: str,
    sides: Sequence[str | None],
) -> list[list[int]]:
    """Group prompts of similar length so that one layer of a batch fits the budget.

    A prompt is in one batch with all its conditions, even if these exceed the budget by themselves.

    Args:
        lengths: The length of each prompt's longest sequence.
        condition_count: The number of conditions, and therefore of rows per prompt.
        bytes_of_row: The memory of a row by its length, see :func:`row_bytes`.
        memory: The budget, such as "2GiB".
        sides: The side of the model's boundary on which each prompt lies; None for each if the
            model has no boundary. A batch has prompts of one side only.

    Returns:
        The indices of the prompts of each batch.
    """
    budget = memory_bytes(memory)

    def fits(prompt_indices: Sequence[int], index: int) -> bool:
        """Whether a prompt at least as long as those of a batch can join them."""
        first_index = prompt_indices[0]
        row_count = (len(prompt_indices) + 1) * condition_count
        return (
            sides[first_index] == sides[index]
            and lengths[first_index] >= _LEAST_FILL * lengths[index]
            and row_count <= _LARGEST_BATCH
            and row_count * bytes_of_row(lengths[index]) <= budget
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
    """Measure some prompts together, or in halves, quarters … if they do not fit in memory.

    Args:
        indices: The indices of the prompts.
        measure: Measures the prompts at some indices together.

    Returns:
        What each group gave, in the order of the prompts, and the groups that did not fit.

    Raises:
        ModelError: A single prompt does not fit.
    """
    values_of_groups = []
    too_large_groups = []
    waiting_groups = [list(indices)]
    while waiting_groups:
        group = waiting_groups.pop(0)
        try:
            values_of_groups.append(measure(group))
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = reason(error)

        # Only after the except block: inside it, the error keeps the tensors of the pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        if len(group) == 1:
            raise ModelError(
                f"the prompt at index {group[0]} alone with all its conditions does not fit in"
                f" memory ({cause}); use fewer conditions per run, a shorter prompt, or a machine"
                " with more memory"
            )

        too_large_groups.append(group)
        middle = len(group) // 2
        waiting_groups[:0] = [group[:middle], group[middle:]]
    return values_of_groups, too_large_groups


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device or the machine has no memory left."""
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
        windows: The layers to measure, each with the number of keys that its queries see; None for
            all.
        analyses: The analyses, which share the pass.
        prompt_ids: The id of each prompt of the run, for interventions and messages.
        blind: What the model adds to its scores regardless of content; only nulls need it.

    Returns:
        The values of each analysis by layer and quantity, each [row of the batch, …].

    Raises:
        ModelError: The attention is invalid, a sum is NaN or infinite, or an analysis does not
            receive what it needs.
        OptionError: An analysis gives sums or values that it does not declare.
    """
    placed_batch = PlacedBatch.of(model, batch, windows, prompt_ids)
    input_batch = placed_batch.input_batch
    nulls = Nulls(analyses, input_batch, blind)
    pending = PendingSums(placed_batch, analyses, nulls)
    receiver = RowReceiver(pending)

    try:
        with ExitStack() as stack:
            # Made before the interventions, so it reads the minimum of the model's own
            # nonlinearities; entered after them, so it sees the activations that they change.
            watching_mlps = receiving_activations(pending)
            interventions = placed_batch.interventions()
            for intervention, target in interventions:
                stack.enter_context(intervention.acting(model, partial(_same_target, target)))

            if any_reads_first(intervention for intervention, _ in interventions):
                # These interventions learn from a first pass, in which no layer is measured.
                forward(model, input_batch, {}, receiver, pending.last_layer)

            stack.enter_context(watching_mlps)
            stack.enter_context(receiving_captures(pending))
            windows_to_see: Windows = {}
            if receiver.is_needed:
                windows_to_see = windows
            with suppress(AllArrived):
                forward(model, input_batch, windows_to_see, receiver, pending.last_layer)
    except RowError as error:
        raise ModelError(f"{placed_batch.name_of_row(error.row)}: {error}") from error
    except Exception:
        pending.refuse_nan()  # if there is NaN, it is the cause of the error
        raise
    return pending.checked_values()


def _same_target(target: Target) -> Target:
    """Return the target, which is the same in every forward pass of this batch."""
    return target
