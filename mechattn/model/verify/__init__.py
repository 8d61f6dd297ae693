"""Verification of a hooked model: the checks, their tolerances, and recorded facts about a model."""
