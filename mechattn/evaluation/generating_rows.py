"""The rows of a batch that generates: padded prompts, and a cache whose rows can be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mechattn.axes import BASELINE, PADDING
from mechattn.evaluation.answer_file import Key
from mechattn.functional.attention import EdgeMask
from mechattn.interventions.intervention import Target, any_reads_first
from mechattn.model.hooked import device_of
from mechattn.model.hooks import last_logits_only
from mechattn.prompts.token_sequences import TokenSequence, edges_to_cut


class Question(NamedTuple):
    """What all samples of an answer share: a prompt's id, and the name of a condition."""

    prompt: str
    condition: str


@dataclass(frozen=True)
class Request:
    """A requested answer.

    Args:
        prompt: The prompt's id.
        sequence: The sequence that the model reads.
        sample: The index of the answer among several to the same question.
        condition: The name of the condition.
        solution: The reference.
    """

    prompt: str
    sequence: TokenSequence
    sample: int
    condition: str = BASELINE
    solution: str = ""

    @property
    def key(self) -> Key:
        """The prompt, condition and sample, which identify the answer in a run."""
        return self.prompt, self.condition, self.sample

    @property
    def question(self) -> Question:
        """The prompt and condition, which all samples of an answer share."""
        return Question(self.prompt, self.condition)


class PaddedPrompts:
    """Sequences padded on the left, as a model reads them.

    Args:
        sequences: The sequences.
        device: The device of the model's inputs.
    """

    def __init__(self, sequences: Sequence[TokenSequence], device: torch.device) -> None:
        def padded(row_values: list[Tensor], filler: int) -> Tensor:
            return pad_sequence(
                row_values, batch_first=True, padding_value=filler, padding_side="left"
            ).to(device)

        self.length = max(len(sequence) for sequence in sequences)

        # Which positions hold tokens rather than padding.
        all_true = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
        self.is_token: Bool[Tensor, "row pos"] = padded(all_true, False)

        self.tokens: Int[Tensor, "row pos"] = padded([sequence.tokens for sequence in sequences], 0)
        self.position_ids: Int[Tensor, "row pos"] = padded(
            [sequence.position_ids for sequence in sequences], 0
        )
        self.segments: Int[Tensor, "row pos"] = padded(
            [sequence.segment for sequence in sequences], PADDING
        )
        # The index of each token in the baseline; negative for inserted tokens and padding.
        self.origin: Int[Tensor, "row pos"] = padded(
            [_origin(sequence) for sequence in sequences], -1 - self.length
        )

        # The cut edges, and which tokens of the prompt those of the answer see.
        edges = [edges_to_cut(sequence) for sequence in sequences]
        self.edge_mask = EdgeMask(
            queries=padded([row_edges.queries for row_edges in edges], False),
            keys=padded([row_edges.keys for row_edges in edges], False),
        )
        self.has_cut_edges = any(sequence.cut_edges is not None for sequence in sequences)
        visible = [~(row_edges.keys & row_edges.later) for row_edges in edges]
        self.visible_to_answers: Bool[Tensor, "row pos"] = padded(visible, False)

        # Position ids with gaps need a mask. Without one, transformers reads them as several
        # sequences that are packed into one row (masking_utils.find_packed_sequence_indices).
        keeps_positions = any(sequence.keeps_positions for sequence in sequences)
        self.needs_mask = keeps_positions or not self.visible_to_answers.all()

    @property
    def mask(self) -> Tensor | None:
        """The attention mask: which keys are tokens [row pos], or None if no mask is needed.

        With cut edges it is which query sees which key [row 1 query key].
        """
        if not self.has_cut_edges:
            if self.needs_mask:
                return self.is_token.long()
            return None

        positions = torch.arange(self.length, device=self.is_token.device)
        is_self = positions[:, None] == positions
        is_causal = positions[:, None] >= positions
        is_cut = self.edge_mask.unseen(positions.expand_as(self.is_token), slice(None))
        is_visible = is_causal & self.is_token[:, None] & ~is_cut

        # The attention of a query without any key would be NaN, so each sees at least itself.
        return (is_visible | is_self)[:, None]

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of the model."""
        return {
            "input_ids": self.tokens,
            "attention_mask": self.mask,
            "position_ids": self.position_ids,
        }


@dataclass
class GeneratingRow:
    """An answer that is being generated.

    Args:
        number: The index of the request.
        request: The request.
        tokens: The tokens so far.
        logprobs: The log-probability of each token, in nats.
        is_ended: Whether the answer has ended, with an end token or at the limit.
    """

    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_ended: bool = False
    # Of the prompt: the largest origin and the last position id, which generated tokens follow.
    last_origin: int = field(init=False)
    last_position_id: int = field(init=False)

    def __post_init__(self) -> None:
        sequence = self.request.sequence
        self.last_origin = int(_origin(sequence).max())
        self.last_position_id = int(sequence.position_ids[-1])

    @property
    def length(self) -> int:
        """The number of the row's tokens in the cache, which has all but the last one."""
        return len(self.request.sequence) + len(self.tokens) - 1


class GeneratingRows:
    """The rows of a batch, whose keys and values are in one cache, padded on the left.

    Args:
        model: The model without hooks.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = device_of(model)
        self.rows: list[GeneratingRow] = []
        # These are set when the first rows are added.
        self.cache: Any
        # Which positions the next tokens see: neither padding nor keys that are cut for answers.
        self.visible: Bool[Tensor, "row pos"]
        self.needs_mask: bool

    @property
    def open_count(self) -> int:
        """The number of rows whose answers have not ended."""
        return sum(not row.is_ended for row in self.rows)

    @property
    def are_exchangeable(self) -> bool:
        """Whether rows can be exchanged: all layers cache keys and values, and nothing else."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        # Subclasses are excluded, as they may store something else as well.
        exchangeable_types = (DynamicLayer, DynamicSlidingWindowLayer)
        return all(type(layer) in exchangeable_types for layer in self.cache.layers)

    @property
    def origin(self) -> Int[Tensor, "row 1"]:
        """The origin of each row's last token, as if the answer followed the baseline sequence."""
        indices = [row.last_origin + len(row.tokens) for row in self.rows]
        return torch.tensor(indices, device=self.device)[:, None]

    def new_cache(self) -> Any:
        """An empty cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def add(self, rows: Sequence[GeneratingRow], prompts: PaddedPrompts, cache: Any) -> None:
        """Add rows whose prompts have been read.

        Args:
            rows: The rows.
            prompts: Their prompts, in the same order.
            cache: The keys and values of these prompts.
        """
        if not self.rows:
            self.rows = list(rows)
            self.cache = cache
            self.visible = prompts.visible_to_answers
            self.needs_mask = prompts.needs_mask
            return

        # The shorter of the two batches is padded on the left.
        length = max(self.visible.shape[1], prompts.length)
        _fit_cache(self.cache, length)
        _fit_cache(cache, length)
        for layer, new_layer in zip(self.cache.layers, cache.layers, strict=True):
            if layer.is_initialized:
                layer.keys = torch.cat([layer.keys, new_layer.keys])
                layer.values = torch.cat([layer.values, new_layer.values])

        new_visible = _fitted_mask(prompts.visible_to_answers, length)
        self.visible = torch.cat([_fitted_mask(self.visible, length), new_visible])
        self.rows += rows
        self.needs_mask = True

    def drop_ended(self) -> None:
        """Remove the rows whose answers have ended, and the padding that no other row needs.

        If rows cannot be exchanged, all stay until every answer has ended.
        """
        open_indices = [index for index, row in enumerate(self.rows) if not row.is_ended]
        if not open_indices:
            self.rows = []
            return
        if len(open_indices) == len(self.rows) or not self.are_exchangeable:
            return

        self.rows = [self.rows[index] for index in open_indices]
        length = max(row.length for row in self.rows)
        self.cache.batch_select_indices(open_indices)
        _fit_cache(self.cache, length)
        self.visible = _fitted_mask(self.visible[open_indices], length)

    def read_last_tokens(self) -> Float[Tensor, "row token"]:
        """Read the last token of each row, and return the logits of the next one.

        A row that has ended and could not be removed reads its last token again.
        """
        last_tokens = [row.tokens[-1] for row in self.rows]
        position_ids = [row.last_position_id + len(row.tokens) for row in self.rows]

        # All later tokens see the last one.
        self.visible = pad(self.visible, (0, 1), value=True)
        output = self.model(
            input_ids=torch.tensor(last_tokens, device=self.device)[:, None],
            attention_mask=self.visible.long() if self.needs_mask else None,
            position_ids=torch.tensor(position_ids, device=self.device)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **last_logits_only(self.model),
        )
        return output.logits[:, -1].float()


@contextmanager
def acting_on_prompts(
    model: Any, requests: Sequence[Request], prompts: PaddedPrompts
) -> Iterator[None]:
    """A block in which the interventions of prompts act, each on its rows.

    If one of them reads first, the model reads the prompts once before the block.
    """

    def target(indices: Int[Tensor, " row"], ids: tuple[str, ...]) -> Target:
        return Target(indices, ids, prompts.origin[indices], prompts.segments[indices])

    with _acting(model, requests, prompts.tokens.device, target):
        interventions = [request.sequence.interventions for request in requests]
        if any_reads_first(chain.from_iterable(interventions)):
            model(**prompts.inputs, use_cache=False, **last_logits_only(model))
        yield


@contextmanager
def acting_on_answers(batch: GeneratingRows) -> Iterator[None]:
    """A block in which the interventions of prompts act, each on the tokens generated after its
    prompt.

    These tokens have no segment. An intervention that reads first has read the prompt, and acts
    only on it.
    """

    def target(indices: Int[Tensor, " row"], ids: tuple[str, ...]) -> Target:
        origin = batch.origin[indices]
        return Target(indices, ids, origin, torch.full_like(origin, PADDING))

    requests = [row.request for row in batch.rows]
    with _acting(batch.model, requests, batch.device, target):
        yield


def _origin(sequence: TokenSequence) -> Int[Tensor, " pos"]:
    """The index of each token in the baseline sequence; each inserted token has a negative number
    of its own."""
    negative = -1 - torch.arange(len(sequence))
    return torch.where(sequence.inserted, negative, sequence.origin)


def _fit_cache(cache: Any, length: int) -> None:
    """Cut or pad a cache on the left, so that each row has ``length`` tokens."""
    for layer in cache.layers:
        if not layer.is_initialized:
            continue

        kept_length = length
        if layer.is_sliding:
            # The cache of a window has room for one key less than its width, since the next token
            # adds its own.
            kept_length = min(length, layer.sliding_window - 1)
            layer.cumulative_length = length  # the other kind of layer counts its keys instead
        added = kept_length - layer.keys.shape[2]
        # From the last axis on: nothing is added to d_head, and ``added`` on the left of pos. A
        # negative number cuts off.
        layer.keys = pad(layer.keys, (0, 0, added, 0))
        layer.values = pad(layer.values, (0, 0, added, 0))


def _fitted_mask(mask: Bool[Tensor, "row pos"], length: int) -> Bool[Tensor, "row length"]:
    """The last ``length`` positions of a mask; if there are fewer, False is added on the left."""
    return pad(mask, (length - mask.shape[1], 0))


@contextmanager
def _acting(
    model: Any,
    requests: Sequence[Request],
    device: torch.device,
    target: Callable[[Int[Tensor, " row"], tuple[str, ...]], Target],
) -> Iterator[None]:
    """A block in which the interventions of sequences act.

    Rows with the same interventions in the same order are treated together.
    """
    # By identity, since an intervention that a user wrote need be neither comparable nor hashable.
    indices_by_interventions: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        identities = tuple(id(intervention) for intervention in request.sequence.interventions)
        indices_by_interventions.setdefault(identities, []).append(index)

    with ExitStack() as stack:
        for indices in indices_by_interventions.values():
            ids = tuple(requests[index].prompt for index in indices)
            row_target = partial(target, torch.tensor(indices, device=device), ids)
            for intervention in requests[indices[0]].sequence.interventions:
                stack.enter_context(intervention.acting(model, row_target))
        yield
