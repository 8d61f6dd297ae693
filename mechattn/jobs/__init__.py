"""Runs in many processes: cut into chunks that are kept, computed here or on a cluster, and
merged."""
