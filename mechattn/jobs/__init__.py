"""Runs in many processes: a run is cut into chunks, which are computed here or on a cluster, kept,
and merged."""
