"""A line belongs here if it happens between the start of a run and the saved adapter."""
