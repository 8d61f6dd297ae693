"""Interventions on a model while it runs, one per file."""
