"""A line belongs here if it gets a model onto this machine: driver, memory, Hub, loading."""
