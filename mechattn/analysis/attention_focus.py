"""What attention focuses on, how far back and over how many keys, and why: by content, bias or
position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechattn.analysis.analysis import (
    Analysis,
    AnalysisBase,
    AttentionRows,
    Captures,
    Quantity,
    Sums,
    seen_keys,
    zeros,
)
from mechattn.errors import OptionError
from mechattn.functional import focus as fn
from mechattn.functional.attention import BLOCK, centred, constant, ranked_target
from mechattn.functional.budget import masses_of_rows
from mechattn.functional.received import (
    segment_mean,
    segment_means,
    self_attention,
    visible_counts,
)
from mechattn.model.hooked import HookedModel
from mechattn.model.scores import K, Q, scores_of
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Batch, TokenSequence, inserted_span

_UNITS = {
    "self_share": ("share", "share of queries whose strongest target is the query itself"),
    "first_share": ("share", "share of queries whose strongest target is the first token"),
    "previous_share": ("share", "share of queries whose strongest target is the token before"),
    "self_mass": ("probability", "attention of a query to itself"),
    "first_mass": ("probability", "attention of a query to the first token"),
    "previous_mass": ("probability", "attention of a query to the token before"),
    "duplicate_mass": (
        "probability",
        "attention of a query to earlier occurrences of its own token, of queries that have one",
    ),
    "induction_mass": (
        "probability",
        (
            "attention of a query to the tokens after earlier occurrences of its own token, of"
            " queries that have one"
        ),
    ),
    "inserted_mass": ("probability", "attention of a query to all inserted tokens together"),
    "concentration": (
        "probability",
        "p(1) - p(2): the largest probability minus the second largest",
    ),
    "entropy": ("nats", "- sum over keys of A log A"),
    "entropy_share": (
        "share",
        "entropy / log of the number of keys that the query sees: 1 if uniform",
    ),
    "distance": ("positions", "sum over keys of A (query - key)"),
    "half_mass_keys": ("keys", "size of the smallest set of keys that holds half of the attention"),
}
_MAY_BE_ZERO = (
    "duplicate_mass",
    "induction_mass",
    "inserted_mass",
    "self_share",
    "first_share",
    "previous_share",
)
_NO_NULL = {
    **dict.fromkeys(
        ("self_share", "first_share", "previous_share", "target"),
        "uniform attention has no largest key",
    ),
    "concentration": "it is 0 under uniform attention for any number of keys",
}


@dataclass(frozen=True)
class AttentionFocus(AnalysisBase):
    """Measure how focused each head's attention is, and on what (R. Claus, "Attention Focus Plots",
    figures 4 to 6).

    "Attends to itself" (or to the first or the previous token) is measured in two ways: the *argmax
    share* is the share of queries whose strongest target it is, and the *mass* is the attention
    that they pay to it. All are means over the queries of each segment. The first query does not
    count because it sees only one key. In a tie the earlier key wins.

    Two masses are the scores of duplicate-token and induction heads. With ``p`` the positions
    before ``q`` that hold the same token as ``q``, ``duplicate_mass[q] = Σ A[q, p]`` and
    ``induction_mass[q] = Σ A[q, p + 1]`` (``p + 1 < q``). They are means over the queries that have
    such a position, NaN where a segment has none. Inserted tokens
    count: repeated filler tokens are duplicates of each other.

    Args:
        half_mass: Also measure the smallest set of keys that holds half of a query's attention.
            Every row is sorted for this, which costs several times as much as the rest.
        per_query: Also keep each query's values, as ``…_at``, and the index of its strongest
            target.
    """

    name = "attention_focus"
    half_mass: bool = False
    per_query: bool = False

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the queries of each segment; also each query's value with ``per_query``."""
        measured = dict(_UNITS)
        if not self.half_mass:
            del measured["half_mass_keys"]
        quantities = {}
        for name, (units, about) in measured.items():
            mean = about
            if "share of queries" not in about:
                mean += ", mean over the queries of the segment"
            compared: Any = "difference" if name in _MAY_BE_ZERO else "ratio"
            no_null = _NO_NULL.get(name, "")
            quantities[name] = Quantity(("head", "segment"), units, mean, compared, no_null)
        if not self.per_query:
            return quantities
        measured["target"] = ("position", "index of the strongest target")
        for name, (units, about) in measured.items():
            own = f"{about}, of each query"
            no_null = _NO_NULL.get(name, "")
            quantities[f"{name}_at"] = Quantity(("head", "key"), units, own, no_null=no_null)
        return quantities

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        names = [name for name in _UNITS if not name.endswith("_share")]
        if not self.half_mass:
            names.remove("half_mass_keys")
        return zeros(batch, heads, *names, "target")

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store each query's values at its position."""
        pattern = rows.pattern
        start = rows.queries.start
        first = rows.keys.start
        largest, second, column = fn.top_two(pattern)
        numbers = {
            "target": column + first,
            "self_mass": self_attention(pattern, start, first),
            "previous_mass": fn.looking_back(pattern, 1, start, first)[0],
            "duplicate_mass": _repeated_mass(rows, 0),
            "induction_mass": _repeated_mass(rows, 1),
            "concentration": largest - second.clamp(min=0),
            "entropy": fn.entropy(pattern),
            "distance": fn.mean_distance(pattern, start, first),
        }
        if first == 0:
            numbers["first_mass"] = pattern[..., 0]
        span_start, span_end = inserted_span(rows.batch)
        if span_start < rows.keys.stop and span_end > first:
            inserted = rows.batch.inserted[:, rows.keys].to(pattern.dtype)
            numbers["inserted_mass"] = masses_of_rows(pattern, inserted[:, None])[:, 0]
        if self.half_mass:
            numbers["half_mass_keys"] = fn.half_mass_keys(pattern)
        for name, number in numbers.items():
            sums[name][..., rows.queries] = number

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment that see at least two keys."""
        seen = visible_counts(torch.ones_like(batch.real), window, batch.edge_mask)
        queries = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        target = sums["target"]
        of_queries = {name: value for name, value in sums.items() if name != "target"}
        of_queries["self_share"] = (target == queries).float()
        of_queries["first_share"] = (target == 0).float()
        of_queries["previous_share"] = (target == queries - 1).float()
        largest_entropy = seen.clamp(min=2).log()[:, None].float()
        of_queries["entropy_share"] = sums["entropy"] / largest_entropy

        uncounted = ~(batch.real & (seen >= 2))[:, None]
        for name, value in of_queries.items():
            of_queries[name] = value.masked_fill(uncounted, torch.nan)
        for name, after in (("duplicate_mass", 0), ("induction_mass", 1)):
            without_repeat = _no_repeat(batch, after)[:, None]
            of_queries[name] = of_queries[name].masked_fill(without_repeat, torch.nan)

        values = segment_means(of_queries, batch.members())
        if self.per_query:
            of_queries["target"] = target.masked_fill(uncounted, torch.nan)
            for name, value in of_queries.items():
                values[f"{name}_at"] = value
        return values


def _repeated_mass(rows: AttentionRows, after: int) -> Float[Tensor, "batch head query"]:
    """Each query's attention to ``fn.repeats_of`` its token, whose places are looked up once for
    all layers."""
    block = (rows.batch, after, *_ends(rows.queries), *_ends(rows.keys))
    if rows.pattern.is_cuda:
        return fn.masked_mass(rows.pattern, _repeats(*block))
    return fn.looked_up_mass(rows.pattern, _places_of_repeats(*block))


def _ends(positions: slice) -> tuple[int, int]:
    return positions.start, positions.stop


@lru_cache(maxsize=2)
def _repeats(
    batch: Batch, after: int, query: int, last_query: int, key: int, last_key: int
) -> Bool[Tensor, "batch query key"]:
    return fn.repeats_of(batch.tokens, after, slice(query, last_query), slice(key, last_key))


@lru_cache(maxsize=256)  # both kinds, in the blocks of a long sequence: few places in a text
def _places_of_repeats(batch: Batch, after: int, *block: int) -> tuple[Tensor, Tensor, Tensor]:
    row, query, key = _repeats(batch, after, *block).nonzero(as_tuple=True)
    return row, query, key


@lru_cache(maxsize=4)  # the layers of a batch share them
def _no_repeat(batch: Batch, after: int) -> Bool[Tensor, "batch query"]:
    """The queries whose token does not occur earlier, or whose earlier occurrences have no token
    after them."""
    return ~fn.has_repeat(batch.tokens, after)


@dataclass(frozen=True)
class AttentionSpread(AnalysisBase):
    """Measure each head's attention by distance, and count the keys with almost as much attention
    as the strongest.

    ``band_mass[t] = mean over q of Σ_{t ≤ q − k < 2t} A[q, k]``, over the queries of a segment that
    see the whole band; constant in t where attention is scale-invariant (arXiv:2505.17083).
    ``near_best[share] = mean over q of #{k : A[q, k] ≥ share · max A[q]}``: keys whose score is at
    most ``−log share`` below the best one's (gap counts, arXiv:2605.12697, read in its abstract).
    Bands count positions: inserted tokens move earlier tokens further away.

    Args:
        bands: The number of bands, labelled by their first distance: 0 (the token itself), 1, 2, 4,
            8, ….
        shares: Fractions of the strongest key's attention.
    """

    name = "attention_spread"
    bands: int = 12
    shares: tuple[float, ...] = (0.5, 0.1, 0.01)

    def __post_init__(self) -> None:
        bands = self.bands
        if isinstance(bands, bool) or not isinstance(bands, int) or not 1 <= bands <= 24:
            raise OptionError(
                f"bands={bands!r}: give the number of bands, from 1 to 24; 12 bands reach back"
                " 2,047 tokens"
            )
        shares = self.shares if isinstance(self.shares, (tuple, list)) else ()
        are_fractions = all(isinstance(share, float) and 0 < share < 1 for share in shares)
        if not shares or not are_fractions or len(set(shares)) < len(shares):
            raise OptionError(
                f"shares={self.shares!r}: give different numbers between 0 and 1, such as (0.5,"
                " 0.1)"
            )

    @property
    def coords(self) -> Mapping[str, Sequence[object]]:
        """The first distance of each band, and the shares."""
        return {
            "band": list(fn.band_edges(self.bands)[:-1]),
            "share": [float(share) for share in self.shares],
        }

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Attention by band, and numbers of keys by share."""
        mass = (
            "attention at the distances band to 2 · band − 1, mean over the queries that see all of"
            " them"
        )
        keys = (
            "keys with at least this share of the strongest key's attention, mean over the queries"
            " of the segment"
        )
        return {
            "band_mass": Quantity(("head", "segment", "band"), "probability", mass, "difference"),
            "near_best": Quantity(("head", "segment", "share"), "keys", keys),
        }

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums."""
        mass = zeros(batch, heads, "mass", last=(self.bands,))
        near = zeros(batch, heads, "near", last=(len(self.shares),))
        return mass | near

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Store both numbers of each query."""
        pattern = rows.pattern
        mass = fn.band_mass(pattern, self.bands, rows.queries.start, rows.keys.start)
        sums["mass"][:, :, rows.queries] = mass
        sums["near"][:, :, rows.queries] = fn.near_best(pattern, self.shares)

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment."""
        members = rearrange(batch.members().float(), "batch segment query -> batch segment query 1")
        sees = rearrange(self._sees(batch, window), "batch query band -> batch 1 query band")
        return {
            "band_mass": _mean(sums["mass"], members * sees),
            "near_best": _mean(sums["near"], members),
        }

    def _sees(self, batch: Batch, window: int | None) -> Float[Tensor, "batch query band"]:
        """1 where a query sees every key of a band."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        edges = constant(fn.band_edges(self.bands), positions.device)
        widths = (edges[1:] - edges[:-1]).clamp(min=1)
        seen = seen_keys(batch, positions, window).float()
        return (fn.band_mass(seen, self.bands) == widths).float()


def _mean(
    value: Float[Tensor, "batch head query each"],
    weight: Float[Tensor, "batch segment query #each"],
) -> Float[Tensor, "batch head segment each"]:
    """The mean over the counted queries; NaN if there are none."""
    weight = weight.expand(*weight.shape[:-1], value.shape[-1])
    total = torch.einsum("bhqe,bsqe->bhse", value, weight)
    count = weight.sum(2)[:, None]
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


PARTS = ("content", "bias", "alibi")
_ABOUT = {
    "content": "(W_Q x_q)·(W_K x_k)",
    "bias": "b_Q·(W_K x_k), the same for every query",
    "alibi": "ALiBi, the position alone",
}


@dataclass(frozen=True)
class ScoreDecomposition(AnalysisBase):
    """Split the score of a query's strongest target into ALiBi + bias + content (R. Claus, figures
    2 and 3).

    ``s[q, k] = alibi[k] + b_Q·(W_K x_k) + (W_Q x_q)·(W_K x_k) + terms of the query alone``, times
    the model's scale, exactly. Each part is centred over the keys that the query sees; ``share =
    |part| / Σ |parts|``. Means over the queries of each segment that see more than ``rank + 1``
    keys. Defined for ALiBi models (Falcon-RW, BLOOM, MPT) and for models without position terms in
    their scores (GPT-2, OPT, GPT-Neo: ALiBi is 0); other models are refused.

    Args:
        rank: Which target: 0 for the strongest, 1 for the second strongest, …
        per_query: Also keep the parts of each query, as ``…_at``, and the index of its target,
            ``ranked_target_at``.
    """

    name = "score_decomposition"
    rank: int = 0
    per_query: bool = False
    scores: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise OptionError(
                f"rank={self.rank!r}: give 0 for the strongest target, 1 for the second"
                " strongest, …"
            )

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The parts of the target's score, their shares, and the bias and ALiBi of every key."""
        mean = (
            ", of the target, centred over the keys that the query sees, mean over the queries of"
            " the segment"
        )
        by_segment = ("head", "segment")
        by_key = ("head", "key")
        quantities = {}
        for part in PARTS:
            described = _ABOUT[part] + mean
            quantities[part] = Quantity(by_segment, "logits", described, "difference")
        for part in PARTS:
            described = f"|{part}| / sum of |parts|{mean}"
            quantities[f"{part}_share"] = Quantity(by_segment, "share", described, "difference")
        for part in PARTS[1:]:
            described = f"{_ABOUT[part]}, not centred: only its trend matters"
            quantities[f"{part}_of_key"] = Quantity(by_key, "logits", described)
        if self.per_query:
            for part in PARTS:
                described = f"{_ABOUT[part]}, of each query"
                quantities[f"{part}_at"] = Quantity(by_key, "logits", described)
            described = "index of the target of each query"
            quantities["ranked_target_at"] = Quantity(by_key, "position", described)
        return quantities

    @property
    def captures(self) -> Sequence[str]:
        """Queries and keys, including their biases."""
        return (Q, K)

    def problem(self, sequence: TokenSequence) -> str | None:
        """A sequence in which no query sees enough keys is refused."""
        if len(sequence) > self.rank + 1:
            return None
        return (
            f"has {len(sequence)} tokens, too few for a target of rank {self.rank} and another key"
        )

    def calibrated(
        self, model: HookedModel, layers: Sequence[int], measured: Sequence[Prompt]
    ) -> Analysis:
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
        scores = self.scores[captures.layer]
        q = captures.by_head(Q, len(scores.b_q))
        k = captures.by_head(K, len(scores.b_k))
        length = q.shape[1]
        for start in range(0, length, BLOCK):
            queries = torch.arange(start, min(start + BLOCK, length), device=q.device)
            visible = seen_keys(captures.batch, queries, captures.window)[:, None]
            content, bias, alibi, rest = scores.parts(q[:, queries], k)
            target = ranked_target(content + bias + alibi + rest, visible, self.rank)
            rows = slice(start, start + len(queries))
            parts = {"content": content, "bias": bias, "alibi": alibi.expand(bias.shape)}
            for name, part in parts.items():
                of_target = centred(part, visible).gather(-1, target[..., None])
                sums[name][..., rows] = of_target[..., 0]
            sums["target"][..., rows] = target.to(sums["target"].dtype)
        sums["bias_of_key"] += bias[:, :, 0]
        sums["alibi_of_key"] += alibi[:, :, 0]

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Means over the queries of each segment; a query must see one key more than the rank."""
        seen = visible_counts(torch.ones_like(batch.real), window, batch.edge_mask)
        uncounted = ~(batch.real & (seen > self.rank + 1))[:, None]
        padding = ~batch.real[:, None]
        members = batch.members()
        parts = {part: sums[part].masked_fill(uncounted, torch.nan) for part in PARTS}
        total = sum(value.abs() for value in parts.values())
        values = {}
        for part, value in parts.items():
            values[part] = segment_mean(value, members)
            values[f"{part}_share"] = segment_mean(value.abs() / total, members)
        for part in PARTS[1:]:
            values[f"{part}_of_key"] = sums[f"{part}_of_key"].masked_fill(padding, torch.nan)
        if self.per_query:
            for part, value in parts.items():
                values[f"{part}_at"] = value
            values["ranked_target_at"] = sums["target"].masked_fill(uncounted, torch.nan)
        return values
