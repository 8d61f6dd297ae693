"""The interface of an analysis, which receives attention one block of query rows at a time and
reduces it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import Attention, Stream, visible_keys
from mechattn.functional.fused import Fused
from mechattn.functional.received import segment_means
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import split_heads
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Batch, Pairs, TokenSequence

Sums = dict[str, Tensor]  # what an analysis adds up in one layer, by name; batch first
Values = dict[str, Tensor]  # the values of one layer by the name of the quantity; batch first
Quantities = Mapping[str, "Quantity"]
Window = int | None  # the largest number of keys that a query of a layer sees; None for all
Coords = Mapping[str, Sequence[object]]  # the labels of an analysis's own dimensions
Layers = Sequence[int]
Prompts = Sequence[Prompt]
HEAD_AND_SEGMENT = ("head", "segment")  # the dimensions of most quantities
DEPENDS_ON_VALUES = "it depends on the values"  # why uniform attention gives no null


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """A block of query rows of one layer's attention pattern, with its batch.

    The pattern's memory is reused for the next block, so reduce or copy it.

    Args:
        layer: The layer.
        pattern: Attention probabilities of these rows, float32.
        queries: The positions of these rows.
        keys: The positions of the keys; these rows see no other keys.
        batch: The sequences, on the device of the pattern. Rows of padding are present and must not
            count.
        window: The largest number of keys that a query of this layer sees; None for full attention.
        v: Values at all positions; None if no hook gives them per head.
        queries_and_keys: The inputs of the layer's whole attention; None for a null, and with the
            engine "hooks", which reads patterns only.
        null: Whether these are the rows of the content-blind head that gives the null. All values
            of that head are 1 and have one dimension; it has no hooks and no activations.
    """

    layer: int
    pattern: Float[Tensor, "batch head query key"]
    queries: slice
    keys: slice
    batch: Batch
    window: Window
    v: Float[Tensor, "batch kv_head pos d_head"] | None = None
    queries_and_keys: Attention | None = None
    null: bool = False

    @property
    def is_first_block(self) -> bool:
        """Whether these are the first rows of the layer; blocks come in the order of the
        queries."""
        return self.queries.start == 0

    def values_for(self, purpose: str) -> Float[Tensor, "batch kv_head pos d_head"]:
        """The values at all positions.

        Args:
            purpose: What they are needed for, as the error names it.

        Raises:
            ModelError: No hook gives the values per head.
        """
        if self.v is None:
            raise ModelError(
                f"layer {self.layer} has no hook_v per head, so {purpose} cannot be measured"
            )
        return self.v


@dataclass(frozen=True)
class WholeAttention:
    """One layer's attention as the sums of a fused kernel, which does not give single rows.

    Args:
        layer: The layer.
        fused: The kernel's sums: ``fused.column_sums(weights)`` over queries,
            ``fused.query_sums(weights)`` over keys, and ``fused.own``, each query's attention to
            itself.
        batch: The sequences, on the same device. Queries of padding are present and must not count.
        window: The largest number of keys that a query of this layer sees; None for full attention.
    """

    layer: int
    fused: Fused
    batch: Batch
    window: Window


@dataclass(frozen=True, eq=False)
class PairedRows:
    """A block of query rows of every sequence, with the rows of the same queries in the prompt's
    baseline.

    A baseline is paired with itself. Rows of inserted tokens and of padding are present; their
    baseline rows are meaningless.

    Args:
        layer: The layer.
        pattern: A', with inserted tokens.
        aligned: A' restricted to the original keys, in the order of the baseline; 0 at padding.
        baseline: A, without inserted tokens.
        v: Values with inserted tokens.
        v_aligned: Values of the original keys, with inserted tokens.
        v_baseline: Values without inserted tokens.
        segment: The segment of each original token, by its index in ``SEGMENTS``; −2 at padding.
        queries: The positions of these rows.
        keys: The positions of the keys of ``pattern``.
        batch: The sequences.
        window: The largest number of keys that a query of this layer sees; None for full attention.
    """

    layer: int
    pattern: Float[Tensor, "batch head query key"]
    aligned: Float[Tensor, "batch head query original"]
    baseline: Float[Tensor, "batch head query original"]
    v: Float[Tensor, "batch kv_head key d_head"]
    v_aligned: Float[Tensor, "batch kv_head original d_head"]
    v_baseline: Float[Tensor, "batch kv_head original d_head"]
    segment: Int[Tensor, "batch original"]
    queries: slice
    keys: slice
    batch: Batch
    window: Window


@dataclass(frozen=True, eq=False)
class Activations:
    """One layer's MLP activations for a batch, right before and after the nonlinearity
    (``act(gate)`` in gated MLPs).

    They are the model's own tensors: reduce them, or copy what you need.

    Args:
        layer: The layer.
        pre: The activations before the nonlinearity.
        post: The activations after it, as the model uses them.
        minimum: The input at which the nonlinearity has its minimum.
        batch: The sequences.
        pairs: Each sequence paired with the baseline of its prompt.
    """

    layer: int
    pre: Float[Tensor, "batch pos d_mlp"]
    post: Float[Tensor, "batch pos d_mlp"]
    minimum: float
    batch: Batch
    pairs: Pairs


@dataclass(frozen=True, eq=False)
class Captures:
    """The tensors at the hooks of one block that an analysis asked for.

    They are the model's own tensors: reduce them, or copy what you need.

    Args:
        layer: The layer.
        tensors: Keyed by the name of the hook within the block, such as "hook_resid_pre" and
            "attn.hook_z".
        batch: The sequences, on the device of the model.
        window: The largest number of keys that a query of this layer sees; None for full attention.
    """

    layer: int
    tensors: Mapping[str, Tensor]
    batch: Batch
    window: Window

    def by_head(self, name: str, heads: int) -> Float[Tensor, "batch pos {heads} d_head"]:
        """The tensor at a hook, split by head.

        Some bridges give the heads concatenated or in another layout.
        """
        return split_heads(self.tensors[name], heads)


@dataclass(frozen=True)
class Quantity:
    """A measured quantity: its dimensions, its unit and its definition.

    The engine adds the null (``…_uniform``) of every quantity computed from rows of attention: the
    same analysis of a head that attends uniformly to the keys it can see.

    Args:
        dims: The dimensions that follow (prompt, condition, layer).
        units: The unit, such as "probability", "nats" or "logits".
        description: The definition, in a phrase.
        compared: How two conditions are compared: by "ratio", or by "difference" if the baseline
            may be 0.
        no_null: Why uniform attention gives no null, such as a tied argmax or a quantity that
            depends on the values. Empty if uniform attention does give one.
        title: How the title of a figure names the quantity; its name if empty.
    """

    dims: tuple[str, ...]
    units: str
    description: str
    compared: Literal["ratio", "difference"] = "ratio"
    no_null: str = ""
    title: str = ""


def means_of(quantities: Quantities, members: str = "queries") -> dict[str, Quantity]:
    """The same quantities, described as means over the members of a segment."""
    return {
        name: replace(
            quantity, description=f"{quantity.description}, mean over the {members} of the segment"
        )
        for name, quantity in quantities.items()
    }


def of_each(quantities: Quantities, member: str = "query") -> dict[str, Quantity]:
    """The same quantities of each single member by its position, named ``…_at``."""
    return {
        f"{name}_at": replace(
            quantity,
            # One value per position replaces one mean per segment.
            dims=tuple("key" if dim == "segment" else dim for dim in quantity.dims),
            description=f"{quantity.description}, of each {member}",
        )
        for name, quantity in quantities.items()
    }


@runtime_checkable
class Analysis(Protocol):
    """Reduces attention to values per prompt.

    In each layer, ``start`` is called first, then a method such as ``add`` for each block, then
    ``values``.

    An analysis has ``add`` (see :class:`RowAnalysis`), ``add_pairs`` (:class:`PairAnalysis`),
    ``add_activations`` (:class:`ActivationAnalysis`), ``add_captures`` (:class:`CaptureAnalysis`)
    or ``add_final`` (:class:`FinalAnalysis`), or several of them. It may also have ``coords``, the
    labels of its own dimensions, ``notes``, attributes of its dataset, and ``calibrated`` (see
    :class:`Calibrates`).

    ``name`` is the name of its dataset, ``options`` are recorded with the result, and
    ``quantities`` are what it measures. In their dimensions, "head" stands for one value per head,
    "key" for one per position and "segment" for one per segment; others have labels in ``coords``.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def quantities(self) -> Quantities: ...

    def problem(self, sequence: TokenSequence) -> str | None:
        """Why this sequence cannot be measured, such as "is too short"; None if it can.

        It is called for every sequence before the first is run. In the error, the words follow the
        name of the prompt.
        """

    def start(self, batch: Batch, heads: int) -> Sums:
        """Return empty sums for one layer, batch first, on the batch's device."""

    def values(self, sums: Sums, batch: Batch, window: Window) -> Values:
        """Return each quantity, batch first, from a layer's sums over all query rows."""


class AnalysisBase:
    """Base class of analyses, with defaults for what most of them share.

    The dataclass fields are the options, any sequence can be measured, and there are no sums at the
    start. A field that calibration fills in is not an option: declare it with
    ``calibrated_field(default=…)``, or with ``repr=False``.
    """

    @property
    def options(self) -> Mapping[str, Any]:
        """The options recorded with the result: the fields that ``repr`` shows."""
        if not is_dataclass(self):
            return {}
        options = {}
        for option in fields(self):
            if option.repr:
                value = getattr(self, option.name)
                if isinstance(value, tuple):
                    value = list(value)  # as JSON reads it back
                options[option.name] = value
        return options

    def problem(self, sequence: TokenSequence) -> str | None:
        """None, since every sequence can be measured."""
        return None

    def start(self, batch: Batch, heads: int) -> Sums:
        """An empty dict: ``add`` and its like store what they need."""
        return {}


def calibrated_field(**default: Any) -> Any:
    """A dataclass field that ``calibrated`` fills in from the model.

    It is left out of ``repr``, and so of the recorded options. Its metadata say that no config may
    set it and that it is no part of an analysis's identity. It does not count when two analyses are
    compared.

    Args:
        default: Either ``default`` or ``default_factory``, as for ``dataclasses.field``.
    """
    return field(**default, repr=False, compare=False, metadata={"calibrated": True})


def zeros_of_rows(batch: Batch, *sizes: int) -> Float[Tensor, " batch *sizes"]:
    """Zeros of these sizes for each sequence of a batch."""
    return torch.zeros(len(batch.rows), *sizes, device=batch.tokens.device)


def zeros(batch: Batch, heads: int, *names: str) -> Sums:
    """Zeros for each head and position [batch head pos], by these names."""
    length = batch.tokens.shape[1]
    return {name: zeros_of_rows(batch, heads, length) for name in names}


def nan_outside(
    value: Float[Tensor, "batch head *pos"], counted: Bool[Tensor, " batch *#pos"]
) -> Float[Tensor, "batch head *pos"]:
    """The values at the counted positions, which are the same for every head; NaN elsewhere."""
    return value.masked_fill(~counted[:, None], torch.nan)


def means_by_segment(member_values: Values, batch: Batch) -> Values:
    """Means over the queries or tokens of each segment, which :func:`means_of` describes.

    Args:
        member_values: Values of each query or token [batch head pos]; NaN does not count.
        batch: The sequences.

    Returns:
        The means [batch head segment].
    """
    return segment_means(member_values, batch.members())


def of_each_query(member_values: Values, names: Iterable[str], batch: Batch) -> Values:
    """The values of each query [batch head pos], named as by :func:`of_each`; NaN at padding."""
    return {f"{name}_at": nan_outside(member_values[name], batch.real) for name in names}


@runtime_checkable
class RowAnalysis(Analysis, Protocol):
    """An analysis of the attention rows of every sequence in a batch."""

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add a block of query rows to the sums, in place."""


@runtime_checkable
class WholeAnalysis(RowAnalysis, Protocol):
    """A row analysis that can use a fused kernel's sums in place of rows."""

    def add_whole(self, sums: Sums, whole: WholeAttention) -> None:
        """Add a whole layer to the sums, in place, as ``add`` with all of its rows would."""


@runtime_checkable
class PairAnalysis(Analysis, Protocol):
    """An analysis of every sequence paired with the baseline of its prompt."""

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Add a block of query rows to the sums, in place."""


@runtime_checkable
class ActivationAnalysis(Analysis, Protocol):
    """An analysis of the activations of each MLP."""

    def add_activations(self, sums: Sums, activations: Activations) -> None:
        """Add the activations of a layer to the sums, in place; called once per layer."""


@runtime_checkable
class CaptureAnalysis(Analysis, Protocol):
    """An analysis of the tensors at some hooks of each block."""

    @property
    def captures(self) -> Sequence[str]:
        """The names of the hooks within a block; every measured layer must have them."""

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Add the captured tensors to the sums, in place.

        It is called once per layer, after the last of the hooks has fired.
        """


@runtime_checkable
class FinalAnalysis(Analysis, Protocol):
    """An analysis that needs the final residual stream, so that the model runs to its last
    layer."""

    def add_final(self, sums: Sums, stream: Stream) -> None:
        """Add the residual stream after the last layer; called for the sums of every layer."""


# What an analysis can receive. Each analysis implements at least one of these protocols.
PROTOCOLS: Mapping[str, Any] = {
    "rows": RowAnalysis,
    "pairs": PairAnalysis,
    "mlps": ActivationAnalysis,
    "hooks": CaptureAnalysis,
    "final": FinalAnalysis,
}
OF_ROWS = (RowAnalysis, PairAnalysis)  # uniform attention can give these a null


@runtime_checkable
class Calibrates(Protocol):
    """An analysis that inspects the model before the run, to set a threshold, prepare weights or
    refuse the model."""

    def calibrated(self, model: HookedModel, layers: Layers, prompts: Prompts) -> Analysis:
        """Return the calibrated analysis, given the layers and prompts to be measured."""


def seen_keys(
    batch: Batch, queries: Int[Tensor, " query"], window: Window
) -> Bool[Tensor, "batch query pos"]:
    """Which positions these queries of each sequence can see.

    A query sees its own position and all before it, except those beyond its window and those that
    cut edges hide.
    """
    length = batch.tokens.shape[1]
    count = len(batch.rows)
    visible = visible_keys(queries, length, window).expand(count, -1, -1)
    if batch.edge_mask is None:
        return visible
    return visible & ~batch.edge_mask.unseen(queries.expand(count, -1), slice(0, length))
