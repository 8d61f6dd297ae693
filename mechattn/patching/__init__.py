"""Activations of one run put into another run of the same prompt, tokens aligned by their origin."""
