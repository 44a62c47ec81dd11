"""A line belongs here if it appears on the screen of a script, or ends it."""
