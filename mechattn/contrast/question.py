"""The question of a comparison (a quantity, two conditions, a null, units and levels), whether it
can be asked, and whether a condition takes the sink from the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xarray as xr
from typing_extensions import Self

from mechattn.axes import BASELINE, INSERTED
from mechattn.contrast.quantities import (
    Null,
    Scale,
    Side,
    check_condition,
    check_layer,
    has_dilution,
    in_parts,
    inserted_counts,
    variable_of,
)
from mechattn.errors import OptionError, check_choice, check_counts, visible
from mechattn.results.result import Result, part_of, shared_units, units_of
from mechattn.stats.intervals import Moments, check_level
from mechattn.stats.units import RESAMPLES, Unit, Units

_SINK_ABOVE = 0.3  # mean attention to one token above this is a sink (arXiv:2410.10781)
_SHARE_WORTH_TELLING = 0.1  # of all heads: if fewer have a sink, its move is not reported


@dataclass(frozen=True)
class Question:
    """The quantity, the two conditions and the options of a comparison.

    Args:
        result: The result that contains ``condition``.
        condition: A condition.
        to: The condition to compare it with.
        quantity: A quantity stored for each prompt, such as "received", "mass" or "scale".
        segment: The segment; None for all of them, which makes the family of tests larger.
        other: The result that contains ``to``, for the same prompts; by default ``result``.
        null: "dilution": the original tokens keep their attention to each other, and all lose the
            same share to the inserted ones. It is the default if the quantity has it. "uniform":
            all keys get the same attention. It is the default otherwise. "blind", for models that
            add something to their scores besides content (ALiBi, learned sinks): the softmax of
            these terms alone.
        scale: "log-ratio" or "difference"; by default that of the quantity. A cell without a ratio
            (0 or negative in some prompt) is left out, with a warning that names it.
        unit: "auto" uses groups of prompts (``Prompt.group``) as units if there are any, with the
            means over their prompts; "prompt" uses single prompts.
        matched: Whether to refuse two conditions that insert different numbers of tokens.
        level: The level of the intervals.
        resamples: The number of resamples for bootstrap and sign flips.
        seed: The seed of the resampling.

    Raises:
        OptionError: The null, scale or unit is unknown, ``result`` or ``other`` is not a result,
            the level is not a number from 0.5 to below 1, ``resamples`` is not a positive whole
            number, or the seed is not a whole number from 0.
    """

    result: Result
    condition: str
    to: str = BASELINE
    quantity: str = "received"
    segment: str | None = "question"
    other: Result | None = None
    null: Null | None = None
    scale: Scale | None = None
    unit: Unit = "auto"
    matched: bool = True
    level: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(Unit, unit=self.unit)
        check_level(self.level)
        check_counts(resamples=self.resamples)
        check_counts(0, seed=self.seed)
        for argument, value in (("result", self.result), ("other", self.reference)):
            if not isinstance(value, Result):
                raise OptionError(
                    f"{argument}={value!r}: give a result, as ma.load_result returns it"
                )
        if self.null is not None:
            check_choice(Null, null=self.null)
        if self.scale is not None:
            check_choice(Scale, scale=self.scale)

    @property
    def reference(self) -> Result:
        """The result that contains ``to``."""
        if self.other is None:
            return self.result
        return self.other

    @cached_property
    def null_used(self) -> Null:
        """The null that was asked for, or the default."""
        if self.null is not None:
            return self.null
        if all(has_dilution(side, self.quantity, self.segment) for side in self.sides):
            return "dilution"
        return "uniform"

    @property
    def scale_used(self) -> Scale:
        """The scale that was asked for, or the default.

        The default is "difference" for a quantity that may be 0 in the baseline.
        """
        if self.scale is not None:
            return self.scale
        variable = variable_of(self.result, self.quantity)
        if variable.attrs.get("compared") == "difference":
            return "difference"
        return "log-ratio"

    @property
    def segment_name(self) -> str:
        """The segment as tables state it; "all" for all segments."""
        if self.segment is None:
            return "all"
        return self.segment

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both conditions with their results."""
        return (self.result, self.condition), (self.reference, self.to)

    @property
    def units(self) -> Units:
        """The units of both results.

        Raises:
            OptionError: Their prompts have different groups.
        """
        return shared_units(self.result, self.reference, self.unit)

    def of_parts(self, part: Callable[[Result], Result]) -> Self:
        """The same question about a part of each result, with the null of the whole."""
        other = self.other
        if other is not None:
            other = part(other)
        return replace(self, result=part(self.result), other=other, null=self.null_used)

    def of_layers(self, block: slice) -> Self:
        """The same question about a block of layers."""
        return self.of_parts(lambda result: part_of(result, "layer", block))

    def at_layer(self, layer: int | None) -> Self:
        """The same question about one layer, or about all layers if ``layer`` is None."""
        if layer is None:
            return self
        check_layer(layer, variable_of(self.result, self.quantity))
        return self.of_parts(lambda result: result.sel(layer=layer))

    def check_alike(self) -> None:
        """Refuse conditions that cannot be compared prompt by prompt.

        Raises:
            OptionError: The results have different prompts, a condition is compared with itself, or
                ``matched`` is set and both conditions insert tokens, but different numbers of them.
        """
        hashes = {result.provenance["prompts"]["hash"] for result, _ in self.sides}
        if len(hashes) > 1:
            raise OptionError(
                "the two results are of different prompts, and a paired comparison needs the same"
                " ones: run both with the same load_prompts"
            )
        if self.result is self.reference and self.condition == self.to:
            raise OptionError(
                f"{self.condition!r} is compared with itself: name another condition to compare it"
                " with"
            )
        if not self.matched or BASELINE in (self.condition, self.to):
            return

        for result, condition in self.sides:
            check_condition(result, condition)
        counts = inserted_counts(self.result, self.condition)
        their_counts = inserted_counts(self.reference, self.to)
        if not counts.any() or not their_counts.any():
            return
        prompt_indices = np.flatnonzero(counts != their_counts)
        if len(prompt_indices):
            first_index = prompt_indices[0]
            raise OptionError(
                f"{self.condition!r} inserts {counts[first_index]} tokens, {self.to!r}"
                f" {their_counts[first_index]}, so they differ in length too. Give both the same"
                " count, or matched=False"
            )


@dataclass(frozen=True)
class FirstToken:
    """The attention to the first token of the baseline, without and with a condition.

    Attention is a fraction, as a mean over the counted queries of a prompt, then over prompts or
    groups. A head has its sink at the token if it pays it more than 0.3 in the baseline. It has
    lost the sink if it pays less than half as much in the condition.

    Args:
        text: The text of the token in the first prompt.
        new_first_text: The text of the token that comes first in the condition, in the first
            prompt.
        baseline_attention: The attention to the token in the baseline, as a mean over layers and
            heads.
        attention: The attention to the token in the condition, as a mean over layers and heads.
        new_first_attention: The attention to the token that comes first in the condition, as a mean
            over layers and heads. It is NaN if it is not stored (if prompts have groups, for each
            prompt), or if no counted query sees that token.
        sink_heads: The number of heads that have their sink at the token in the baseline.
        lost_heads: The number of these heads that have lost it in the condition.
        heads: The number of heads in all layers.
        preceded: Whether the condition puts tokens before the token in any prompt.
    """

    text: str
    new_first_text: str
    baseline_attention: float
    attention: float
    new_first_attention: float
    sink_heads: int
    lost_heads: int
    heads: int
    preceded: bool

    @property
    def moved(self) -> bool:
        """Whether the sink has moved: at least a tenth of all heads have it in the baseline, and at
        least half of these have lost it.
        """
        is_worth_telling = self.sink_heads >= _SHARE_WORTH_TELLING * self.heads
        return is_worth_telling and 2 * self.lost_heads >= self.sink_heads


def first_token(result: Result, condition: str) -> FirstToken | None:
    """The attention that the first token of the baseline gets, without and with a condition.

    Args:
        result: A result.
        condition: A condition.

    Returns:
        The attention; None if the condition is the baseline, or if the attention to the first token
        was not measured (without ``ReceivedAttention``, or with ``skip_first``).

    Raises:
        OptionError: There is no such condition.
    """
    check_condition(result, condition)
    dataset = result.datasets.get("received_attention")
    if condition == BASELINE or dataset is None or "mass_by_segment" not in dataset:
        return None
    if "first" not in dataset.segment.values or BASELINE not in result.conditions:
        return None

    masses = dataset.mass_by_segment.sel(segment="first")
    baseline_means = _head_means(result, masses.sel(condition=BASELINE))
    condition_means = _head_means(result, masses.sel(condition=condition))
    if np.isnan(baseline_means).all():
        return None
    has_sink = baseline_means > _SINK_ABOVE
    has_lost_sink = has_sink & (condition_means < baseline_means / 2)

    # The token that comes first in the condition.
    sequences = result["sequences"]
    first_origins = sequences.origin.sel(condition=condition).isel(pos=0)
    return FirstToken(
        text=_first_text(sequences, BASELINE),
        new_first_text=_first_text(sequences, condition),
        baseline_attention=float(np.nanmean(baseline_means)),
        attention=float(np.nanmean(condition_means)),
        new_first_attention=_new_first_attention(result, condition),
        sink_heads=int(has_sink.sum()),
        lost_heads=int(has_lost_sink.sum()),
        heads=has_sink.size,
        preceded=bool((first_origins == INSERTED).any()),
    )


def first_token_words(result: Result, condition: str) -> str:
    """Two sentences on the baseline's first token, if a condition puts tokens before it or takes
    its sink; otherwise "".

    They state the attention to it without and with the condition, and that it is a segment of its
    own.
    """
    token = first_token(result, condition)
    if token is None or not (token.preceded or token.moved):
        return ""
    sentence = (
        f"The baseline's first token (“{visible(token.text).strip()}” in the first prompt) held"
        f" {100 * token.baseline_attention:.1f} points of 100 of the attention, and"
        f" {100 * token.attention:.1f} with “{condition}”"
    )
    if token.preceded:
        new_first = visible(token.new_first_text).strip()
        sentence += f", whose tokens come before it (now “{new_first}” is first"
        if not np.isnan(token.new_first_attention):
            sentence += f", and gets {100 * token.new_first_attention:.1f}"
        sentence += ")"
    if token.moved:
        sentence += (
            f": the sink moves, as {token.lost_heads} of the {token.sink_heads} heads that had"
            " their sink there lose it"
        )
    return f"{sentence}. The first token is counted by itself, in no other segment."


def _head_means(result: Result, masses: xr.DataArray) -> np.ndarray:
    """The mean over prompts or groups of each head's attention [layer, head].

    Some layers are read at a time.
    """
    units = units_of(result)
    means = []
    for block in in_parts(masses, "layer", result.memory):
        unit_values = units.means(block.transpose("prompt", "layer", "head").values)
        means.append(Moments.of(unit_values).known_mean)
    return np.concatenate(means)


def _new_first_attention(result: Result, condition: str) -> float:
    """The attention to the token that comes first in a condition, as a mean over prompts or groups,
    then over layers and heads; NaN if it is not stored."""
    dataset = result["received_attention"]
    has_groups = units_of(result).kind == "groups"
    if not has_groups and "received" in dataset:  # the stored mean is over prompts
        received = dataset.received.sel(condition=condition)
        return float(received.isel(key=0).mean())
    if has_groups and "received_per_prompt" in dataset:
        received = dataset.received_per_prompt.sel(condition=condition)
        head_means = _head_means(result, received.isel(key=0))
        return float(Moments.of(head_means.ravel()).known_mean)
    return np.nan


def _first_text(sequences: xr.Dataset, condition: str) -> str:
    """The text at the first position of the first prompt; empty if no texts are stored."""
    if "first_prompt_text" not in sequences:
        return ""
    return str(sequences.first_prompt_text.sel(condition=condition).isel(pos=0).item())
