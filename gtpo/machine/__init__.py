"""A line belongs here if it asks what this machine, its driver or the Hub can do."""
