"""What is done to a model while it runs: each file an intervention."""
