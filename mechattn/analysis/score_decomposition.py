"""Why a query attends to its strongest target: its content, a bias or its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mechattn.analysis.analysis import (
    HEAD_AND_SEGMENT,
    Analysis,
    AnalysisBase,
    Captures,
    Layers,
    Prompts,
    Quantities,
    Quantity,
    Sums,
    Values,
    Window,
    calibrated_field,
    means_by_segment,
    means_of,
    nan_outside,
    of_each,
    of_each_query,
    seen_keys,
    zeros,
)
from mechattn.errors import check_counts
from mechattn.functional.attention import BLOCK
from mechattn.functional.received import visible_counts
from mechattn.functional.scores import centred, ranked_target
from mechattn.model.hooked import HookedModel
from mechattn.model.scores import K_HOOK, Q_HOOK, Scores, scores_of
from mechattn.prompts.token_sequences import Batch, TokenSequence

_FORMULAS = {
    "content": "(W_Q x_q)·(W_K x_k)",
    "bias": "b_Q·(W_K x_k), the same for every query",
    "alibi": "ALiBi, which depends only on the position",
}
PARTS = tuple(_FORMULAS)


@dataclass(frozen=True)
class ScoreDecomposition(AnalysisBase):
    """Split the score of a query's strongest target into ALiBi + bias + content (R. Claus, figures
    2 and 3).

    ``s[q, k] = alibi[k] + b_Q·(W_K x_k) + (W_Q x_q)·(W_K x_k) + terms of the query alone``. The sum
    is exact; all products contain the model's scale. Each part is centred over the keys that the
    query sees, and ``share = |part| / Σ |parts|``. Values are means over those queries of each
    segment that see more than ``rank + 1`` keys. Defined for ALiBi models (Falcon-RW, BLOOM, MPT)
    and for models without position terms in their scores (GPT-2, OPT, GPT-Neo: ALiBi is 0); other
    models are refused.

    Args:
        rank: Which target is split: 0 for the strongest, 1 for the second strongest, …
        per_query: Also keep the parts of each query, as ``…_at``, and the index of its target,
            ``ranked_target_at``.
    """

    name = "score_decomposition"
    rank: int = 0
    per_query: bool = False
    # How each layer computes its scores.
    scores: Mapping[int, Scores] = calibrated_field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(0, rank=self.rank)

    @property
    def quantities(self) -> Quantities:
        """The parts of the target's score, their shares, and the bias and ALiBi of every key."""
        parts = {}
        shares = {}
        key_trends = {}
        for name, formula in _FORMULAS.items():
            part_words = f"{formula}, of the target, centred over the keys that the query sees"
            parts[name] = Quantity(HEAD_AND_SEGMENT, "logits", part_words, compared="difference")
            share_words = f"|{name}| / sum of |parts|, of the target, centred likewise"
            shares[f"{name}_share"] = Quantity(
                HEAD_AND_SEGMENT, "share", share_words, compared="difference"
            )
            if name != "content":
                key_words = f"{formula}, not centred: only its trend matters"
                key_trends[f"{name}_of_key"] = Quantity(("head", "key"), "logits", key_words)

        quantities = means_of(parts | shares) | key_trends
        if self.per_query:
            quantities |= of_each(parts)
            quantities["ranked_target_at"] = Quantity(
                ("head", "key"), "position", "index of the target of each query"
            )
        return quantities

    @property
    def captures(self) -> Sequence[str]:
        """Queries and keys, including their biases."""
        return (Q_HOOK, K_HOOK)

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence of at most ``rank + 1`` tokens is refused, since no query sees enough keys."""
        if len(sequence) > self.rank + 1:
            return None
        return (
            f"has {len(sequence)} tokens, too few for a target of rank {self.rank} and another key"
        )

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Find out how each layer computes its scores.

        Raises:
            ModelError: The model's scores are not a sum of these parts.
        """
        return replace(self, scores=scores_of(model, list(layers)))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Zeros for the target of each query and the parts of its score, and for each key."""
        return zeros(batch, heads, *PARTS, "target", "bias_of_key", "alibi_of_key")

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Store each query's target and the parts of its score, one block of queries at a time."""
        layer_scores = self.scores[captures.layer]
        q = captures.by_head(Q_HOOK, len(layer_scores.b_q))
        k = captures.by_head(K_HOOK, len(layer_scores.b_k))
        for queries in captures.batch.positions.split(BLOCK):
            visible = seen_keys(captures.batch, queries, captures.window)[:, None]
            content, bias, alibi, rest = layer_scores.parts(q[:, queries], k)

            target = ranked_target(content + bias + alibi + rest, visible, self.rank)
            sums["target"][..., queries] = target.float()

            parts = {"content": content, "bias": bias, "alibi": alibi}
            for name, part in parts.items():
                centred_part = centred(part.expand(len(q), -1, -1, -1), visible)
                sums[name][..., queries] = centred_part.gather(-1, target[..., None])[..., 0]

            # These do not depend on the queries, so they are the same in every block.
            sums["bias_of_key"][:] = bias[:, :, 0]
            sums["alibi_of_key"][:] = alibi[:, :, 0]

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Means over those queries of each segment that see more than ``rank + 1`` keys."""
        key_counts = visible_counts(torch.ones_like(batch.real), window, batch.edge_mask)
        counted = batch.real & (key_counts > self.rank + 1)

        parts = {name: nan_outside(sums[name], counted) for name in PARTS}
        total = sum(part.abs() for part in parts.values())
        shares = {f"{name}_share": part.abs() / total for name, part in parts.items()}
        values = means_by_segment(parts | shares, batch)
        for name in ("bias_of_key", "alibi_of_key"):
            values[name] = nan_outside(sums[name], batch.real)
        if self.per_query:
            values |= of_each_query(parts, PARTS, batch)
            values["ranked_target_at"] = nan_outside(sums["target"], counted)
        return values
