"""The attention budget: which segments pay for the attention to inserted tokens, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.analysis.analysis import (
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
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.functional import budget as fn
from mechattn.functional.attention import Attention
from mechattn.model.hooked import HookedModel
from mechattn.model.positions import rotations_of
from mechattn.prompts.token_sequences import Batch, TokenSequence

RowIndex = Int[Tensor, " row"]  # rows of a batch, one per sequence
BySegment = Float[Tensor, "batch head segment"]

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
            ("head", "segment"),
            "probability",
            "attention to the segment, mean over the question's queries",
            "difference",
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

    def calibrated(self, model: HookedModel, layers: Layers, measured: Prompts) -> Analysis:
        """Find out how each layer rotates its queries and keys."""
        rotations, why_unknown = rotations_of(model, layers)
        return replace(self, rotations=rotations, why_unknown=why_unknown)

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zero masses [batch segment head query]."""
        length = batch.tokens.shape[1]
        return {"masses": zeros_of_rows(batch, len(SEGMENTS), heads, length)}

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store the attention of these queries to each segment.

        With a layer's first block, also store what the question's attention would be without some
        of the causes.
        """
        shared = _shared(rows.batch)
        question = shared.question
        if rows.queries.start < question.stop and rows.queries.stop > question.start:
            members = shared.members[..., rows.keys]
            sums["masses"][..., rows.queries] = fn.masses_of_rows(rows.pattern, members)

        # Once per layer. The null and the engine "hooks" have no queries and keys to move, so their
        # sums have no "moved".
        is_missing = "moved" not in sums and not rows.null
        if is_missing and isinstance(rows.attention, Attention):
            sums |= self._without_causes(rows.attention, rows.layer, rows.batch)

    def _without_causes(self, attention: Attention, layer: int, batch: Batch) -> Sums:
        """The question's mean attention if the hidden states had not changed.

        Returns:
            ``moved``, with the inserted keys in the softmax, and ``moved_original``, without them,
            both [batch head segment] and 0 for baselines; ``knows_distance``, whether positions can
            be moved, and ``is_unchanged``, whether hidden states are the baseline's, both [batch].
        """
        shared = _shared(batch)
        longer = shared.longer
        moved = zeros_of_rows(batch, attention.q.shape[1], len(SEGMENTS))
        moved_original = torch.zeros_like(moved)
        is_unchanged = torch.zeros(len(batch.rows), dtype=torch.bool, device=moved.device)

        if len(longer):
            rotation = self.rotations.get(layer, fn.NO_ROTATION)
            queries = shared.question_of_longer
            with_old_states = fn.before_hidden_states(
                attention,
                longer,
                shared.baseline[longer],
                batch.origin[longer],
                rotation,
                _turns(batch, rotation),
                queries,
            )

            if layer == 0:  # only here the hidden states are embeddings, which do not change
                is_unchanged[longer] = fn.is_unchanged(with_old_states, attention.of(longer))
            masses = fn.segment_masses(with_old_states, shared.members[longer], queries)
            weights = shared.question_weights[longer, :, queries]

            with_all_keys = fn.mean_over_queries(masses, weights)
            with_original_keys = fn.mean_among_original(
                masses, weights, _INSERTED, sinks=attention.sinks is not None
            )

            moved[longer] = with_all_keys.to(moved.dtype)
            moved_original[longer] = with_original_keys.to(moved.dtype)

        return {
            "moved": moved,
            "moved_original": moved_original,
            "knows_distance": torch.full_like(is_unchanged, layer in self.rotations),
            "is_unchanged": is_unchanged,
        }

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over the question's queries, and their differences from the baseline of the same
        prompt."""
        shared = _shared(batch)
        baseline = shared.baseline
        queries = shared.question
        weights = shared.question_weights[..., queries]
        masses = sums["masses"]
        attention = fn.mean_over_queries(masses[..., queries], weights)
        change = attention - attention[baseline]

        source = batch.origin[:, None, None, queries].clamp(min=0)
        source = source.expand(-1, *masses.shape[1:3], -1)
        baseline_masses = masses[baseline].gather(-1, source)
        to_inserted = masses[:, _INSERTED, :, queries]
        dilution = -fn.mean_over_queries(baseline_masses, weights * to_inserted)

        measured = {
            "attention": attention,
            "change": change,
            "dilution": dilution,
            "rerouting": change - dilution,
        }
        values = {name: nan_outside(value, shared.payers) for name, value in measured.items()}
        by_cause = self._by_cause(sums, attention, change, baseline)
        values["by_cause"] = nan_outside(by_cause, shared.payers[..., None])
        return values

    def _by_cause(
        self,
        sums: Sums,
        attention: BySegment,
        change: BySegment,
        baseline: RowIndex,
    ) -> Float[Tensor, "batch head segment cause"]:
        """The change by cause; NaN if the engine gave no queries and keys."""
        if "moved" not in sums:
            return torch.full((*change.shape, len(CAUSES)), torch.nan, device=change.device)
        # One truth value per row, for all heads and segments.
        rows = torch.arange(len(baseline), device=baseline.device)
        is_longer = (baseline != rows)[:, None, None]  # not a baseline itself
        knows_distance = sums["knows_distance"][:, None, None]
        # Here only rounding distinguishes the last step from the condition: it is not a change.
        has_same_inputs = is_longer & sums["is_unchanged"][:, None, None]

        # From the baseline's attention to the condition's, one cause at a time.
        at_new_positions = sums["moved_original"]
        with_inserted_keys = torch.where(has_same_inputs, attention, sums["moved"])
        distance = (at_new_positions - attention[baseline]) * is_longer
        mass = with_inserted_keys - at_new_positions
        hidden_states = (attention - with_inserted_keys) * is_longer

        # Where positions cannot be moved, distance belongs to the hidden states.
        hidden_states = torch.where(knows_distance, hidden_states, change - mass)
        distance = distance.masked_fill(~knows_distance, torch.nan)
        return torch.stack([distance, mass, hidden_states], -1)


@dataclass(eq=False)
class _Shared:
    """What the layers and blocks of a batch share; each item is computed when it is first
    needed."""

    batch: Batch

    @cached_property
    def members(self) -> Float[Tensor, "batch segment pos"]:
        """1 if a position belongs to a segment, otherwise 0."""
        return self.batch.members().float()

    @cached_property
    def question(self) -> slice:
        """The positions from the first to the last at which any row has a question token."""
        return _span(self.batch.of_segment("question"))

    @cached_property
    def question_of_longer(self) -> slice:
        """The same positions for the rows that are not a baseline."""
        return _span(self.batch.of_segment("question")[self.longer])

    @cached_property
    def question_weights(self) -> Float[Tensor, "batch 1 pos"]:
        """The weight of each query in a mean over the question's queries."""
        is_question = self.batch.of_segment("question").float()[:, None]
        return is_question / is_question.sum(-1, keepdim=True).clamp(min=1)

    @cached_property
    def baseline(self) -> RowIndex:
        """The row of each sequence's baseline.

        Unlike ``pairs_of``, this reads nothing from a GPU, and so does not wait for it.
        """
        rows = self.batch.rows
        row_of_prompt = {
            prompt: row for row, (prompt, condition) in enumerate(rows) if condition == BASELINE
        }
        baseline = [row_of_prompt[prompt] for prompt, _ in rows]
        return torch.tensor(baseline, device=self.batch.tokens.device)

    @cached_property
    def longer(self) -> RowIndex:
        """The rows that are not a baseline."""
        rows = [row for row, (_, name) in enumerate(self.batch.rows) if name != BASELINE]
        return torch.tensor(rows, dtype=torch.long, device=self.batch.tokens.device)

    @cached_property
    def payers(self) -> Bool[Tensor, "batch segment"]:
        """The segments that have tokens in at least one condition of the row's prompt."""
        same_prompt = (self.baseline[:, None] == self.baseline).float()
        return same_prompt @ self.batch.members().any(-1).float() > 0


# One per batch, for all of its layers. More than one is kept, as batches may alternate with those
# of a null.
_shared = lru_cache(maxsize=4)(_Shared)


def _span(marked: Bool[Tensor, "batch pos"]) -> slice:
    """The positions from the first to the last that is marked in any row."""
    positions = marked.any(0).nonzero()
    return slice(int(positions[0]), int(positions[-1]) + 1)


@lru_cache(maxsize=8)  # a model may have several rotations
def _turns(batch: Batch, rotation: fn.Rotation) -> fn.Turns:
    """The rotation of each original token from its position in the baseline to that in its row, for
    the rows that are not a baseline."""
    longer = _shared(batch).longer
    position_ids = batch.position_ids
    if position_ids is None:
        position_ids = batch.positions.expand_as(batch.tokens)
    baseline_ids = position_ids[_shared(batch).baseline[longer]]
    old_ids = baseline_ids.gather(1, batch.origin[longer].clamp(min=0))
    return rotation.turns(old_ids, position_ids[longer], torch.float32)
