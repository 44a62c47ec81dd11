"""A line belongs here if it is part of one run's life: directory, lock, resume, screen, exit."""
