"""Why a key is attended to: its position (ALiBi), a bias shared by all queries, or content that matches this query."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mechattn.analysis.analysis import Analysis, AnalysisBase, Captures, Quantity, Sums, seen_keys, zeros
from mechattn.errors import OptionError
from mechattn.functional.attention import BLOCK, centred, ranked_target
from mechattn.functional.received import segment_mean, visible_counts
from mechattn.model.hooked import HookedModel
from mechattn.model.scores_and_positions import K, Q, scores_of
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch, Sequence

PARTS = ("content", "bias", "alibi")
_ABOUT = {
    "content": "(W_Q x_q)·(W_K x_k)",
    "bias": "b_Q·(W_K x_k), the same for every query",
    "alibi": "ALiBi, the position alone",
}


@dataclass(frozen=True)
class ScoreDecomposition(AnalysisBase):
    """Split the score of a query's strongest target into ALiBi + bias + content (R. Claus, figures 2 and 3).

    ``s[q, k] = alibi[k] + b_Q·(W_K x_k) + (W_Q x_q)·(W_K x_k) + terms of the query alone``, times the model's scale,
    exactly. Each part is centred over the keys that the query sees; ``share = |part| / Σ |parts|``. Means over the
    queries of each segment that see more than ``rank + 1`` keys. Defined for ALiBi models (Falcon-RW, BLOOM, MPT) and
    for models without position terms in their scores (GPT-2, OPT, GPT-Neo: ALiBi is 0); other models are refused.

    Args:
        rank: Which target: 0 for the strongest, 1 for the second strongest, …
        per_query: Also keep the parts of each query, as ``…_at``, and the index of its target.
    """

    rank: int = 0
    per_query: bool = False
    scores: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise OptionError(f"rank={self.rank!r}: give 0 for the strongest target, 1 for the second strongest, …")

    name = "score_decomposition"

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The parts of the target's score, their shares, and the bias and ALiBi of every key."""
        mean = ", of the target, centred over the keys that the query sees, mean over the queries of the segment"
        made = {
            p: Quantity(("head", "segment"), "logits", _ABOUT[p] + mean, "difference") for p in PARTS
        }  # fmt: skip
        made |= {
            f"{p}_share": Quantity(("head", "segment"), "share", f"|{p}| / sum of |parts|{mean}", "difference")
            for p in PARTS
        }
        made |= {
            f"{p}_of_key": Quantity(("head", "key"), "logits", f"{_ABOUT[p]}, not centred: only its trend matters")
            for p in PARTS[1:]
        }
        if self.per_query:
            made |= {f"{p}_at": Quantity(("head", "key"), "logits", f"{_ABOUT[p]}, of each query") for p in PARTS}
            made["target_at"] = Quantity(("head", "key"), "position", "index of the target of each query")
        return made

    @property
    def captures(self) -> Seq[str]:
        """Queries and keys, including their biases."""
        return (Q, K)

    def problem(self, sequence: Sequence) -> str | None:
        """A sequence in which no query sees enough keys is refused."""
        if len(sequence) > self.rank + 1:
            return None
        return f"has {len(sequence)} tokens, too few for a target of rank {self.rank} and another key"

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """Find out how the layers compute their scores.

        Raises:
            ModelError: The model's scores are not a sum of these parts.
        """
        return replace(self, scores=scores_of(model, list(layers)))

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        return zeros(batch, heads, *PARTS, "target", *(f"{part}_of_key" for part in PARTS[1:]))

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Compute the parts of each query's target, for a block of queries at a time."""
        assert self.scores is not None, "calibrated() comes first"
        scores, batch = self.scores[captures.layer], captures.batch
        q, k = captures.by_head(Q, len(scores.b_q)), captures.by_head(K, len(scores.b_k))
        length = q.shape[1]
        for start in range(0, length, BLOCK):
            queries = torch.arange(start, min(start + BLOCK, length), device=q.device)
            visible = seen_keys(batch, queries, captures.window)[:, None]
            content, bias, alibi, rest = scores.parts(q[:, queries], k)
            target = ranked_target(content + bias + alibi + rest, visible, self.rank)
            rows = slice(start, start + len(queries))
            for name, part in (("content", content), ("bias", bias), ("alibi", alibi.expand(bias.shape))):
                sums[name][..., rows] = centred(part, visible).gather(-1, target[..., None])[..., 0]
            sums["target"][..., rows] = target.to(sums["target"].dtype)
        sums["bias_of_key"] += bias[:, :, 0]
        sums["alibi_of_key"] += alibi[:, :, 0]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment; a query must see one key more than the rank."""
        seen = visible_counts(torch.ones_like(batch.real), window, batch.edge_mask)
        hidden = ~(batch.real & (seen > self.rank + 1))[:, None]
        each = {part: sums[part].masked_fill(hidden, torch.nan) for part in PARTS}
        total = sum(value.abs() for value in each.values())
        shares = {f"{part}_share": value.abs() / total for part, value in each.items()}
        made = {name: segment_mean(value, batch.members()) for name, value in (each | shares).items()}
        made |= {f"{p}_of_key": sums[f"{p}_of_key"].masked_fill(~batch.real[:, None], torch.nan) for p in PARTS[1:]}
        if self.per_query:
            made |= {f"{part}_at": value for part, value in each.items()}
            made["target_at"] = sums["target"].masked_fill(hidden, torch.nan)
        return made
