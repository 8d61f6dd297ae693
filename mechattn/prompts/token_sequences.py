"""Token sequences with the origin and segment of every position, their batches, and their pairs
with the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mechattn import markup
from mechattn.axes import BASELINE, INSERTED, PADDING, SEGMENTS
from mechattn.errors import ConditionError
from mechattn.functional.attention import EdgeMask
from mechattn.prompts.prompt import shortened

_NO_CHARACTER = "\ufffd"  # what decoders return for bytes that are not a whole character
# Tokens that make a character: a character has at most 4 bytes, but a token may end one character
# and begin the next.
_MOST_PARTS = 8
_TOKENS_IN_REPR = 99  # enough for the 40 characters that are shown


@dataclass(frozen=True, eq=False)
class CutEdges:
    """The attention edges that are cut in a sequence.

    Args:
        queries: Which tokens don't see the keys. Each still sees itself.
        keys: Which tokens they don't see.
        layers: The layers in which these edges are cut; None for all.
        later: Whether tokens generated after the sequence don't see the keys either.
    """

    queries: Bool[Tensor, " pos"]
    keys: Bool[Tensor, " pos"]
    layers: tuple[int, ...] | None = None
    later: bool = True


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Token ids with the origin and segment of every position.

    Args:
        tokens: Token ids.
        origin: The index of each token in the baseline sequence; −1 for inserted tokens.
        segment: The index of each token's segment in ``SEGMENTS``.
        keeps_positions: Whether the original tokens keep the position ids of the baseline.
        cut_edges: The attention edges that are cut; None for none.
        interventions: The interventions while the model reads this sequence.
        decode: Maps token ids to text, for display; without it a notebook shows ids.
        counterpart: Whether this is the other version of a prompt, whose tokens may differ from the
            baseline's.
        first_part: What the baseline's first token belongs to: "bos", "template", "system",
            "question" or "answer". The token's segment is "first" in any case.
    """

    tokens: Int[Tensor, " pos"]
    origin: Int[Tensor, " pos"]
    segment: Int[Tensor, " pos"]
    keeps_positions: bool = False
    cut_edges: CutEdges | None = None
    interventions: tuple[Any, ...] = ()
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)
    counterpart: bool = False
    first_part: str = "bos"

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        segments = []
        for name in SEGMENTS:
            count = int(self.of_segment(name).sum())
            if count:
                segments.append(f"{name} {count}")

        words = f"{self._counts_in_words()}; {', '.join(segments)}"
        if self.decode is None:
            return f"TokenSequence({words})"

        text = self.decode(self.tokens[:_TOKENS_IN_REPR].tolist())
        return f"TokenSequence({words}: {shortened(text)!r})"

    @property
    def inserted(self) -> Bool[Tensor, " pos"]:
        """Which positions a condition inserted."""
        return self.origin == INSERTED

    @property
    def position_ids(self) -> Int[Tensor, " pos"]:
        """The position ids for RoPE or a position embedding.

        They are 0, 1, 2 …, or with ``keeps_positions`` those of the baseline. An inserted token
        then has the id just before that of the next token, so ids may be negative.
        """
        if not self.keeps_positions:
            return torch.arange(len(self))

        reversed_ids = []
        position_id = len(self) - int(self.inserted.sum())
        for origin in reversed(self.origin.tolist()):
            if origin == INSERTED:
                position_id -= 1
            else:
                position_id = origin
            reversed_ids.append(position_id)
        return torch.tensor(reversed_ids[::-1])

    def of_segment(self, name: str) -> Bool[Tensor, " pos"]:
        """Which positions belong to the segment ``name``."""
        return self.segment == SEGMENTS.index(name)

    def of_part(self, name: str) -> Bool[Tensor, " pos"]:
        """Which positions hold the text ``name`` of the prompt.

        Unlike :meth:`of_segment`, this includes the first token if the text begins with it.
        """
        members = self.of_segment(name)
        if name == self.first_part:
            members = members | self.of_segment("first")
        return members

    def _repr_html_(self) -> str:
        token_ids = self.tokens.tolist()
        if self.decode is None:
            texts = list(map(str, token_ids))
        else:
            texts = token_texts(self.decode, token_ids)
        segments = [SEGMENTS[code] for code in self.segment.tolist()]
        texts_and_segments = list(zip(texts, segments, strict=True))
        return markup.tokens(texts_and_segments, f"{self._counts_in_words()}:")

    def _counts_in_words(self) -> str:
        """How many tokens there are, and how many are inserted or changed."""
        inserted_count = int(self.inserted.sum())
        if not self.counterpart:
            return f"{len(self)} tokens, {inserted_count} inserted"
        changed_count = int(self.of_segment("changed").sum())
        return f"{len(self)} tokens, {inserted_count} without a partner, {changed_count} changed"


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text of each token.

    Tokens that together make a character have the character and their number, such as "你 2/3". A
    token that makes no character with the next ones has its id in brackets after its text.
    """
    # A long text repeats its tokens, and decoding takes 20 µs for each.
    text_of = cache(lambda *ids: decode(list(ids)))
    texts: list[str] = []
    while len(texts) < len(token_ids):
        start = len(texts)
        first_id = token_ids[start]
        count = _tokens_of_character(text_of, token_ids[start : start + _MOST_PARTS])
        text = text_of(*token_ids[start : start + count])

        if count == 0:
            texts.append(f"{text_of(first_id)} (token {first_id})")
        elif count == 1:
            texts.append(text)
        else:
            texts += [f"{text} {number}/{count}" for number in range(1, count + 1)]
    return texts


def baseline_sequence(
    tokens: Sequence[int], segments: Sequence[str], decode: Callable[[list[int]], str] | None = None
) -> TokenSequence:
    """A sequence without inserted tokens, from the segment of each token.

    The first token's segment becomes "first". ``segments`` may name it "bos", which is not a
    segment.
    """
    codes = [SEGMENTS.index(name) for name in ("first", *segments[1:])]
    return TokenSequence(
        tokens=torch.tensor(list(tokens), dtype=torch.long),
        origin=torch.arange(len(tokens)),
        segment=torch.tensor(codes, dtype=torch.long),
        decode=decode,
        first_part=segments[0],
    )


def insert(sequence: TokenSequence, filler: Sequence[int], at: int) -> TokenSequence:
    """Return the sequence with the token ids ``filler`` inserted before position ``at``.

    Everything else about the sequence stays as it is. Inserted tokens have no cut edges.

    Raises:
        ConditionError: The position is not in the sequence, or the filler is not token ids.
    """
    if type(at) is not int or not 0 <= at <= len(sequence):  # True is an int too
        raise ConditionError(
            f"at={at!r}: give a position from 0 to {len(sequence)}, the end of this sequence"
        )

    if not all(isinstance(token, int) for token in filler):
        raise ConditionError(
            f"filler={filler!r}: give token ids; tokenizer(text, add_special_tokens=False) makes"
            " them"
        )

    filler_tokens = torch.tensor(list(filler), dtype=torch.long)

    def spliced(
        values: Shaped[Tensor, " pos"], filler_values: Shaped[Tensor, " filler"]
    ) -> Shaped[Tensor, " longer"]:
        return torch.cat([values[:at], filler_values, values[at:]])

    cut_edges = sequence.cut_edges
    if cut_edges is not None:
        not_cut = torch.zeros_like(filler_tokens, dtype=torch.bool)
        queries = spliced(cut_edges.queries, not_cut)
        keys = spliced(cut_edges.keys, not_cut)
        cut_edges = replace(cut_edges, queries=queries, keys=keys)

    segment_index = SEGMENTS.index("inserted")
    return replace(
        sequence,
        tokens=spliced(sequence.tokens, filler_tokens),
        origin=spliced(sequence.origin, torch.full_like(filler_tokens, INSERTED)),
        segment=spliced(sequence.segment, torch.full_like(filler_tokens, segment_index)),
        cut_edges=cut_edges,
    )


def with_changes(sequences: Mapping[str, TokenSequence]) -> dict[str, TokenSequence]:
    """The sequences of a prompt under each condition, with "changed" as a segment in all of them.

    It holds every token that some counterpart changes or lacks.
    """
    is_shared = torch.ones(len(sequences[BASELINE]), dtype=torch.bool)  # by all counterparts
    for sequence in sequences.values():
        if sequence.counterpart:
            is_same = ~sequence.inserted & ~sequence.of_segment("changed")
            is_in_counterpart = torch.zeros_like(is_shared)
            is_in_counterpart[sequence.origin[is_same]] = True
            is_shared &= is_in_counterpart

    if is_shared.all():
        return dict(sequences)

    changed_sequences = {}
    for name, sequence in sequences.items():
        is_changed = ~sequence.inserted & ~is_shared[sequence.origin.clamp(min=0)]
        segment = sequence.segment.masked_fill(is_changed, SEGMENTS.index("changed"))
        changed_sequences[name] = replace(sequence, segment=segment)

    return changed_sequences


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that are padded on the right to one length.

    Args:
        tokens: Token ids.
        origin: The origin of each token, as in ``TokenSequence``; −2 for padding.
        segment: The segment of each token, as in ``TokenSequence``; −2 for padding.
        lengths: The number of tokens in each row, without padding.
        rows: For each row the index of its prompt and the name of its condition.
        edge_mask: The cut attention edges; None for none.
        edge_mask_layers: The layers in which each row's edges are cut, where None means all; see
            :meth:`as_read_by`.
        position_ids: None if no sequence keeps those of the baseline: all are then 0, 1, 2 …
        interventions: The interventions that act on each row.
    """

    tokens: Int[Tensor, "batch pos"]
    origin: Int[Tensor, "batch pos"]
    segment: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    rows: tuple[tuple[int, str], ...]
    edge_mask: EdgeMask | None = None
    edge_mask_layers: tuple[tuple[int, ...] | None, ...] = ()
    position_ids: Int[Tensor, "batch pos"] | None = None
    interventions: tuple[tuple[Any, ...], ...] = ()

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """Which positions hold a token rather than padding."""
        return self.segment >= 0

    @property
    def positions(self) -> Int[Tensor, " pos"]:
        """0, 1, 2 …, on the batch's device."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    @property
    def original(self) -> Bool[Tensor, "batch pos"]:
        """Which positions hold a token of the prompt itself."""
        return self.origin >= 0

    @property
    def inserted(self) -> Bool[Tensor, "batch pos"]:
        """Which positions a condition inserted."""
        return self.origin == INSERTED

    @property
    def after_inserted(self) -> Bool[Tensor, "batch pos"]:
        """Which positions hold an original token after the first inserted one."""
        return (self.inserted.cumsum(-1) > 0) & self.original

    def of_segment(self, name: str) -> Bool[Tensor, "batch pos"]:
        """Which positions belong to the segment ``name``."""
        return self.segment == SEGMENTS.index(name)

    def members(self) -> Bool[Tensor, "batch segment pos"]:
        """Whether each position belongs to each segment, in the order of ``SEGMENTS``."""
        segments = torch.arange(len(SEGMENTS), device=self.segment.device)
        return self.segment[:, None, :] == segments[:, None]

    def masked_in(self, layer: int) -> tuple[bool, ...]:
        """Whether edges of each row are cut in a layer; empty if no row has cut edges.

        A row without cut edges is True in every layer.
        """
        if self.edge_mask is None:
            return ()
        return tuple(layers is None or layer in layers for layers in self.edge_mask_layers)

    def as_read_by(self, layer: int) -> Batch:
        """The batch as one layer reads it, without edges that are cut only in other layers."""
        if self.edge_mask is None or all(layers is None for layers in self.edge_mask_layers):
            return self
        is_masked = torch.tensor(self.masked_in(layer), device=self.tokens.device)
        keys = is_masked.unsqueeze(1) & self.edge_mask.keys
        if not keys.any():
            return replace(self, edge_mask=None)
        return replace(self, edge_mask=replace(self.edge_mask, keys=keys))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        copies = {}
        for name in ("tokens", "origin", "segment", "lengths", "position_ids", "edge_mask"):
            value = getattr(self, name)
            if value is not None:
                copies[name] = value.to(device)
        return replace(self, **copies)


# Cached for all blocks of queries and all layers, since each call would wait for the GPU.
@lru_cache(maxsize=4)
def inserted_span(batch: Batch) -> tuple[int, int]:
    """The first position at which any row has an inserted token, and the position after the last.

    Both are 0 if no token is inserted.
    """
    inserted_positions = batch.inserted.any(0).nonzero()
    if len(inserted_positions) == 0:
        return 0, 0
    return int(inserted_positions[0]), int(inserted_positions[-1]) + 1


def edges_to_cut(sequence: TokenSequence) -> CutEdges:
    """The cut edges of a sequence, without queries and keys if it has none."""
    no_token = torch.zeros(len(sequence), dtype=torch.bool)
    if sequence.cut_edges is None:
        return CutEdges(no_token, no_token)
    return sequence.cut_edges


def pad_right(
    sequences: Sequence[TokenSequence], rows: Sequence[tuple[int, str]], pad_token: int
) -> Batch:
    """Put sequences into one batch, padded on the right."""

    def padded(attribute: str, padding_value: int) -> Tensor:
        values = [getattr(sequence, attribute) for sequence in sequences]
        return pad_sequence(values, batch_first=True, padding_value=padding_value)

    edge_mask = None
    cuts = [edges_to_cut(sequence) for sequence in sequences]
    if any(sequence.cut_edges is not None for sequence in sequences):
        edge_mask = EdgeMask(
            queries=pad_sequence([cut.queries for cut in cuts], batch_first=True),
            keys=pad_sequence([cut.keys for cut in cuts], batch_first=True),
        )

    position_ids = None
    if any(sequence.keeps_positions for sequence in sequences):
        position_ids = padded("position_ids", 0)

    return Batch(
        tokens=padded("tokens", pad_token),
        origin=padded("origin", PADDING),
        segment=padded("segment", PADDING),
        lengths=torch.tensor([len(sequence) for sequence in sequences]),
        rows=tuple(rows),
        edge_mask=edge_mask,
        edge_mask_layers=tuple(cut.layers for cut in cuts),
        position_ids=position_ids,
        interventions=tuple(sequence.interventions for sequence in sequences),
    )


@dataclass(frozen=True, eq=False)
class Pairs:
    """Each sequence of a batch, paired with the baseline of its prompt.

    A baseline is paired with itself. ``original`` is an axis of the prompt's own tokens, by their
    positions in the baseline.

    Args:
        batch: The batch; pair ``i`` has its row ``i``.
        baseline: The row of each pair's baseline.
        place: The position of each original token in the sequence; 0 if it is not there.
        original: Whether each original token is in the sequence.
        segment: The index of its segment in ``SEGMENTS``; −2 if it is not in the sequence.
        reach: The number of original tokens up to each position, in the pair that has the most.
    """

    batch: Batch
    baseline: Int[Tensor, " pair"]
    place: Int[Tensor, "pair original"]
    original: Bool[Tensor, "pair original"]
    segment: Int[Tensor, "pair original"]
    reach: tuple[int, ...]


def baseline_rows(batch: Batch) -> list[int]:
    """For each row of a batch, the row of its prompt's baseline, which the batch must hold."""
    row_of_prompt = {
        prompt: row for row, (prompt, condition) in enumerate(batch.rows) if condition == BASELINE
    }
    return [row_of_prompt[prompt] for prompt, _ in batch.rows]


# Cached for all blocks of queries and all layers, since each call waits for the GPU. With several
# GPUs there is a copy of the batch on each.
@lru_cache(maxsize=8)
def pairs_of(batch: Batch) -> Pairs:
    """The pairs of a batch, which must hold the baseline of each of its prompts."""
    # The position of each original token in a row is the inverse of ``origin``.
    origin = batch.origin.cpu()
    is_original = origin >= 0
    counts_up_to = is_original.cumsum(-1)
    reach = tuple(counts_up_to.amax(0).tolist())
    place = torch.zeros(len(batch.rows), reach[-1], dtype=torch.long)  # as many as any row has
    original = torch.zeros_like(place, dtype=torch.bool)
    pair, position = is_original.nonzero(as_tuple=True)
    original_index = origin[pair, position]
    place[pair, original_index] = position
    original[pair, original_index] = True
    segment = batch.segment.cpu().gather(1, place)
    segment = segment.masked_fill(~original, PADDING)

    device = batch.tokens.device
    return Pairs(
        batch=batch,
        baseline=torch.tensor(baseline_rows(batch), device=device),
        place=place.to(device),
        original=original.to(device),
        segment=segment.to(device),
        reach=reach,
    )


def _tokens_of_character(text_of: Callable[..., str], token_ids: Sequence[int]) -> int:
    """The number of tokens, from the first on, that together make whole characters.

    It is 0 if the first token makes none with those after it, or is the replacement character.
    """
    for count, token_id in enumerate(token_ids, 1):
        if _NO_CHARACTER not in text_of(*token_ids[:count]):
            return count
        if _NO_CHARACTER not in text_of(token_id):
            return 0  # a token of whole characters completes nothing
    return 0
