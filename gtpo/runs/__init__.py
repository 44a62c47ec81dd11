"""A line belongs here if it creates, locks, resumes or reads a run directory."""
