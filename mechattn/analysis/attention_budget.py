"""The attention budget: which segments pay for the attention to inserted tokens, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.analysis.analysis import (
    HEAD_AND_SEGMENT,
    Analysis,
    AnalysisBase,
    AttentionRows,
    Coords,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    nan_outside,
    zeros_of_rows,
)
from mechattn.axes import SEGMENTS
from mechattn.functional import budget as fn
from mechattn.functional.attention import Attention, Marked
from mechattn.model.hooked import HookedModel
from mechattn.model.positions import rotations_of
from mechattn.prompts.token_sequences import Batch, TokenSequence, baseline_rows

RowIndex = Int[Tensor, " row"]  # rows of a batch, one per sequence

CAUSES = ("distance", "mass", "hidden states")
_INSERTED = SEGMENTS.index("inserted")


@dataclass(frozen=True)
class AttentionBudget(AnalysisBase):
    """Divide the attention of the question's queries among the segments, and their changes among
    causes.

    ``attention[s] = mean over queries q of the question of Σ_{k in s} A[q, k]``, and ``change[s]``
    is its difference from the baseline. ``by_cause`` adds up to ``change``, in this order:

    - *distance*: a softmax over the original keys, with the baseline's queries and keys at the
      positions that they have in the longer sequence, minus the baseline's attention;
    - *mass*: the same softmax with the inserted keys as well, minus the one without them;
    - *hidden states*: the condition's attention minus that of the last step; 0 in layer 0.

    ``change = dilution + rerouting`` needs no order and no positions: with M the attention of a
    query to inserted tokens, ``dilution[s] = mean of −M A[s]``. Dimensions are (prompt, condition,
    layer, head, segment).

    If positions cannot be moved (learned ones, for instance), distance is NaN and its part belongs
    to the hidden states; the dataset's attribute ``one_cause`` says why. The engine "hooks" gives
    no queries and keys, so ``by_cause`` is NaN. A segment that has no tokens in any condition of a
    prompt is NaN.

    Source:
        Own definition. Rotations of RoPE add up (arXiv:2104.09864), so rotated queries and keys can
        be rotated further.
    """

    name = "attention_budget"
    # Of the layers whose positions can be moved, and why those of the others cannot.
    rotations: Mapping[int, fn.Rotation] = calibrated_field(default_factory=dict)
    why_unknown: str = calibrated_field(default="")

    @property
    def coords(self) -> Coords:
        """The causes, in their order."""
        return {"cause": list(CAUSES)}

    @property
    def notes(self) -> Mapping[str, str]:
        """Why distance and hidden states are one cause; empty if they are not."""
        return {"one_cause": self.why_unknown}

    @property
    def quantities(self) -> Quantities:
        """Attention by segment, and its change: as a whole, as dilution and re-routing, and by
        cause."""
        attention = Quantity(
            HEAD_AND_SEGMENT,
            "probability",
            "attention to the segment, mean over the question's queries",
            compared="difference",
        )
        change = replace(
            attention,
            description=f"{attention.description}, minus that in the baseline",
            no_null="it is a difference",
        )

        dilution = "-M A: M the attention to inserted tokens, A that to the segment in the baseline"
        causes = "the change by cause: positions, inserted keys, changed queries and keys"
        return {
            "attention": attention,
            "change": change,
            "dilution": replace(
                change, description=f"{dilution}, mean over the question's queries"
            ),
            "rerouting": replace(change, description="change + M A: what dilution leaves"),
            "by_cause": replace(change, dims=(*change.dims, "cause"), description=causes),
        }

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence without question tokens is refused."""
        if sequence.of_segment("question").any():
            return None
        return (
            "has no question tokens besides its first token, so there is no query whose attention"
            " could be divided"
        )

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Find out how each layer rotates its queries and keys."""
        rotations, why_unknown = rotations_of(model, layers)
        return replace(self, rotations=rotations, why_unknown=why_unknown)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero masses [batch segment head query], and no cause known yet.

        ``at_new_positions`` and ``with_inserted_keys`` are the question's mean attention if the
        hidden states had not changed, with the original keys in the softmax and with all keys, both
        [batch head segment] and 0 for baselines. Three truth values per row say whether these two
        are known, whether positions can be moved, and whether queries and keys are those of the
        baseline.
        """
        length = batch.tokens.shape[1]
        is_false = zeros_of_rows(batch).bool()
        return {
            "masses": zeros_of_rows(batch, len(SEGMENTS), heads, length),
            "at_new_positions": zeros_of_rows(batch, heads, len(SEGMENTS)),
            "with_inserted_keys": zeros_of_rows(batch, heads, len(SEGMENTS)),
            "knows_causes": is_false,
            "knows_distance": is_false.clone(),
            "is_unchanged": is_false.clone(),
        }

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the attention of these queries to each segment.

        With a layer's first block, also store what the question's attention would be without some
        of the causes.
        """
        layout = _layout(rows.batch)
        question_span = layout.question_span
        if rows.queries.start < question_span.stop and rows.queries.stop > question_span.start:
            members = layout.members[..., rows.keys]
            sums["masses"][..., rows.queries] = fn.masses_of_rows(rows.pattern, members)

        # Queries and keys are those of the whole layer, so one block is enough.
        attention = rows.queries_and_keys
        if rows.is_first_block and attention is not None:
            self._add_without_causes(sums, attention, rows.layer, rows.batch)

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the question's queries, and their differences from the baseline of the same
        prompt."""
        layout = _layout(batch)
        baseline = layout.baseline
        question_span = layout.question_span
        weights = layout.question_weights[..., question_span]
        masses = sums["masses"]
        segment_attention = fn.mean_over_queries(masses[..., question_span], weights)
        change = segment_attention - segment_attention[baseline]

        # The attention of each query's counterpart in the baseline; question tokens all have one.
        origin = batch.origin[:, None, None, question_span].clamp(min=0)
        query_index = origin.expand(-1, *masses.shape[1:3], -1)
        baseline_masses = masses[baseline].gather(-1, query_index)
        inserted_mass = masses[:, _INSERTED, :, question_span]
        dilution = -fn.mean_over_queries(baseline_masses, weights * inserted_mass)

        by_cause = _by_cause(sums, segment_attention, change, baseline)
        has_tokens = layout.has_tokens
        return {
            "attention": nan_outside(segment_attention, has_tokens),
            "change": nan_outside(change, has_tokens),
            "dilution": nan_outside(dilution, has_tokens),
            "rerouting": nan_outside(change - dilution, has_tokens),
            "by_cause": nan_outside(by_cause, has_tokens[..., None]),
        }

    def _add_without_causes(
        self, sums: Sums, attention: Attention, layer: int, batch: Batch
    ) -> None:
        """Store the question's mean attention if the hidden states had not changed."""
        sums["knows_causes"].fill_(True)
        sums["knows_distance"].fill_(layer in self.rotations)
        layout = _layout(batch)
        longer = layout.longer
        if len(longer) == 0:
            return

        rotation = self.rotations.get(layer, fn.NO_ROTATION)
        question_span = layout.question_span_of_longer
        with_old_states = fn.before_hidden_states(
            attention,
            longer_rows=longer,
            baseline_rows=layout.baseline[longer],
            origin=batch.origin[longer],
            rotation=rotation,
            turns=_turns(batch, rotation),
            queries=question_span,
        )
        if layer == 0:  # only here the hidden states are embeddings, which do not change
            with_own_states = attention.of(longer)
            sums["is_unchanged"][longer] = fn.is_unchanged(with_old_states, with_own_states)

        masses = fn.segment_masses(with_old_states, layout.members[longer], question_span)
        weights = layout.question_weights[longer, :, question_span]
        has_sinks = attention.sinks is not None
        mean_among_original = fn.mean_among_original(masses, weights, _INSERTED, sinks=has_sinks)
        mean_over_all = fn.mean_over_queries(masses, weights)
        sums["at_new_positions"][longer] = mean_among_original.float()
        sums["with_inserted_keys"][longer] = mean_over_all.float()


def _by_cause(
    sums: Sums, segment_attention: fn.Means, change: fn.Means, baseline: RowIndex
) -> Float[Tensor, "batch head segment cause"]:
    """The change by cause; NaN if the engine gave no queries and keys."""
    # One truth value per row, for all heads and segments.
    row_indices = torch.arange(len(baseline), device=baseline.device)
    is_longer = (baseline != row_indices)[:, None, None]
    knows_causes = sums["knows_causes"][:, None, None, None]
    knows_distance = sums["knows_distance"][:, None, None]
    # Here only rounding distinguishes the last step from the condition: it is not a change.
    has_same_inputs = is_longer & sums["is_unchanged"][:, None, None]

    # From the baseline's attention to the condition's, one cause at a time.
    at_new_positions = sums["at_new_positions"]
    with_inserted_keys = torch.where(has_same_inputs, segment_attention, sums["with_inserted_keys"])
    distance = (at_new_positions - segment_attention[baseline]) * is_longer
    mass = with_inserted_keys - at_new_positions
    hidden_states = (segment_attention - with_inserted_keys) * is_longer

    # Where positions cannot be moved, distance belongs to the hidden states.
    hidden_states = torch.where(knows_distance, hidden_states, change - mass)
    distance = distance.masked_fill(~knows_distance, torch.nan)
    by_cause = torch.stack([distance, mass, hidden_states], -1)
    return by_cause.masked_fill(~knows_causes, torch.nan)


@dataclass(eq=False)
class _BatchLayout:
    """Where the baselines and the question of a batch are, which its layers and blocks share."""

    batch: Batch

    @cached_property
    def members(self) -> fn.Members:
        """1 if a position belongs to a segment, otherwise 0."""
        return self.batch.members().float()

    @cached_property
    def question_span(self) -> slice:
        """The positions of the question's tokens in any row."""
        return _span(self.batch.of_segment("question"))

    @cached_property
    def question_span_of_longer(self) -> slice:
        """The positions of the question's tokens in any row that is not a baseline."""
        return _span(self.batch.of_segment("question")[self.longer])

    @cached_property
    def question_weights(self) -> Float[Tensor, "batch 1 pos"]:
        """The weight of each query in a mean over the question's queries."""
        is_question = self.batch.of_segment("question").float()[:, None]
        return is_question / is_question.sum(-1, keepdim=True)

    @cached_property
    def baseline(self) -> RowIndex:
        """The row of each sequence's baseline.

        Unlike ``pairs_of``, this reads nothing from a GPU, and so does not wait for it.
        """
        return torch.tensor(baseline_rows(self.batch), device=self.batch.tokens.device)

    @cached_property
    def longer(self) -> RowIndex:
        """The rows that are not a baseline."""
        baselines = enumerate(baseline_rows(self.batch))
        row_indices = [row for row, baseline in baselines if row != baseline]
        return torch.tensor(row_indices, dtype=torch.long, device=self.batch.tokens.device)

    @cached_property
    def has_tokens(self) -> Bool[Tensor, "batch segment"]:
        """Whether a segment has tokens in at least one condition of the row's prompt."""
        same_prompt = (self.baseline[:, None] == self.baseline).float()
        return same_prompt @ self.batch.members().any(-1).float() > 0


# One per batch, for all of its layers. More than one is kept, as batches may alternate with those
# of a null.
_layout = lru_cache(maxsize=4)(_BatchLayout)


def _span(is_question: Marked) -> slice:
    """The positions from the first to the last at which any row has a question token."""
    positions = is_question.any(0).nonzero()
    return slice(int(positions[0]), int(positions[-1]) + 1)


@lru_cache(maxsize=8)  # a model may have several rotations
def _turns(batch: Batch, rotation: fn.Rotation) -> fn.Turns:
    """The rotation of each original token from its position in the baseline to that in its row, for
    the rows that are not a baseline."""
    layout = _layout(batch)
    position_ids = batch.position_ids
    if position_ids is None:
        position_ids = batch.positions.expand_as(batch.tokens)

    longer = layout.longer
    baseline_ids = position_ids[layout.baseline[longer]]
    old_ids = baseline_ids.gather(1, batch.origin[longer].clamp(min=0))
    return rotation.turns(old_ids, position_ids[longer], torch.float32)
