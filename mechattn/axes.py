"""The names of dimensions and of a sequence's segments; dimension names follow TransformerLens.

``batch`` sequences in a forward pass, ``pos`` positions, ``query`` and ``key`` positions in their two roles, ``head``,
``segment`` one of SEGMENTS. All positions, layers and heads count from 0.
"""

BASELINE = "baseline"  # the condition that every other is compared with
SEGMENTS = ("bos", "template", "system", "inserted", "question", "answer", "changed")
