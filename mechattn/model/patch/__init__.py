"""Changes to a model inside a ``with`` block: its attention, keys, values, heads' outputs and
activations."""
