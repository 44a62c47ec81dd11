"""A line belongs here if it turns the words of a command line into Settings."""
