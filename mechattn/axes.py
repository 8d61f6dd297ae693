"""The names of dimensions and of a sequence's segments, and what an origin below 0 says; dimension
names follow TransformerLens.

``batch`` sequences in a forward pass, ``pos`` positions, ``query`` and ``key`` positions in their
two roles, ``head``, ``segment`` one of SEGMENTS. All positions, layers and heads count from 0.
"""

from __future__ import annotations

BASELINE = "baseline"  # the condition that every other is compared with
# "first" is the first token of the baseline by itself, whatever text it belongs to: in most models
# it is the sink, and holds a third of all attention.
SEGMENTS = ("first", "template", "system", "inserted", "question", "answer", "changed")
INSERTED = -1  # the origin of an inserted token
PADDING = -2  # the origin and segment beyond the end of a sequence
