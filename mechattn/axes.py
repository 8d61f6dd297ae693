"""The words for shapes: jaxtyping aliases, with the dimension names of TransformerLens.

``batch`` sequences in a forward pass, ``pos`` positions, ``query`` and ``key`` positions in their two roles, ``head``,
``segment`` one of SEGMENTS. All positions, layers and heads count from 0.
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

SEGMENTS = ("bos", "template", "system", "inserted", "question", "answer")

Pattern: TypeAlias = Float[Tensor, "*batch head query key"]
PerKey: TypeAlias = Float[Tensor, "*batch head key"]
Tokens: TypeAlias = Int[Tensor, "pos"]
Positions: TypeAlias = Int[Tensor, "pos"]
Counted: TypeAlias = Bool[Tensor, "*batch query"]
