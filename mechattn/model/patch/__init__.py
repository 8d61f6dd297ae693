"""Changes to a model: permanent corrections, and replacements inside a ``with`` block."""
