"""Generates, grades and compares answers under conditions."""
