"""One forward pass of a batch, in which analyses reduce each block of rows as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

from mechattn.analysis.analysis import ActivationAnalysis, Analysis, PairAnalysis
from mechattn.engine.engines import Forward
from mechattn.engine.nulls import Nulls
from mechattn.engine.pending_sums import LayerValues, PendingSums
from mechattn.engine.placed_batch import PlacedBatch, Windows
from mechattn.engine.receivers import RowReceiver, receiving_activations, receiving_captures
from mechattn.errors import ModelError, RowError
from mechattn.interventions.intervention import Target, read_first
from mechattn.model.hooked import HookedModel
from mechattn.model.scores import BlindScores
from mechattn.prompts.token_sequences import Batch


def measure_batch(
    model: HookedModel,
    batch: Batch,
    forward: Forward,
    windows: Windows,
    analyses: Sequence[Analysis],
    prompt_ids: Sequence[str] = (),
    blind: BlindScores = BlindScores(),  # noqa: B008, a frozen value
) -> list[LayerValues]:
    """Run the model on a batch and return the values of each analysis in each layer, on the CPU.

    Args:
        model: The model.
        batch: Sequences, padded on the right.
        forward: The engine, see :func:`mechattn.engine.engines.chosen_forward`.
        windows: The layers to measure, each with the number of keys that its queries see.
        analyses: The analyses, which share the pass.
        prompt_ids: The id of each prompt of the run, for interventions and messages.
        blind: What the model adds to its scores regardless of content.

    Returns:
        For each analysis its values by layer and quantity, each [row of the batch, …].

    Raises:
        ModelError: The attention is invalid, gives NaN, or lacks what an analysis needs.
    """
    needs_pairs = any(
        isinstance(analysis, (PairAnalysis, ActivationAnalysis)) for analysis in analyses
    )
    placed_batch = PlacedBatch.of(model, batch, windows, prompt_ids, needs_pairs)
    placed = placed_batch.placed
    nulls = Nulls(analyses, placed, placed_batch.pairs[placed.tokens.device], blind)
    pending = PendingSums(placed_batch, analyses, nulls, when_complete=_stop_pass)
    receiver = RowReceiver(pending)

    try:
        with ExitStack() as stack:
            # Made before interventions on the nonlinearities, but entered after them: it sees their
            # results.
            watching_mlps = receiving_activations(pending)
            interventions = placed_batch.interventions()
            for intervention, target in interventions:
                stack.enter_context(intervention.acting(model, partial(_constant, target)))

            if read_first(intervention for intervention, _ in interventions):
                # Without windows no layer is measured: interventions read this pass.
                forward(model, placed, {}, receiver.see, pending.last_layer)

            stack.enter_context(watching_mlps)
            stack.enter_context(receiving_captures(pending))
            with suppress(_Enough):
                seen_windows = windows if receiver.is_needed else {}
                forward(model, placed, seen_windows, receiver.see, pending.last_layer)
    except RowError as error:
        raise ModelError(f"{placed_batch.name_of_row(error.row)}: {error}") from error
    except Exception:
        pending.refuse_nan()  # the cause, if there is one
        raise
    return pending.checked_values()


class _Enough(BaseException):
    """Raised when all data has arrived, to skip the rest of the pass; error handlers must not catch
    it."""


def _stop_pass() -> None:
    raise _Enough


def _constant(target: Target) -> Target:
    """The target of every forward pass of this batch."""
    return target
