"""Answers under conditions: generated, read, compared."""
