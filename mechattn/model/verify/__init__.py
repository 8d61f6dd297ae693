"""Verification of a hooked model: its checks, their tolerances, and the report."""
