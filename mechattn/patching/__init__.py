"""Activation patching between two runs of a prompt, whose tokens are aligned by their origin."""
