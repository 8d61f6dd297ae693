"""A published claim, what would support it, and what a model says: fixed beforehand, measured, decided by rule."""
