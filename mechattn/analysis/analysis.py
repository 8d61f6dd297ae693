"""What an analysis is: it sees attention one block of query rows at a time and reduces it at once."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.fused import Fused
from mechattn.model.heads import split_heads
from mechattn.model.hooked import HookedModel
from mechattn.prompts.pairs import Pairs
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Batch, Sequence

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class AttentionRows:
    """A block of query rows of one layer's attention, with the batch that it belongs to.

    The pattern's memory is used again for the next block: reduce it, or copy it.

    Args:
        layer: The layer.
        pattern: Attention probabilities of these rows, float32.
        queries: The positions of these rows.
        keys: The positions of the keys; the others are seen by none of these rows.
        batch: The sequences, on the device of the pattern; rows of padding are present and must not count.
        window: How many keys a query of this layer sees at most; None for full attention.
        v: Values of all positions; None where no hook shows them head by head.
        null: Whether these are the rows of a head that is blind to content, from which the null is made: the values
            are then all 1, of one dimension, and no hooks and no activations come.
    """

    layer: int
    pattern: Float[Tensor, "batch head query key"]
    queries: slice
    keys: slice
    batch: Batch
    window: int | None
    v: Float[Tensor, "batch kv_head pos d_head"] | None = None
    null: bool = False


@dataclass(frozen=True)
class WholeAttention:
    """One layer's attention of which no row is to be had: sums over queries, asked of a fused kernel.

    Args:
        layer: The layer.
        fused: What the kernel gave: ``fused.column_sums(weights)`` and ``fused.own``.
        batch: The sequences, on the same device; queries of padding are present and must not count.
        window: How many keys a query of this layer sees at most; None for full attention.
    """

    layer: int
    fused: Fused
    batch: Batch
    window: int | None


@dataclass(frozen=True)
class PairedRows:
    """A block of query rows of every sequence, and the rows of the same queries in the baseline of its prompt.

    A baseline stands beside itself. Rows of inserted tokens and of padding are present; what stands there for the
    baseline means nothing.

    Args:
        layer: The layer.
        pattern: A', with inserted tokens.
        aligned: A' over the original keys alone, in the order of the baseline; 0 where there is none.
        baseline: A, without inserted tokens.
        v: Values with them.
        v_aligned: Values of the original keys, with them.
        v_baseline: Values without them.
        segment: The segment of each original token, by its index in ``SEGMENTS``; −2 where there is none.
        queries: The positions of these rows.
        keys: The positions of the keys of ``pattern``.
        batch: The sequences.
        window: How many keys a query of this layer sees at most; None for full attention.
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
    window: int | None


@dataclass(frozen=True)
class Activations:
    """One layer's MLP activations for a batch, right before and after the nonlinearity (``act(gate)`` in gated MLPs).

    Reduce them, or copy what is needed: they are the model's own.

    Args:
        layer: The layer.
        pre: Before the nonlinearity.
        post: After it, as the model goes on with it.
        minimum: The argument at which the nonlinearity is smallest.
        batch: The sequences.
        pairs: Each sequence beside the baseline of its prompt.
    """

    layer: int
    pre: Float[Tensor, "batch pos d_mlp"]
    post: Float[Tensor, "batch pos d_mlp"]
    minimum: float
    batch: Batch
    pairs: Pairs


@dataclass(frozen=True)
class Captures:
    """What passed the hooks of one block that an analysis asked for: the model's own tensors, to be reduced at once.

    Args:
        layer: The layer.
        tensors: By the name of the hook within the block, such as "hook_resid_pre" and "attn.hook_z".
        batch: The sequences, on the device of the model.
        window: How many keys a query of this layer sees at most; None for full attention.
    """

    layer: int
    tensors: Mapping[str, Tensor]
    batch: Batch
    window: int | None

    def by_head(self, name: str, heads: int) -> Float[Tensor, "batch pos {heads} d_head"]:
        """What passed a hook, head by head; some bridges hand it over with all heads in a row, or split otherwise."""
        return split_heads(self.tensors[name], heads)


@dataclass(frozen=True)
class Quantity:
    """What a number is: its dimensions after (prompt, condition, layer), its unit, its definition.

    Every quantity that an analysis makes of rows of attention gets its null from the engine: the same analysis, on the
    rows of a head that attends uniformly to the keys it can see (``…_uniform``).

    Args:
        dims: After (prompt, condition, layer).
        units: Such as "probability", "nats", "logits".
        description: What it is, in a phrase.
        compared: How two conditions are: by "ratio"; by "difference" where the baseline may be 0.
        no_null: Why uniform attention is no null for it: an argmax that is tied, or values and hooks that it needs and
            in which it is not linear. Empty where it is one.
    """

    dims: tuple[str, ...]
    units: str
    description: str
    compared: Literal["ratio", "difference"] = "ratio"
    no_null: str = ""


@runtime_checkable
class Analysis(Protocol):
    """Reduces attention to values per prompt: ``start`` once a layer, then each block, ``values`` at the end.

    An analysis has ``add`` (see :class:`RowAnalysis`), ``add_pairs`` (:class:`PairAnalysis`), ``add_activations``
    (:class:`ActivationAnalysis`), ``add_captures`` (:class:`CaptureAnalysis`) or ``add_final``
    (:class:`FinalAnalysis`), or several of them. It may have ``coords``: labels of dimensions of its own, and
    ``calibrated`` (see :class:`Calibrates`).

    ``name``: the name of its dataset. ``options``: recorded with the result. ``quantities``: what it measures. A
    quantity with dimension "key" is per position; with "segment" per segment; otherwise per head.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def quantities(self) -> Mapping[str, Quantity]: ...

    def problem(self, sequence: Sequence) -> str | None:
        """Why this sequence cannot be measured, in a sentence, or None; asked before the first forward pass."""
        ...

    def start(self, batch: Batch, heads: int) -> Sums:
        """Empty sums for one layer, batch first, on the device of the batch."""
        ...

    def values(self, sums: Sums, batch: Batch, window: int | None) -> dict[str, Tensor]:
        """Each quantity, batch first, from the sums over all query rows of a layer."""
        ...


class AnalysisBase:
    """What analyses have in common: the fields of the dataclass are the options, and any sequence can be measured."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What is recorded with the result."""
        names: list[str] = [field.name for field in fields(self) if field.repr] if is_dataclass(self) else []
        given = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def problem(self, sequence: Sequence) -> str | None:
        """None: every sequence can be measured."""
        return None


@runtime_checkable
class RowAnalysis(Analysis, Protocol):
    """Sees every sequence of a batch."""

    def add(self, sums: Sums, rows: AttentionRows) -> None:
        """Add a block of query rows to the sums, in place."""
        ...


@runtime_checkable
class WholeAnalysis(RowAnalysis, Protocol):
    """A row analysis that needs no rows where a fused kernel gives its sums."""

    def add_whole(self, sums: Sums, whole: WholeAttention) -> None:
        """Add a layer to the sums, in place, as ``add`` would from all of its rows."""
        ...


@runtime_checkable
class PairAnalysis(Analysis, Protocol):
    """Sees every sequence beside the baseline of its prompt."""

    def add_pairs(self, sums: Sums, rows: PairedRows) -> None:
        """Add a block of query rows to the sums, in place."""
        ...


@runtime_checkable
class ActivationAnalysis(Analysis, Protocol):
    """Sees the activations of each MLP."""

    def add_activations(self, sums: Sums, activations: Activations) -> None:
        """Reduce the activations of a layer to sums, in place; called once a layer."""
        ...


@runtime_checkable
class CaptureAnalysis(Analysis, Protocol):
    """Sees what passes some hooks of each block."""

    @property
    def captures(self) -> Seq[str]:
        """The names of the hooks within a block; every layer that is measured must fire them."""
        ...

    def add_captures(self, sums: Sums, captures: Captures) -> None:
        """Reduce what passed them to sums, in place; called once a layer, when the last of them has fired."""
        ...


@runtime_checkable
class FinalAnalysis(Analysis, Protocol):
    """Needs the end of the residual stream too; the model then runs to its last layer."""

    def add_final(self, sums: Sums, stream: Float[Tensor, "batch pos d_model"]) -> None:
        """Take the residual stream after the last layer; called for the sums of every layer."""
        ...


@runtime_checkable
class Calibrates(Protocol):
    """Has to look at a model before the run: to learn a threshold, to prepare weights, or to refuse it."""

    def calibrated(self, model: HookedModel, layers: Seq[int], measured: Seq[Prompt]) -> Analysis:
        """The analysis with what it has found; it is told what will be measured."""
        ...
