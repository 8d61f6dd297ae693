"""Activation patching between two runs of the same prompt, with tokens aligned by their origin."""
