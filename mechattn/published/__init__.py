"""Compares what a paper published with what your model and untrained weights show."""
