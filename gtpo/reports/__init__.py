"""A line belongs here if it shows a run to a person."""
