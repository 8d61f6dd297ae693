"""What is changed in a model: mended for good, or replaced for the length of a ``with``."""
