"""A line belongs here if it turns a file or a Hub id into rows, and rows into token ids."""
