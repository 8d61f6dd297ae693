"""Whether a hooked model is the model: the checks, their tolerances, and what is known of a model."""
