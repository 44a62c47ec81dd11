"""A line belongs here if it loads or builds a model."""
