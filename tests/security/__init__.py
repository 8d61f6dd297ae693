"""What somebody else made does nothing: stored results, checkpoints, names, addresses; each attack with its control."""
