"""The names of segments, and the origins that are not positions of the baseline.

Dimensions have TransformerLens's names: ``batch`` for the sequences of a forward pass, ``pos`` for
positions, ``query`` and ``key`` for positions in these two roles, ``head``, and ``segment`` for
SEGMENTS. Positions, layers and heads count from 0.
"""

from __future__ import annotations

BASELINE = "baseline"  # the condition with which all others are compared
# "first" is the first token of the baseline alone, whatever text it belongs to. In most models it
# is the attention sink, and would hide what else its segment receives.
SEGMENTS = ("first", "template", "system", "inserted", "question", "answer", "changed")
INSERTED = -1  # the origin of an inserted token
PADDING = -2  # the origin and segment beyond the end of a sequence
