"""Attention knockout: some tokens cannot see others, in some layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.functional.rows import EdgeMask
from mechattn.prompts.sequences import Sequence

_ORIGINAL = tuple(name for name in SEGMENTS if name != "inserted")


@dataclass(frozen=True)
class Knockout:
    """Hide the keys of some segments from the queries of others; the softmax is over the rest (arXiv:2304.14767).

    A token always sees itself. ``Knockout(keys="inserted")`` equals ``.masked()``.

    Args:
        queries: The segment or segments of the affected queries; all but the inserted tokens by default.
        keys: The segment or segments to hide.
        layers: The layers, from 0; all by default.
    """

    queries: str | tuple[str, ...] = _ORIGINAL
    keys: str | tuple[str, ...] = "inserted"
    layers: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            value: Any = getattr(self, name)
            given = _several(value) if isinstance(value, (str, tuple)) else (value,)
            unknown = [segment for segment in given if segment not in SEGMENTS]
            if unknown or not given:
                raise OptionError(f"{name}={getattr(self, name)!r}: choose among {', '.join(map(repr, SEGMENTS))}")

    def marked(self, sequence: Sequence) -> Sequence:
        """Return the sequence with these edges cut.

        Raises:
            OptionError: The sequence already has cut edges, or it has none of these edges.
        """
        if sequence.edge_mask is not None:
            raise OptionError(
                "this sequence already has cut edges (masked, or another Knockout): use a single Knockout"
            )

        def members(segments: str | tuple[str, ...]) -> Bool[Tensor, " pos"]:
            return torch.stack([sequence.of_segment(name) for name in _several(segments)]).any(0)

        queries, keys = members(self.queries), members(self.keys)
        if not (queries & (keys.cumsum(0) - keys.long() > 0)).any():
            raise OptionError(f"{self} cuts no edge: no token of {self.queries} comes after one of {self.keys} here")
        later = "answer" in _several(self.queries)
        layers = (self.layers,) if isinstance(self.layers, int) else self.layers
        return replace(sequence, edge_mask=EdgeMask(queries, keys, layers, later))


def _several(segments: str | tuple[str, ...]) -> tuple[str, ...]:
    return (segments,) if isinstance(segments, str) else tuple(segments)
